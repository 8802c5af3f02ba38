"""Reproduce one row of a pack: train and evaluate from its recipe, or train on its toy, and compare the
results.

No command of a pack is executed; the run is built from the recipe and from validated names.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from outrider.config import validate
from outrider.errors import ConfigError, OutriderError, PackError
from outrider.evaluation.packs import (
    DECIMALS,
    START,
    WEIGHTS,
    ExactResult,
    Verified,
    local,
    packed_start,
    parse_exact_result,
    read_exact,
    read_recipe,
)
from outrider.printing import plural, score
from outrider.training.adaptation import adapt
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training

ProgressKind: TypeAlias = Literal["auto", "rich", "plain", "none"]
_MAX_STARTS = 10  # runs that start from one another


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A reproduced row. ``low`` and ``high`` are the interval in the pack, or for an exact return the range
    over seeds.

    ``is_share``: the row is a score, otherwise an expected return.

    ``num_different`` counts the tasks with a different result; None if there are no tasks.
    """

    row: str
    recorded: float
    low: float
    high: float
    measured: float
    num_different: int | None
    is_share: bool = True

    @property
    def agrees(self) -> bool:
        """Whether the results are equal to the digits of the tables, or within the interval."""
        same = round(self.measured, DECIMALS) == round(self.recorded, DECIMALS)
        return same or self.low <= self.measured <= self.high

    @property
    def sentence(self) -> str:
        """The result in words."""
        packed = score(self.recorded, self.low, self.high, is_share=self.is_share)
        measured = score(self.measured, is_share=self.is_share)
        kind = "" if self.is_share else "expected return (no share) "
        tasks = (
            "" if self.num_different is None else f", {plural(self.num_different, 'task')} with another score"
        )
        verdict = "agrees" if self.agrees else "does NOT agree"
        return f"{self.row}: {kind}{packed} in the pack, {measured} replayed{tasks}: it {verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Reproduces runs in ``folder``; ``local_paths`` has the paths of files outside of the pack."""

    pack: Path
    verified: Verified
    folder: Path
    local_paths: Mapping[str, Path]
    progress: ProgressKind

    def play(self, row: str) -> Replayed:
        """Reproduce the row. Raises PackError if it does not exist or cannot be reproduced here."""
        exact = read_exact(self.pack)
        if row in exact:
            return self._toy(exact[row])
        if row not in self.verified.manifest.runs:
            names = [*self.verified.manifest.runs, *exact]
            listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise PackError(f"no row {row!r}: there are {listed or 'none'}")
        recorded = self._last_evaluation(self.pack / "runs" / row, row)
        replayed = self._last_evaluation(self.run(row, depth=0), row)
        if (replayed["label"], replayed["panel_hash"]) != (recorded["label"], recorded["panel_hash"]):
            raise PackError(
                f"{row}: the last evaluation is another one here: {replayed['label']!r} "
                f"on {replayed['panel_hash'][:12]}"
            )
        scores, replayed_scores = recorded.get("task_scores") or {}, replayed["task_scores"]
        packed = recorded["metric"]["score"]
        return Replayed(
            row=row,
            recorded=packed["value"],
            low=packed["ci_low"],
            high=packed["ci_high"],
            measured=replayed["metric"]["score"]["value"],
            num_different=sum(
                scores.get(key) != replayed_scores.get(key) for key in {*scores, *replayed_scores}
            )
            if scores
            else None,
        )

    def run(self, name: str, *, depth: int, last_step: int | None = None) -> Path:
        """Train a run of the pack from its recipe, up to ``last_step``; its folder. What it starts from is
        trained first.
        """
        if depth > _MAX_STARTS:
            raise PackError(f"{name}: runs of this pack start from one another in a circle")
        target = self.folder / name
        if target.exists():
            return target
        recipe = {**read_recipe(self.pack, name), "trackers": []}
        if start := packed_start(recipe):
            packed = self.pack / "runs" / start[0] / "checkpoints" / start[1]
            if not (packed / WEIGHTS).is_file():  # the weights of the run that is run again
                if start[0] not in self.verified.manifest.runs:
                    raise PackError(f"{START}: there is no run {start[0]} in this pack")
                step = int(start[1].removeprefix("step-"))
                packed = self.run(start[0], depth=depth + 1, last_step=step) / "checkpoints" / start[1]
            recipe["model"] = {**recipe["model"], "initial_checkpoint": str(packed)}
        if last_step == 0:  # only the state before the steps is needed, without scores
            shortened = {"num_tasks": 1, "panel": "none", "at_start": True, "every": 0}
            recipe |= {
                "train": {**recipe.get("train", {}), "num_steps": 0},
                "evaluation": {**recipe.get("evaluation", {}), **shortened},
            }
        inputs = self.verified.manifest.runs[name].inputs
        settings = validate(RunSettings, local(recipe, self.local_paths, inputs))
        opened = (RunDirectory.create(target, settings), settings)
        if settings.evaluation.num_trials:
            adapt(opened, progress=self.progress)
        else:
            run_training(opened, progress=self.progress, on_start=lambda stop: None)
        return target

    def _last_evaluation(self, folder: Path, name: str) -> dict[str, Any]:
        if self.verified.manifest.runs[name].kind == "panel":
            raise PackError(
                f"{name} is an evaluation by `outrider eval --tasks`, which a pack cannot "
                "repeat: its model is not in a recipe"
            )
        evaluations = RunDirectory(folder).finished_evaluations()
        if not evaluations:
            raise PackError(f"{name} has no evaluation")
        main = evaluations[0].get("panel")
        return [entry for entry in evaluations if entry.get("panel") == main][-1]

    def _toy(self, row: ExactResult) -> Replayed:
        """Play a toy by the source tree's own command: it is no part of the installed package."""
        if not Path("benchmarks/learning.py").is_file():
            raise PackError(f"{row.name}: toys need a clone of Outrider's repository: run the command there")
        toy_args = ["--toys", row.toy, "--methods", row.method, "--first-seed", str(row.seed), "--seeds", "1"]
        tokens = ["--policy-tokens", str(row.max_policy_tokens)] if row.max_policy_tokens else []
        command = [sys.executable, "-m", "benchmarks.learning", "toys", "--out", str(self.folder)]
        process = subprocess.run([*command, *toy_args, *tokens], capture_output=True, text=True, check=False)
        if process.returncode:
            last_line = (process.stderr.strip().splitlines() or ["no reason"])[-1]
            raise PackError(f"{row.name} could not be replayed: {last_line}"[:300])
        path = self.folder / "toys" / row.toy / f"{row.method}-{row.seed}.json"
        result = parse_exact_result(path.read_bytes(), row.name)
        if result.settings != row.settings:
            raise PackError(f"{row.name}: the toy's settings here are not those of the pack")
        group = next(
            entry
            for entry in self.verified.tables["exact"]
            if (entry["toy"], entry["method"]) == (row.toy, row.method)
        )
        seeds = [
            value
            for value in [*group["returns"].values(), group["ci_low"], group["ci_high"]]
            if value is not None
        ]
        low, high = min(seeds), max(seeds)  # one seed may lie beside the interval of their interquartile mean
        return Replayed(
            row=row.name, recorded=row.expected_return, low=low, high=high, measured=result.expected_return,
            num_different=None, is_share=False,
        )  # fmt: skip


def replay_row(
    pack: Path,
    verified: Verified,
    row: str | None,
    *,
    folder: Path,
    local_paths: Mapping[str, Path],
    progress: ProgressKind,
) -> str:
    """Reproduce ``row`` (None: the cheapest that is possible here) and return the result as a sentence.

    Raises PackError if the results do not agree, and ConfigError if ``folder`` is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty")
    rows = [row] if row is not None else cheapest_first(pack, verified)
    replay = Replay(pack=pack, verified=verified, folder=folder, local_paths=local_paths, progress=progress)
    unplayable = []
    for name in rows:
        try:
            result = replay.play(name)
        except OutriderError as error:  # data, a model or a tool that this machine does not have
            if row is not None:
                raise
            unplayable.append(f"{name}: {error}")
            continue
        if not result.agrees:
            raise PackError(result.sentence)
        return result.sentence
    raise PackError(
        "files and tables are correct, but no row can be replayed here: "
        f"{unplayable[0] if unplayable else 'the pack has none'}; --no-replay checks files and tables alone"
    )


def cheapest_first(pack: Path, verified: Verified) -> list[str]:
    """Rows sorted by cost: toys by their policy tokens, then trainings by their seconds."""
    exact = sorted(read_exact(pack).values(), key=lambda item: (item.num_policy_tokens, item.name))
    seconds = {item["run"]: item.get("seconds", 0.0) for item in verified.tables["costs"]}
    starts = {name: packed_start(read_recipe(pack, name)) for name in seconds}
    scored = {item["run"] for item in verified.tables["evaluations"]}

    def cost(name: str) -> tuple[float, str]:
        start = starts[name]
        return seconds[name] + (seconds.get(start[0], 0.0) if start else 0.0), name

    return [*(item.name for item in exact), *sorted((name for name in seconds if name in scored), key=cost)]
