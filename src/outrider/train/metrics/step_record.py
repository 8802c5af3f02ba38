"""The record of a training step: its declared metrics, from rollouts, credit and update."""

from collections.abc import Mapping, Sequence

from outrider.algorithms.base import GroupAdvantages
from outrider.rollout.branch import Brancher
from outrider.train.components import Components
from outrider.train.data.task_sampling import SampledStep
from outrider.train.metrics.step_metrics import (
    advantage_metrics,
    branch_metrics,
    diversity,
    environment_metrics,
    retrieval_metrics,
    rollout_metrics,
)


def step_record(
    parts: Components,
    report: SampledStep,
    group_advantages: Sequence[GroupAdvantages],
    *,
    mix_metrics: Mapping[str, float],
    update_metrics: Mapping[str, float],
    counts_before: Sequence[Mapping[str, int]],
) -> dict[str, float]:
    """All metrics but those of the clock. ``mix_metrics`` and ``update_metrics`` are those of what joined the rollouts and
    of the update.

    The algorithm's counts run over the whole training; a step's own are what came since ``counts_before``.
    """
    algorithm, traces = parts.algorithm, report.traces
    values = rollout_metrics(traces) | advantage_metrics(group_advantages) | algorithm.measure(traces)
    if any(isinstance(hook, Brancher) for hook in algorithm.hooks):
        values |= branch_metrics(traces)
    if parts.settings.environment.reports_metrics:
        values |= environment_metrics(traces)
    values |= {**mix_metrics, **update_metrics}
    if now := algorithm.counts():
        counts = {name: number - counts_before[0].get(name, 0) for name, number in now[0].items()}
        values |= retrieval_metrics(traces, group_advantages, counts)
    values["rollout/num_retries"] = float(report.faults["retries"])
    values["rollout/num_close_faults"] = float(report.faults["close"])
    if report.is_filtered:
        values |= report.metrics(parts.settings.train.tasks_per_step)
    if report.loop_lag_s is not None:
        values["time/loop_lag"] = report.loop_lag_s
    if (diversity_value := diversity(traces)) is not None:
        values["rollout/diversity"] = diversity_value
    return values
