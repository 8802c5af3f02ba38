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
from outrider.train.update.agreement import logprob_gap, require_agreement
from outrider.train.update.batch_loss import TokenLossOf, batch_loss, loss_inputs
from outrider.train.update.metric_accumulator import MetricAccumulator
from outrider.train.update.off_policy import ActingLogprobs, acting_logprobs
from outrider.train.update.pack import PackedBatch, RolloutPath, credits_by_rollout
from outrider.train.update.policy import Policy, Scorer, TokenScores
from outrider.train.update.ranks import packed, passes
from outrider.train.update.success_term import success_nll, success_weights
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
    kept = [one for one in scored if one[0].rollout not in one[2].pruned]
    groups = {id(trace): number for number, trace in enumerate(traces)}
    return [
        replace(_rendered(path, index, leaf, trace), group=groups[id(trace)])
        for index, (leaf, path, trace) in enumerate(kept)
    ]


def _rendered(path: Sequence[Node], index: int, leaf: Leaf, trace: Trace) -> RolloutPath:
    # a rollout without any has one rendering: it is on-policy
    saw_tips = any(node.origin is Origin.MEMORY for node in path)
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
    token_loss: TokenLossOf | None = None,
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
    mini_batches = mini_batches_of(traces, settings.num_mini_batches)
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


def mini_batches_of(traces: Sequence[Trace], num: int) -> list[list[RolloutPath]]:
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
    token_loss: TokenLossOf
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
        once = len(mini_batches) == 1 and self.settings.num_epochs == 1
        # All of them before the first step: pi_old is one policy, whatever mini-batch or epoch it divides.
        olds = [None if once else self.old_scores(paths) for paths in mini_batches]
        actings = [self.acting(paths) for paths in mini_batches]
        for _ in range(self.settings.num_epochs):
            for number, (paths, old, acting) in enumerate(zip(mini_batches, olds, actings, strict=True)):
                # until a step was made: a mini-batch without signal makes none
                checked = gate or (gate_first and self.policy.num_steps == 0)
                self.mini_batch(paths, number, olds=old, acting=acting, gate=checked)

    def check(self, paths: Sequence[RolloutPath]) -> None:
        """Raises EngineFault where an engine does not have the policy's weights."""
        gaps: list[Tensor] = []
        with torch.no_grad():
            for batch in passes(self._packed(paths), self.policy.ranks):
                if batch is None:
                    self.policy.idle()
                    continue
                scores = self.policy.score(batch)
                gaps.append((scores.logprobs_T - batch.like(scores.logprobs_T).engine_logprobs_T).abs())
                self._measure_gap(gaps[-1])
        require_agreement(self.policy, gaps, self.settings.max_logprob_gap)

    def old_scores(self, paths: Sequence[RolloutPath]) -> list[TokenScores]:
        """pi_old and entropies of every micro-batch, recomputed by the trainer before the first of several
        steps.
        """
        found = []
        with torch.no_grad():
            for batch in passes(self._packed(_trained(paths, self.objective)), self.policy.ranks):
                if batch is None:
                    self.policy.idle()
                else:
                    found.append(self.policy.score(batch))
        return found

    def acting(self, paths: Sequence[RolloutPath]) -> ActingLogprobs | None:
        """Log-probs in the context that the rollouts acted in, where the update renders another one."""
        trained = _trained(paths, self.objective)
        return acting_logprobs(self.policy, trained, max_tokens=self.settings.max_tokens)

    def mini_batch(
        self,
        paths: Sequence[RolloutPath],
        number: int,
        *,
        olds: Sequence[TokenScores] | None,
        acting: ActingLogprobs | None,
        gate: bool,
    ) -> None:
        """One optimiser step over all micro-batches, with the denominators of the whole mini-batch."""
        trained = _trained(paths, self.objective)
        if not trained:
            self.common.add("grad/norm", 0.0)
            return
        batches = self._packed(trained)
        weights = _weights(paths, self.objective, batches)
        successes = success_weights(paths, batches, self.policy.ranks)
        gaps: list[Tensor] = []
        for index, batch in enumerate(passes(batches, self.policy.ranks)):
            if batch is None:
                loss, is_finite = self._idle(), True
            else:
                given = _Given(
                    number=number,
                    batch=batch,
                    start=None if olds is None else olds[index],
                    acting=acting,
                    weights_T=weights[index],
                    success_T=successes[index],
                )
                loss, is_finite = self._pass(given, gaps)
            # Asked of all before any of them leaves: the backward pass needs every rank.
            if not all(self.policy.ranks.gather(is_finite)):
                self._skip(gaps, gate=gate)
                return
            loss.backward()  # frees the graph; over micro-batches the gradients add up
            if batch is not None:
                self._count(batch)
        # After the backward passes, so that nothing is scored twice; still before any weight moves.
        if gate:
            require_agreement(self.policy, gaps, self.settings.max_logprob_gap)
        self._step()

    def _pass(self, given: "_Given", gaps: list[Tensor]) -> tuple[Tensor, bool]:
        """The loss of a micro-batch, and whether its log-probs are finite (else the loss means nothing);
        ``gaps`` gets the trainer's to the engine.
        """
        scores = self.policy.score(given.batch)
        batch = given.batch.like(scores.logprobs_T)
        start = given.start or scores
        # A constant also where it comes from this very pass: x - x would have no gradient.
        start_T = start.logprobs_T.detach()
        acting_T = None if given.acting is None else given.acting.of(batch).to(start_T)
        inputs = loss_inputs(
            scores.logprobs_T, batch, self.objective.denominators(start_T, acting_T), self.accumulator
        )
        is_older_T = None if self.version is None else batch.version_T != self.version
        gaps.append(logprob_gap(inputs, is_older_T))
        reference_T = self._reference_logprobs(batch)
        # After the gap is kept: where the engine is gated, the gate has to see the NaN.
        if not bool(torch.isfinite(scores.logprobs_T.detach() - batch.engine_logprobs_T).all()):
            return scores.logprobs_T, False
        self.report.tokens.append(token_record(given.number, batch, inputs))
        loss = batch_loss(
            inputs,
            reference_T=reference_T,
            weights_T=given.weights_T.to(inputs.old_T),
            objective=self.objective,
            token_loss=self.token_loss,
            accumulator=self.accumulator,
        )
        if self.objective.positive_nll > 0:
            nll = success_nll(scores.logprobs_T, given.success_T, self.accumulator)
            loss = loss + self.objective.positive_nll * nll
        own_T = ~inputs.is_foreign_T
        if bool(own_T.any()):
            self.accumulator.add(
                "entropy/trainer_mean", float(start.entropies_T[own_T].mean()), int(own_T.sum())
            )
        self._measure_gap(gaps[-1])
        if is_older_T is not None:
            self._measure_shift(inputs, is_older_T & own_T)
        return loss, True

    def _idle(self) -> Tensor:
        """What :meth:`_pass` asks of the models, without a rollout."""
        loss = self.policy.idle()
        if self.reference is not None:
            with torch.no_grad():
                self.reference.idle()
        return loss

    def _packed(self, trained: Sequence[RolloutPath]) -> list[PackedBatch]:
        ranks = self.policy.ranks
        return packed(ranks.share(trained), ranks, max_tokens=self.settings.max_tokens)

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            return self.reference.score(batch).logprobs_T

    def _measure_shift(self, inputs: TokenLossInputs, older_T: Tensor) -> None:
        """How far the policy has moved since it wrote the older tokens."""
        if bool(older_T.any()):
            shift_T = (inputs.denominators.trainer_T - inputs.engine_logprobs_T).abs()
            self.accumulator.add(
                "staleness/logprob_shift", float(shift_T[older_T].mean()), int(older_T.sum())
            )

    def _measure_gap(self, gap_O: Tensor) -> None:
        """Trainer against engine, over O tokens that both have from the same weights."""
        if len(gap_O):
            self.accumulator.add("gap/logprob_mean", float(gap_O.mean()), len(gap_O))
            self.accumulator.add_max("gap/logprob_max", float(gap_O.max()))

    def _count(self, batch: PackedBatch) -> None:
        self.report.num_scored_tokens += len(batch.targets_U)
        self.report.num_computed_tokens += self.policy.num_computed_tokens(batch)
        self.on_batch(self.report.num_scored_tokens)

    def _skip(self, gaps: Sequence[Tensor], *, gate: bool) -> None:
        """A log-prob that is not finite makes no step; where the engine is checked, it may be the reason."""
        if gate:
            require_agreement(self.policy, gaps, self.settings.max_logprob_gap)
        self.policy.drop_gradients()
        self.common.add_sum("grad/num_skipped", 1.0)
        self._end_step(skipped=True)

    def _end_step(self, *, skipped: bool = False) -> None:
        for share in self.policy.ranks.gather(self.accumulator.take_losses()):
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
class _Given:
    """What a pass of mini-batch ``number`` needs beside the weights. ``start`` None: the pass that trains
    gives the old log-probs.
    """

    number: int
    batch: PackedBatch
    start: TokenScores | None
    acting: ActingLogprobs | None
    weights_T: Tensor
    success_T: Tensor


def _trained(paths: Sequence[RolloutPath], objective: ObjectiveSettings) -> list[RolloutPath]:
    """Rollouts whose gradient is not zero by construction; the others stay in every denominator."""
    return [path for path in paths if _is_trained(path, objective)]


def _is_trained(path: RolloutPath, objective: ObjectiveSettings) -> bool:
    credits_ = [credit for node in path.nodes for _, credit, _ in credits_by_rollout(node, [path])]
    # These terms train every policy token, also of a rollout without advantage.
    every = objective.kl_weight > 0 or (
        objective.positive_nll > 0 and path.succeeded and not path.is_replayed
    )
    return any(map(len, credits_)) if every else any(any(credit) for credit in credits_)


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
            if credits_by_rollout(node, [path])
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
