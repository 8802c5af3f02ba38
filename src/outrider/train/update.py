"""One policy update from credited groups: old log-probs, the clipped loss over packed micro-batches, the step.

Shape letters: T scored tokens of a micro-batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from pydantic import Field
from torch import Tensor

from outrider.algorithms.base import ObjectiveSettings, OffPolicyObjective, RejectionMask
from outrider.algorithms.losses import SurrogateLoss, clipped_surrogate_per_token, kl_per_token, token_weights, weighted_loss
from outrider.algorithms.objectives import cispo_per_token, gppo_per_token, gspo_per_token, reinforce_per_token
from outrider.algorithms.sampler_correction import correction_stats, rejection_mask_per_token, sampler_weights_per_token
from outrider.config import Settings
from outrider.errors import EngineFault
from outrider.trace import Leaf, Node, Trace, without_memory
from outrider.train.foreign import measure_foreign, mixed_surrogate
from outrider.train.off_policy import ActingLogprobs, Denominators, acting_logprobs, denominators, student_mask
from outrider.train.pack import PackedBatch, RolloutPath, credits_by_rollout, pack
from outrider.train.policy import Policy, Scorer, TokenScores
from outrider.train.success_term import success_nll, success_weights
from outrider.train.tally import Tally
from outrider.types import Origin


class UpdateSettings(Settings):
    """How a batch becomes optimiser steps.

    ``num_mini_batches`` splits the tasks of a step into that many optimiser steps; ``num_epochs`` repeats them;
    ``max_tokens`` bounds the unique tokens of a micro-batch. ``max_logprob_gap`` stops the run before its first update
    when trainer and engine disagree by more (mean absolute difference over a mini-batch, nats): a template or weight fault, not noise.
    ``checkpoint_activations`` trades a second forward pass for the memory of the layers' activations.
    """

    num_mini_batches: int = Field(1, ge=1)
    num_epochs: int = Field(1, ge=1)
    max_tokens: int = Field(4096, ge=1)
    max_logprob_gap: float = Field(0.1, gt=0)
    checkpoint_activations: bool = False


@dataclass(slots=True)
class UpdateReport:
    """Sums and means of one update; names are those of the metrics."""

    metrics: dict[str, float] = field(default_factory=dict)
    num_scored_tokens: int = 0
    num_computed_tokens: int = 0


def rollout_paths(traces: Sequence[Trace]) -> list[RolloutPath]:
    """The rollouts of a mini-batch that have a return, numbered over the mini-batch."""
    scored = [(leaf, path, trace) for trace in traces for leaf, path in trace.scored_rollouts()]
    kept = [one for one in scored if one[0].rollout not in one[2].pruned]
    return [_rendered(path, index, leaf, trace) for index, (leaf, path, trace) in enumerate(kept)]


def _rendered(path: Sequence[Node], index: int, leaf: Leaf, trace: Trace) -> RolloutPath:
    saw_tips = any(node.origin is Origin.MEMORY for node in path)  # a rollout without any has one rendering: it is on-policy
    nodes = without_memory(path) if trace.without_memory and saw_tips else path
    acted = path if trace.without_memory and saw_tips else None
    return RolloutPath(
        nodes=nodes,
        rollout_index=index,
        rollout=leaf.rollout,
        acted=acted,
        succeeded=leaf.success,
        is_replayed=trace.is_replayed,
    )


def update(
    policy: Policy,
    traces: Sequence[Trace],
    *,
    objective: ObjectiveSettings,
    settings: UpdateSettings,
    reference: Scorer | None,
    first: bool,
    gate_always: bool = False,
    on_batch: Callable[[int], None] | None = None,
) -> UpdateReport:
    """Train on credited groups. Raises EngineFault before the very first step when the log-prob gap is too large.

    ``gate_always`` checks every step: for an engine with weights of its own, which could be old ones.

    ``on_batch`` is called after every micro-batch with the scored tokens so far: live progress.
    Raises ValueError for an objective with a KL term and no ``reference``.
    """
    if objective.kl_weight > 0 and reference is None:
        raise ValueError(f"kl_weight = {objective.kl_weight} needs a reference model")
    bounds = [len(traces) * i // settings.num_mini_batches for i in range(settings.num_mini_batches + 1)]
    mini_batches = [traces[start:end] for start, end in pairwise(bounds) if end > start]
    reference = reference if objective.kl_weight > 0 else None  # one that the reward alone needs has been used by now
    once = len(mini_batches) == 1 and settings.num_epochs == 1
    report = UpdateReport()
    tally = Tally()
    olds = None if once else [_old_logprobs(policy, rollout_paths(mini), objective, settings) for mini in mini_batches]
    paths = [rollout_paths(mini) for mini in mini_batches]
    actings = [acting_logprobs(policy, _trained(each, objective), max_tokens=settings.max_tokens) for each in paths]
    for _ in range(settings.num_epochs):
        for number, each in enumerate(paths):
            gate = gate_always or (
                first and policy.num_steps == 0
            )  # until a step was made: a mini-batch without signal makes none
            old = olds[number] if olds else None
            acting = actings[number]
            _mini_batch(policy, each, objective, settings, reference, old, acting, report, tally, gate, on_batch)
    if not mini_batches:
        tally.add("grad/norm", 0.0)
    report.metrics |= tally.means()
    return report


def _trained(paths: Sequence[RolloutPath], objective: ObjectiveSettings) -> list[RolloutPath]:
    """Rollouts whose gradient is not zero by construction; the others stay in every denominator."""
    return [path for path in paths if _is_trained(path, objective)]


def _is_trained(path: RolloutPath, objective: ObjectiveSettings) -> bool:
    credits_ = [credit for node in path.nodes for _, credit, _ in credits_by_rollout(node, [path])]
    # These terms train every policy token, also of a rollout without advantage.
    every = objective.kl_weight > 0 or (objective.positive_nll > 0 and path.succeeded and not path.is_replayed)
    return any(map(len, credits_)) if every else any(any(credit) for credit in credits_)


def _old_logprobs(
    policy: Policy, paths: Sequence[RolloutPath], objective: ObjectiveSettings, settings: UpdateSettings
) -> list[TokenScores]:
    """pi_old and entropies of every micro-batch, recomputed by the trainer before the first of several steps."""
    with torch.no_grad():
        return [policy.score(batch) for batch in pack(_trained(paths, objective), max_tokens=settings.max_tokens)]


def _mini_batch(
    policy: Policy,
    paths: Sequence[RolloutPath],
    objective: ObjectiveSettings,
    settings: UpdateSettings,
    reference: Scorer | None,
    olds: Sequence[TokenScores] | None,
    acting: ActingLogprobs | None,
    report: UpdateReport,
    tally: Tally,
    gate: bool,
    on_batch: Callable[[int], None] | None,
) -> None:
    """One optimiser step over all micro-batches, with the denominators of the whole mini-batch."""
    batches = list(pack(_trained(paths, objective), max_tokens=settings.max_tokens))
    if not batches:
        tally.add("grad/norm", 0.0)
        return
    weights = _weights(paths, objective, batches)
    successes = success_weights(paths, batches)
    gaps: list[Tensor] = []
    for index, batch in enumerate(batches):
        scores = policy.score(batch)
        batch = batch.like(scores.logprobs_T)
        start = scores if olds is None else olds[index]
        old = denominators(start.logprobs_T.detach(), batch, acting=acting, objective=objective)
        own_T = ~batch.is_foreign_T
        gaps.append((old.trainer_T - batch.engine_logprobs_T)[own_T].abs())
        reference_logprobs = None
        if reference is not None:
            with torch.no_grad():
                reference_logprobs = reference.score(batch).logprobs_T
        if not bool(torch.isfinite(scores.logprobs_T.detach() - batch.engine_logprobs_T).all()):
            if gate:
                _require_agreement(policy, gaps, settings.max_logprob_gap)
            policy.drop_gradients()
            tally.add_sum("grad/num_skipped", 1.0)
            tally.end_step(skipped=True)
            return
        loss = _loss(scores.logprobs_T, old, reference_logprobs, batch, weights[index].to(old.old_T), objective, tally)
        if objective.positive_nll > 0:
            loss = loss + objective.positive_nll * success_nll(scores.logprobs_T, successes[index], tally)
        if bool(own_T.any()):
            tally.add("entropy/trainer_mean", float(start.entropies_T[own_T].mean()), len(gaps[-1]))
            tally.add("gap/logprob_mean", float(gaps[-1].mean()), len(gaps[-1]))
            tally.add_max("gap/logprob_max", float(gaps[-1].max()))
        loss.backward()
        report.num_scored_tokens += len(batch.targets_U)
        report.num_computed_tokens += batch.num_tokens
        if on_batch is not None:
            on_batch(report.num_scored_tokens)
    if gate:
        _require_agreement(policy, gaps, settings.max_logprob_gap)
    norm = policy.step()
    tally.end_step()
    tally.add_sum("grad/num_skipped", float(not math.isfinite(norm)))
    tally.add("grad/clipped_fraction", float(norm > policy.settings.max_grad_norm))
    tally.add("grad/norm", norm)


def _require_agreement(policy: Policy, gaps: Sequence[Tensor], limit: float) -> None:
    """The mean over all tokens of the mini-batch: that of a micro-batch would depend on the split, and a short one is noisy."""
    every = torch.cat(list(gaps)).double()
    gap = float(every.mean()) if len(every) else 0.0
    if not gap <= limit:  # NaN too
        policy.drop_gradients()
        raise EngineFault(f"trainer and engine disagree by {gap:.4f} nats a token before an update (limit {limit})")


def _weights(paths: Sequence[RolloutPath], objective: ObjectiveSettings, batches: Sequence[PackedBatch]) -> list[Tensor]:
    """Token weights with global denominators: tokens of rollouts without gradient count, but are not computed."""
    owners = torch.tensor(
        [path.rollout_index for path in paths for node in path.nodes if credits_by_rollout(node, [path]) for _ in node.token_ids]
    )
    every = token_weights(
        kind=objective.aggregation,
        rollout_index=owners,
        num_rollouts=len(paths),
        max_length=objective.max_length,
        dtype=torch.float64,
    )
    per_rollout = torch.zeros(len(paths), dtype=torch.float64)
    per_rollout[owners] = every  # all tokens of a rollout weigh the same
    return [per_rollout[batch.rollout_index_T] for batch in batches]


def _loss(
    logprobs_T: Tensor,
    denominator: Denominators,
    reference_T: Tensor | None,
    batch: PackedBatch,
    weights_T: Tensor,
    objective: ObjectiveSettings,
    tally: Tally,
) -> Tensor:
    """The weighted surrogate of one micro-batch, with the sampler correction and the KL term where they are on."""
    old_T = denominator.old_T
    surrogate = _surrogate(logprobs_T, old_T, batch, objective)
    losses = surrogate.losses
    own_T = ~batch.is_foreign_T  # what the engine sampled in this step: only there does it make sense to compare it
    if objective.sampler_correction is not None and bool(own_T.any()):
        arguments = {"old_logprobs": denominator.trainer_T, "sampler_logprobs": batch.engine_logprobs_T, "mask": own_T}
        applied = sampler_weights_per_token(
            old_logprobs=denominator.trainer_T,
            sampler_logprobs=batch.engine_logprobs_T,
            mask=own_T,
            rollout_index=batch.rollout_index_T.to(old_T.device),
            level=objective.sampler_level,
            lower=objective.sampler_floor,
            upper=objective.sampler_correction,
            outside=objective.sampler_outside,
        )
        losses = losses * applied.weights.masked_fill(batch.is_foreign_T, 1.0)
        tally.add_importance(correction_stats(applied, **arguments))
    if objective.sampler_rejection is not None:
        weights_T = weights_T * _agreed(objective.sampler_rejection, denominator, batch, tally)
    if denominator.is_off_T is not None and isinstance(objective, OffPolicyObjective):
        losses = losses * _kept(objective, denominator, denominator.is_off_T, batch, logprobs_T.detach(), tally)
    loss = weighted_loss(losses=losses, weights=weights_T)
    tally.add_loss("loss/policy", float(loss.detach()))
    if reference_T is not None:
        old = old_T if objective.kl_estimator == "k3_ratio" else None
        kl = kl_per_token(estimator=objective.kl_estimator, logprobs=logprobs_T, reference_logprobs=reference_T, old_logprobs=old)
        loss = loss + objective.kl_weight * weighted_loss(losses=kl.masked_fill(batch.is_foreign_T, 0.0), weights=weights_T)
        tally.add("loss/kl", float(kl.detach()[own_T].sum()) / max(1, int(own_T.sum())), float(own_T.sum()))
    measure_foreign(tally, batch, objective, logprobs_T=logprobs_T.detach(), old_T=old_T)
    if bool(own_T.any()):
        _measure_ratios(tally, surrogate, (logprobs_T.detach() - old_T).exp()[own_T], batch.ratio_scale_T[own_T], own_T)
    return loss


def _measure_ratios(tally: Tally, surrogate: SurrogateLoss, ratio_O: Tensor, scale_O: Tensor, own_T: Tensor) -> None:
    """Clips and ratios of the policy's own tokens, the O among T where ``own_T`` is True."""
    for name, mask in (("high", surrogate.clipped_high), ("low", surrogate.clipped_low), ("dual", surrogate.dual_clipped)):
        tally.add(f"ratio/clip_fraction_{name}", float(mask[own_T].float().mean()), len(ratio_O))
    ratio = ratio_O * scale_O
    tally.add("ratio/mean", float(ratio.mean()), len(ratio))
    tally.add("ratio/shaping_mean", float(scale_O.mean()), len(ratio))
    tally.add_min("ratio/min", float(ratio.min()))
    tally.add_max("ratio/max", float(ratio.max()))


def _agreed(rejection: RejectionMask, denominator: Denominators, batch: PackedBatch, tally: Tally) -> Tensor:
    """[T], False for own tokens on which engine and trainer disagree; neither the policy term nor the KL term has them."""
    own_T = ~batch.is_foreign_T
    kept_T = rejection_mask_per_token(
        old_logprobs=denominator.trainer_T,
        sampler_logprobs=batch.engine_logprobs_T,
        rollout_index=batch.rollout_index_T.to(denominator.trainer_T.device),
        mask=own_T,
        statistic=rejection.statistic,
        scope=rejection.scope,
        upper=rejection.upper,
        lower=rejection.lower,
    )
    tally.add_sum("ratio/num_rejected", float((own_T & ~kept_T).sum()))
    return kept_T | batch.is_foreign_T


def _surrogate(logprobs_T: Tensor, old_T: Tensor, batch: PackedBatch, objective: ObjectiveSettings) -> SurrogateLoss:
    """The token loss that the settings name."""
    mixed = mixed_surrogate(logprobs_T, old_T, batch, objective)
    if mixed is not None:
        return mixed
    tokens = {"logprobs": logprobs_T, "old_logprobs": old_T, "advantages": batch.credit_T}
    low, high = objective.clip_low, objective.clip_high
    if objective.loss == "gppo":
        return gppo_per_token(**tokens, clip_low=low, clip_high=high, dual_clip=objective.dual_clip)
    if objective.loss == "cispo" and objective.ratio_cap is not None:
        return cispo_per_token(**tokens, cap=objective.ratio_cap, floor=objective.ratio_floor)
    if objective.loss == "gspo":
        return gspo_per_token(
            logprobs=logprobs_T,
            old_logprobs=old_T,
            advantages=batch.credit_T,
            rollout_index=batch.rollout_index_T.to(logprobs_T.device),
            clip_low=low,
            clip_high=high,
            form=objective.sequence_ratio,
        )
    if objective.loss == "reinforce":
        return reinforce_per_token(logprobs=logprobs_T, advantages=batch.credit_T)
    return clipped_surrogate_per_token(
        **tokens,
        clip_low=low,
        clip_high=high,
        dual_clip=objective.dual_clip,
        ratio_scale=batch.ratio_scale_T,
        keep_clipped_gradient=objective.keep_clipped_gradient,
    )


def _kept(
    objective: OffPolicyObjective,
    denominator: Denominators,
    is_off_T: Tensor,
    batch: PackedBatch,
    logprobs_T: Tensor,
    tally: Tally,
) -> Tensor:
    """The student's mask, and what the tokens without their tips look like."""
    acting_T = denominator.trainer_T
    kept_T = student_mask(objective, logprobs_T=logprobs_T, acting_T=acting_T, is_off_T=is_off_T, turn_T=batch.turn_T)
    num = int(is_off_T.sum())
    if num:
        off = (acting_T - logprobs_T)[is_off_T]
        tally.add("tips/kl_acting_student", float(off.mean()), num)
        tally.add("tips/ratio_mean", float((logprobs_T - denominator.old_T)[is_off_T].exp().mean()), num)
        tally.add("tips/masked_fraction", float(1.0 - kept_T[is_off_T].mean()), num)
        tally.add_sum("tips/num_off_tokens", float(num))
    return kept_T
