"""The token losses that settings name, applied to a micro-batch: what every objective does unless it says
otherwise.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.algorithms.common.losses import clipped_surrogate_per_token
from outrider.algorithms.common.objectives import (
    cispo_per_token,
    gppo_per_token,
    gspo_per_token,
    reinforce_per_token,
)
from outrider.algorithms.common.token_loss import OldLogprobs, TokenLoss, TokenLossInputs

if TYPE_CHECKING:
    from outrider.algorithms.base import ObjectiveSettings, OffPolicyObjective


def configured_loss(inputs: TokenLossInputs, objective: "ObjectiveSettings") -> TokenLoss:
    """The token loss that ``objective.loss`` names."""
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
            logprobs=inputs.logprobs_T,
            old_logprobs=inputs.old_T,
            advantages=inputs.advantages_T,
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


def old_logprobs_without_tips(
    start_T: Tensor, with_tips_T: Tensor, objective: "OffPolicyObjective"
) -> OldLogprobs:
    """Denominators where rollouts are trained without the tips that they acted with (EMPO², Table 3 and
    Algorithm 1).

    ``start_T``: the policy when the update began, in the rendering that is trained. ``with_tips_T``: the same
    with tips, NaN where the token's rollout had none to lose.
    """
    is_without_tips_T = ~with_tips_T.isnan()
    trainer_T = torch.where(is_without_tips_T, with_tips_T, start_T)
    old_T = trainer_T if objective.old_context == "acting" else start_T
    return OldLogprobs(old_T=old_T, trainer_T=trainer_T, is_without_tips_T=is_without_tips_T)


def without_tips_mask(
    objective: "OffPolicyObjective",
    *,
    logprobs_T: Tensor,
    with_tips_T: Tensor,
    is_without_tips_T: Tensor,
    turn_T: Tensor,
) -> Tensor:
    """[T] 1 or 0: which off-policy tokens are trained; the average is not renormalised (Eq. 2).

    ``token``: the student's present probability of the token is at least ``min_probability``. ``turn``
    (released code, whose rows are turns): no token of the turn was less likely to the acting policy.
    ``none``: all. Tokens of other rollouts are never masked.
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


def measure_without_tips_mask(
    inputs: TokenLossInputs, objective: "OffPolicyObjective", is_without_tips_T: Tensor
) -> Tensor:
    """:func:`student_mask`, and what the tokens without their tips look like."""
    logprobs_T, with_tips_T = inputs.logprobs_T.detach(), inputs.old_logprobs.trainer_T
    mask_T = without_tips_mask(
        objective,
        logprobs_T=logprobs_T,
        with_tips_T=with_tips_T,
        is_without_tips_T=is_without_tips_T,
        turn_T=inputs.turn_T,
    )
    num = int(is_without_tips_T.sum())
    if num:
        off = (with_tips_T - logprobs_T)[is_without_tips_T]
        inputs.measures.add("tips/kl_acting_student", float(off.mean()), num)
        inputs.measures.add(
            "tips/ratio_mean", float((logprobs_T - inputs.old_T)[is_without_tips_T].exp().mean()), num
        )
        inputs.measures.add("tips/masked_fraction", float(1.0 - mask_T[is_without_tips_T].mean()), num)
        inputs.measures.add_sum("tips/num_off_tokens", float(num))
    return mask_T
