"""Evaluation on a fixed list of tasks, with confidence intervals.

Evaluations neither retrieve nor train. Faulted rollouts are counted separately and do not affect scores.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from types import MappingProxyType
from typing import Any

import numpy as np

from outrider.printing import plural, points
from outrider.rollout.faults import require_results
from outrider.rollout.scheduler import Rollouts
from outrider.seeding import stream
from outrider.trace import Trace
from outrider.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation. Faulted rollouts are only in ``num_faults``.

    Attributes:
        label: name of the evaluated policy.
        step: the training step.
        score: mean success over tasks.
        ci_low: lower bound of the 95 % interval of ``score``.
        ci_high: upper bound of the 95 % interval of ``score``.
        mean_return: mean return over rollouts.
        num_tasks: number of tasks with at least one scored rollout.
        num_faults: number of rollouts lost to faults.
        num_tool_calls: mean number per rollout.
        num_policy_tokens: mean number per rollout.
        num_retries: number of attempts that were repeated after a fault.
        fault_reasons: reasons of all faults, also of repeated attempts and of environments that failed to
            close.
        task_scores: mean success of every scored task, by task key.
        task_returns: mean return of every scored task, by task key.
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
    fault_reasons: tuple[str, ...] = ()


def evaluate(
    rollouts: Rollouts,
    tasks: Sequence[Task],
    *,
    num_samples: int,
    label: str,
    step: int,
    mode: str = "evaluation",
    # Training steps start at 0, so with -1 evaluations share no random stream with training.
    stream_step: int = -1,
) -> tuple[Evaluation, list[Trace]]:
    """Evaluate the policy on tasks with ``num_samples`` rollouts each.

    The random streams depend only on task, sample and ``stream_step``, so all checkpoints are evaluated with
    the same draws, and their difference can be tested with paired scores.

    Raises:
        InvalidResult: if rewards are not numbers.
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
        fault_reasons=report.fault_reasons,
    )
    return evaluation, report.traces


def evaluation_label(label: str, panel: str) -> str:
    """Format the label of an evaluation on the evaluation set ``panel``; "" is the only set."""
    return f"{label}, {panel}" if panel else label


def averages_over_sets(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Combine the lines of ``evaluations.jsonl`` of several sets: ``macro`` is the mean of their scores,
    ``micro`` the mean over all of their scored tasks.
    """
    scores = [entry["metric"]["score"]["value"] for entry in evaluations]
    nums = [entry["num_tasks"] for entry in evaluations]
    weighted = [value * num for value, num in zip(scores, nums, strict=True)]
    return {"macro": fmean(scores), "micro": math.fsum(weighted) / sum(nums)}


def describe_conditions(
    *,
    split: str,
    panel_hash: str,
    temperature: float,
    num_samples: int | str | None = None,
    truncation: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """Describe in one line what a score was measured on and how: scores with another line cannot be
    compared.
    """
    samples = () if num_samples is None else (f"n = {num_samples}",)
    cuts = (f"{name} {value:g}" for name, value in truncation.items())
    return ", ".join(
        (f"split {split}", f"panel {panel_hash[:12]}", f"temperature {temperature:g}", *cuts, *samples)
    )


_LEVEL = 0.95


def interval(scores: Sequence[float], *, binary: bool) -> tuple[float, float]:
    """Return the confidence interval of the mean over tasks; NaN without scores.

    If all task scores are 0 or 1 (``binary``), this is the Wilson interval (1927), otherwise a seeded
    percentile bootstrap. Binary scores need the Wilson interval because a bootstrap of equal values has zero
    width.
    """
    if not scores:
        return float("nan"), float("nan")
    if not binary:
        draws = stream(0, "bootstrap").choice(np.asarray(scores), size=(2000, len(scores))).mean(axis=1)
        tail = 50 * (1 - _LEVEL)
        return float(np.percentile(draws, tail)), float(np.percentile(draws, 100 - tail))
    z, n, p = NormalDist().inv_cdf(0.5 + _LEVEL / 2), len(scores), fmean(scores)
    centre, margin = p + z * z / (2 * n), z * float(np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)))
    low, high = (centre - margin) / (1 + z * z / n), (centre + margin) / (1 + z * z / n)
    return max(0.0, min(low, p)), min(1.0, max(high, p))  # rounding may put a bound on the wrong side of p


# Paired comparison of two evaluations on the same tasks and draws.


_NUM_DRAWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedGain:
    """Mean difference of the scores, later minus earlier, with its confidence interval.

    ``num_tasks`` is the number of tasks that both evaluations scored.
    """

    earlier: str
    difference: float
    ci_low: float
    ci_high: float
    num_tasks: int

    def __str__(self) -> str:
        """Format the gain in one line, in percentage points."""
        gained = points(self.difference, self.ci_low, self.ci_high)
        return f"{gained} over {self.earlier!r}, the same {plural(self.num_tasks, 'task')} and draws"


def paired_gain(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> PairedGain | None:
    """Compare two lines of ``evaluations.jsonl``.

    Returns None if their splits, task lists, temperatures, top-p or top-k differ, or if they have no scored
    task in common.
    """
    conditions = ("split", "panel_hash", "temperature", "top_p", "top_k")
    if any(earlier.get(key) != later.get(key) for key in conditions):
        return None
    before, after = earlier["task_scores"], later["task_scores"]
    differences = [after[key] - before[key] for key in after if key in before]
    if not differences:
        return None
    low, high = difference_interval(differences)
    return PairedGain(
        earlier=earlier["label"],
        difference=fmean(differences),
        ci_low=low,
        ci_high=high,
        num_tasks=len(differences),
    )


def gain_over_start(evaluations: Sequence[Mapping[str, Any]]) -> PairedGain | None:
    """Compare the last evaluation with the last one of step 0, the policy before reinforcement learning."""
    starts = [evaluation for evaluation in evaluations if evaluation["step"] == 0]
    if not starts or evaluations[-1]["step"] == 0:
        return None
    return paired_gain(starts[-1], evaluations[-1])


def difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the confidence interval of the mean of paired differences.

    If all differences are -1, 0 or 1 (one sample per task), this is the Wald interval with half a task added
    to each of the four cells (Agresti and Min 2005, "Simple improved confidence intervals for comparing
    matched proportions"). Its coverage holds with few changed tasks, and its width is positive even if all
    tasks agree. Otherwise, it is a seeded percentile bootstrap over tasks.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not np.isin(values, (-1.0, 0.0, 1.0)).all():
        draws = stream(0, "paired bootstrap").choice(values, size=(_NUM_DRAWS, len(values))).mean(axis=1)
        tail = 50 * (1 - _LEVEL)
        return float(np.percentile(draws, tail)), float(np.percentile(draws, 100 - tail))
    gained, lost, num = float((values > 0).sum()) + 0.5, float((values < 0).sum()) + 0.5, len(values) + 2.0
    centre = (gained - lost) / num
    z = NormalDist().inv_cdf(0.5 + _LEVEL / 2)
    margin = z * math.sqrt(gained + lost - (gained - lost) ** 2 / num) / num
    return max(-1.0, centre - margin), min(1.0, centre + margin)
