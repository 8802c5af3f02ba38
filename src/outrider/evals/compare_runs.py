"""The runs of a comparison as they are on disk: what they spent, what they scored, and where."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from outrider.errors import DataError, OutriderError
from outrider.evals.statistics import Scores
from outrider.watch.run_directory import finite, read_run

AXES: Final[Mapping[str, tuple[str, ...]]] = {  # what a curve is drawn over, and the metrics of a step that add up to it
    "training steps": ("step",),
    "policy tokens": ("tokens/policy", "tokens/remarks"),  # the second only where tips are written
    "tool calls": ("rollout/num_tool_calls",),
    "seconds": ("time/step",),
}
STEPS: Final = "training steps"
_REWARD: Final = "reward/mean"


class Incomparable(OutriderError):
    """Runs whose results do not measure the same thing, or do not measure it independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What an evaluation was made on: scores of different panels are not compared."""

    split: str
    temperature: float
    panel_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """One evaluation: mean success over tasks after ``step`` training steps; ``task_scores`` is empty where not on file."""

    step: int
    score: float
    panel: Panel
    task_scores: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it is on disk. ``costs`` are totals since step 0 after each training step, by axis; ``rewards`` are the mean
    training rewards of the steps, NaN where not known. Evaluations ascend by step, one a step (the last made there).
    """

    name: str
    config: Mapping[str, str]
    costs: Mapping[str, Scores]
    rewards: Scores
    evaluations: tuple[ScoredStep, ...]
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """The last training step on record."""
        return int(self.costs[STEPS][-1]) if len(self.rewards) else 0

    def cost_at(self, axis: str, step: int) -> float:
        """What the run had spent after ``step`` training steps; NaN where the record does not tell."""
        if step == 0 or axis == STEPS:
            return float(step)
        found = np.flatnonzero(self.costs[STEPS] == step)
        return float(self.costs[axis][found[0]]) if axis in self.costs and len(found) else math.nan


def load_run(path: Path, name: str) -> Run:
    """Read one run directory; ``name`` is what messages call it. Raises DataError when it has no configuration."""
    data = read_run(path)
    if not {"seed", "algorithm.type"} <= data.config.keys():
        raise DataError(f"{name} is no run that can be compared: its config.toml has no seed and algorithm ({path})")
    steps = sorted({step for step, _ in data.curve("train", "step")})  # of a step that is there twice, the last record counts
    costs: dict[str, Scores] = {STEPS: np.asarray(steps, dtype=np.float64)}
    notes = list(data.notes)
    for axis, (metric, *more) in AXES.items():
        values = {step: value for step, value in dict(data.curve("train", metric)).items() if value is not None}
        if axis != STEPS and values:
            others = [dict(data.curve("train", name)) for name in more]
            costs[axis] = np.cumsum([values.get(step, 0.0) + sum(one.get(step) or 0.0 for one in others) for step in steps])
            if len(values) < len(steps):
                notes.append(f"{len(steps) - len(values)} step(s) without {metric} count as 0")
    rewards = {step: value for step, value in dict(data.curve("train", _REWARD)).items() if value is not None}
    by_task = _task_scores(path / "evaluations.jsonl")
    evaluations = {
        one.step: ScoredStep(
            step=one.step,
            score=one.metrics["score"].value,
            panel=Panel(split=one.split, temperature=one.temperature, panel_hash=one.panel_hash),
            task_scores=by_task.get((one.label, one.step), {}),
        )
        for one in data.evaluations
        if "score" in one.metrics and math.isfinite(one.metrics["score"].value)
    }
    ascending = [evaluations[step] for step in sorted(evaluations)]
    return Run(
        name=name,
        config=data.config,
        costs=costs,
        rewards=np.asarray([rewards.get(step, math.nan) for step in steps], dtype=np.float64),
        evaluations=tuple(one for one in ascending if one.panel == ascending[-1].panel),
        notes=tuple(notes),
    )


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise Incomparable("a run directory is given twice")
    length = next(n for n in range(1, max(map(len, parts)) + 1) if len({one[-n:] for one in parts}) == len(parts))
    return ["/".join(one[-length:]) for one in parts]


def _task_scores(file: Path) -> dict[tuple[str, int], dict[str, float]]:
    """The optional ``task_scores`` of evaluations by label and step; what cannot be read, :func:`read_run` has noted."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else ():
        try:
            record = json.loads(line)
            scores = {str(key): finite(value) for key, value in record["task_scores"].items()}
            place = (str(record["label"]), int(record["step"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        found[place] = {key: value for key, value in scores.items() if value is not None}
    return found
