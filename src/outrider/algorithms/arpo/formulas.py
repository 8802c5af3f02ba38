"""ARPO's and AEPO's formulas (arXiv 2507.19849, 2510.14545) as pure functions of entropies and uniform draws.

Entropies are in nats. ``u`` is a draw in [0, 1).
"""

import math
from collections.abc import Sequence
from typing import Literal

Reduce = Literal["mean", "sum"]
Normalizer = Literal["log_vocabulary", "vocabulary", "none"]
Decision = Literal["bernoulli", "threshold", "aepo_released"]


def truncated_entropy(logprobs: Sequence[float]) -> float:
    """``-sum p ln p`` over the log-probs that a server returned, not renormalised: a lower bound (released
    ARPO).
    """
    return -math.fsum(math.exp(value) * value for value in logprobs)


def segment_entropy(
    token_entropies: Sequence[float],
    *,
    vocabulary_size: int,
    window: int = 20,
    reduce: Reduce = "mean",
    normalizer: Normalizer = "log_vocabulary",
) -> float:
    """Entropy of a segment's first ``window`` tokens: mean or sum, divided by ln V, V or nothing; 0 for an
    empty segment.

    Raises ValueError for a vocabulary of fewer than two entries.
    """
    if vocabulary_size < 2:
        raise ValueError(f"a vocabulary of {vocabulary_size} has no entropy")
    first = token_entropies[:window]
    if not first:
        return 0.0
    value = math.fsum(first) / (len(first) if reduce == "mean" else 1)
    return (
        value
        / {"log_vocabulary": math.log(vocabulary_size), "vocabulary": vocabulary_size, "none": 1}[normalizer]
    )


def branch_probability(
    *, change: float, base: float, weight: float, penalty: float = 0.0, streak: int = 0
) -> float:
    """``clip((p + w dH) (1 - penalty l), 0, 1)``; ``streak`` l counts the branched steps in a row (AEPO), 0
    in ARPO.
    """
    # The factor stops at 0: below, a long streak would turn a negative probability positive.
    return min(1.0, max(0.0, (base + weight * change) * max(0.0, 1.0 - penalty * streak)))


def branches(
    u: float,
    *,
    change: float,
    base: float,
    weight: float,
    decision: Decision = "bernoulli",
    threshold: float = 0.5,
    penalty: float = 0.0,
    streak: int = 0,
) -> bool:
    """Whether to fork.

    ``bernoulli`` draws with :func:`branch_probability` (released ARPO, ``clip(u - w dH, 0, 1) <= p``, is the
    same for p in (0, 1)); ``threshold`` forks iff that probability exceeds ``threshold`` (ARPO section 3.1);
    ``aepo_released`` forks iff ``clip((u + w dH) (1 - penalty l), 0, 1) >= p``.
    """
    if decision == "aepo_released":
        return min(1.0, max(0.0, (u + weight * change) * max(0.0, 1.0 - penalty * streak))) >= base
    if decision == "threshold":
        return (
            branch_probability(change=change, base=base, weight=weight, penalty=penalty, streak=streak)
            > threshold
        )
    if penalty == 0.0 or streak == 0:
        return min(1.0, max(0.0, u - weight * change)) <= base
    return u < branch_probability(change=change, base=base, weight=weight, penalty=penalty, streak=streak)


def first_wave_budget(*, total: int, entropy_root: float, entropy_tools: float, slope: float = 0.5) -> int:
    """Rollouts that begin at the prompt: ``floor(k sigmoid(beta (H_root - H_tool))) + 1``, between 1 and k
    (AEPO).

    The paper's real number is k times the sigmoid; the added one is the released code's rounding.
    """
    share = 1.0 / (1.0 + math.exp(-slope * (entropy_root - entropy_tools)))
    return min(total, max(1, math.floor(total * share) + 1))


def entropy_advantage_factors(token_entropies: Sequence[float], *, weight: float) -> list[float]:
    """``1 + a z`` with z the entropy's deviation in (unbiased) standard deviations; 1 without spread
    (AEPO).
    """
    count = len(token_entropies)
    if count == 0:
        return []
    mean = math.fsum(token_entropies) / count
    variance = math.fsum((value - mean) ** 2 for value in token_entropies) / (count - 1) if count > 1 else 0.0
    std = math.sqrt(variance) or 1.0
    return [1.0 + weight * (value - mean) / std for value in token_entropies]
