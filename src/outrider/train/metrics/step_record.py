"""The record of a training step: its declared metrics, from rollouts, credit and update."""

from collections.abc import Mapping, Sequence

from outrider.algorithms.base import GroupCredit
from outrider.rollout.branch import Brancher
from outrider.train.components import Components
from outrider.train.data.task_sampling import SampledStep
from outrider.train.metrics.step_metrics import (
    branch_metrics,
    credit_metrics,
    diversity,
    environment_metrics,
    retrieval_metrics,
    rollout_metrics,
)


def step_record(
    parts: Components,
    report: SampledStep,
    credits_: Sequence[GroupCredit],
    *,
    mixed: Mapping[str, float],
    updated: Mapping[str, float],
    counts_before: Sequence[Mapping[str, int]],
) -> dict[str, float]:
    """All metrics but those of the clock. ``mixed`` and ``updated`` are those of what joined the rollouts and
    of the update.

    The algorithm's counts run over the whole training; a step's own are what came since ``counts_before``.
    """
    algorithm, traces = parts.algorithm, report.traces
    values = rollout_metrics(traces) | credit_metrics(credits_) | algorithm.measure(traces)
    if any(isinstance(hook, Brancher) for hook in algorithm.hooks):
        values |= branch_metrics(traces)
    if parts.settings.environment.reports_metrics:
        values |= environment_metrics(traces)
    values |= {**mixed, **updated}
    if now := algorithm.counts():
        counts = {name: number - counts_before[0].get(name, 0) for name, number in now[0].items()}
        values |= retrieval_metrics(traces, credits_, counts)
    values["rollout/num_retries"] = float(report.faults["retries"])
    values["rollout/num_close_faults"] = float(report.faults["close"])
    if report.is_filtered:
        values |= report.metrics(parts.settings.train.tasks_per_step)
    if report.loop_lag_s is not None:
        values["time/loop_lag"] = report.loop_lag_s
    if (spread := diversity(traces)) is not None:
        values["rollout/diversity"] = spread
    return values
