"""Token losses (to be minimised) and their aggregation.

Shapes: T tokens in the flat packed layout, N rollouts. A batch loss is ``weighted_loss(losses=...,
weights=...)`` with :func:`token_weights` taken over the *global* mini-batch, so that any split into
micro-batches gives the same sum.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.algorithms.common.ratios import log_ratio, require_tokens, shaped_ratio, token_ratio

Aggregation = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant_length",
    "sum_over_length",
    "token_sum",
]
KlEstimator = Literal["k1", "k2", "k3", "k3_ratio"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """Per-token surrogate ``losses`` [T] and which branch of the clip acted, as masks [T].

    ``clipped_high``: positive advantage, ratio above 1 + high. ``clipped_low``: negative advantage, ratio
    below 1 - low. ``dual_clipped``: negative advantage, ratio above the dual clip. A shared token can be
    clipped for one sign only.
    """

    losses: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    dual_clipped: Tensor


def clipped_surrogate_per_token(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_scale: Tensor | None = None,
    keep_clipped_gradient: bool = False,
) -> TokenLoss:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))`` [T] (PPO, arXiv 1707.06347 Eq. 7); unequal bounds are
    DAPO's clip-higher.

    ``dual_clip`` c > 1 bounds the loss of a negative advantage at ``-A c`` (arXiv 1912.09729).
    ``ratio_scale`` [T] multiplies the ratio before every clip (RAPO Eq. 8). A clipped token has no gradient,
    except that ``keep_clipped_gradient`` lets the upper bound be ``(1 + high) r / sg(r)``, whose gradient is
    that of 1 + high (AEPO).
    """
    return clipped_surrogate_shared_per_token(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantage_positive=advantages.clamp(min=0.0),
        advantage_negative=advantages.clamp(max=0.0),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        ratio_scale=ratio_scale,
        keep_clipped_gradient=keep_clipped_gradient,
    )


def clipped_surrogate_shared_per_token(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantage_positive: Tensor,
    advantage_negative: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_scale: Tensor | None = None,
    keep_clipped_gradient: bool = False,
) -> TokenLoss:
    """The sum over leaves of :func:`clipped_surrogate_per_token` for tokens that several rollouts share,
    computed once.

    ``advantage_positive`` [T] is the sum of the leaves' positive advantages, ``advantage_negative`` [T] of
    the negative ones. Exact because all leaves have one ratio r, so the clipped minimum depends on a leaf
    only through the sign of A: ``-(P min(r, 1 + high) + N min(max(r, 1 - low), c))``. Hence only valid where
    ``ratio_scale`` is equal over the leaves. When leaves have different token weights, put each leaf's weight
    into the sums and leave it out of the aggregation.

    Raises ValueError for shapes that differ, half precision, ``clip_low`` outside [0, 1], ``clip_high`` < 0,
    ``dual_clip`` <= 1.
    """
    if not 0.0 <= clip_low <= 1.0 or clip_high < 0.0 or (dual_clip is not None and dual_clip <= 1.0):
        raise ValueError(f"impossible clip: low {clip_low}, high {clip_high}, dual {dual_clip}")
    require_tokens(
        logprobs=logprobs, advantage_positive=advantage_positive, advantage_negative=advantage_negative
    )
    positive, negative = advantage_positive.detach(), advantage_negative.detach()
    ratio = token_ratio(logprobs=logprobs, old_logprobs=old_logprobs)
    if ratio_scale is not None:
        ratio = shaped_ratio(ratio=ratio, scale=ratio_scale)
    over, under = ratio > 1.0 + clip_high, ratio < 1.0 - clip_low
    over_dual = torch.zeros_like(over) if dual_clip is None else ratio > dual_clip
    # where, not minimum: at an exact tie minimum would split the gradient between the ratio and the constant.
    upper = (1.0 + clip_high) * (ratio / ratio.detach() if keep_clipped_gradient else torch.ones_like(ratio))
    ratio_positive = torch.where(over, upper, ratio)
    ratio_negative = torch.where(under, torch.full_like(ratio, 1.0 - clip_low), ratio)
    if dual_clip is not None:
        ratio_negative = torch.where(over_dual, torch.full_like(ratio, dual_clip), ratio_negative)
    return TokenLoss(
        losses=-(positive * ratio_positive + negative * ratio_negative),
        clipped_high=over & (positive > 0.0),
        clipped_low=under & (negative < 0.0),
        dual_clipped=over_dual & (negative < 0.0),
    )


def kl_per_token(
    *,
    estimator: KlEstimator,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Estimate of KL(pi || reference) [T] from sampled tokens, ``d = log pi - log reference`` clamped to
    +-20.

    Value and expected gradient on-policy, when used as a loss (Schulman, "Approximating KL Divergence"; arXiv
    2506.09477):

    - ``k1`` = d: unbiased value, but a gradient of mean zero - use it in a reward, not in a loss.
    - ``k2`` = d^2 / 2: biased value, gradient of the reverse KL.
    - ``k3`` = exp(-d) + d - 1 (>= 0): unbiased value, gradient of the forward KL(reference || pi).
    - ``k3_ratio`` = k3 * pi / pi_old with the ratio differentiated: unbiased value, gradient of the reverse
      KL; needs ``old_logprobs``.

    Only the log-ratio is clamped, never the value.
    """
    if (estimator == "k3_ratio") != (old_logprobs is not None):
        raise ValueError("old_logprobs belongs to the estimator k3_ratio and to no other")
    difference = log_ratio(logprobs=logprobs, reference_logprobs=reference_logprobs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    # expm1: next to d = 0, where a policy begins, exp(-d) - 1 keeps no digits.
    k3 = torch.expm1(-difference) + difference
    return k3 if old_logprobs is None else k3 * token_ratio(logprobs=logprobs, old_logprobs=old_logprobs)


def token_weights(
    *,
    kind: Aggregation,
    rollout_index: Tensor,
    num_rollouts: int,
    max_length: int | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight [T] of every token of the global mini-batch; slice it along with the tokens into
    micro-batches.

    ``rollout_index`` [T] int64 says whose token it is; a token that d rollouts share counts d times, so list
    it once per rollout and add the weights up. ``num_rollouts`` N counts the kept rollouts, also those
    without a trained token. ``mask`` [T] False gives weight 0 and leaves the token out of every count. With
    n_i tokens of rollout i: ``token_mean`` 1 / sum n_i; ``sequence_mean_token_mean`` 1 / (N n_i);
    ``sequence_mean_token_sum`` 1 / N; ``constant_length`` 1 / (N max_length) (Dr. GRPO, arXiv 2503.20783);
    ``sum_over_length`` 1 / max_length (LUFFY's script); ``token_sum`` 1.

    Raises ValueError when ``max_length`` is given for another kind or missing, or an index is outside [0, N).
    """
    if (kind in ("constant_length", "sum_over_length")) != (max_length is not None) or (
        max_length is not None and max_length < 1
    ):
        raise ValueError(
            "constant_length and sum_over_length need a positive max_length, and no other kind takes one"
        )
    trained = torch.ones_like(rollout_index, dtype=torch.bool) if mask is None else mask.bool()
    owners = rollout_index[trained]
    if owners.numel() and not 0 <= int(owners.min()) <= int(owners.max()) < num_rollouts:
        raise ValueError(f"rollout_index outside [0, {num_rollouts})")
    # float64 until the end: 1 / n is rounded once, to the precision of the losses.
    weights = torch.zeros(rollout_index.shape, dtype=torch.float64, device=rollout_index.device)
    if kind == "sequence_mean_token_mean":
        num_tokens = torch.bincount(owners, minlength=num_rollouts).double()
        weights[trained] = 1.0 / (num_rollouts * num_tokens[owners])
    elif owners.numel():
        weights[trained] = 1.0 / _denominator(kind, owners.numel(), num_rollouts, max_length)
    return weights.to(dtype)


def weighted_loss(*, losses: Tensor, weights: Tensor) -> Tensor:
    """``sum_t weight_t * loss_t``, a scalar; tokens of weight 0 are left out, so that even a NaN there
    changes nothing.
    """
    require_tokens(losses=losses, weights=weights)
    # Selected, not multiplied: NaN times 0 is NaN.
    is_trained = weights != 0.0
    return (losses[is_trained] * weights.detach()[is_trained]).sum()


def _denominator(kind: Aggregation, num_tokens: int, num_rollouts: int, max_length: int | None) -> int:
    if kind == "token_mean":
        return num_tokens
    if max_length is not None:
        return num_rollouts * max_length if kind == "constant_length" else max_length
    return num_rollouts if kind == "sequence_mean_token_sum" else 1
