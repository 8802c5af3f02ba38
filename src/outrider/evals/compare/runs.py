"""The runs of a comparison as they are on disk: what they spent, what they scored, and where."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from outrider.errors import DataError, OutriderError
from outrider.evals.statistics import Scores
from outrider.metrics import WRITTEN_TOKENS
from outrider.watch.run_directory import Evaluation, RunData, read_run

# what a curve is drawn over, and the metrics of a step that add up to it
AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "training steps": ("step",),
    "policy tokens": WRITTEN_TOKENS,
    "tool calls": ("rollout/num_tool_calls",),
    "seconds": ("time/step",),
}
STEPS: Final = "training steps"
_REWARD: Final = "reward/mean"


class Incomparable(OutriderError):
    """Runs whose results do not measure the same thing, or do not measure it independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConditions:
    """Tasks and draws of an evaluation: scores of different panels are not compared."""

    split: str
    temperature: float
    panel_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """One evaluation: mean success over tasks after ``step`` training steps; ``task_scores`` and
    ``task_returns`` are empty where not on file.

    ``num_faults`` are rollouts that are in no score.
    """

    step: int
    score: float
    conditions: EvalConditions
    task_scores: Mapping[str, float]
    task_returns: Mapping[str, float]
    num_faults: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it is on disk. ``config`` is for people, ``settings`` has whole paths
    (``watch.run_directory``).

    ``costs`` are totals since step 0 after each training step, by axis; ``rewards`` are the mean training
    rewards of the steps, NaN where not known. Evaluations ascend by step, one per step (the last made there);
    ``trials`` are all evaluations of a run that adapts, which are of one step.
    """

    name: str
    config: Mapping[str, str]
    settings: Mapping[str, str]
    costs: Mapping[str, Scores]
    rewards: Scores
    evaluations: tuple[ScoredStep, ...]
    trials: tuple[ScoredStep, ...]
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        """The last training step on record."""
        return int(self.costs[STEPS][-1]) if len(self.rewards) else 0

    def cost_at_step(self, axis: str, step: int) -> float:
        """Cost of the run up to ``step`` training steps; NaN where the record does not tell."""
        if step == 0 or axis == STEPS:
            return float(step)
        indices = np.flatnonzero(self.costs[STEPS] == step)
        return float(self.costs[axis][indices[0]]) if axis in self.costs and len(indices) else math.nan


def load_run(path: Path, name: str) -> Run:
    """Read one run directory; ``name`` is what messages call it.

    Raises DataError when it has no configuration, or one without seed, algorithm and a number of steps.
    """
    data = read_run(path)
    if not {"seed", "algorithm.type"} <= data.config.keys():
        reason = "its config.toml has no seed and algorithm" if data.config else data.notes[0]
        raise DataError(f"{name} is no run that can be compared: {reason} ({path})")
    for key in ("train.num_steps", "train.max_policy_tokens"):
        if not (value := data.config.get(key, "none")).isdecimal() and value != "none":
            raise DataError(f"{name} is no run that can be compared: {key} = {value!r} is no number ({path})")
    notes = list(data.notes)
    # of a step that is there twice, the last record counts
    steps = sorted({step for step, _ in data.curve("train", "step")})
    rewards = {step: value for step, value in dict(data.curve("train", _REWARD)).items() if value is not None}
    return Run(
        name=name,
        config=data.config,
        settings=data.settings,
        costs=_costs(data, steps, notes),
        rewards=np.asarray([rewards.get(step, math.nan) for step in steps], dtype=np.float64),
        evaluations=_evaluations(data, notes),
        trials=_trials(data),
        notes=tuple(notes),
    )


def short_ends(names: Sequence[Sequence[str]]) -> list[str]:
    """The shortest ends, of as many parts each, that tell different names apart."""
    num_different = len(set(map(tuple, names)))
    length = next(
        n
        for n in range(1, max(map(len, names)) + 1)
        if len({tuple(name[-n:]) for name in names}) == num_different
    )
    return ["/".join(name[-length:]) for name in names]


def run_names(paths: Sequence[Path]) -> list[str]:
    """Names of runs: ends of their paths. Raises :class:`Incomparable` where two are one folder."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise Incomparable("a run directory is given twice")
    return short_ends(parts)


def _costs(data: RunData, steps: Sequence[int], notes: list[str]) -> dict[str, Scores]:
    costs: dict[str, Scores] = {STEPS: np.asarray(steps, dtype=np.float64)}
    for axis, (metric, *more) in AXES.items():
        values = {
            step: value for step, value in dict(data.curve("train", metric)).items() if value is not None
        }
        if axis != STEPS and values:
            others = [dict(data.curve("train", name)) for name in more]
            costs[axis] = np.cumsum(
                [values.get(step, 0.0) + sum(curve.get(step) or 0.0 for curve in others) for step in steps]
            )
            if len(values) < len(steps):
                notes.append(f"{len(steps) - len(values)} step(s) without {metric} count as 0")
    return costs


def _evaluations(data: RunData, notes: list[str]) -> tuple[ScoredStep, ...]:
    """The last evaluation of each step, as far as they are on the panel of the very last."""
    scored_by_step = {
        evaluation.step: _to_scored_step(evaluation)
        for evaluation in data.evaluations
        if "score" in evaluation.metrics
    }
    ascending = [scored_by_step[step] for step in sorted(scored_by_step)]
    comparable = tuple(
        evaluation for evaluation in ascending if evaluation.conditions == ascending[-1].conditions
    )
    if len(comparable) < len(ascending):
        notes.append(
            f"{len(ascending) - len(comparable)} evaluation(s) on another panel than the last are left out"
        )
    return comparable


def _trials(data: RunData) -> tuple[ScoredStep, ...]:
    if data.config.get("evaluation.num_trials", "0") == "0":
        return ()
    return tuple(
        _to_scored_step(evaluation) for evaluation in data.evaluations if "score" in evaluation.metrics
    )


def _to_scored_step(evaluation: Evaluation) -> ScoredStep:
    return ScoredStep(
        step=evaluation.step,
        score=evaluation.metrics["score"].value,
        conditions=EvalConditions(
            split=evaluation.split, temperature=evaluation.temperature, panel_hash=evaluation.panel_hash
        ),
        task_scores=evaluation.task_scores,
        task_returns=evaluation.task_returns,
        num_faults=evaluation.num_faults,
    )
