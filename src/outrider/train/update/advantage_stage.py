"""Credit of one step: by group, or over the whole batch where the algorithm's statistics span it."""

from collections.abc import Sequence

from outrider.algorithms.base import GroupCredit
from outrider.trace import Trace
from outrider.train.components import Components
from outrider.train.update.reward_kl import measure_kl


def credit_step(parts: Components, traces: Sequence[Trace]) -> list[GroupCredit]:
    """Assign credit to the groups that the update gets; one entry a trace. A KL that the reward counts is
    measured first.
    """
    if parts.settings.algorithm.rewards_kl and parts.reference is not None:
        # Before the update, so that the KL is that of the policy which wrote the tokens.
        measure_kl(parts.policy, parts.reference, traces, max_tokens=parts.settings.update.max_tokens)
    return parts.algorithm.advantages(traces)
