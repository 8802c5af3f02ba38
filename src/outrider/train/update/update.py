"""One policy update from credited groups: old log-probs, the clipped loss over packed micro-batches, the
step.

Shape letters: T scored tokens of a micro-batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from outrider.algorithms.base import ObjectiveSettings
from outrider.algorithms.common.losses import token_weights
from outrider.algorithms.common.token_loss import TokenLossInputs
from outrider.trace import Leaf, Node, Trace, without_memory
from outrider.train.learning_settings import UpdateSettings
from outrider.train.update.agreement import check_logprob_mismatch, logprob_mismatch
from outrider.train.update.batch_loss import TokenLossFn, batch_loss, loss_inputs
from outrider.train.update.metric_accumulator import MetricAccumulator
from outrider.train.update.off_policy import LogprobsWithTips, score_with_tips
from outrider.train.update.pack import PackedBatch, RolloutPath, advantages_by_rollout
from outrider.train.update.policy import Policy, Scorer, TokenScores
from outrider.train.update.ranks import pack_for_rank, padded_micro_batches
from outrider.train.update.success_term import sft_loss, success_weights
from outrider.train.update.token_record import TokenRecord, token_record
from outrider.types import Origin


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
