"""Token losses beside the plain clip of :mod:`outrider.algorithms.common.losses`; all of them are minimised.

Shapes: T tokens in the flat packed layout. Each function returns a
:class:`~outrider.algorithms.common.losses.TokenLoss`: losses [T] to be aggregated with ``token_weights``,
and masks [T] of the branch that acted. Below, ``r = pi / pi_old`` from the log-ratio clamped to +-20, and
``k`` is the coefficient in ``d loss / d log pi = -A k``. Only ``logprobs`` carries gradient. Sources:
docs/algorithms/objectives.md.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from outrider.algorithms.common.losses import TokenLoss, clipped_surrogate_per_token
from outrider.algorithms.common.ratios import log_ratio, require_tokens, token_ratio
from outrider.algorithms.common.sampler_correction import over_rollouts

SequenceForm = Literal["token", "sequence", "product"]


def gppo_per_token(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenLoss:
    """GPPO (Klear-Reasoner): the value of the clipped surrogate, but a clipped token keeps the gradient of
    its bound.

    ``A > 0`` and ``r > 1 + high``: k = 1 + high. ``A < 0`` and ``r < 1 - low``: k = 1 - low. Otherwise k = r.
    ``dual_clip`` c bounds the loss of a negative advantage at ``-A c`` with k = 0, as the released code does
    (c = 10); None is the paper. Raises ValueError as
    :func:`~outrider.algorithms.common.losses.clipped_surrogate_per_token` does.
    """
    clipped = clipped_surrogate_per_token(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    # A factor of value one. The printed form (bound / sg(r)) * r is the same, but NaN once r overflows.
    unit_factor = (logprobs - logprobs.detach()).exp()
    is_clipped = clipped.clipped_high | clipped.clipped_low
    return replace(
        clipped, losses=torch.where(is_clipped, clipped.losses.detach() * unit_factor, clipped.losses)
    )


def cispo_per_token(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cap: float, floor: float = 0.0
) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585): ``-sg(clip(r, floor, cap)) A log pi``; every token keeps its
    gradient, k = clip(r).

    ``cap`` is absolute, and there is no floor unless asked. verl's variant clips on both sides: ``cap = 1 +
    high`` and ``floor = 1 - low``; TRL's ``epsilon_high`` is the cap itself. The masks say where cap and
    floor acted, for either sign of A. The value moves with ``log pi``, so it cannot be compared with the loss
    of a clipped surrogate. Raises ValueError unless ``0 <= floor < cap``.
    """
    if not 0.0 <= floor < cap:
        raise ValueError(f"impossible bounds of the weight: floor {floor}, cap {cap}")
    require_tokens(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    weights, detached_advantages = (
        token_ratio(logprobs=logprobs.detach(), old_logprobs=old_logprobs),
        advantages.detach(),
    )
    return TokenLoss(
        losses=-weights.clamp(floor, cap) * detached_advantages * logprobs,
        clipped_high=(weights > cap) & (detached_advantages != 0.0),
        clipped_low=(weights < floor) & (detached_advantages != 0.0),
        dual_clipped=torch.zeros_like(detached_advantages, dtype=torch.bool),
    )


def reinforce_per_token(*, logprobs: Tensor, advantages: Tensor, weights: Tensor | None = None) -> TokenLoss:
    """``-sg(w) A log pi`` (REINFORCE), without ratio and clip; ``weights`` [T] are importance weights, 1 when
    left out.

    With advantages of 1 it is the negative log-likelihood (cold start, the extra term of GPPO).
    """
    coefficients = advantages.detach() if weights is None else advantages.detach() * weights.detach()
    require_tokens(logprobs=logprobs, coefficients=coefficients)
    never = torch.zeros_like(coefficients, dtype=torch.bool)
    return TokenLoss(
        losses=-coefficients * logprobs, clipped_high=never, clipped_low=never, dual_clipped=never
    )


def gspo_per_token(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    rollout_index: Tensor,
    mask: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    form: SequenceForm = "token",
) -> TokenLoss:
    """GSPO (arXiv 2507.18071): the clipped surrogate with one ratio per rollout, ``s = exp(mean over its
    tokens of log r)``.

    ``rollout_index`` [T] says whose token it is; all tokens of a rollout must be in the call. ``mask`` [T]
    False leaves tokens out of the mean. A clipped rollout has no gradient at all. Forms:

    - ``token`` (GSPO-token): ``s_t = sg(s) pi_t / sg(pi_t)``, k = s for each token, so advantages may differ
      within a rollout.
    - ``sequence``: s itself is differentiated. Equal to ``token`` in value and gradient where the advantages
      and weights of a rollout's tokens are equal; otherwise each token gets the rollout's mean.
    - ``product``: no length normalisation, ``s = exp(sum of log r)``: the ratio of whole rollouts, TRL's
      RLOO.

    The logarithm of s is clamped to +-20. Raises ValueError for unequal shapes, half precision and impossible
    clips.
    """
    require_tokens(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_s = over_rollouts(
        logprobs - old_logprobs.detach(),
        rollout_index=rollout_index,
        mask=torch.ones_like(rollout_index, dtype=torch.bool) if mask is None else mask,
        reduce="sum" if form == "product" else "mean",
    )
    if form == "token":
        # log s in value, the token's own log-prob in gradient.
        log_s = log_s.detach() + logprobs - logprobs.detach()
    return clipped_surrogate_per_token(
        logprobs=log_s,
        old_logprobs=torch.zeros_like(log_s),
        advantages=advantages,
        clip_low=clip_low,
        clip_high=clip_high,
    )


def luffy_per_token(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    is_demonstration: Tensor,
    shaping: float | None = 0.1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """LUFFY (arXiv 2504.14945): the clipped surrogate, but ``-A f(pi)`` without a clip where
    ``is_demonstration`` [T] is True.

    ``f(p) = p / (p + shaping)`` with the demonstrator's probability taken as 1, so k = shaping p / (p +
    shaping)^2: small probabilities move most. ``shaping=None`` is f(p) = p. The released script removes the
    clip of the policy's own tokens too: ``clip_low=1, clip_high=math.inf``. Raises ValueError for ``shaping``
    <= 0 and as ``clipped_surrogate_per_token`` does.
    """
    if shaping is not None and shaping <= 0.0:
        raise ValueError(f"shaping must be positive or None, got {shaping}")
    demonstrated = is_demonstration.bool()
    own = clipped_surrogate_per_token(
        logprobs=logprobs,
        # A demonstration needs no old log-prob; whatever stands there must not count as clipped.
        old_logprobs=torch.where(demonstrated, logprobs.detach(), old_logprobs),
        advantages=advantages,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    # The logistic function of log p - log shaping is p / (p + shaping), without underflow.
    shaped = logprobs.exp() if shaping is None else torch.sigmoid(logprobs - math.log(shaping))
    return replace(own, losses=torch.where(demonstrated, -advantages.detach() * shaped, own.losses))


def replay_centred_per_token(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float | None = None,
) -> TokenLoss:
    """RolloutReplay's loss for stored rollouts: ``max(-A r, -A clip(r, (1 - low) r0, (1 + high) r0))``.

    Here ``r = pi / behaviour`` and ``r0 = old / behaviour``, with ``old`` the policy when the update began
    and ``behaviour`` the one that wrote the stored tokens. That equals ``r0`` times the clipped surrogate of
    ``pi / old``, which is how it is computed; on fresh rollouts r0 is 1. ``weight_cap`` bounds r0 (None: the
    released code). Raises ValueError for ``weight_cap`` <= 0.
    """
    if weight_cap is not None and weight_cap <= 0.0:
        raise ValueError(f"weight_cap must be positive, got {weight_cap}")
    clipped = clipped_surrogate_per_token(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    weights = log_ratio(logprobs=old_logprobs.detach(), reference_logprobs=behaviour_logprobs).exp()
    weights = weights if weight_cap is None else weights.clamp(max=weight_cap)
    return replace(clipped, losses=clipped.losses * weights)
