"""Evaluation on a frozen panel: no retrieval, no training, faults apart from scores, and intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from outrider.printing import points
from outrider.rollout.faults import require_results
from outrider.rollout.scheduler import Rollouts
from outrider.seeding import stream
from outrider.trace import Trace
from outrider.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """``score`` is the mean success over tasks with its 95 % interval; faulty rollouts are counted and left
    out.

    ``num_retries``: tries that were repeated after a fault. ``task_scores`` and ``task_returns``: mean
    success and mean return of each scored task, by its key.
    """

    label: str
    step: int
    score: float
    ci_low: float
    ci_high: float
    mean_return: float
    num_tasks: int
    num_faults: int
    num_tool_calls: float
    num_policy_tokens: float
    num_retries: int
    task_scores: Mapping[str, float]
    task_returns: Mapping[str, float]


def evaluate(
    rollouts: Rollouts,
    tasks: Sequence[Task],
    *,
    num_samples: int,
    label: str,
    step: int,
    mode: str = "evaluation",
    # Training steps count from 0: no evaluation shares a random stream with one.
    stream_step: int = -1,
) -> tuple[Evaluation, list[Trace]]:
    """Play the panel. The random streams depend on task, sample and ``stream_step`` only, so two checkpoints
    face the same draws. Raises InvalidResult if rewards are no numbers.
    """
    report = rollouts.run(tasks, modes=(mode,) * num_samples, training_step=stream_step)
    require_results(report.traces, report.faults)
    leaves = [
        [leaf for leaf, _ in trace.rollouts() if leaf.episode_return is not None] for trace in report.traces
    ]
    scored = [group for group in leaves if group]
    keys = [trace.task.key for trace, group in zip(report.traces, leaves, strict=True) if group]
    successes = [fmean(float(leaf.success) for leaf in group) for group in scored]
    returns = [fmean(leaf.episode_return or 0.0 for leaf in group) for group in scored]
    low, high = interval(successes, binary=all(success in (0.0, 1.0) for success in successes))
    paths = [
        path for trace in report.traces for leaf, path in trace.rollouts() if leaf.episode_return is not None
    ]
    num_rollouts = max(1, len(paths))
    evaluation = Evaluation(
        label=label,
        step=step,
        score=fmean(successes) if successes else float("nan"),
        ci_low=low,
        ci_high=high,
        mean_return=fmean(leaf.episode_return or 0.0 for group in scored for leaf in group)
        if scored
        else float("nan"),
        num_tasks=len(scored),
        num_faults=sum(num_samples - len(group) for group in leaves),
        num_tool_calls=sum(node.metadata.get("num_tool_calls", 0) for path in paths for node in path)
        / num_rollouts,
        num_policy_tokens=sum(len(node.token_ids) for path in paths for node in path if node.trainable)
        / num_rollouts,
        num_retries=report.num_retries,
        task_scores=dict(zip(keys, successes, strict=True)),
        task_returns=dict(zip(keys, returns, strict=True)),
    )
    return evaluation, report.traces


def interval(scores: Sequence[float], *, binary: bool, level: float = 0.95) -> tuple[float, float]:
    """Interval of the mean over tasks: Wilson's (1927) where each is a failure (0) or a success (1), also
    where many samples of a task all ended alike, else a seeded percentile bootstrap. Without scores NaN.

    A bootstrap of equal values has no width: it has seen nothing else, and is no interval.
    """
    if not scores:
        return float("nan"), float("nan")
    if not binary:
        draws = stream(0, "bootstrap").choice(np.asarray(scores), size=(2000, len(scores))).mean(axis=1)
        tail = 50 * (1 - level)
        return float(np.percentile(draws, tail)), float(np.percentile(draws, 100 - tail))
    z, n, p = NormalDist().inv_cdf(0.5 + level / 2), len(scores), fmean(scores)
    centre, margin = p + z * z / (2 * n), z * float(np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)))
    low, high = (centre - margin) / (1 + z * z / n), (centre + margin) / (1 + z * z / n)
    return max(0.0, min(low, p)), min(1.0, max(high, p))  # rounded, a bound may fall short of p = 1


# The gain between two evaluations of one policy on the same tasks and draws, with an interval of the paired
# difference.


_NUM_DRAWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedGain:
    """Mean difference of the scores, later minus earlier, with its interval; ``num_tasks`` were scored by
    both.
    """

    earlier: str
    difference: float
    ci_low: float
    ci_high: float
    num_tasks: int

    def __str__(self) -> str:
        """One line, in percentage points."""
        gained = points(self.difference, self.ci_low, self.ci_high)
        return f"{gained} over {self.earlier!r}, the same {self.num_tasks} tasks and draws"


def paired_gain(
    earlier: Mapping[str, Any], later: Mapping[str, Any], *, level: float = 0.95
) -> PairedGain | None:
    """Gain between two lines of ``evaluations.jsonl``; None where they have no task, panel or temperature in
    common.
    """
    if any(earlier[key] != later[key] for key in ("split", "panel_hash", "temperature")):
        return None
    before, after = earlier["task_scores"], later["task_scores"]
    differences = [after[key] - before[key] for key in after if key in before]
    if not differences:
        return None
    low, high = difference_interval(differences, level=level)
    return PairedGain(
        earlier=earlier["label"],
        difference=fmean(differences),
        ci_low=low,
        ci_high=high,
        num_tasks=len(differences),
    )


def gain_over_start(evaluations: Sequence[Mapping[str, Any]]) -> PairedGain | None:
    """Gain of the last evaluation over the policy that reinforcement learning began with (the last one of
    step 0).
    """
    starts = [evaluation for evaluation in evaluations if evaluation["step"] == 0]
    if not starts or evaluations[-1]["step"] == 0:
        return None
    return paired_gain(starts[-1], evaluations[-1])


def difference_interval(differences: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of paired differences.

    Where each is -1, 0 or 1 (one sample per task): the Wald interval with half a task added to each of the
    four cells (Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
    proportions"), which keeps its level with few changed tasks and has a width where all agree. Else a seeded
    percentile bootstrap over tasks.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not np.isin(values, (-1.0, 0.0, 1.0)).all():
        draws = stream(0, "paired bootstrap").choice(values, size=(_NUM_DRAWS, len(values))).mean(axis=1)
        tail = 50 * (1 - level)
        return float(np.percentile(draws, tail)), float(np.percentile(draws, 100 - tail))
    gained, lost, num = float((values > 0).sum()) + 0.5, float((values < 0).sum()) + 0.5, len(values) + 2.0
    centre = (gained - lost) / num
    z = NormalDist().inv_cdf(0.5 + level / 2)
    margin = z * math.sqrt(gained + lost - (gained - lost) ** 2 / num) / num
    return max(-1.0, centre - margin), min(1.0, centre + margin)
