"""What a training step writes down: its declared metrics, from rollouts, credit and update."""

from collections.abc import Mapping, Sequence

from outrider.algorithms.base import GroupCredit
from outrider.algorithms.empo2 import Empo2
from outrider.rollout.branch import Brancher
from outrider.train.components import Components
from outrider.train.sampling import SampledStep
from outrider.train.step_metrics import branch_metrics, credit_metrics, diversity, retrieval_metrics, rollout_metrics
from outrider.train.tip_metrics import tip_metrics


def step_record(
    parts: Components,
    report: SampledStep,
    credits_: Sequence[GroupCredit],
    *,
    mixed: Mapping[str, float],
    updated: Mapping[str, float],
    hook_counts: Sequence[Mapping[str, int]],
    hook_counts_before: Sequence[Mapping[str, int]],
) -> dict[str, float]:
    """All metrics but those of the clock. ``mixed`` and ``updated`` are those of what joined the rollouts and of the update.

    ``hook_counts`` run over the whole training; a step's own are what came since ``hook_counts_before``.
    """
    algorithm, traces = parts.algorithm, report.traces
    values = rollout_metrics(traces) | credit_metrics(credits_)
    if isinstance(algorithm, Empo2):
        values |= tip_metrics(traces, algorithm.tips)
    if any(isinstance(hook, Brancher) for hook in algorithm.hooks):
        values |= branch_metrics(traces)
    values |= {**mixed, **updated}
    if hook_counts:
        counts = {name: number - hook_counts_before[0].get(name, 0) for name, number in hook_counts[0].items()}
        values |= retrieval_metrics(traces, credits_, counts)
    values["rollout/num_retries"] = float(report.faults["retries"])
    values["rollout/num_close_faults"] = float(report.faults["close"])
    if report.rule is not None:
        values |= report.metrics(parts.settings.train.tasks_per_step)
    if (spread := diversity(traces)) is not None:
        values["rollout/diversity"] = spread
    return values
