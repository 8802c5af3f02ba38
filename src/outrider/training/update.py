"""One policy update from groups with advantages: old log-probs, the loss over packed micro-batches, the step.

:func:`update` is the entry point; ``_Update.train`` is one optimizer step, ``_Update.compute_loss`` one
forward pass, and :func:`batch_loss` the loss of a micro-batch.

Shape letters: T scored tokens of a micro-batch, O those of them that the policy wrote in this step.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.algorithms.base import ObjectiveSettings, is_plugin_loss
from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.losses import (
    OldLogprobs,
    TokenLoss,
    TokenLossInputs,
    kl_per_token,
    token_weights,
    weighted_loss,
)
from outrider.algorithms.sampler_correction import (
    ImportanceStats,
    correction_stats,
    rejection_mask_per_token,
    sampler_weights_per_token,
    token_ratio,
)
from outrider.errors import EngineFault
from outrider.seeding import stream
from outrider.trace import Node, Trace, split_contexts, with_help, without_memory, without_open_prompt
from outrider.training.distill_term import (
    DistillTerm,
    OtherScores,
    TermLosses,
    other_rendering,
    pair_paths,
    rollouts_with_term,
    score_other,
    term_mask,
    until_last_turn,
)
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
from outrider.types import Origin

# Metrics of an update: weighted means, sums, extremes, and losses, however it was split.


class MetricAccumulator:
    """The :class:`~outrider.algorithms.losses.Measures` of one update; :meth:`means` are its metrics."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._totals: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._minima: dict[str, float] = {}
        # of the sampler correction: how many, their sum, the sum of their squares
        self._weights = [0.0, 0.0, 0.0]
        self._losses: dict[str, float] = {}  # of the optimiser step that is being computed

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        total = self._sums.setdefault(name, [0.0, 0.0])
        total[0] += value * weight
        total[1] += weight

    def add_sum(self, name: str, value: float) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + value

    def add_max(self, name: str, value: float) -> None:
        self._maxima[name] = max(value, self._maxima.get(name, value))

    def add_min(self, name: str, value: float) -> None:
        self._minima[name] = min(value, self._minima.get(name, value))

    def add_loss(self, name: str, value: float) -> None:
        """Add a micro-batch's share of a loss of the optimizer step."""
        self._losses[name] = self._losses.get(name, 0.0) + value

    def pop_losses(self) -> dict[str, float]:
        """Return this rank's share of the losses of the optimizer step, and reset it."""
        losses, self._losses = self._losses, {}
        return losses

    def merge(self, other: "MetricAccumulator") -> None:
        """Add what another rank has measured, whose optimiser steps have ended."""
        for name, (total, weight) in other._sums.items():
            own = self._sums.setdefault(name, [0.0, 0.0])
            own[0] += total
            own[1] += weight
        for name, value in other._totals.items():
            self.add_sum(name, value)
        for name, value in other._maxima.items():
            self.add_max(name, value)
        for name, value in other._minima.items():
            self.add_min(name, value)
        self._weights = [own + more for own, more in zip(self._weights, other._weights, strict=True)]

    def add_importance(self, stats: ImportanceStats) -> None:
        """The weights of the sampler correction of a micro-batch."""
        self.add("ratio/importance_mean", stats.mean, stats.num_tokens)
        totals = (stats.num_tokens, stats.num_tokens * stats.mean, stats.num_tokens * stats.mean_square)
        self._weights = [total + more for total, more in zip(self._weights, totals, strict=True)]
        self.add_max("ratio/importance_max", stats.max)
        self.add_sum("ratio/num_truncated", stats.num_truncated)

    def means(self) -> dict[str, float]:
        """Every measure by its name."""
        averaged = {name: total / weight for name, (total, weight) in self._sums.items() if weight}
        num, total, squares = self._weights
        if num:  # over all tokens: the share of a micro-batch would depend on the split
            averaged["ratio/importance_ess_share"] = total**2 / (num * squares) if squares else 0.0
        if num and "staleness/logprob_shift" in averaged:
            averaged["staleness/truncated_fraction"] = self._totals["ratio/num_truncated"] / num
        return averaged | self._totals | self._maxima | self._minima


Floats = NDArray[np.float32]
Integers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """The T scored tokens of a micro-batch, for the trace files: trainer log-probs and importance ratios.

    ``rollout_T`` numbers the rollouts of the mini-batch ``number``, ``ordinal_T`` the trained tokens of a
    rollout.
    """

    number: int
    rollout_T: Integers
    ordinal_T: Integers
    trainer_T: Floats
    ratio_T: Floats


def token_record(number: int, batch: PackedBatch, inputs: TokenLossInputs) -> TokenRecord:
    """Return the trainer's log-probs and the scaled ratios of a micro-batch."""
    ratio_T = token_ratio(logprobs=inputs.logprobs_T.detach(), old_logprobs=inputs.old_T)
    return TokenRecord(
        number=number,
        rollout_T=batch.rollout_index_T.numpy().astype(np.int32),
        ordinal_T=batch.ordinal_T.numpy().astype(np.int32),
        trainer_T=inputs.old_logprobs.trainer_T.float().cpu().numpy(),
        ratio_T=(ratio_T * inputs.ratio_scale_T).float().cpu().numpy(),
    )


TokenLossFn = Callable[[TokenLossInputs], TokenLoss]


@dataclass(slots=True)
class UpdateReport:
    """Sums and means of one update by metric name; ``tokens`` has the values of each trained token.
    ``first_step`` is the number of optimizer steps before the update.
    """

    first_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    num_scored_tokens: int = 0
    num_computed_tokens: int = 0
    tokens: list[TokenRecord] = field(default_factory=list)


def update(
    policy: Policy,
    traces: Sequence[Trace],
    *,
    objective: ObjectiveSettings,
    settings: UpdateSettings,
    reference: Scorer | None,
    token_loss: TokenLossFn | None = None,
    teacher: Scorer | None = None,
    always_check_mismatch: bool = False,
    version: int | None = None,
    probes: Sequence[Trace] = (),
    on_batch: Callable[[int], None] | None = None,
    seed: int = 0,
    training_step: int = 0,
) -> UpdateReport:
    """Train on groups with advantages.

    Args:
        policy: The model to train, with its optimizer.
        traces: The groups. Mini-batches are cut between them, in order, or consist of samples
            (:func:`make_mini_batches`).
        objective: The algorithm's settings of the loss.
        settings: Mini-batches, epochs, and tokens of a micro-batch.
        reference: The frozen model of the KL term, and of self-distillation with ``teacher = frozen``.
        token_loss: The algorithm's loss (None: that of ``objective``).
        teacher: The averaged model of self-distillation with ``teacher = ema``.
        always_check_mismatch: Compare trainer and engine log-probs before every optimizer step, for an engine
            with its own weights, which could be old; else only before the first step of the policy.
        version: The version of the policy's weights, if tokens may come from older ones: the log-probs of
            these do not show whether the engine is right.
        probes: Traces that are compared and not trained on.
        on_batch: Called after every micro-batch with the number of scored tokens so far.
        seed: The seed of the run, for the order of samples.
        training_step: The number of training steps before this one, which ``distill.scale_steps`` counts.

    Raises:
        EngineFault: Trainer and engine log-probs differ by more than ``settings.max_logprob_gap``.
        ValueError: The objective has a KL term and there is no reference.
    """
    if objective.kl_weight > 0 and reference is None:
        raise ValueError(f"kl_weight = {objective.kl_weight} needs a reference model")
    distill = objective.distill
    if distill is not None and distill.teacher != "start":
        teacher = reference if distill.teacher == "frozen" else teacher
        if teacher is None:
            raise ValueError(f"distill.teacher = {distill.teacher} needs a frozen model")
    else:
        teacher = policy
    running = _Update(
        policy=policy,
        objective=objective,
        token_loss=token_loss or objective.token_loss,
        whole_rollouts=objective.needs_whole_rollouts
        or (token_loss is not None and is_plugin_loss(token_loss)),
        settings=settings,
        # A reference that only the reward needs has been used before.
        reference=reference if objective.kl_weight > 0 else None,
        teacher=teacher,
        on_batch=on_batch or (lambda num_tokens: None),
        version=version,
        report=UpdateReport(first_step=policy.num_steps),
        training_step=training_step,
    )
    if probes:
        running.check_engine(rollout_paths(probes))
    mini_batches = [
        running.prepare(paths, number)
        for number, paths in enumerate(
            make_mini_batches(traces, settings, seed=seed, first_step=policy.num_steps)
        )
    ]
    # With a single step, pi_old is the policy being scored: the training pass gives the old log-probs too.
    is_centered = distill is not None and distill.gate == "gap_centered"  # by the mean of all micro-batches
    if len(mini_batches) > 1 or settings.num_epochs > 1 or is_centered:
        # All of them before the first step: pi_old is one policy for every mini-batch and epoch.
        for mini_batch in mini_batches:
            mini_batch.old_scores = running.score(mini_batch.batches)
    for mini_batch in mini_batches:
        running.score_other(mini_batch)
    for _ in range(settings.num_epochs):
        for mini_batch in mini_batches:
            # The engine is checked until a step was made: a mini-batch without signal makes none.
            running.train(mini_batch, check_mismatch=always_check_mismatch or policy.num_steps == 0)
    if not mini_batches:
        running.common.add("grad/norm", 0.0)
    if settings.mini_batch_samples is not None:
        running.common.add_sum("grad/num_steps", float(policy.num_steps - running.report.first_step))
    return running.whole_report()


def make_mini_batches(
    traces: Sequence[Trace], settings: UpdateSettings, *, seed: int, first_step: int
) -> list[list[RolloutPath]]:
    """The rollouts of each mini-batch, whole or in part. ``first_step`` is the number of optimizer steps
    before the update, which keys the order of samples: it is the same on all ranks and after a resume.
    """
    if settings.mini_batch_samples is None:
        return split_mini_batches(traces, settings.num_mini_batches)
    random = stream(seed, "mini-batches", first_step)
    return shuffle_samples(rollout_paths(traces), settings.mini_batch_samples, random)


def shuffle_samples(
    paths: Sequence[RolloutPath], size: int, random: np.random.Generator
) -> list[list[RolloutPath]]:
    """Mini-batches of ``size`` samples (:func:`split_samples`) in random order; the last one may be smaller.

    The samples of a rollout in a mini-batch are one path, numbered over the mini-batch: aggregations count
    them as one rollout. Within a mini-batch the order is that of ``paths``, so that packing finds shared
    prefixes.
    """
    samples = [(index, numbers) for index, path in enumerate(paths) for numbers in split_samples(path.nodes)]
    order = random.permutation(len(samples)).tolist()
    mini_batches: list[list[RolloutPath]] = []
    for start in range(0, len(samples), size):
        contexts: dict[int, list[int]] = {}
        for index, numbers in sorted(samples[at] for at in order[start : start + size]):
            contexts.setdefault(index, []).extend(numbers)
        mini_batches.append([])
        for position, (index, numbers) in enumerate(contexts.items()):
            parts: dict[str, Any] = {}
            for name in ("nodes", "nodes_with_tips", "nodes_with_help"):
                if (nodes := getattr(paths[index], name)) is not None:
                    every = split_contexts(nodes)
                    parts[name] = [node for number in numbers for node in every[number]]
            mini_batches[-1].append(replace(paths[index], rollout_index=position, **parts))
    return mini_batches


def split_samples(nodes: Sequence[Node]) -> list[list[int]]:
    """Return the numbers of the contexts of each sample of a rollout: one, and a later one without a turn, in
    which a limit ended the rollout.
    """
    samples: list[list[int]] = []
    for number, context in enumerate(split_contexts(nodes)):
        if samples and not any(node.receives_advantages for node in context):
            samples[-1].append(number)
        else:
            samples.append([number])
    return samples


def split_mini_batches(traces: Sequence[Trace], num: int) -> list[list[RolloutPath]]:
    """The rollouts of each mini-batch. Cut between groups, never inside one: siblings share the beginning
    that packing computes once.
    """
    bounds = [len(traces) * i // num for i in range(num + 1)]
    return [rollout_paths(traces[start:end]) for start, end in pairwise(bounds) if end > start]


def rollout_paths(traces: Sequence[Trace]) -> list[RolloutPath]:
    """The rollouts of a mini-batch that have a return, numbered over the mini-batch."""
    paths: list[RolloutPath] = []
    for group, trace in enumerate(traces):
        for leaf, whole_path in trace.scored_rollouts():
            if leaf.rollout in trace.pruned:  # not numbered: it counts in no denominator
                continue
            path = without_open_prompt(whole_path)
            # A rollout that saw no tips has one rendering: it is on-policy.
            drops_tips = trace.without_memory and any(node.origin is Origin.MEMORY for node in path)
            paths.append(
                RolloutPath(
                    nodes=without_memory(path) if drops_tips else path,
                    rollout_index=len(paths),
                    rollout=leaf.rollout,
                    group=group,
                    nodes_with_tips=path if drops_tips else None,
                    nodes_with_help=(
                        with_help(path, trace.help[leaf.rollout])
                        if leaf.rollout in trace.help and not drops_tips
                        else None
                    ),
                    succeeded=leaf.success,
                    is_replayed=trace.is_replayed,
                )
            )
    return paths


@dataclass(slots=True, kw_only=True)
class _MiniBatch:
    """The rollouts of one optimizer step, packed once for all epochs.

    ``num_rollouts`` is without those that only teach (``pairs`` of self-distillation), whose indices come
    last. ``trained`` are the rollouts with a gradient, ``batches`` this rank's micro-batches of them, with
    the weights [T] of their tokens in the loss. ``extra_weights`` are those of further terms by metric, if
    the objective has them: [T] in the likelihood of successful rollouts and in the mean entropy, [M] in the
    likelihood of observations.
    ``old_scores`` None: the training pass gives the old log-probs. ``with_tips``: log-probs in the context
    with tips, of every rollout that is trained in another rendering, computed before any step (EMPO², arXiv
    2602.23008, App. C). The numerator of the ratio is the policy without tips; the denominator is the policy
    with tips (Table 3) or the policy without tips when the update began (Algorithm 1).
    """

    number: int
    num_rollouts: int
    trained: Sequence[RolloutPath]
    batches: Sequence[PackedBatch]
    weights: Sequence[Tensor]
    extra_weights: Mapping[str, Sequence[Tensor]]
    old_scores: Sequence[TokenScores] | None = None
    with_tips: OtherScores | None = None
    distill: DistillTerm | None = None


@dataclass(slots=True, kw_only=True)
class _Update:
    """One update in progress: what all of its mini-batches share, and what they add to."""

    policy: Policy
    objective: ObjectiveSettings
    token_loss: TokenLossFn
    whole_rollouts: bool
    settings: UpdateSettings
    reference: Scorer | None
    teacher: Scorer
    on_batch: Callable[[int], None]
    version: int | None
    training_step: int
    head: nn.Module | None = None  # the teacher's, see DistillTerm
    report: UpdateReport = field(default_factory=UpdateReport)
    accumulator: MetricAccumulator = field(default_factory=MetricAccumulator)
    common: MetricAccumulator = field(init=False)

    def __post_init__(self) -> None:
        # Values that all ranks know are counted by one of them.
        self.common = self.accumulator if self.policy.ranks.rank == 0 else MetricAccumulator()

    def prepare(self, paths: Sequence[RolloutPath], number: int) -> _MiniBatch:
        """Pack the rollouts of a mini-batch that have a gradient; the weights count all rollouts."""
        distill = self.objective.distill
        has_pairs = distill is not None and distill.pairs != "none"
        every = [*paths, *pair_paths(paths)] if has_pairs else paths
        has_term_R = None if distill is None else rollouts_with_term(every, distill)
        trained = _trained_paths(every, self.objective, has_term_R)
        batches = self._pack(trained)
        term = None
        if distill is not None and has_term_R is not None and distill.form != "ratio" and trained:
            masks = [
                term_mask(batch, has_term_R, skip_first=distill.skip_first, has_pairs=has_pairs)
                for batch in batches
            ]
            term = DistillTerm(
                settings=distill,
                has_term_R=has_term_R,
                succeeded_R=torch.tensor([path.succeeded for path in every]),
                masks=masks,
                weights=_distill_weights(every, self.objective, distill, batches, masks, has_term_R),
                scale=distill.scale * max(0.0, 1.0 - self.training_step / distill.scale_steps),
            )
        objective, ranks, extra = self.objective, self.policy.ranks, dict[str, Sequence[Tensor]]()
        if trained and objective.positive_nll > 0:
            extra["loss/positive_nll"] = success_weights(every, batches, ranks)
        if trained and objective.entropy_bonus > 0:
            masks = [~batch.is_off_policy_T for batch in batches]
            entropy_weights = mean_weights(masks, ranks)  # on every rank
            if any(bool(mask.any()) for mask in masks):  # not only replayed rollouts
                extra["loss/entropy"] = entropy_weights
        if trained and objective.observation_nll > 0:
            masks = [torch.ones_like(batch.observed_M) for batch in batches]
            extra["loss/observation_nll"] = mean_weights(masks, ranks)
        return _MiniBatch(
            number=number,
            num_rollouts=len(paths),
            trained=trained,
            batches=batches,
            weights=_loss_weights(paths, self.objective, batches, num=len(every)) if trained else (),
            extra_weights=extra,
            distill=term,
        )

    def score_other(self, mini_batch: _MiniBatch) -> None:
        """Score the other renderings: those that the policy acted in, and those that the teacher reads."""
        policy, term, max_tokens = self.policy, mini_batch.distill, self.settings.max_tokens
        own = policy.ranks.share(mini_batch.trained)
        with_tips = [(path, path.nodes_with_tips) for path in own]
        if term is None:
            mini_batch.with_tips = score_other(policy, policy.ranks, with_tips, max_tokens=max_tokens)
            return
        began = time.perf_counter()
        settings = term.settings
        support = settings.support if settings.form == "divergence" else None
        is_one_pass = settings.plays == "helped" and self.teacher is policy
        mini_batch.with_tips = score_other(
            policy, policy.ranks, with_tips, max_tokens=max_tokens, support=support if is_one_pass else None
        )
        if is_one_pass:
            term.teacher = mini_batch.with_tips
        else:
            nodes = [other_rendering(path, settings) for path in own]
            renderings = [
                (path, until_last_turn(other) if other and term.has_term_R[path.rollout_index] else None)
                for path, other in zip(own, nodes, strict=True)
            ]
            term.teacher = score_other(
                self.teacher, policy.ranks, renderings, max_tokens=max_tokens, support=support
            )
        if support == "all":
            # One copy for all mini-batches, made before the first step.
            term.head = self.head = self.head or self.teacher.frozen_head()
        self.common.add_sum("time/help", time.perf_counter() - began)

    def train(self, mini_batch: _MiniBatch, *, check_mismatch: bool) -> None:
        """One optimizer step over all micro-batches, with the denominators of the whole mini-batch."""
        policy = self.policy
        if not mini_batch.trained:
            self.common.add("grad/norm", 0.0)
            return
        if (term := mini_batch.distill) is not None and term.settings.gate == "gap_centered":
            # The gates are those of the current policy, and so is their mean.
            is_start = policy.num_steps == self.report.first_step
            old_scores = mini_batch.old_scores if is_start else self.score(mini_batch.batches)
            assert old_scores is not None
            term.measure_gate(mini_batch.batches, old_scores, policy.ranks)
        mismatches: list[Tensor] = []
        for index, batch in enumerate(padded_micro_batches(mini_batch.batches, policy.ranks)):
            if batch is None:
                loss, is_finite = policy.dummy_forward(), True
                if self.reference is not None:
                    with torch.no_grad():
                        self.reference.dummy_forward()
            else:
                loss, is_finite = self.compute_loss(mini_batch, index, mismatches)
            # All ranks decide together before any of them leaves: the backward pass needs every rank.
            if not all(policy.ranks.gather(is_finite)):
                if check_mismatch:  # a wrong engine may be the reason
                    check_logprob_mismatch(policy, mismatches, self.settings.max_logprob_gap)
                policy.drop_gradients()
                self.common.add_sum("grad/num_skipped", 1.0)
                self.accumulator.pop_losses()  # those of a skipped step count in no mean
                return
            loss.backward()  # frees the graph; over micro-batches the gradients add up
            if batch is not None:
                self.report.num_scored_tokens += len(batch.targets_U)
                self.report.num_computed_tokens += policy.num_computed_tokens(batch)
                self.on_batch(self.report.num_scored_tokens)
        # After the backward passes, so that nothing is scored twice; still before any weight moves.
        if check_mismatch:
            check_logprob_mismatch(policy, mismatches, self.settings.max_logprob_gap)
        norm = policy.step()
        losses: dict[str, float] = {}
        for share in policy.ranks.gather(self.accumulator.pop_losses()):
            for name, value in share.items():
                losses[name] = losses.get(name, 0.0) + value
        for name, value in losses.items():
            self.common.add(name, value)
        # The norm of a skipped step has no value, so the means are those of the other steps.
        is_skipped = not math.isfinite(norm)
        self.common.add_sum("grad/num_skipped", float(is_skipped))
        if not is_skipped:
            self.common.add("grad/clipped_fraction", float(norm > policy.settings.max_grad_norm))
            self.common.add("grad/norm", norm)

    def compute_loss(
        self, mini_batch: _MiniBatch, index: int, mismatches: list[Tensor]
    ) -> tuple[Tensor, bool]:
        """The loss of the micro-batch ``index``, and whether its log-probs are finite (if not, the loss is
        meaningless). Appends the trainer's mismatch with the engine to ``mismatches``.
        """
        batch, with_tips, term = mini_batch.batches[index], mini_batch.with_tips, mini_batch.distill
        options: dict[str, Any] = (
            {"trains_entropy": True} if "loss/entropy" in mini_batch.extra_weights else {}
        )
        tokens = None if term is None else term.tokens(index, batch)
        if term is not None and tokens is not None and (support := term.support(tokens, batch)) is not None:
            options["support"] = support
        scores = self.policy.score(batch, **options)
        batch = batch.like(scores.logprobs_T)
        old = scores if mini_batch.old_scores is None else mini_batch.old_scores[index]
        # Detached also if it comes from this very pass: x - x would have no gradient.
        old_T = old.logprobs_T.detach()
        with_tips_T = None if with_tips is None else with_tips.logprobs(batch).to(old_T)
        is_finite = term is None or tokens is None or term.is_finite(tokens)
        is_finite = is_finite and (with_tips is None or with_tips.is_finite(batch))
        if term is not None and tokens is not None and not term.settings.has_term and is_finite:
            values_T = term.advantages(tokens, batch, old_T, self.accumulator)
            batch = replace(batch, advantages_T=values_T)
        old_logprobs = self.objective.old_logprobs(old_T, with_tips_T)
        inputs = replace(
            loss_inputs(scores.logprobs_T, batch, old_logprobs, self.accumulator),
            is_pair_T=(batch.rollout_index_T >= mini_batch.num_rollouts).to(old_T.device),
        )
        is_older_T = None if self.version is None else batch.version_T != self.version
        # The engine has the weights of these tokens: those of this step, of the current version.
        excluded_T = inputs.is_off_policy_T if is_older_T is None else inputs.is_off_policy_T | is_older_T
        mismatches.append((inputs.old_logprobs.trainer_T - inputs.engine_logprobs_T)[~excluded_T].abs())
        reference_T = None
        if self.reference is not None:
            with torch.no_grad():
                reference_T = self.reference.score(batch).logprobs_T
        # After the mismatch is kept: if the engine is checked, the check has to see the NaN.
        is_finite = is_finite and bool(
            torch.isfinite(scores.logprobs_T.detach() - batch.engine_logprobs_T).all()
        )
        if not is_finite:
            return scores.logprobs_T, False
        self.report.tokens.append(token_record(mini_batch.number, batch, inputs))
        term_losses = None
        if term is not None and tokens is not None and term.settings.has_term:
            term_losses = term.losses(index, tokens, batch, scores, old_T, self.accumulator)
        loss = batch_loss(
            inputs,
            reference_T=reference_T,
            weights_T=mini_batch.weights[index].to(inputs.old_T),
            objective=self.objective,
            token_loss=self.token_loss,
            accumulator=self.accumulator,
            policy_factors_T=None if term is None else term.policy_factors(batch),
            term=term_losses,
        )
        observed_M = scores.observed_M
        for name, factor, losses in (
            ("loss/positive_nll", self.objective.positive_nll, -scores.logprobs_T),
            (
                "loss/observation_nll",
                self.objective.observation_nll,
                None if observed_M is None else -observed_M,
            ),
            ("loss/entropy", -self.objective.entropy_bonus, scores.entropies_T),
        ):
            if name in mini_batch.extra_weights and losses is not None:
                mean = weighted_loss(losses=losses, weights=mini_batch.extra_weights[name][index].to(losses))
                self.accumulator.add_loss(name, float(mean.detach()))
                loss = loss + factor * mean
        own_T = ~inputs.is_off_policy_T
        if bool(own_T.any()):
            self.accumulator.add(
                "entropy/trainer_mean", float(old.entropies_T.detach()[own_T].mean()), int(own_T.sum())
            )
        self._measure_mismatch(mismatches[-1])
        if is_older_T is not None and bool((older_T := is_older_T & own_T).any()):
            # how far the policy has moved since it wrote the older tokens
            shift_T = (inputs.old_logprobs.trainer_T - inputs.engine_logprobs_T).abs()
            self.accumulator.add(
                "staleness/logprob_shift", float(shift_T[older_T].mean()), int(older_T.sum())
            )
        return loss, True

    @torch.no_grad()
    def score(self, batches: Sequence[PackedBatch]) -> list[TokenScores]:
        """Log-probs and entropies of every micro-batch of this rank, without gradient."""
        scores = []
        for batch in padded_micro_batches(batches, self.policy.ranks):
            if batch is None:
                self.policy.dummy_forward()
            else:
                scores.append(self.policy.score(batch))
        return scores

    @torch.no_grad()
    def check_engine(self, paths: Sequence[RolloutPath]) -> None:
        """Raise EngineFault if an engine does not have the policy's weights."""
        mismatches: list[Tensor] = []
        for batch in padded_micro_batches(self._pack(paths), self.policy.ranks):
            if batch is None:
                self.policy.dummy_forward()
                continue
            scores = self.policy.score(batch)
            mismatches.append((scores.logprobs_T - batch.like(scores.logprobs_T).engine_logprobs_T).abs())
            self._measure_mismatch(mismatches[-1])
        check_logprob_mismatch(self.policy, mismatches, self.settings.max_logprob_gap)

    def whole_report(self) -> UpdateReport:
        """The measurements of all ranks."""
        first, *others = self.policy.ranks.gather((self.report, self.accumulator))
        report, accumulator = first
        for other, measured in others:
            report.num_scored_tokens += other.num_scored_tokens
            report.num_computed_tokens += other.num_computed_tokens
            report.tokens += other.tokens
            accumulator.merge(measured)
        report.metrics |= accumulator.means()
        return report

    def _pack(self, paths: Sequence[RolloutPath]) -> list[PackedBatch]:
        ranks = self.policy.ranks
        return pack_for_rank(
            ranks.share(paths), ranks, max_tokens=self.settings.max_tokens, whole_rollouts=self.whole_rollouts
        )

    def _measure_mismatch(self, mismatch_O: Tensor) -> None:
        """Trainer against engine, over the tokens that both have from the same weights."""
        if len(mismatch_O):
            self.accumulator.add("gap/logprob_mean", float(mismatch_O.mean()), len(mismatch_O))
            self.accumulator.add_max("gap/logprob_max", float(mismatch_O.max()))


def check_logprob_mismatch(policy: Policy, mismatches: Sequence[Tensor], limit: float) -> None:
    """Raise EngineFault and drop the gradients if the mean mismatch of all ranks is above ``limit``.

    The mean is over all tokens of the mini-batch: that of a micro-batch would depend on the split, and that
    of a short one is noisy.
    """
    # float64: near the limit the verdict must not depend on how a float32 sum was split.
    values = torch.cat(
        [mismatch for each in policy.ranks.gather(list(mismatches)) for mismatch in each]
    ).double()
    mismatch = float(values.mean()) if len(values) else 0.0
    if not mismatch <= limit:  # NaN too
        policy.drop_gradients()
        raise EngineFault(
            f"trainer and engine disagree by {mismatch:.4f} nats a token before an update (limit {limit})"
        )


def loss_inputs(
    logprobs_T: Tensor, batch: PackedBatch, old_logprobs: OldLogprobs, accumulator: MetricAccumulator
) -> TokenLossInputs:
    """Inputs of the token loss of a micro-batch."""
    return TokenLossInputs(
        logprobs_T=logprobs_T,
        old_logprobs=old_logprobs,
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
    policy_factors_T: Tensor | None = None,
    term: TermLosses | None = None,
) -> Tensor:
    """The weighted loss of one micro-batch: the algorithm's token loss with sampler correction, rejection and
    KL term. ``reference_T`` are the reference policy's log-probs (None: no KL term), ``policy_factors_T``
    factors of the algorithm's token loss alone, and ``term`` is that of self-distillation.
    """
    surrogate = token_loss(inputs)
    losses = surrogate.losses
    if policy_factors_T is not None:
        losses = losses * policy_factors_T.to(losses)
    # Tokens that the engine sampled in this step: only there can trainer and engine be compared.
    own_T = ~inputs.is_off_policy_T
    trainer_T, engine_T = inputs.old_logprobs.trainer_T, inputs.engine_logprobs_T
    if (correction := objective.sampler_correction) is not None and bool(own_T.any()):
        applied = sampler_weights_per_token(
            old_logprobs=trainer_T,
            sampler_logprobs=engine_T,
            mask=own_T,
            rollout_index=inputs.rollout_T.to(trainer_T.device),
            level=correction.level,
            lower=correction.lower,
            upper=correction.upper,
            outside=correction.outside,
        )
        accumulator.add_importance(
            correction_stats(applied, old_logprobs=trainer_T, sampler_logprobs=engine_T, mask=own_T)
        )
        sampler_T = applied.weights.masked_fill(inputs.is_off_policy_T, 1.0)
        losses = losses * sampler_T
        term = None if term is None else term.times(sampler_T)
    if (rejection := objective.sampler_rejection) is not None:
        accepted_T = rejection_mask_per_token(
            old_logprobs=trainer_T,
            sampler_logprobs=engine_T,
            rollout_index=inputs.rollout_T.to(trainer_T.device),
            mask=own_T,
            statistic=rejection.statistic,
            scope=rejection.scope,
            upper=rejection.upper,
            lower=rejection.lower,
        )
        accumulator.add_sum("ratio/num_rejected", float((own_T & ~accepted_T).sum()))
        # Weight 0 and no new denominator: one counted here would depend on the split into micro-batches.
        retained_T = accepted_T | inputs.is_off_policy_T
        weights_T = weights_T * retained_T
        term = None if term is None else term.times(retained_T)
    loss = weighted_loss(losses=losses, weights=weights_T)
    accumulator.add_loss("loss/policy", float(loss.detach()))
    if reference_T is not None:
        kl = kl_per_token(
            estimator=objective.kl_estimator,
            logprobs=inputs.logprobs_T,
            reference_logprobs=reference_T,
            old_logprobs=inputs.old_T if objective.kl_estimator == "k3_ratio" else None,
        )
        # The estimators need samples of the policy, and these tokens are not.
        kl_losses = kl.masked_fill(inputs.is_off_policy_T, 0.0)
        loss = loss + objective.kl_weight * weighted_loss(losses=kl_losses, weights=weights_T)
        accumulator.add(
            "loss/kl", float(kl.detach()[own_T].sum()) / max(1, int(own_T.sum())), float(own_T.sum())
        )
    if term is not None:
        distilled = weighted_loss(losses=term.losses_M, weights=term.weights_M)
        accumulator.add_loss("distill/loss", float(distilled.detach()))
        loss = loss + term.settings.weight * distilled
    if bool(own_T.any()):
        _measure_ratios(inputs, surrogate, own_T, accumulator)
    return loss


def _measure_ratios(
    inputs: TokenLossInputs, surrogate: TokenLoss, own_T: Tensor, accumulator: MetricAccumulator
) -> None:
    """Clips and ratios of the policy's own tokens."""
    ratio_O = token_ratio(logprobs=inputs.logprobs_T.detach(), old_logprobs=inputs.old_T)[own_T]
    scale_O = inputs.ratio_scale_T[own_T]
    clipped = {"high": surrogate.clipped_high, "low": surrogate.clipped_low, "dual": surrogate.dual_clipped}
    for name, mask in clipped.items():
        accumulator.add(f"ratio/clip_fraction_{name}", float(mask[own_T].float().mean()), len(ratio_O))
    ratio = ratio_O * scale_O
    accumulator.add("ratio/mean", float(ratio.mean()), len(ratio))
    accumulator.add("ratio/shaping_mean", float(scale_O.mean()), len(ratio))
    accumulator.add_min("ratio/min", float(ratio.min()))
    accumulator.add_max("ratio/max", float(ratio.max()))


def _trained_paths(
    paths: Sequence[RolloutPath], objective: ObjectiveSettings, has_term_R: Tensor | None = None
) -> list[RolloutPath]:
    """Rollouts whose gradient is not zero by construction; the others stay in every denominator.
    ``has_term_R``: those that are distilled.
    """
    trained = []
    for path in paths:
        is_distilled, has_policy_term = False, True
        if (distill := objective.distill) is not None and has_term_R is not None:
            has_term = bool(has_term_R[path.rollout_index])
            is_distilled = has_term and distill.needs_gradient_without_advantage
            has_policy_term = (distill.policy_weight if has_term else distill.policy_outside) > 0.0
        advantages = [values for node in path.nodes for _, values, _ in advantages_by_rollout(node, [path])]
        # These terms train every policy token, also of a rollout without advantage.
        trains_all = max(objective.kl_weight, objective.entropy_bonus) > 0 or (
            objective.positive_nll > 0 and path.succeeded and not path.is_replayed
        )
        # A pair repeats a rollout in another context: its observations are scored in the sampled one.
        observes = objective.observation_nll > 0 and not path.is_pair
        if observes := observes and any(node.body_positions for node in path.nodes):
            path = replace(path, scores_observations=True)
        trains_all = trains_all or is_distilled or observes
        has_signal = has_policy_term and any(any(values) for values in advantages)
        if any(map(len, advantages)) if trains_all else has_signal:
            trained.append(path)
    return trained


def _loss_weights(
    paths: Sequence[RolloutPath], objective: ObjectiveSettings, batches: Sequence[PackedBatch], *, num: int
) -> list[Tensor]:
    """Token weights of each micro-batch [T], with the denominators of the whole mini-batch, which has ``num``
    rollouts with those that only teach.

    They are counted over all paths, not over the packed ones: a rollout without gradient is not computed, but
    it is part of the mean.
    """
    sizes = {
        path.rollout_index: sum(
            len(node.token_ids) for node in path.nodes if advantages_by_rollout(node, [path])
        )
        for path in paths
    }
    return _spread_weights(sizes, objective, batches, num=num)


def _spread_weights(
    sizes: Mapping[int, int], objective: ObjectiveSettings, batches: Sequence[PackedBatch], *, num: int
) -> list[Tensor]:
    """Token weights [T] of each micro-batch in the mean over the rollouts with these numbers of tokens, of
    ``num`` in the mini-batch; 0 for the tokens of other rollouts.
    """
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(list(sizes.values()), dtype=torch.long))
    weights = token_weights(
        kind=objective.aggregation,
        rollout_index=owners,
        num_rollouts=len(sizes),
        max_length=objective.max_length,
        dtype=torch.float64,
    )
    values = torch.zeros(len(sizes), dtype=torch.float64)
    values[owners] = weights  # all tokens of a rollout have the same weight
    per_rollout = torch.zeros(num, dtype=torch.float64)
    per_rollout[torch.tensor(list(sizes), dtype=torch.long)] = values
    return [per_rollout[batch.rollout_index_T] for batch in batches]


def _distill_weights(
    paths: Sequence[RolloutPath],
    objective: ObjectiveSettings,
    distill: DistillSettings,
    batches: Sequence[PackedBatch],
    masks: Sequence[Tensor],
    has_term_R: Tensor,
) -> list[Tensor]:
    """Token weights [T] of the term of self-distillation in each micro-batch, with the denominators of the
    whole mini-batch: over the tokens with the term, or over every trained token.
    """
    if distill.over == "all":
        weights = _loss_weights(paths, objective, batches, num=len(paths))
    else:
        sizes = {
            path.rollout_index: sum(
                max(0, len(node.token_ids) - distill.skip_first)
                for node in path.nodes
                if node.trainable and advantages_by_rollout(node, [path])
            )
            for path in paths
            if has_term_R[path.rollout_index]
        }
        weights = _spread_weights(sizes, objective, batches, num=len(paths))
    factors = [batch.advantages_T if distill.pairs != "none" else 1.0 for batch in batches]
    return [weight * mask * factor for weight, mask, factor in zip(weights, masks, factors, strict=True)]


def success_weights(
    paths: Sequence[RolloutPath], batches: Sequence[PackedBatch], ranks: Ranks | None = None
) -> list[Tensor]:
    """Weights of the negative log-likelihood of successful rollouts (GPPO, arXiv 2508.07629, Eq. 13).

    For every micro-batch [T]: one over the trained tokens of all successful rollouts of the mini-batch, and 0
    for other tokens. Tokens that the policy did not sample in this step have weight 0, because demonstrations
    and replayed rollouts have their own term. ``rollout_index`` is the index into ``paths``; the ``batches``
    of all ``ranks`` together contain every successful path (None: one rank).
    """
    succeeded = torch.tensor([path.succeeded for path in paths])
    masks = [succeeded[batch.rollout_index_T] & ~batch.is_off_policy_T for batch in batches]
    return mean_weights(masks, ranks or SingleRank())


def mean_weights(masks: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Weights of the mean over the tokens of ``masks``, one [T] per micro-batch of this rank."""
    # The count over all micro-batches of all ranks: the mean must not depend on how they were split.
    num = sum(ranks.gather(sum(int(mask.sum()) for mask in masks)))
    return [mask.double() / max(1, num) for mask in masks]


@torch.no_grad()
def measure_kl(policy: Scorer, reference: Scorer, traces: Sequence[Trace], *, max_tokens: int) -> None:
    """Write ``kl`` on the policy nodes of every rollout with a return, for a reward that counts it: k1 =
    log pi_old - log reference of every policy token. ``policy`` is the one that the update starts from.

    Raises ValueError for a node that several rollouts share.
    """
    scored = [
        (group, path)
        for group, trace in enumerate(traces)
        for _, path in trace.scored_rollouts()
        if any(node.trainable and node.token_ids for node in path)
    ]
    # Packing scores tokens with advantages, which are not there yet; shared prompts stay shared.
    copies: dict[int, Node] = {}
    for node in (node for _, path in scored for node in path):
        copies.setdefault(
            id(node), replace(node, credit=(0.0,) * len(node.token_ids)) if node.trainable else node
        )
    rollouts = [
        RolloutPath(nodes=[copies[id(node)] for node in path], rollout_index=i, group=group)
        for i, (group, path) in enumerate(scored)
    ]
    ranks = policy.ranks
    kl_values: dict[int, list[tuple[int, float]]] = {}
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
    for number, (_, path) in enumerate(scored):
        values_in_order = iter(value for _, value in sorted(kl_values[number]))
        for node in path:
            if node.trainable:
                node.kl = tuple(next(values_in_order) for _ in node.token_ids)
