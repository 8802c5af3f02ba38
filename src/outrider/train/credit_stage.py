"""Credit of one step: by group, or over the whole batch where the algorithm's statistics span it."""

from collections.abc import Sequence

from outrider.algorithms.base import BatchCredit, GroupCredit
from outrider.algorithms.group_settings import GroupSettings
from outrider.trace import Trace
from outrider.train.components import Components
from outrider.train.reward_kl import measure_kl


def credit_step(parts: Components, traces: Sequence[Trace]) -> list[GroupCredit]:
    """Assign credit to the groups that the update gets; one entry a trace. A KL that the reward counts is measured first."""
    settings = parts.settings.algorithm
    if isinstance(settings, GroupSettings) and settings.reward_kl_weight > 0 and parts.reference is not None:
        measure_kl(parts.policy, parts.reference, traces, max_tokens=parts.settings.update.max_tokens)
    if isinstance(parts.algorithm, BatchCredit):
        return parts.algorithm.credit_batch(traces)
    return [parts.algorithm.credit(trace) for trace in traces]
