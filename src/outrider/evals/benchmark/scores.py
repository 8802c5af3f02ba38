"""Scores of a panel from the results of its samples: pass@k, avg@k, majority, tool use. Pure functions, no
files.

A sample that infrastructure ended has no score: it is counted by its outcome and enters no mean.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from outrider.environments.grading.answers import normalize_answer
from outrider.types import Outcome

SIGMA: Final = 0.1  # tool calls; ARPO's released evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """One sample of one task. ``score`` in [0, 1] is the task set's own metric and ``success`` whether it
    counts as solved; both are None when it could not be scored: ``outcome`` is a fault then, and ``detail``
    says which. Of a sample that a judge scored, ``detail`` is what the judge wrote.

    ``answered`` is how the rollout ended where only the judge failed: the answer stands, and only the judge
    is asked again. ``num_tokens`` is None where a server did not count them. ``turns`` is the reply, all that
    the policy wrote, a text per turn; None after a fault, and where an earlier Outrider did not keep it.
    ``token_ids`` has the same in ids, where the player has them.
    """

    task_key: str
    sample: int
    outcome: Outcome
    answered: Outcome | None = None
    score: float | None = None
    success: bool | None = None
    prediction: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_tool_calls: int = 0
    num_tokens: int | None = 0
    detail: str = ""
    turns: tuple[str, ...] | None = None
    token_ids: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a fault with a score, a score without success, an ending that has no score,
        and an answer without a fault of its judge.
        """
        is_scored = self.score is not None
        if is_scored is self.outcome.is_fault or is_scored is not (self.success is not None):
            raise ValueError(
                f"{self.task_key}: outcome {self.outcome}, score {self.score} "
                f"and success {self.success} contradict"
            )
        if self.answered is not None and (is_scored or self.answered.is_fault):
            raise ValueError(
                f"{self.task_key}: answered as {self.answered} and outcome {self.outcome} contradict"
            )
        if not all(math.isfinite(value) for value in (*self.metrics.values(), self.score or 0.0)):
            raise ValueError(f"{self.task_key}: a score or a metric is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTasksSummary:
    """Means over tasks of means over a task's scored samples; ``num_tool_calls`` and ``num_tokens`` are per
    answer, tokens without the ``num_uncounted`` answers whose tokens nobody counted.

    ``pass_at_k`` maps k to pass@k over the ``num_tasks_at_k[k]`` tasks with at least k scored samples. ``score``
    is avg@k. ``outcomes`` counts scored samples by how they ended, ``faults`` the others. NaN where nothing
    was scored. ``task_...`` hold what was averaged, by task key.
    """

    num_tasks: int
    num_scored: int
    score: float
    pass_at_k: Mapping[int, float]
    num_tasks_at_k: Mapping[int, int]
    majority: float
    metrics: Mapping[str, float]
    num_tool_calls: float
    num_tokens: float
    num_uncounted: int
    tool_usage_rate: float
    tool_productivity: float
    outcomes: Mapping[str, int]
    faults: Mapping[str, int]
    task_scores: Mapping[str, float]
    task_passes: Mapping[int, Mapping[str, float]]
    task_majorities: Mapping[str, float]
    task_metrics: Mapping[str, Mapping[str, float]]


def pass_at_k(*, num_samples: int, num_correct: int, k: int) -> float:
    """Chance that one of ``k`` samples drawn without replacement from ``num_samples`` is correct: 1 - C(n-c,
    k) / C(n, k).

    Unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1); exact integers, one division.
    Raises ValueError unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples is not defined")
    total = math.comb(num_samples, k)
    return (total - math.comb(num_samples - num_correct, k)) / total


def avg_at_k(scores: Sequence[float]) -> float:
    """Mean score of a task's k samples. Raises ValueError without any."""
    if not scores:
        raise ValueError("avg@k of no samples is not defined")
    return fmean(scores)


def majority_at_k(labels: Sequence[str], successes: Sequence[bool]) -> float:
    """Success of the most frequent label among k samples; of a tie the mean, which is what a random choice
    would expect.

    An empty label (no answer) has no vote; without any vote the result is 0. Samples of one label may differ
    in success (two texts that normalise alike): their mean counts. Raises ValueError when the lengths differ
    or there is no sample.
    """
    if len(labels) != len(successes) or not labels:
        raise ValueError("majority needs one success a label, and at least one")
    votes = Counter(label for label in labels if label)
    if not votes:
        return 0.0
    max_votes = max(votes.values())
    winners = [label for label, count in votes.items() if count == max_votes]
    winner_rates = [
        fmean(ok for other, ok in zip(labels, successes, strict=True) if other == label) for label in winners
    ]
    return fmean(winner_rates)


def tool_productivity(*, accuracy: float, mean_tool_calls: float, sigma: float = SIGMA) -> float:
    """100 a T / (T + sigma): accuracy in percent, discounted where tools are hardly used (ARPO's released
    evaluation).

    ``mean_tool_calls`` is T, calls per answer. There T counts tag pairs, refused calls too; pass executed
    calls here.
    """
    return 100.0 * accuracy * mean_tool_calls / (mean_tool_calls + sigma)


def tool_usage_rate(num_tool_calls: Sequence[int]) -> float:
    """Share of answers with at least one tool call. Raises ValueError without answers."""
    if not num_tool_calls:
        raise ValueError("the tool usage rate of no answers is not defined")
    return fmean(count > 0 for count in num_tool_calls)


def summarise(
    results: Iterable[SampleResult],
    *,
    ks: Sequence[int] = (1,),
    normalize: Callable[[str], str] = normalize_answer,
) -> EvalTasksSummary:
    """The panel's scores; the order of results changes nothing. ``normalize`` makes labels of predictions for
    the majority.

    Raises ValueError for two results of one sample.
    """
    results_by_task: dict[str, list[SampleResult]] = {}
    seen: set[tuple[str, int]] = set()
    faults: Counter[str] = Counter()
    for result in sorted(results, key=lambda entry: (entry.task_key, entry.sample)):
        if (result.task_key, result.sample) in seen:
            raise ValueError(f"two results of {result.task_key}, sample {result.sample}")
        seen.add((result.task_key, result.sample))
        if result.score is None:
            faults[result.outcome.value] += 1
        else:
            results_by_task.setdefault(result.task_key, []).append(result)
    scored = [entry for group in results_by_task.values() for entry in group]
    scores = {
        key: avg_at_k([entry.score or 0.0 for entry in group]) for key, group in results_by_task.items()
    }
    majorities = {key: _majority(group, normalize) for key, group in results_by_task.items()}
    metrics = _task_metrics(results_by_task)
    calls = [entry.num_tool_calls for entry in scored]
    # A k that no task has samples enough for is left out rather than reported as a number.
    task_passes = {
        k: {key: _group_pass_at_k(group, k) for key, group in results_by_task.items() if len(group) >= k}
        for k in ks
    }
    return EvalTasksSummary(
        num_tasks=len(results_by_task),
        num_scored=len(scored),
        score=_mean(scores.values()),
        pass_at_k={k: _mean(tasks.values()) for k, tasks in task_passes.items() if tasks},
        num_tasks_at_k={k: len(tasks) for k, tasks in task_passes.items()},
        majority=_mean(majorities.values()),
        metrics={name: _mean(tasks.values()) for name, tasks in metrics.items()},
        num_tool_calls=_mean(calls),
        num_tokens=_mean(entry.num_tokens for entry in scored if entry.num_tokens is not None),
        num_uncounted=sum(entry.num_tokens is None for entry in scored),
        tool_usage_rate=tool_usage_rate(calls) if calls else math.nan,
        tool_productivity=tool_productivity(accuracy=_mean(scores.values()), mean_tool_calls=_mean(calls)),
        outcomes=dict(sorted(Counter(entry.outcome.value for entry in scored).items())),
        faults=dict(sorted(faults.items())),
        task_scores=scores,
        task_passes=task_passes,
        task_majorities=majorities,
        task_metrics=metrics,
    )


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return fmean(numbers) if numbers else math.nan


def _group_pass_at_k(group: Sequence[SampleResult], k: int) -> float:
    return pass_at_k(num_samples=len(group), num_correct=sum(result.success is True for result in group), k=k)


def _majority(group: Sequence[SampleResult], normalize: Callable[[str], str]) -> float:
    return majority_at_k(
        [normalize(result.prediction) for result in group], [result.success is True for result in group]
    )


def _task_metrics(groups: Mapping[str, Sequence[SampleResult]]) -> dict[str, dict[str, float]]:
    """The mean of each metric over a task's samples, for the tasks that have it."""
    means: dict[str, dict[str, float]] = {}
    for key, group in groups.items():
        for name in sorted({name for result in group for name in result.metrics}):
            means.setdefault(name, {})[key] = fmean(
                result.metrics[name] for result in group if name in result.metrics
            )
    return dict(sorted(means.items()))
