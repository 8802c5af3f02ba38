"""RAPO's formulas (arXiv 2603.03078, Eq. 2 and 5-10) as pure functions of step entropies and token counts.

Every ablation of the paper that concerns a formula is a parameter here; the step index and the buffer live
elsewhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outrider.algorithms.common.advantages import (
    Float64Array,
    RolloutAdvantages,
    group_normalized_advantages_per_rollout,
)

EntropySign = Literal["decrease", "increase"]
Timing = Literal["entropy", "inverse_entropy", "none"]

# float32 log-softmax can leave an entropy of zero slightly negative; more than this is a fault of the engine.
_ENTROPY_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalReward:
    """The retrieval reward ``value`` (Z_ret) of one rollout, and what it was made from.

    ``gains`` and ``rewards`` hold g and Z of every scored retrieval, in order. ``num_without_after``
    retrievals had no on-policy step after them (the budget ran out) and are left out of the mean; for
    ``num_floored`` scored ones the entropy before was under the floor, so their relative change is damped.
    """

    value: float
    gains: tuple[float, ...]
    rewards: tuple[float, ...]
    num_without_after: int
    num_floored: int


def step_entropy_per_step(*, token_entropies: Sequence[float] | Float64Array) -> float:
    """Mean token entropy in nats over the tokens that the policy generated in one step (Eq. 2).

    Raises ValueError for a step without tokens and for entropies that are negative or not finite.
    """
    if len(token_entropies) == 0:
        raise ValueError("a step without generated tokens has no entropy")
    return math.fsum(_checked_entropy(float(entropy)) for entropy in token_entropies) / len(token_entropies)


def step_entropy_change(*, entropy_before: float, entropy_after: float, entropy_floor: float = 1e-3) -> float:
    """``-(H_a - H_b) / H_b``: the relative fall of the step entropy across a retrieval (Eq. 5); positive is a
    fall.

    ``entropy_floor`` (nats) bounds the denominator from below, so that a change between two near-zero
    entropies stays near zero and H_b = 0 is defined.
    """
    before, after = _checked_entropy(entropy_before), _checked_entropy(entropy_after)
    if entropy_floor <= 0.0:
        raise ValueError(f"entropy_floor must be positive, got {entropy_floor}")
    return (before - after) / max(before, entropy_floor)


def retrieval_reward_per_rollout(
    *,
    entropies_before: Sequence[float],
    entropies_after: Sequence[float | None],
    quality: bool = True,
    timing: Timing = "entropy",
    sign: EntropySign = "decrease",
    sharpness: float = 2.0,
    entropy_floor: float = 1e-3,
) -> RetrievalReward:
    """Mean of ``Z = g * H_b`` over the retrievals of one rollout, ``g = tanh(sharpness * change)`` (Eq. 5-7).

    ``entropies_before`` and ``entropies_after`` [R]: step entropies of the on-policy steps around each
    retrieval; None or NaN after where the rollout was cut. A rollout without a scored retrieval gets 0.
    Ablations: ``quality=False`` sets g to 1; ``timing`` replaces the factor H_b by 1/H_b (floored) or by 1;
    ``sign="increase"`` rewards a rise.

    Raises ValueError when both terms are off, or when the sign is flipped without the quality term it acts
    on.
    """
    if not quality and timing == "none":
        raise ValueError(
            "a retrieval reward without quality and timing is constant: set the advantage weight to 0 instead"
        )
    if not quality and sign == "increase":
        raise ValueError("the sign acts on the quality term, which is off")
    gains: list[float] = []
    rewards: list[float] = []
    num_without_after = num_floored = 0
    for before, after in zip(entropies_before, entropies_after, strict=True):
        if after is None or math.isnan(after):
            # Left out and not 0: a budget that ran out says nothing about the retrieval.
            num_without_after += 1
            continue
        change = step_entropy_change(entropy_before=before, entropy_after=after, entropy_floor=entropy_floor)
        num_floored += before < entropy_floor
        gain = math.tanh(sharpness * (change if sign == "decrease" else -change))
        gains.append(gain)
        rewards.append((gain if quality else 1.0) * _timing_factor(before, timing, entropy_floor))
    value = math.fsum(rewards) / len(rewards) if rewards else 0.0
    return RetrievalReward(
        value=value,
        gains=tuple(gains),
        rewards=tuple(rewards),
        num_without_after=num_without_after,
        num_floored=num_floored,
    )


def retrieval_advantages_per_rollout(
    *, rewards: Sequence[float | None] | Float64Array, std_ddof: Literal[0, 1] = 1, eps: float = 1e-6
) -> RolloutAdvantages:
    """``A_ret = (Z - mean Z) / (std Z + eps)`` over the whole group, zeros of on-policy rollouts included
    (Eq. 9).

    ``rewards`` [N]; None marks an unscorable rollout, which must be the same rollouts as for the outcome
    advantage.
    """
    return group_normalized_advantages_per_rollout(returns=rewards, std_ddof=std_ddof, eps=eps)


def retrieval_factors_per_rollout(*, retrieval: RolloutAdvantages, weight: float = 0.2) -> Float64Array:
    """``1 + a * A_ret`` [N], the factor on the outcome advantage (Eq. 10); ``weight`` 0 switches it off
    exactly.

    A factor below 0 turns the outcome's sign. With the sample std this needs (N - 1) / sqrt(N) > 1 / a, that
    is N >= 27 at a = 0.2; it is not clamped, so count it.
    """
    return np.asarray(1.0 + weight * retrieval.values, dtype=np.float64)


def combined_advantages_per_rollout(
    *, outcome: RolloutAdvantages, factors: Float64Array
) -> RolloutAdvantages:
    """``A = (1 + a * A_ret) * A_acc`` [N] (Eq. 10), ``factors`` from :func:`retrieval_factors_per_rollout`.

    The sum over the group is in general not 0 any more. Raises ValueError when the lengths differ.
    """
    if factors.shape != outcome.values.shape:
        raise ValueError(f"{factors.size} retrieval factors for {outcome.values.size} rollouts")
    return RolloutAdvantages(
        values=factors * outcome.values,
        assigned=outcome.assigned,
        has_signal=outcome.has_signal,
        reason=outcome.reason,
    )


def retrieved_token_share(*, num_retrieved_tokens: int, num_response_tokens: int) -> float:
    """``F_ret``: retrieved tokens over all response tokens of a rollout, the prompt not counted (Eq. 8); 0
    without response.

    Raises ValueError for counts that cannot be.
    """
    if not 0 <= num_retrieved_tokens <= num_response_tokens:
        raise ValueError(f"{num_retrieved_tokens} retrieved of {num_response_tokens} response tokens")
    return num_retrieved_tokens / num_response_tokens if num_response_tokens else 0.0


def retrieval_ratio_scale(*, retrieved_token_share: float, weight: float = 0.05) -> float:
    """``1 + m * F_ret`` of a rollout, the factor on its tokens' importance ratios; weight 0 gives exactly 1
    (Eq. 8).
    """
    return 1.0 + weight * retrieved_token_share


def _timing_factor(entropy_before: float, timing: Timing, entropy_floor: float) -> float:
    if timing == "entropy":
        return _checked_entropy(entropy_before)
    return 1.0 / max(entropy_before, entropy_floor) if timing == "inverse_entropy" else 1.0


def _checked_entropy(entropy: float) -> float:
    if not -_ENTROPY_ROUNDING <= entropy < math.inf:
        raise ValueError(f"not an entropy: {entropy}")
    return max(entropy, 0.0)
