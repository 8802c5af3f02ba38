"""Likelihood ratios between policies, and the correction for an engine whose policy differs from the
trainer's: weights and rejection.

Shapes: T tokens in the flat packed layout. ``logprobs`` is the policy in training (carries gradient), ``old``
the trainer's policy at the start of the update, ``sampler`` the policy as computed by the engine during
sampling, ``w = old / sampler``. ``mask`` is True for the tokens that count; the values of other tokens have
no effect. A statistic over a rollout needs all tokens of that rollout in one call.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# exp(20) is 5e8: larger than any useful ratio, and even its square is far from overflow in float32.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceStats:
    """Mismatch between sampler and trainer, over the unmasked tokens.

    ``mean`` and ``mean_square`` describe the truncated weights that are applied, so that they can be averaged
    over parts of a batch. ``max`` is the largest weight before truncation, which reveals template or
    weight-sync faults.
    """

    num_tokens: int
    num_truncated: int
    mean: float
    max: float
    mean_square: float


def require_tokens(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are floating-point of one shape [T], log-probs at least float32.

    Broadcasting [T] against [T, 1] would silently compute a wrong loss, and a half-precision ratio rounds
    small updates away.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"expected tensors of one shape [T], got {shapes}")
    low = [name for name, tensor in tensors.items() if tensor.dtype not in (torch.float32, torch.float64)]
    if low:
        raise ValueError(f"expected float32 or float64 for {', '.join(low)}")


def log_ratio(*, logprobs: Tensor, reference_logprobs: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """Return ``logprobs - reference_logprobs`` [T], clamped to +-``limit`` so that exp cannot overflow.

    There is no gradient beyond the clamp, and the reference is detached.
    """
    require_tokens(logprobs=logprobs, reference_logprobs=reference_logprobs)
    return (logprobs - reference_logprobs.detach()).clamp(-limit, limit)


def token_ratio(*, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Compute ``r = pi / pi_old`` [T] (PPO, arXiv 1707.06347 Eq. 6) from the clamped log-ratio."""
    return log_ratio(logprobs=logprobs, reference_logprobs=old_logprobs).exp()


def shaped_ratio(*, ratio: Tensor, scale: Tensor) -> Tensor:
    """Compute ``(1 + m * F_ret) * r`` [T] (RAPO Eq. 8 and 11). The clip applies to the product, and the scale
    has no gradient.
    """
    require_tokens(ratio=ratio, scale=scale)
    return scale.detach() * ratio


Level = Literal["token", "sequence", "geometric"]
Outside = Literal["truncate", "zero"]
Statistic = Literal["k1", "k2", "k3"]
Scope = Literal["token", "sum", "mean", "max"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplerWeights:
    """``weights`` [T] multiply the token losses and are 0 for masked tokens; ``changed`` [T] is True if a
    bound changed the weight.
    """

    weights: Tensor
    changed: Tensor


def over_rollouts(
    values: Tensor, *, rollout_index: Tensor, mask: Tensor, reduce: Literal["sum", "mean", "max"]
) -> Tensor:
    """Return the sum, mean or maximum [T] of ``values`` [T] over the unmasked tokens of each token's rollout.

    Differentiable. Tokens of a fully masked rollout get 0.
    """
    require_tokens(values=values)
    is_counted = mask.bool()
    owners = rollout_index[is_counted]
    # Rollouts are numbered within the mini-batch, so some have no token in this micro-batch.
    count = int(rollout_index.max()) + 1 if rollout_index.numel() else 0
    empty = values.new_zeros(count)
    if reduce == "max":
        return empty.scatter_reduce(0, owners, values[is_counted], reduce="amax", include_self=False)[
            rollout_index
        ]
    sums = empty.index_add(0, owners, values[is_counted])
    if reduce == "mean":
        # A fully masked rollout has a count of 0; divide by 1 to get 0 instead of NaN.
        sums = sums / torch.bincount(owners, minlength=count).clamp(min=1)
    return sums[rollout_index]


def sampler_weights_per_token(
    *,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    rollout_index: Tensor,
    mask: Tensor,
    level: Level = "token",
    lower: float | None = None,
    upper: float | None = 2.0,
    outside: Outside = "truncate",
) -> SamplerWeights:
    """Return ``w``; values outside [``lower``, ``upper``] become the bound (``truncate``) or 0 (``zero``).

    ``level`` is ``token``: the weight of each token; ``sequence``: the product over the rollout's tokens, the
    only one that is unbiased for a whole rollout, but with a variance that grows exponentially with length;
    or ``geometric``: the n-th root of the product. The logarithm is clamped to +-20. Truncated importance
    sampling is ``truncate`` with an upper bound; masked importance sampling (IcePop) is ``zero`` with both
    bounds. None disables a bound. The denominators of the aggregation do not change, even for dropped tokens.
    Raises ValueError for invalid bounds.
    """
    low, high = lower or 0.0, math.inf if upper is None else upper
    if not 0.0 <= low < high:
        raise ValueError(f"invalid bounds of the sampler correction: {lower} and {upper}")
    log_weights = _difference(old_logprobs, sampler_logprobs)
    if level != "token":
        reduce: Literal["sum", "mean"] = "sum" if level == "sequence" else "mean"
        log_weights = over_rollouts(log_weights, rollout_index=rollout_index, mask=mask, reduce=reduce)
    is_counted, zeros = mask.bool(), torch.zeros_like(log_weights)
    weights = torch.where(is_counted, log_weights.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), zeros)
    is_outside = (weights < low) | (weights > high)
    bounded = weights.clamp(low, high) if outside == "truncate" else torch.where(is_outside, zeros, weights)
    return SamplerWeights(weights=torch.where(is_counted, bounded, zeros), changed=is_outside & is_counted)


def correction_stats(
    applied: SamplerWeights, *, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
) -> ImportanceStats:
    """Compute the metrics of :func:`sampler_weights_per_token`.

    Mean and mean square are those of the applied weights. ``num_truncated`` counts the tokens that a bound
    changed. ``max`` is the largest token weight before truncation. Raises ValueError if no token is left or a
    log-prob is not finite, because either indicates a fault.
    """
    is_counted = mask.bool()
    # float64, because ESS divides the square of a sum by a sum of squares over all tokens.
    difference = _difference(old_logprobs, sampler_logprobs)[is_counted].double()
    if difference.numel() == 0 or not bool(torch.isfinite(difference).all()):
        raise ValueError("sampler correction needs at least one token and finite log-probabilities")
    weights = applied.weights[is_counted].double()
    return ImportanceStats(
        num_tokens=weights.numel(),
        num_truncated=int(applied.changed[is_counted].sum()),
        mean=float(weights.mean()),
        max=float(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().max()),
        mean_square=float((weights**2).mean()),
    )


def rejection_mask_per_token(
    *,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    rollout_index: Tensor,
    mask: Tensor,
    statistic: Statistic,
    scope: Scope = "token",
    upper: float,
    lower: float | None = None,
) -> Tensor:
    """Return True [T] for the tokens to train on: unmasked, with an engine-trainer divergence inside the
    bounds.

    With ``d = log w`` clamped to +-20: ``k1 = -d``, ``k2 = d^2 / 2``, ``k3 = exp(d) - 1 - d``. ``scope``
    selects the token's own value, or the sum, mean or maximum over its rollout, which is then trained or
    dropped as a whole. The bounds follow verl's convention. Those of k1 are ratios, compared as ``log lower
    <= k1 <= log upper``, so they bound ``1 / w``: for example, (0.4, 1.3) accepts w in [0.77, 2.5]. Without
    ``lower``, k1 uses ``1 / upper``. k2 and k3 have only an upper bound, on the value itself. Raises
    ValueError for invalid bounds, a lower bound on k2 or k3, and the maximum of k1, which is signed.
    """
    if statistic == "k1":
        if scope == "max":
            raise ValueError("k1 is signed, so its maximum over a rollout does not bound its minimum")
        low = 1.0 / upper if lower is None and upper > 0.0 else lower or 0.0
        if not 0.0 < low < upper:
            raise ValueError(f"k1 needs ratios 0 < lower < upper, got {lower} and {upper}")
        low, high = math.log(low), math.log(upper)
    else:
        if lower is not None or upper < 0.0:
            raise ValueError(f"{statistic} needs one bound of at least 0, above; got {lower} and {upper}")
        low, high = -math.inf, upper
    difference = _difference(old_logprobs, sampler_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if statistic == "k1":
        value = -difference
    elif statistic == "k2":
        value = 0.5 * difference**2
    else:
        value = torch.expm1(difference) - difference
    if scope != "token":
        value = over_rollouts(value, rollout_index=rollout_index, mask=mask, reduce=scope)
    # Return a mask over all tokens instead of a shorter tensor, so that indices into losses stay valid.
    return (value >= low) & (value <= high) & mask.bool()


def _difference(old_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    require_tokens(old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
    # Detached: the weight is not part of the objective, and the policy must not learn to reduce it.
    return old_logprobs.detach() - sampler_logprobs.detach()
