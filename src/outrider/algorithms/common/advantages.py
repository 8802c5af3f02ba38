"""Group credit: one scalar advantage per rollout, from the returns of the rollouts of one task.

Every statistic counts rollouts, never turns or rows. float64 throughout, and independent of the order of the
rollouts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Float64Array: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
NoSignalReason = Literal["unscorable", "singleton", "no_spread", "rejected"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutAdvantages:
    """The credit of one group.

    ``values`` [N] are the advantages; ``assigned`` [N] is False where the rollout had no return (an
    infrastructure fault), whose value is 0 only as a placeholder: such a rollout must not be trained on.
    ``has_signal`` is False when no rollout can be told from another; ``reason`` then says why: every rollout
    ``unscorable``, a ``singleton``, ``no_spread`` among the returns, or every rollout ``rejected`` (rejection
    sampling).
    """

    values: Float64Array
    assigned: BoolArray
    has_signal: bool
    reason: NoSignalReason | None


def group_normalized_advantages_per_rollout(
    *,
    returns: Sequence[float | None] | Float64Array,
    std_ddof: Literal[0, 1] = 1,
    eps: float = 1e-6,
    normalize_std: bool = True,
    spread_tolerance: float = 1e-9,
) -> RolloutAdvantages:
    """``(R_i - mean R) / (std R + eps)`` over the scorable rollouts of one group (GRPO, arXiv 2402.03300
    section 4.1).

    ``returns`` [N]; None or NaN marks an unscorable rollout, which counts in neither mean nor std.
    ``std_ddof`` is 1 for the sample and 0 for the population std. ``normalize_std=False`` only centres (Dr.
    GRPO, arXiv 2503.20783). A group whose max - min is within ``spread_tolerance * max(1, max |R|)`` gets
    exactly 0; a test on ``std == 0`` would let rounding noise through. A group of one gets 0, where upstream
    libraries hand out the raw return.

    Raises ValueError for an empty group, an infinite return or a negative ``eps``.
    """
    if eps < 0.0:
        raise ValueError(f"eps must not be negative, got {eps}")
    scorable, assigned = _split(returns)
    reason = _no_signal_reason(scorable, spread_tolerance)
    if reason is not None:
        return _no_signal(assigned, reason)
    centred = scorable - math.fsum(scorable) / scorable.size
    if normalize_std:
        # fsum rounds once: no bit depends on the order of the rollouts.
        variance = math.fsum(centred * centred) / (scorable.size - std_ddof)
        centred = centred / (math.sqrt(variance) + eps)
    return _scatter(centred, assigned)


def leave_one_out_advantages_per_rollout(
    *, returns: Sequence[float | None] | Float64Array, spread_tolerance: float = 1e-9
) -> RolloutAdvantages:
    """``R_i - mean_{j != i} R_j`` over the scorable rollouts of one group (RLOO, arXiv 2402.14740).

    The baseline does not depend on rollout i, so the policy gradient stays unbiased. Unscorable rollouts,
    groups of one and groups without spread are treated as in :func:`group_normalized_advantages_per_rollout`.
    """
    scorable, assigned = _split(returns)
    reason = _no_signal_reason(scorable, spread_tolerance)
    if reason is not None:
        return _no_signal(assigned, reason)
    centred = scorable - math.fsum(scorable) / scorable.size
    # R_i minus the mean of the others is n / (n - 1) times R_i minus the mean of all.
    return _scatter(centred * (scorable.size / (scorable.size - 1)), assigned)


def _split(returns: Sequence[float | None] | Float64Array) -> tuple[Float64Array, BoolArray]:
    """The scorable returns and the mask [N] of who has one."""
    values = np.array([math.nan if value is None else float(value) for value in returns], dtype=np.float64)
    if values.size == 0:
        raise ValueError("a group needs at least one rollout")
    if np.isinf(values).any():
        raise ValueError("an infinite return cannot be credited")
    assigned = ~np.isnan(values)
    return values[assigned], assigned


def _no_signal_reason(scorable: Float64Array, spread_tolerance: float) -> NoSignalReason | None:
    if scorable.size == 0:
        return "unscorable"
    if scorable.size == 1:
        return "singleton"
    spread = float(scorable.max() - scorable.min())
    # Relative for large returns, whose rounding grows with them; absolute for small ones.
    scale = max(1.0, float(np.abs(scorable).max()))
    return "no_spread" if spread <= spread_tolerance * scale else None


def _no_signal(assigned: BoolArray, reason: NoSignalReason) -> RolloutAdvantages:
    return RolloutAdvantages(
        values=np.zeros(assigned.size), assigned=assigned, has_signal=False, reason=reason
    )


def _scatter(advantages: Float64Array, assigned: BoolArray) -> RolloutAdvantages:
    values = np.zeros(assigned.size)
    values[assigned] = advantages
    return RolloutAdvantages(values=values, assigned=assigned, has_signal=True, reason=None)
