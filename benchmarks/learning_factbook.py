"""The Factbook task with the real model: every method from one cold start per seed, at equal policy tokens.

Each method and seed has a run directory in the output folder. Finished runs are skipped, started ones are
resumed, and changed settings are refused. ``outrider compare`` reads the same folders.
"""

import json
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.comparison import require_same
from benchmarks.learning_jobs import Job
from benchmarks.learning_methods import IMITATION, REFERENCE, Method, factbook_methods
from outrider.config import load_settings, to_toml
from outrider.errors import ConfigError, OutriderError
from outrider.evaluation.compare import Comparison, compare
from outrider.files import replace_file
from outrider.plugins.imports import ORIGINS_FILE
from outrider.training.settings import RunSettings
from outrider.types import Json
from outrider.viewer.run_reader import read_run

Launch = Callable[[Sequence[str]], None]

_MANY: Final = 100_000  # steps: the token budget ends a run before


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``recipe`` has the settings that all methods share. ``policy_tokens`` is the budget of every run; None:
    the tokens that the reference method uses in the steps of the recipe, by seed. ``out`` is absolute.

    If the recipe has a cold start, the methods share its result by seed; otherwise they start from the model.
    """

    recipe: Path
    out: Path
    seeds: Sequence[int]
    policy_tokens: int | None
    overrides: Sequence[str]

    def settings(self) -> RunSettings:
        """The settings of the recipe."""
        return load_settings(RunSettings, file=self.recipe, overrides=[*_shared_only(self.overrides)])

    @property
    def has_cold_start(self) -> bool:
        """Whether every seed has a run of imitation alone, from which the others start."""
        return self.settings().cold_start.num_examples > 0

    def methods(self) -> tuple[Method, ...]:
        """Every method, for the recipe's group size and response length."""
        settings = self.settings()
        given: dict[str, Any] = tomllib.loads(self.recipe.read_text(encoding="utf-8")).get("algorithm", {})
        shared = _objective(settings)
        own = {key: value for key, value in given.items() if key not in shared}
        return factbook_methods(settings.algorithm.group_size, settings.rollout.max_response_tokens, own=own)

    def folder(self, method: Method, seed: int) -> Path:
        """Return the run directory of one training."""
        return self.out / f"{method.key}-{seed}"


def train_all(
    plan: Plan, chosen: Sequence[Method], *, launch: Launch, after_seed: Callable[[], None]
) -> None:
    """Run the unfinished trainings by seed. Raises ConfigError before the first run if one has invalid
    settings.
    """
    require_possible(plan, chosen)
    by_key = {method.key: method for method in plan.methods()}
    rest = [method for method in chosen if method.key not in (IMITATION, REFERENCE)]
    for seed in plan.seeds:
        if plan.has_cold_start:
            complete(plan, by_key[IMITATION], seed, budget=None, launch=launch)
        budget = plan.policy_tokens
        if REFERENCE in [method.key for method in chosen]:
            complete(plan, by_key[REFERENCE], seed, budget=budget, launch=launch)
            budget = budget or policy_tokens(plan.folder(by_key[REFERENCE], seed))
        for method in rest:
            complete(plan, method, seed, budget=budget, launch=launch)
        after_seed()


def require_possible(plan: Plan, chosen: Sequence[Method]) -> None:
    """Raise ConfigError if the budget is unknown or the settings of a method are invalid."""
    if IMITATION in [method.key for method in chosen] and not plan.has_cold_start:
        raise ConfigError(f"{plan.recipe} has no cold start: there is no score of imitation alone")
    if plan.policy_tokens is None and REFERENCE not in [method.key for method in chosen]:
        raise ConfigError(f"the budget is what {REFERENCE} spends: choose it too, or give --policy-tokens")
    for method in chosen:
        load_settings(
            RunSettings, file=write_recipe(plan, method), overrides=_overrides(plan, method, seed=0, budget=1)
        )


def compare_all(plan: Plan, chosen: Sequence[Method]) -> Comparison | None:
    """Compare the finished runs; None if there are fewer than two."""
    runs = [plan.folder(method, seed) for seed in plan.seeds for method in chosen]
    finished = [run for run in runs if is_finished(run)]
    return compare(finished) if len(finished) > 1 else None


def complete(plan: Plan, method: Method, seed: int, *, budget: int | None, launch: Launch) -> None:
    """Start, continue or skip one run.

    Raises ConfigError if it was started with other settings, and OutriderError if it stopped.
    """
    arguments = owed_arguments(plan, method, seed, budget=budget)
    if arguments is None:
        return
    launch(arguments)
    run = plan.folder(method, seed)
    if not is_finished(run):
        raise OutriderError(f"{run} was stopped before its end: the same command continues it")


def owed_arguments(plan: Plan, method: Method, seed: int, *, budget: int | None) -> list[str] | None:
    """Return the arguments of ``outrider train`` that start or continue a run; None if it is finished.

    Raises ConfigError if it was started with other settings.
    """
    run = plan.folder(method, seed)
    recipe, overrides = write_recipe(plan, method), _overrides(plan, method, seed=seed, budget=budget)
    begun = (run / "config.toml").exists()
    if begun:
        require_same(run, load_settings(RunSettings, file=recipe, overrides=overrides))
    if is_finished(run):
        return None
    return ["--resume", str(run)] if begun else [str(recipe), *overrides, "--run", str(run)]


def factbook_jobs(plan: Plan, chosen: Sequence[Method]) -> list[Job]:
    """Return the same runs as jobs: for each seed the cold start, if the recipe has one, then the reference
    unless a budget is given.

    Raises ConfigError if one has invalid settings.
    """
    require_possible(plan, chosen)
    by_key = {method.key: method for method in plan.methods()}
    chosen_keys = [method.key for method in chosen]
    first = [IMITATION] if plan.has_cold_start else []
    keys = dict.fromkeys([*first, *(key for key in chosen_keys if key == REFERENCE), *chosen_keys])
    return [_job(plan, by_key[key], seed) for seed in plan.seeds for key in keys]


def _job(plan: Plan, method: Method, seed: int) -> Job:
    run = plan.folder(method, seed)
    needs = (IMITATION,) if method.key != IMITATION and plan.has_cold_start else ()
    if plan.policy_tokens is None and method.key not in (IMITATION, REFERENCE):
        needs = (*needs, REFERENCE)

    def owed() -> list[str] | None:
        budget = plan.policy_tokens
        if REFERENCE in needs:
            budget = policy_tokens(plan.out / f"{REFERENCE}-{seed}")
        return owed_arguments(plan, method, seed, budget=budget)

    return Job(
        name=f"factbook/{run.name}",
        kind=f"factbook/{method.key}",
        command=lambda: [sys.executable, "-m", "outrider", "train", *(owed() or ()), "--progress", "plain"],
        is_done=lambda: (run / "config.toml").exists() and owed() is None,
        after=tuple(f"factbook/{key}-{seed}" for key in needs),
    )


def launch_outrider(arguments: Sequence[str]) -> None:
    """``outrider train`` in a process of its own."""
    if subprocess.run([sys.executable, "-m", "outrider", "train", *arguments], check=False).returncode:
        raise OutriderError("that run failed; fix the cause and repeat the command to continue")


def is_finished(run: Path) -> bool:
    """Return whether a training has spent its budget and its last evaluation is recorded (for imitation: the
    one after the cold start).
    """
    data = read_run(run)
    is_imitation = data.config.get("train.num_steps") == "0"
    labels = [one.label for one in data.evaluations if is_imitation or one.step >= data.num_steps > 0]
    return data.is_done and any(label.startswith("after ") for label in labels)


def policy_tokens(run: Path) -> int:
    """What a run's policy has written, tips included."""
    totals = [total for _, total in read_run(run).curve("train", "tokens/policy_total") if total is not None]
    if not totals:
        raise OutriderError(f"{run} has no number of policy tokens")
    return int(totals[-1])


def write_recipe(plan: Plan, method: Method) -> Path:
    """The recipe with the method's table in place of its own; the shared objective is the recipe's."""
    tree: dict[str, Any] = tomllib.loads(plan.recipe.read_text(encoding="utf-8"))
    settings = plan.settings()
    # A cold start that shows tips needs the algorithm that has a memory of them.
    if not (method.key == IMITATION and settings.cold_start.tip_share):
        tree["algorithm"] = method.table(_objective(settings))
        retrieval = tree["algorithm"].get("retrieval", {})
        if retrieval.get("schedule", "constant") != "constant":
            # over the recipe's steps: those of a run that a budget ends are not known
            tree["algorithm"]["retrieval"] = {"schedule_steps": settings.train.num_steps} | retrieval
    path = plan.out / "recipes" / f"{method.key}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(to_toml(tree) + "\n", encoding="utf-8")
    os.replace(temporary, path)  # another process may be reading it for another seed
    # The recipe may name classes from modules in its own folder, and the copy is in another one.
    origins = {"recipe": {"folder": str(plan.recipe.absolute().parent)}}
    replace_file(path.parent / ORIGINS_FILE, json.dumps(origins).encode())
    return path


def _objective(settings: RunSettings) -> Mapping[str, Json]:
    chosen = settings.algorithm
    return {
        "group_size": chosen.group_size,
        "loss": chosen.loss.model_dump(mode="json", include={"clip_low", "clip_high", "dual_clip"}),
        "aggregation": chosen.aggregation,
        "positive_nll": chosen.positive_nll,
    }


def _overrides(plan: Plan, method: Method, *, seed: int, budget: int | None) -> list[str]:
    """Return the overrides of a run: seed, the user's overrides, its initial weights and its budget."""
    common = [f"seed={seed}", *plan.overrides]
    if method.key == IMITATION:
        return [*common, "train.num_steps=0"]
    end = [] if budget is None else [f"train.max_policy_tokens={budget}", f"train.num_steps={_MANY}"]
    if not plan.has_cold_start:
        return [*common, *end]
    start = plan.out / f"{IMITATION}-{seed}" / "checkpoints" / "step-000000"
    # What a method starts from has been evaluated: it is imitation alone.
    return [
        *common,
        f"model.initial_checkpoint={start}",
        "cold_start.num_examples=0",
        "evaluation.at_start=false",
        *end,
    ]


def _shared_only(overrides: Sequence[str]) -> list[str]:
    return [
        one
        for one in overrides
        if not one.startswith("algorithm.") or one.startswith("algorithm.group_size=")
    ]
