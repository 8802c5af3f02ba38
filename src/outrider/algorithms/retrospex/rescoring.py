"""Action rescoring of Retrospex (Xiang et al., EMNLP 2024; ``dynamic_action_scoring`` of the released code).

``λ_t minmax(p) + (1 - λ_t) minmax(Q - V)`` with ``λ_t = max(b, d^t)``. Shape letter: C candidates of a turn.
"""

from collections.abc import Sequence
from math import exp
from statistics import fmean

import numpy as np
from numpy.typing import NDArray


def policy_weight(turn: int, *, decay: float, floor: float) -> float:
    """``λ_t`` of turn t, the first of an episode is 0: the longer it lasts, the more the critic decides."""
    return max(floor, decay**turn)


def probability(logprobs: Sequence[float]) -> float:
    """How likely the policy is to write a turn: ``exp`` of the mean log-probability of its tokens."""
    return exp(fmean(logprobs))


def rescore(
    probabilities: Sequence[float], advantages: Sequence[float], *, weight: float
) -> NDArray[np.float64]:
    """``[C]`` scores. What is equal for all candidates decides nothing, where the released code divides by
    0.
    """
    scores_C: NDArray[np.float64] = weight * _min_max_scale(probabilities) + (1 - weight) * _min_max_scale(
        advantages
    )
    return scores_C


def _min_max_scale(values: Sequence[float]) -> NDArray[np.float64]:
    """From 0 (the least) to 1 (the greatest)."""
    values_C = np.asarray(values, np.float64)
    spread = values_C.max() - values_C.min()
    return (values_C - values_C.min()) / spread if spread > 0 else np.zeros_like(values_C)
