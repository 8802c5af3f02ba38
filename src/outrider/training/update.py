"""Whether the engine that sampled has the weights of the trainer: their log-probs of the same tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.loss_settings import RejectionMask
from outrider.algorithms.losses import (
    OldLogprobs,
    TokenLoss,
    TokenLossInputs,
    kl_per_token,
    token_weights,
    weighted_loss,
)
from outrider.algorithms.sampler_correction import (
    correction_stats,
    rejection_mask_per_token,
    sampler_weights_per_token,
)
from outrider.errors import EngineFault
from outrider.trace import Leaf, Node, Trace, without_memory
from outrider.training.packing import PackedBatch, RolloutPath, advantages_by_rollout
from outrider.training.policy import (
    Policy,
    Ranks,
    Scorer,
    SingleRank,
    TokenScores,
    pack_for_rank,
    padded_micro_batches,
)
from outrider.training.settings import UpdateSettings
from outrider.training.update_metrics import MetricAccumulator, TokenRecord, token_record
from outrider.types import Origin


def logprob_mismatch(inputs: TokenLossInputs, is_older_T: Tensor | None) -> Tensor:
    """|trainer - engine| in nats, of the tokens that the policy wrote in this step with the weights that it
    has (all of them without ``is_older_T``).
    """
    excluded_T = inputs.is_off_policy_T if is_older_T is None else inputs.is_off_policy_T | is_older_T
    return (inputs.old_logprobs.trainer_T - inputs.engine_logprobs_T)[~excluded_T].abs()


def check_logprob_mismatch(policy: Policy, mismatches: Sequence[Tensor], limit: float) -> None:
    """Raises EngineFault where the mean gap of all ranks is above ``limit``, and drops the gradients.

    The mean over all tokens of the mini-batch: that of a micro-batch would depend on the split, and a short
    one is noisy.
    """
    # float64: near the limit the verdict must not hang on how a float32 sum was split.
    values = torch.cat(
        [mismatch for each in policy.ranks.gather(list(mismatches)) for mismatch in each]
    ).double()
    mismatch = float(values.mean()) if len(values) else 0.0
    if not mismatch <= limit:  # NaN too
        policy.drop_gradients()
        raise EngineFault(
            f"trainer and engine disagree by {mismatch:.4f} nats a token before an update (limit {limit})"
        )


# Log-probs in the context that rollouts acted in, where the update renders another one (EMPO², arXiv
# 2602.23008, App. C).
#
# The numerator of the ratio is the student, the policy that sees no tips. The denominator is the acting
# policy (Table 3) or the student when the update began (Algorithm 1): :mod:`outrider.algorithms.losses`.
#
# Shape letters: T entries of a :class:`~outrider.training.packing.PackedBatch`.


class LogprobsWithTips:
    """Log-probs in the context with tips, for every rollout that has another rendering; computed by the
    trainer before any step.
    """

    def __init__(self, logprobs: Mapping[int, Sequence[float]]) -> None:
        """``logprobs``: rollout index to one value for each of its trained tokens, in their order."""
        self._logprobs = logprobs

    def gather(self, batch: PackedBatch) -> Tensor:
        """[T], NaN where the entry's rollout had no tips to lose."""
        entries = zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        values = [
            # NaN, where a 0 would pass for a log-prob: nobody can divide by it unnoticed.
            self._logprobs[rollout][ordinal] if rollout in self._logprobs else math.nan
            for rollout, ordinal in entries
        ]
        return torch.tensor(values, dtype=torch.float64).to(batch.advantages_T)


@torch.no_grad()
def score_with_tips(
    policy: Policy, paths: Sequence[RolloutPath], *, max_tokens: int
) -> LogprobsWithTips | None:
    """Score the rollouts among ``paths`` that have another rendering, in the one that they were acted in;
    None where this rank has none.
    """
    # Whose rollout it is, the rendering that is trained decides: the same rank needs both.
    own = policy.ranks.share(paths)
    paths_with_tips = [
        replace(path, nodes=path.nodes_with_tips, nodes_with_tips=None)
        for path in own
        if path.nodes_with_tips is not None
    ]
    values_by_ordinal: dict[int, dict[int, float]] = {}
    for batch in padded_micro_batches(
        pack_for_rank(paths_with_tips, policy.ranks, max_tokens=max_tokens), policy.ranks
    ):
        if batch is None:
            policy.dummy_forward()
            continue
        entries = zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        for (rollout, ordinal), value in zip(entries, policy.score(batch).logprobs_T.tolist(), strict=True):
            values_by_ordinal.setdefault(rollout, {})[ordinal] = value
    logprobs = {
        rollout: [values[i] for i in range(len(values))] for rollout, values in values_by_ordinal.items()
    }
    return LogprobsWithTips(logprobs) if logprobs else None


# The KL to the reference that a reward counts, measured before credit: k1 = log pi_old - log reference of
# every policy token.


@torch.no_grad()
def measure_kl(policy: Scorer, reference: Scorer, traces: Sequence[Trace], *, max_tokens: int) -> None:
    """Write ``kl`` on the policy nodes of every rollout with a return. ``policy`` is the one that the update
    starts from.

    Raises ValueError for a node that several rollouts share.
    """
    scored = [(group, path) for group, trace in enumerate(traces) for _, path in trace.scored_rollouts()]
    scored = [
        (group, path) for group, path in scored if any(node.trainable and node.token_ids for node in path)
    ]
    paths = [path for _, path in scored]
    # packing scores what has credit, which is not there yet; shared prompts stay shared
    copies: dict[int, Node] = {}
    for node in (node for path in paths for node in path):
        copies.setdefault(
            id(node), replace(node, credit=(0.0,) * len(node.token_ids)) if node.trainable else node
        )
    kl_values: dict[int, list[tuple[int, float]]] = {}
    rollouts = [
        RolloutPath(nodes=[copies[id(node)] for node in path], rollout_index=i, group=group)
        for i, (group, path) in enumerate(scored)
    ]
    ranks = policy.ranks
    for batch in padded_micro_batches(
        pack_for_rank(ranks.share(rollouts), ranks, max_tokens=max_tokens), ranks
    ):
        if batch is None:
            policy.dummy_forward()
            reference.dummy_forward()
            continue
        values = (policy.score(batch).logprobs_T - reference.score(batch).logprobs_T).tolist()
        for rollout, ordinal, value in zip(
            batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), values, strict=True
        ):
            kl_values.setdefault(rollout, []).append((ordinal, value))
    kl_values = {rollout: values for each in ranks.gather(kl_values) for rollout, values in each.items()}
    for number, path in enumerate(paths):
        each = iter(value for _, value in sorted(kl_values[number]))
        for node in path:
            if node.trainable:
                node.kl = tuple(next(each) for _ in node.token_ids)


# The negative log-likelihood of successful rollouts beside the policy term (GPPO, arXiv 2508.07629, Eq. 13).
#
# Shape letters: T scored tokens of a micro-batch.


def success_weights(
    paths: Sequence[RolloutPath], batches: Sequence[PackedBatch], ranks: Ranks | None = None
) -> list[Tensor]:
    """For every micro-batch [T]: one over the trained tokens of all successful rollouts of the mini-batch,
    and 0 for other tokens.

    Tokens that the policy did not write in this step count for nothing: demonstrations and replayed rollouts
    have a term of their own. ``paths`` are numbered as ``rollout_index`` says, and ``batches`` hold every
    successful one, those of all ``ranks`` together (None: there is one).
    """
    succeeded = torch.tensor([path.succeeded for path in paths])
    masks = [succeeded[batch.rollout_index_T] & ~batch.is_off_policy_T for batch in batches]
    num = sum((ranks or SingleRank()).gather(sum(int(mask.sum()) for mask in masks)))
    # The count over all micro-batches of all ranks: the mean must not depend on how they were split.
    return [mask.double() / max(1, num) for mask in masks]


def sft_loss(logprobs_T: Tensor, weights_T: Tensor, accumulator: MetricAccumulator) -> Tensor:
    """The micro-batch's share of the mean; reported before its weight."""
    loss = weighted_loss(losses=-logprobs_T, weights=weights_T.to(logprobs_T))
    accumulator.add_loss("loss/positive_nll", float(loss.detach()))
    return loss


# The loss of one micro-batch: the algorithm's token loss, with sampler correction, rejection, KL term and
# aggregation weights.
#
# Shape letters: T scored tokens of the micro-batch, O those of them that the policy wrote in this step.


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


# One policy update from credited groups: old log-probs, the clipped loss over packed micro-batches, the
# step.
#
# Shape letters: T scored tokens of a micro-batch.


@dataclass(slots=True)
class UpdateReport:
    """Sums and means of one update; names are those of the metrics. ``tokens``: what it saw of each."""

    metrics: dict[str, float] = field(default_factory=dict)
    num_scored_tokens: int = 0
    num_computed_tokens: int = 0
    tokens: list[TokenRecord] = field(default_factory=list)


def rollout_paths(traces: Sequence[Trace]) -> list[RolloutPath]:
    """The rollouts of a mini-batch that have a return, numbered over the mini-batch."""
    scored = [(leaf, path, trace) for trace in traces for leaf, path in trace.scored_rollouts()]
    # Before they are numbered: a pruned rollout stands in no denominator.
    retained = [entry for entry in scored if entry[0].rollout not in entry[2].pruned]
    groups = {id(trace): number for number, trace in enumerate(traces)}
    return [
        replace(_render_path(path, index, leaf, trace), group=groups[id(trace)])
        for index, (leaf, path, trace) in enumerate(retained)
    ]


def _render_path(path: Sequence[Node], index: int, leaf: Leaf, trace: Trace) -> RolloutPath:
    # a rollout without any has one rendering: it is on-policy
    saw_tips = any(node.origin is Origin.MEMORY for node in path)
    nodes = without_memory(path) if trace.without_memory and saw_tips else path
    nodes_with_tips = path if trace.without_memory and saw_tips else None
    return RolloutPath(
        nodes=nodes,
        rollout_index=index,
        rollout=leaf.rollout,
        nodes_with_tips=nodes_with_tips,
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
    token_loss: TokenLossFn | None = None,
    gate_always: bool = False,
    version: int | None = None,
    probes: Sequence[Trace] = (),
    on_batch: Callable[[int], None] | None = None,
) -> UpdateReport:
    """Train on credited groups. Raises EngineFault before the very first step when the log-prob gap is too
    large.

    ``token_loss`` is the algorithm's (None: that of the ``objective``). ``gate_always`` checks every step:
    for an engine with weights of its own, which could be old ones. ``version`` is that of the policy's
    weights, where tokens may be of older ones, which say nothing of the engine; ``probes`` are checked and
    not trained on. ``on_batch`` is called after every micro-batch with the scored tokens so far.
    Raises ValueError for an objective with a KL term and no ``reference``.
    """
    if objective.kl_weight > 0 and reference is None:
        raise ValueError(f"kl_weight = {objective.kl_weight} needs a reference model")
    mini_batches = split_mini_batches(traces, settings.num_mini_batches)
    running = _Update(
        policy=policy,
        objective=objective,
        token_loss=token_loss or objective.token_loss,
        settings=settings,
        # one that the reward alone needs has been used by now
        reference=reference if objective.kl_weight > 0 else None,
        on_batch=on_batch or (lambda num_tokens: None),
        version=version,
    )
    if probes:
        running.check(rollout_paths(probes))
    running.steps(mini_batches, gate=gate_always, gate_first=first)
    if not mini_batches:
        running.common.add("grad/norm", 0.0)
    return running.whole_report()


def split_mini_batches(traces: Sequence[Trace], num: int) -> list[list[RolloutPath]]:
    """The rollouts of each mini-batch. Cut between groups, never inside one: siblings share the beginning
    that packing computes once.
    """
    bounds = [len(traces) * i // num for i in range(num + 1)]
    return [rollout_paths(traces[start:end]) for start, end in pairwise(bounds) if end > start]


@dataclass(slots=True, kw_only=True)
class _Update:
    """One update while it runs: what all of its mini-batches share, and what they add to."""

    policy: Policy
    objective: ObjectiveSettings
    token_loss: TokenLossFn
    settings: UpdateSettings
    reference: Scorer | None
    on_batch: Callable[[int], None]
    version: int | None
    report: UpdateReport = field(default_factory=UpdateReport)
    accumulator: MetricAccumulator = field(default_factory=MetricAccumulator)
    common: MetricAccumulator = field(init=False)

    def __post_init__(self) -> None:
        # What all ranks know is counted by one of them.
        self.common = self.accumulator if self.policy.ranks.rank == 0 else MetricAccumulator()

    def whole_report(self) -> UpdateReport:
        """What all ranks have measured."""
        first, *others = self.policy.ranks.gather((self.report, self.accumulator))
        report, accumulator = first
        for other, measured in others:
            report.num_scored_tokens += other.num_scored_tokens
            report.num_computed_tokens += other.num_computed_tokens
            report.tokens += other.tokens
            accumulator.merge(measured)
        report.metrics |= accumulator.means()
        return report

    def steps(self, mini_batches: Sequence[Sequence[RolloutPath]], *, gate: bool, gate_first: bool) -> None:
        """All optimiser steps; ``gate_first`` checks until one was made."""
        # A single step: pi_old is the policy being scored: the pass that trains gives the old log-probs too.
        is_single_step = len(mini_batches) == 1 and self.settings.num_epochs == 1
        # All of them before the first step: pi_old is one policy, whatever mini-batch or epoch it divides.
        olds = [None if is_single_step else self.old_scores(paths) for paths in mini_batches]
        all_with_tips = [self.score_with_tips(paths) for paths in mini_batches]
        for _ in range(self.settings.num_epochs):
            for number, (paths, old, with_tips) in enumerate(
                zip(mini_batches, olds, all_with_tips, strict=True)
            ):
                # until a step was made: a mini-batch without signal makes none
                checked = gate or (gate_first and self.policy.num_steps == 0)
                self.mini_batch(paths, number, olds=old, with_tips=with_tips, gate=checked)

    def check(self, paths: Sequence[RolloutPath]) -> None:
        """Raises EngineFault where an engine does not have the policy's weights."""
        mismatches: list[Tensor] = []
        with torch.no_grad():
            for batch in padded_micro_batches(self._pack(paths), self.policy.ranks):
                if batch is None:
                    self.policy.dummy_forward()
                    continue
                scores = self.policy.score(batch)
                mismatches.append((scores.logprobs_T - batch.like(scores.logprobs_T).engine_logprobs_T).abs())
                self._measure_mismatch(mismatches[-1])
        check_logprob_mismatch(self.policy, mismatches, self.settings.max_logprob_gap)

    def old_scores(self, paths: Sequence[RolloutPath]) -> list[TokenScores]:
        """pi_old and entropies of every micro-batch, recomputed by the trainer before the first of several
        steps.
        """
        scores = []
        with torch.no_grad():
            for batch in padded_micro_batches(
                self._pack(_trained_paths(paths, self.objective)), self.policy.ranks
            ):
                if batch is None:
                    self.policy.dummy_forward()
                else:
                    scores.append(self.policy.score(batch))
        return scores

    def score_with_tips(self, paths: Sequence[RolloutPath]) -> LogprobsWithTips | None:
        """Log-probs in the context that the rollouts acted in, where the update renders another one."""
        trained = _trained_paths(paths, self.objective)
        return score_with_tips(self.policy, trained, max_tokens=self.settings.max_tokens)

    def mini_batch(
        self,
        paths: Sequence[RolloutPath],
        number: int,
        *,
        olds: Sequence[TokenScores] | None,
        with_tips: LogprobsWithTips | None,
        gate: bool,
    ) -> None:
        """One optimiser step over all micro-batches, with the denominators of the whole mini-batch."""
        trained = _trained_paths(paths, self.objective)
        if not trained:
            self.common.add("grad/norm", 0.0)
            return
        batches = self._pack(trained)
        weights = _weights(paths, self.objective, batches)
        successes = success_weights(paths, batches, self.policy.ranks)
        mismatches: list[Tensor] = []
        for index, batch in enumerate(padded_micro_batches(batches, self.policy.ranks)):
            if batch is None:
                loss, is_finite = self._dummy_forward(), True
            else:
                micro_batch = _PassInputs(
                    number=number,
                    batch=batch,
                    start=None if olds is None else olds[index],
                    with_tips=with_tips,
                    weights_T=weights[index],
                    success_T=successes[index],
                )
                loss, is_finite = self._compute_loss(micro_batch, mismatches)
            # Asked of all before any of them leaves: the backward pass needs every rank.
            if not all(self.policy.ranks.gather(is_finite)):
                self._skip(mismatches, gate=gate)
                return
            loss.backward()  # frees the graph; over micro-batches the gradients add up
            if batch is not None:
                self._count(batch)
        # After the backward passes, so that nothing is scored twice; still before any weight moves.
        if gate:
            check_logprob_mismatch(self.policy, mismatches, self.settings.max_logprob_gap)
        self._step()

    def _compute_loss(self, micro_batch: "_PassInputs", mismatches: list[Tensor]) -> tuple[Tensor, bool]:
        """The loss of a micro-batch, and whether its log-probs are finite (else the loss means nothing);
        ``mismatches`` gets the trainer's to the engine.
        """
        scores = self.policy.score(micro_batch.batch)
        batch = micro_batch.batch.like(scores.logprobs_T)
        start = micro_batch.start or scores
        # A constant also where it comes from this very pass: x - x would have no gradient.
        start_T = start.logprobs_T.detach()
        with_tips_T = (
            None if micro_batch.with_tips is None else micro_batch.with_tips.gather(batch).to(start_T)
        )
        inputs = loss_inputs(
            scores.logprobs_T, batch, self.objective.old_logprobs(start_T, with_tips_T), self.accumulator
        )
        is_older_T = None if self.version is None else batch.version_T != self.version
        mismatches.append(logprob_mismatch(inputs, is_older_T))
        reference_T = self._reference_logprobs(batch)
        # After the gap is kept: where the engine is gated, the gate has to see the NaN.
        if not bool(torch.isfinite(scores.logprobs_T.detach() - batch.engine_logprobs_T).all()):
            return scores.logprobs_T, False
        self.report.tokens.append(token_record(micro_batch.number, batch, inputs))
        loss = batch_loss(
            inputs,
            reference_T=reference_T,
            weights_T=micro_batch.weights_T.to(inputs.old_T),
            objective=self.objective,
            token_loss=self.token_loss,
            accumulator=self.accumulator,
        )
        if self.objective.positive_nll > 0:
            nll = sft_loss(scores.logprobs_T, micro_batch.success_T, self.accumulator)
            loss = loss + self.objective.positive_nll * nll
        own_T = ~inputs.is_off_policy_T
        if bool(own_T.any()):
            self.accumulator.add(
                "entropy/trainer_mean", float(start.entropies_T[own_T].mean()), int(own_T.sum())
            )
        self._measure_mismatch(mismatches[-1])
        if is_older_T is not None:
            self._measure_shift(inputs, is_older_T & own_T)
        return loss, True

    def _dummy_forward(self) -> Tensor:
        """What :meth:`_pass` asks of the models, without a rollout."""
        loss = self.policy.dummy_forward()
        if self.reference is not None:
            with torch.no_grad():
                self.reference.dummy_forward()
        return loss

    def _pack(self, trained: Sequence[RolloutPath]) -> list[PackedBatch]:
        ranks = self.policy.ranks
        return pack_for_rank(ranks.share(trained), ranks, max_tokens=self.settings.max_tokens)

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            return self.reference.score(batch).logprobs_T

    def _measure_shift(self, inputs: TokenLossInputs, older_T: Tensor) -> None:
        """How far the policy has moved since it wrote the older tokens."""
        if bool(older_T.any()):
            shift_T = (inputs.old_logprobs.trainer_T - inputs.engine_logprobs_T).abs()
            self.accumulator.add(
                "staleness/logprob_shift", float(shift_T[older_T].mean()), int(older_T.sum())
            )

    def _measure_mismatch(self, mismatch_O: Tensor) -> None:
        """Trainer against engine, over O tokens that both have from the same weights."""
        if len(mismatch_O):
            self.accumulator.add("gap/logprob_mean", float(mismatch_O.mean()), len(mismatch_O))
            self.accumulator.add_max("gap/logprob_max", float(mismatch_O.max()))

    def _count(self, batch: PackedBatch) -> None:
        self.report.num_scored_tokens += len(batch.targets_U)
        self.report.num_computed_tokens += self.policy.num_computed_tokens(batch)
        self.on_batch(self.report.num_scored_tokens)

    def _skip(self, mismatches: Sequence[Tensor], *, gate: bool) -> None:
        """A log-prob that is not finite makes no step; where the engine is checked, it may be the reason."""
        if gate:
            check_logprob_mismatch(self.policy, mismatches, self.settings.max_logprob_gap)
        self.policy.drop_gradients()
        self.common.add_sum("grad/num_skipped", 1.0)
        self._end_step(skipped=True)

    def _end_step(self, *, skipped: bool = False) -> None:
        for share in self.policy.ranks.gather(self.accumulator.pop_losses()):
            for name, value in share.items():
                self.common.add_loss(name, value)
        self.common.end_step(skipped=skipped)

    def _step(self) -> None:
        norm = self.policy.step()
        self._end_step()
        self.common.add_sum("grad/num_skipped", float(not math.isfinite(norm)))
        self.common.add("grad/clipped_fraction", float(norm > self.policy.settings.max_grad_norm))
        self.common.add("grad/norm", norm)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PassInputs:
    """What a pass of mini-batch ``number`` needs beside the weights. ``start`` None: the pass that trains
    gives the old log-probs.
    """

    number: int
    batch: PackedBatch
    start: TokenScores | None
    with_tips: LogprobsWithTips | None
    weights_T: Tensor
    success_T: Tensor


def _trained_paths(paths: Sequence[RolloutPath], objective: ObjectiveSettings) -> list[RolloutPath]:
    """Rollouts whose gradient is not zero by construction; the others stay in every denominator."""
    return [path for path in paths if _is_trained(path, objective)]


def _is_trained(path: RolloutPath, objective: ObjectiveSettings) -> bool:
    advantages = [values for node in path.nodes for _, values, _ in advantages_by_rollout(node, [path])]
    # These terms train every policy token, also of a rollout without advantage.
    every = objective.kl_weight > 0 or (
        objective.positive_nll > 0 and path.succeeded and not path.is_replayed
    )
    return any(map(len, advantages)) if every else any(any(values) for values in advantages)


def _weights(
    paths: Sequence[RolloutPath], objective: ObjectiveSettings, batches: Sequence[PackedBatch]
) -> list[Tensor]:
    """Token weights with global denominators: tokens of rollouts without gradient count, but are not
    computed.
    """
    # Over all paths, not over the packed ones: a rollout without gradient is still part of the mean.
    owners = torch.tensor(
        [
            path.rollout_index
            for path in paths
            for node in path.nodes
            if advantages_by_rollout(node, [path])
            for _ in node.token_ids
        ]
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
