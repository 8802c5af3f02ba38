"""The loss of one micro-batch: the algorithm's token loss, with sampler correction, rejection, KL term and
aggregation weights.

Shape letters: T scored tokens of the micro-batch, O those of them that the policy wrote in this step.
"""

from collections.abc import Callable

from torch import Tensor

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.common.loss_settings import RejectionMask
from outrider.algorithms.common.losses import kl_per_token, weighted_loss
from outrider.algorithms.common.sampler_correction import (
    correction_stats,
    rejection_mask_per_token,
    sampler_weights_per_token,
)
from outrider.algorithms.common.token_loss import OldLogprobs, TokenLoss, TokenLossInputs
from outrider.train.update.metric_accumulator import MetricAccumulator
from outrider.train.update.pack import PackedBatch

TokenLossFn = Callable[[TokenLossInputs], TokenLoss]


def loss_inputs(
    logprobs_T: Tensor, batch: PackedBatch, denominators: OldLogprobs, accumulator: MetricAccumulator
) -> TokenLossInputs:
    """Inputs of the token loss of a micro-batch."""
    return TokenLossInputs(
        logprobs_T=logprobs_T,
        old_logprobs=denominators,
        advantages_T=batch.advantages_T,
        ratio_scale_T=batch.ratio_scale_T,
        engine_logprobs_T=batch.engine_logprobs_T,
        is_off_policy_T=batch.is_off_policy_T,
        rollout_T=batch.rollout_index_T,
        turn_T=batch.turn_T,
        measures=accumulator,
    )


def batch_loss(
    inputs: TokenLossInputs,
    *,
    reference_T: Tensor | None,
    weights_T: Tensor,
    objective: ObjectiveSettings,
    token_loss: TokenLossFn,
    accumulator: MetricAccumulator,
) -> Tensor:
    """The weighted loss of one micro-batch; ``reference_T`` are the reference policy's log-probs (None: no KL
    term).
    """
    surrogate = token_loss(inputs)
    losses = surrogate.losses
    # what the engine sampled in this step: only there does it make sense to compare it
    own_T = ~inputs.is_off_policy_T
    if objective.sampler_correction is not None and bool(own_T.any()):
        losses = losses * _sampler_weights(inputs, objective, own_T, accumulator)
    if objective.sampler_rejection is not None:
        # Weight 0 and no new denominator: one counted here would depend on the split into micro-batches.
        weights_T = weights_T * _rejection_mask(objective.sampler_rejection, inputs, own_T, accumulator)
    loss = weighted_loss(losses=losses, weights=weights_T)
    accumulator.add_loss("loss/policy", float(loss.detach()))
    if reference_T is not None:
        old = inputs.old_T if objective.kl_estimator == "k3_ratio" else None
        kl = kl_per_token(
            estimator=objective.kl_estimator,
            logprobs=inputs.logprobs_T,
            reference_logprobs=reference_T,
            old_logprobs=old,
        )
        # The estimators need samples of the policy, and these tokens are not.
        kl_losses = kl.masked_fill(inputs.is_off_policy_T, 0.0)
        loss = loss + objective.kl_weight * weighted_loss(losses=kl_losses, weights=weights_T)
        accumulator.add(
            "loss/kl", float(kl.detach()[own_T].sum()) / max(1, int(own_T.sum())), float(own_T.sum())
        )
    if bool(own_T.any()):
        _measure_ratios(inputs, surrogate, own_T, accumulator)
    return loss


def _sampler_weights(
    inputs: TokenLossInputs, objective: ObjectiveSettings, own_T: Tensor, accumulator: MetricAccumulator
) -> Tensor:
    """[T] trainer / sampler within its bounds; 1 for tokens that no engine sampled in this step."""
    correction = objective.sampler_correction
    assert correction is not None
    trainer_T = inputs.old_logprobs.trainer_T
    applied = sampler_weights_per_token(
        old_logprobs=trainer_T,
        sampler_logprobs=inputs.engine_logprobs_T,
        mask=own_T,
        rollout_index=inputs.rollout_T.to(trainer_T.device),
        level=correction.level,
        lower=correction.lower,
        upper=correction.upper,
        outside=correction.outside,
    )
    stats = correction_stats(
        applied, old_logprobs=trainer_T, sampler_logprobs=inputs.engine_logprobs_T, mask=own_T
    )
    accumulator.add_importance(stats)
    return applied.weights.masked_fill(inputs.is_off_policy_T, 1.0)


def _rejection_mask(
    rejection: RejectionMask, inputs: TokenLossInputs, own_T: Tensor, accumulator: MetricAccumulator
) -> Tensor:
    """[T], False for own tokens on which engine and trainer disagree; neither the policy term nor the KL term
    has them.
    """
    trainer_T = inputs.old_logprobs.trainer_T
    accepted_T = rejection_mask_per_token(
        old_logprobs=trainer_T,
        sampler_logprobs=inputs.engine_logprobs_T,
        rollout_index=inputs.rollout_T.to(trainer_T.device),
        mask=own_T,
        statistic=rejection.statistic,
        scope=rejection.scope,
        upper=rejection.upper,
        lower=rejection.lower,
    )
    accumulator.add_sum("ratio/num_rejected", float((own_T & ~accepted_T).sum()))
    return accepted_T | inputs.is_off_policy_T


def _measure_ratios(
    inputs: TokenLossInputs, surrogate: TokenLoss, own_T: Tensor, accumulator: MetricAccumulator
) -> None:
    """Clips and ratios of the policy's own tokens."""
    ratio_O = (inputs.logprobs_T.detach() - inputs.old_T).exp()[own_T]
    scale_O = inputs.ratio_scale_T[own_T]
    clipped = {"high": surrogate.clipped_high, "low": surrogate.clipped_low, "dual": surrogate.dual_clipped}
    for name, mask in clipped.items():
        accumulator.add(f"ratio/clip_fraction_{name}", float(mask[own_T].float().mean()), len(ratio_O))
    ratio = ratio_O * scale_O
    accumulator.add("ratio/mean", float(ratio.mean()), len(ratio))
    accumulator.add("ratio/shaping_mean", float(scale_O.mean()), len(ratio))
    accumulator.add_min("ratio/min", float(ratio.min()))
    accumulator.add_max("ratio/max", float(ratio.max()))
