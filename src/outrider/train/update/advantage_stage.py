"""Credit of one step: by group, or over the whole batch where the algorithm's statistics span it."""

from collections.abc import Sequence

from outrider.algorithms.base import GroupAdvantages
from outrider.trace import Trace
from outrider.train.components import Components


def assign_step_advantages(parts: Components, traces: Sequence[Trace]) -> list[GroupAdvantages]:
    """Assign credit to the groups that the update gets; one entry a trace. A KL that the reward counts is
    measured first.
    """
    if parts.settings.algorithm.rewards_kl and parts.learner.has_reference:
        # Before the update, so that the KL is that of the policy which wrote the tokens.
        parts.learner.score(traces)
    return parts.algorithm.advantages(traces)
