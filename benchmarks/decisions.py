"""How often a rollout of RAPO is rewarded, by the number of decisions that its policy must learn
(docs/algorithms/details/rapo_measured.md).

A lock has D doors and T policy turns; a turn at door d opens it with probability p_d. A wrong turn has no
effect, or ends the episode of a strict lock. Before every turn of a hybrid rollout except the first, a step
is retrieved with probability q. It opens the current door (the nearest step is the right one), but not the
last, whose step is terminal and never retrieved: there, the nearest other step is executed and is wrong. All
probabilities are exact, in float64.
"""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """``chances`` are p_1 to p_D, ``num_turns`` is T; ``probability`` q is 0 for an on-policy rollout. With
    ``only_known`` (``min_similarity`` near 1) nothing is retrieved at the last door.
    """

    chances: tuple[float, ...]
    num_turns: int
    probability: float = 0.5
    is_strict: bool = False
    only_known: bool = False


def rewarded(lock: Lock, *, own: int | None = None) -> float:
    """Return the probability of a rewarded rollout, or of one in which the policy itself made decision
    ``own`` (from 1).
    """
    last = len(lock.chances) - 1

    @cache
    def before(turn: int, door: int) -> float:
        if door > last:
            return 1.0
        if turn == lock.num_turns:
            return 0.0
        if turn == 0:
            return policy(turn, door)
        return (1 - lock.probability) * policy(turn, door) + lock.probability * retrieved(turn, door)

    def policy(turn: int, door: int) -> float:
        wrong = 0.0 if lock.is_strict else before(turn + 1, door)
        return lock.chances[door] * before(turn + 1, door + 1) + (1 - lock.chances[door]) * wrong

    def retrieved(turn: int, door: int) -> float:
        if door == last:
            return 0.0 if lock.is_strict and not lock.only_known else policy(turn, door)
        return 0.0 if door + 1 == own else policy(turn, door + 1)

    return before(0, 0)
