"""Token losses (to be minimised) and their aggregation.

Shapes: T tokens in the flat packed layout, N rollouts. A batch loss is ``weighted_loss(losses=...,
weights=...)`` with :func:`token_weights` computed over the *global* mini-batch, so that any split into
micro-batches gives the same sum. Only ``logprobs`` carries gradient. Sources: docs/algorithms/objectives.md.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from outrider.algorithms.sampler_correction import (
    log_ratio,
    over_rollouts,
    require_tokens,
    shaped_ratio,
    token_ratio,
)

if TYPE_CHECKING:
    from outrider.algorithms.base import ObjectiveSettings, OffPolicyObjective


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
    """Per-token surrogate ``losses`` [T], and masks [T] of the clipped tokens by branch.

    ``clipped_high``: positive advantage, ratio above 1 + high. ``clipped_low``: negative advantage, ratio
    below 1 - low. ``dual_clipped``: negative advantage, ratio above the dual clip.
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
    """Compute ``max(-A r, -A clip(r, 1 - low, 1 + high))`` [T] (PPO, arXiv 1707.06347 Eq. 7).

    Unequal bounds are DAPO's clip-higher.

    Args:
        ratio_scale: [T] factors of the ratio, applied before every clip (RAPO Eq. 8).
        dual_clip: c > 1 bounds the loss of a negative advantage at ``-A c`` (arXiv 1912.09729).
        keep_clipped_gradient: a clipped token normally has no gradient. If True, the upper bound is
            ``(1 + high) r / sg(r)``, whose gradient is that of a ratio 1 + high (AEPO).

    Raises:
        ValueError: for unequal shapes, half precision, ``clip_low`` outside [0, 1], ``clip_high`` < 0 or
            ``dual_clip`` <= 1.
    """
    if not 0.0 <= clip_low <= 1.0 or clip_high < 0.0 or (dual_clip is not None and dual_clip <= 1.0):
        raise ValueError(f"invalid clip: low {clip_low}, high {clip_high}, dual {dual_clip}")
    require_tokens(logprobs=logprobs, advantages=advantages)
    positive, negative = advantages.detach().clamp(min=0.0), advantages.detach().clamp(max=0.0)
    ratio = token_ratio(logprobs=logprobs, old_logprobs=old_logprobs)
    if ratio_scale is not None:
        ratio = shaped_ratio(ratio=ratio, scale=ratio_scale)
    over, under = ratio > 1.0 + clip_high, ratio < 1.0 - clip_low
    over_dual = torch.zeros_like(over) if dual_clip is None else ratio > dual_clip
    # where instead of minimum: at an exact tie, minimum splits the gradient between ratio and constant.
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

    - ``k1`` = d: unbiased value, but a gradient of mean zero; use it in a reward and not in a loss.
    - ``k2`` = d^2 / 2: biased value, gradient of the reverse KL.
    - ``k3`` = exp(-d) + d - 1 (>= 0): unbiased value, gradient of the forward KL(reference || pi).
    - ``k3_ratio`` = k3 * pi / pi_old with the ratio differentiated: unbiased value, gradient of the reverse
      KL; needs ``old_logprobs``.

    Only the log-ratio is clamped, not the value.
    """
    if (estimator == "k3_ratio") != (old_logprobs is not None):
        raise ValueError("old_logprobs belongs to the estimator k3_ratio and to no other")
    difference = log_ratio(logprobs=logprobs, reference_logprobs=reference_logprobs)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    # expm1: near d = 0, where training starts, exp(-d) - 1 cancels and loses all significant digits.
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
    """Return the weight [T] of every token of the global mini-batch.

    Slice the weights along with the tokens into micro-batches. With n_i tokens of rollout i, the weights are:
    ``token_mean`` 1 / sum n_i; ``sequence_mean_token_mean`` 1 / (N n_i); ``sequence_mean_token_sum`` 1 / N;
    ``constant_length`` 1 / (N max_length) (Dr. GRPO, arXiv 2503.20783); ``sum_over_length`` 1 / max_length
    (LUFFY's script); ``token_sum`` 1.

    Args:
        rollout_index: [T] int64, the rollout of each token. A token that d rollouts share counts d times:
            list it once per rollout and add the weights up.
        num_rollouts: number of rollouts that were not dropped, including those without a trained token.
        mask: [T]; False sets the weight to 0 and excludes the token from every count.

    Raises:
        ValueError: if ``max_length`` is passed for another aggregation or is missing, or if an index is
            outside [0, N).
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
    # Computed in float64, so that 1 / n is rounded only once, to the dtype of the losses.
    weights = torch.zeros(rollout_index.shape, dtype=torch.float64, device=rollout_index.device)
    if kind == "sequence_mean_token_mean":
        num_tokens = torch.bincount(owners, minlength=num_rollouts).double()
        weights[trained] = 1.0 / (num_rollouts * num_tokens[owners])
    elif owners.numel():
        denominators = {
            "token_mean": owners.numel(),
            "sequence_mean_token_sum": num_rollouts,
            "constant_length": num_rollouts * (max_length or 0),
            "sum_over_length": max_length or 0,
            "token_sum": 1,
        }
        weights[trained] = 1.0 / denominators[kind]
    return weights.to(dtype)


def weighted_loss(*, losses: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum_t weight_t * loss_t``, a scalar. Tokens of weight 0 are excluded, even if their loss is
    NaN.
    """
    require_tokens(losses=losses, weights=weights)
    # Index instead of multiplying: NaN times 0 is NaN.
    is_trained = weights != 0.0
    return (losses[is_trained] * weights.detach()[is_trained]).sum()


class Measures(Protocol):
    """Collects the metrics of an update over its micro-batches, independent of how it was split."""

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add to a weighted mean."""

    def add_sum(self, name: str, value: float) -> None:
        """Add to a total."""

    def add_max(self, name: str, value: float) -> None:
        """Update a maximum."""

    def add_min(self, name: str, value: float) -> None:
        """Update a minimum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldLogprobs:
    """Reference log-probs of an update.

    ``old_T`` is the denominator of the ratio. ``trainer_T`` is the trainer's log-prob in the context in which
    the engine sampled. ``is_without_tips_T`` marks tokens that are trained without their tips (None: no such
    tokens).
    """

    old_T: Tensor
    trainer_T: Tensor
    is_without_tips_T: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLossInputs:
    """One micro-batch with one value per trained token. Log-probs are natural logs; only ``logprobs_T``
    carries gradient.

    ``logprobs_T``: of the policy. ``old_logprobs``: denominators of the ratio. ``advantages_T`` and
    ``ratio_scale_T``: the values that the algorithm wrote on the trace. ``engine_logprobs_T``: of the
    engine, 0 for tokens that it did not sample. ``is_off_policy_T``: the policy did not sample the token in
    this step (for example a demonstration or a replayed rollout). ``rollout_T`` and ``turn_T``: indices of
    the token's rollout and turn. ``measures`` collects metrics of the loss.
    """

    logprobs_T: Tensor
    old_logprobs: OldLogprobs
    advantages_T: Tensor
    ratio_scale_T: Tensor
    engine_logprobs_T: Tensor
    is_off_policy_T: Tensor
    rollout_T: Tensor
    turn_T: Tensor
    measures: Measures

    @property
    def old_T(self) -> Tensor:
        """The denominator of the ratio."""
        return self.old_logprobs.old_T


# Other token losses than the plain clip. Below, ``r = pi / pi_old`` from the log-ratio clamped to +-20, and
# ``k`` is the coefficient in ``d loss / d log pi = -A k``.


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
    :func:`~outrider.algorithms.losses.clipped_surrogate_per_token` does.
    """
    clipped = clipped_surrogate_per_token(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    # A factor of value 1. The paper's form (bound / sg(r)) * r is equal, but NaN once r overflows.
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

    ``cap`` is absolute; there is no floor by default. verl's variant clips on both sides: ``cap = 1 + high``
    and ``floor = 1 - low``. TRL's ``epsilon_high`` is the cap itself. The masks mark tokens at the cap and at
    the floor, for either sign of A. The value changes with ``log pi``, so it cannot be compared with the loss
    of a clipped surrogate. Raises ValueError unless ``0 <= floor < cap``.
    """
    if not 0.0 <= floor < cap:
        raise ValueError(f"invalid bounds of the weight: floor {floor}, cap {cap}")
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
    """Compute ``-sg(w) A log pi`` (REINFORCE), without ratio and clip.

    ``weights`` [T] are importance weights (default 1). With advantages of 1 the loss is the negative
    log-likelihood (cold start, the additional term of GPPO).
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

    ``rollout_index`` [T] is the rollout of each token; all tokens of a rollout must be in the call. ``mask``
    [T] False excludes tokens from the mean. A clipped rollout has no gradient at all. Forms:

    - ``token`` (GSPO-token): ``s_t = sg(s) pi_t / sg(pi_t)``, k = s for each token, so advantages may differ
      within a rollout.
    - ``sequence``: s itself is differentiated. Equal to ``token`` in value and gradient if the advantages and
      weights of a rollout's tokens are equal; otherwise each token gets the rollout's mean.
    - ``product``: no length normalisation, ``s = exp(sum of log r)``: the ratio of whole rollouts, TRL's
      RLOO.

    The logarithm of s is clamped to +-20. Raises ValueError for unequal shapes, half precision and invalid
    clip bounds.
    """
    require_tokens(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_s = over_rollouts(
        logprobs - old_logprobs.detach(),
        rollout_index=rollout_index,
        mask=torch.ones_like(rollout_index, dtype=torch.bool) if mask is None else mask,
        reduce="sum" if form == "product" else "mean",
    )
    if form == "token":
        # The value is log s, the gradient that of the token's own log-prob.
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
    """LUFFY (arXiv 2504.14945): the clipped surrogate, but the unclipped ``-A f(pi)`` for tokens with
    ``is_demonstration`` [T].

    ``f(p) = p / (p + shaping)``, with the demonstrator's probability set to 1, so k = shaping p / (p +
    shaping)^2, which emphasises improbable tokens. ``shaping=None`` is f(p) = p. The released script also
    disables the clip of the policy's own tokens: ``clip_low=1, clip_high=math.inf``. Raises ValueError for
    ``shaping`` <= 0, and as ``clipped_surrogate_per_token`` does.
    """
    if shaping is not None and shaping <= 0.0:
        raise ValueError(f"shaping must be positive or None, got {shaping}")
    require_tokens(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    demonstrated = is_demonstration.bool()
    own = clipped_surrogate_per_token(
        logprobs=logprobs,
        # A demonstration has no old log-prob; a placeholder value must not count as clipped.
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

    Here ``r = pi / behaviour`` and ``r0 = old / behaviour``; ``old`` is the policy at the start of the update
    and ``behaviour`` the policy that sampled the stored tokens. The loss equals ``r0`` times the clipped
    surrogate of ``pi / old`` and is computed that way; for fresh rollouts r0 is 1. ``weight_cap`` bounds r0
    (None: the released code). Raises ValueError for ``weight_cap`` <= 0.
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


# The configured token loss, applied to a micro-batch: the default of every objective.


def configured_loss(inputs: TokenLossInputs, objective: "ObjectiveSettings") -> TokenLoss:
    """Compute the token loss that ``objective.loss`` selects."""
    loss = objective.loss
    tokens = {
        "logprobs": inputs.logprobs_T,
        "old_logprobs": inputs.old_T,
        "advantages": inputs.advantages_T,
    }
    if loss.type == "gppo":
        return gppo_per_token(
            **tokens, clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip
        )
    if loss.type == "cispo":
        return cispo_per_token(**tokens, cap=loss.ratio_cap, floor=loss.ratio_floor)
    if loss.type == "gspo":
        return gspo_per_token(
            **tokens,
            rollout_index=inputs.rollout_T.to(inputs.logprobs_T.device),
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            form=loss.sequence_ratio,
        )
    if loss.type == "reinforce":
        return reinforce_per_token(logprobs=inputs.logprobs_T, advantages=inputs.advantages_T)
    return clipped_surrogate_per_token(
        **tokens,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        ratio_scale=inputs.ratio_scale_T,
        keep_clipped_gradient=loss.keep_clipped_gradient,
    )


def without_tips_mask(
    objective: "OffPolicyObjective",
    *,
    logprobs_T: Tensor,
    with_tips_T: Tensor,
    is_without_tips_T: Tensor,
    turn_T: Tensor,
) -> Tensor:
    """Return a mask [T] of 1 or 0: the off-policy tokens to train on. The average is not renormalised
    (Eq. 2).

    ``token``: the current probability of the token without tips is at least ``min_probability``. ``turn``
    (released code, whose rows are turns): no token of the turn had a lower probability with tips. ``none``:
    all tokens. Tokens of other rollouts are never masked.
    """
    min_logprob = math.log(objective.min_probability) if objective.min_probability else -math.inf
    if objective.student_mask == "none":
        is_trained = torch.ones_like(is_without_tips_T)
    elif objective.student_mask == "token":
        is_trained = logprobs_T.detach() >= min_logprob
    else:
        turns, index_T = torch.unique(turn_T.to(is_without_tips_T.device), return_inverse=True)
        lowest = with_tips_T.new_full((len(turns),), math.inf).scatter_reduce(
            0, index_T, with_tips_T, reduce="amin"
        )
        is_trained = (lowest >= min_logprob)[index_T]
    return (is_trained | ~is_without_tips_T).to(logprobs_T)
