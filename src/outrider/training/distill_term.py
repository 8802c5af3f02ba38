"""Self-distillation in an update: scores of another rendering of the rollouts, and the term of the loss.

The rendering that is trained is the student's context, the other one the teacher's; both contain the same
policy tokens. Formulas: :mod:`outrider.algorithms.distill_losses`.

Shape letters: R rollouts of a mini-batch, T entries of a micro-batch, M those of them with the term, S scored
tokens of another rendering.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.distill_help import PAIR_WEIGHT
from outrider.algorithms.distill_losses import (
    bounded,
    distill_losses,
    divergence_per_token,
    factors,
    gap_to_go,
    gates,
    pushes,
    scaled_advantages,
)
from outrider.algorithms.losses import Measures
from outrider.algorithms.sampler_correction import log_ratio
from outrider.trace import Node, split_contexts, without_memory
from outrider.training.packing import PackedBatch, RolloutPath
from outrider.training.policy import (
    FullTeacher,
    Ranks,
    Scorer,
    Support,
    TokenScores,
    pack_for_rank,
    padded_micro_batches,
)

_MAX_ORDINAL = 2**32


def _keys(batch: PackedBatch) -> Tensor:
    """A number [T] of every entry, which is the same in both renderings."""
    return batch.rollout_index_T * _MAX_ORDINAL + batch.ordinal_T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherScores:
    """Scores of tokens in another rendering than the trained one; ``keys_S`` ascend."""

    keys_S: Tensor
    scores: TokenScores

    def find(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the rows [T] of the entries of a micro-batch, and a mask [T] of those that have one."""
        keys_T = _keys(batch)
        rows_T = torch.searchsorted(self.keys_S, keys_T).clamp(max=len(self.keys_S) - 1)
        return rows_T, self.keys_S[rows_T] == keys_T

    def is_finite(self, batch: PackedBatch) -> bool:
        """Whether all log-probs of entries with another rendering are finite numbers."""
        rows_T, is_scored_T = self.find(batch)
        device = self.scores.logprobs_T.device
        return bool(self.scores.logprobs_T[rows_T[is_scored_T].to(device)].isfinite().all())

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Return the log-probs of the entries [T], NaN for those of rollouts without another rendering."""
        rows_T, is_scored_T = self.find(batch)
        device = self.scores.logprobs_T.device
        # NaN, because a 0 would pass for a log-prob: dividing by NaN cannot go unnoticed.
        return self.scores.logprobs_T[rows_T.to(device)].masked_fill(~is_scored_T.to(device), torch.nan)


@torch.no_grad()
def score_other(
    scorer: Scorer,
    ranks: Ranks,
    renderings: Sequence[tuple[RolloutPath, Sequence[Node] | None]],
    *,
    max_tokens: int,
    support: Support | None = None,
) -> OtherScores | None:
    """Score this rank's rollouts that have another rendering in it; None if it has none.

    The rendering that is trained decides whose rollout it is, because the same rank needs both.
    """
    paths = [
        replace(path, nodes=nodes, nodes_with_tips=None, nodes_with_help=None, scores_observations=False)
        for path, nodes in renderings
        if nodes is not None
    ]
    keys: list[Tensor] = []
    scores: list[TokenScores] = []
    for batch in padded_micro_batches(pack_for_rank(paths, ranks, max_tokens=max_tokens), ranks):
        if batch is None:
            scorer.dummy_forward()
            continue
        options: dict[str, Any] = {} if support is None else {"support": support}
        keys.append(_keys(batch))
        scores.append(scorer.score(batch, **options))
    if not keys:
        return None
    order = torch.cat(keys).argsort()
    columns: dict[str, Any] = {}
    for each in fields(TokenScores):
        values = [getattr(part, each.name) for part in scores]
        columns[each.name] = None if values[0] is None else torch.cat(values)
    device = scores[0].logprobs_T.device
    return OtherScores(keys_S=torch.cat(keys)[order], scores=TokenScores(**columns).select(order.to(device)))


def until_last_turn(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes without those behind the last turn of each context, which predict nothing."""
    scored: list[Node] = []
    for context in split_contexts(nodes):
        last = max((number for number, node in enumerate(context) if node.receives_advantages), default=0)
        scored += context[: last + 1]
    return scored


def other_rendering(path: RolloutPath, settings: DistillSettings) -> Sequence[Node] | None:
    """Return the teacher's rendering of a rollout; None if it has no help."""
    if path.is_replayed:
        return None
    if settings.pairs != "none":
        return path.nodes_with_help if path.is_pair else None
    if settings.plays == "both":  # a rollout was sampled in one of the contexts
        return path.nodes_with_tips or path.nodes_with_help
    return path.nodes_with_tips if settings.plays == "helped" else path.nodes_with_help


def rollouts_with_term(paths: Sequence[RolloutPath], settings: DistillSettings) -> Tensor:
    """Return a mask [R] of the rollouts that are distilled: those with help, and of the outcome ``where``."""
    outcomes = {"all": (True, False), "succeeded": (True,), "failed": (False,)}[settings.where]
    return torch.tensor(
        [
            settings.form != "ratio"
            and other_rendering(path, settings) is not None
            and path.succeeded in outcomes
            for path in paths
        ],
        dtype=torch.bool,
    )


def pair_paths(paths: Sequence[RolloutPath]) -> list[RolloutPath]:
    """Return further rollouts for the turns that teach the other context (``pairs``): rendered in that
    context, with the sampled one as the teacher's. Other turns are context only.
    """
    pairs: list[RolloutPath] = []
    for path in paths:
        opposite = path.nodes_with_help
        if opposite is None and len(bare := without_memory(path.nodes)) < len(path.nodes):
            opposite = bare
        if opposite is None or not any(PAIR_WEIGHT in node.metadata for node in path.nodes):
            continue
        pairs.append(
            replace(
                path,
                nodes=[_teaching(node) for node in opposite],
                nodes_with_help=[_teaching(node) for node in path.nodes],
                rollout_index=len(paths) + len(pairs),
                is_pair=True,
            )
        )
    return pairs


def _teaching(node: Node) -> Node:
    weight = node.metadata.get(PAIR_WEIGHT)
    advantages = None if weight is None else (weight,) * len(node.token_ids)
    return replace(node, credit=advantages, shares=None, owner=None, ratio_scale=1.0)


def term_mask(batch: PackedBatch, has_term_R: Tensor, *, skip_first: int, has_pairs: bool = False) -> Tensor:
    """Return a mask [T] of the entries that are distilled: no demonstrations, and not the first tokens of a
    turn. With pairs, only these have the term, and they are off-policy.
    """
    first_ordinals = torch.full((int(batch.turn_T.max()) + 1,), _MAX_ORDINAL)
    first_ordinals = first_ordinals.scatter_reduce(0, batch.turn_T, batch.ordinal_T, reduce="amin")
    number_T = batch.ordinal_T - first_ordinals[batch.turn_T]
    is_own_T = torch.ones_like(batch.is_off_policy_T) if has_pairs else ~batch.is_off_policy_T
    return has_term_R[batch.rollout_index_T] & is_own_T & (number_T >= skip_first)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermTokens:
    """The entries of a micro-batch with the term: their indices and the teacher's scores of them."""

    index_M: Tensor
    teacher: TokenScores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermLosses:
    """The term of a micro-batch: the entries, their losses with gradient, and their weights."""

    settings: DistillSettings
    index_M: Tensor
    losses_M: Tensor
    weights_M: Tensor

    def times(self, factors_T: Tensor) -> "TermLosses":
        """Multiply the weights by those of the sampler correction or rejection. Divergences are unchanged:
        they compare whole distributions, however the tokens were sampled.
        """
        if self.settings.form == "divergence":
            return self
        return replace(self, weights_M=self.weights_M * factors_T[self.index_M])


@dataclass(slots=True, kw_only=True)
class DistillTerm:
    """Self-distillation of one mini-batch.

    Args:
        has_term_R: the rollouts that are distilled.
        succeeded_R: the environment's verdict of every rollout.
        masks: entries [T] with the term of each micro-batch of this rank.
        weights: weights [T] of the entries in the term.
        scale: of ``advantage_scale`` in this update.
        teacher: the teacher's scores of this rank's rollouts.
        head: the teacher's vocabulary projection, if the support is the whole vocabulary.
        gate_mean: mean gate of the mini-batch before the optimizer step, for ``gap_centered``.
    """

    settings: DistillSettings
    has_term_R: Tensor
    succeeded_R: Tensor
    masks: Sequence[Tensor]
    weights: Sequence[Tensor]
    scale: float
    teacher: OtherScores | None = None
    head: nn.Module | None = None
    gate_mean: float = 0.0

    def tokens(self, number: int, batch: PackedBatch) -> TermTokens | None:
        """Return the entries with the term of micro-batch ``number``; None if it has none."""
        index_M = self.masks[number].nonzero()[:, 0]
        if not len(index_M):
            return None
        assert self.teacher is not None
        rows_T, is_scored_T = self.teacher.find(batch)
        if not bool(is_scored_T[index_M].all()):
            raise ValueError("the rendering with help has other policy tokens than the one without")
        device = self.teacher.scores.logprobs_T.device
        return TermTokens(
            index_M=index_M.to(device), teacher=self.teacher.scores.select(rows_T[index_M].to(device))
        )

    def is_finite(self, tokens: TermTokens) -> bool:
        """Whether the teacher's log-probs are numbers; if not, the optimizer step is skipped."""
        return math.isfinite(self.gate_mean) and bool(torch.isfinite(tokens.teacher.logprobs_T).all())

    def support(self, tokens: TermTokens, batch: PackedBatch) -> Support | None:
        """Return what the student's pass scores besides the sampled tokens; entries without the term have
        arbitrary rows.
        """
        if self.settings.form != "divergence":
            return None
        ids_MK, hidden_ME = tokens.teacher.support_ids_TK, tokens.teacher.hidden_TE
        if ids_MK is not None:
            return ids_MK.new_zeros(len(batch.token_T), ids_MK.shape[1]).index_copy(0, tokens.index_M, ids_MK)
        assert hidden_ME is not None and self.head is not None
        hidden_TE = hidden_ME.new_zeros(len(batch.token_T), hidden_ME.shape[1])
        return FullTeacher(
            hidden_TE=hidden_TE.index_copy(0, tokens.index_M, hidden_ME),
            head=self.head,
            alpha=self.settings.alpha,
        )

    def advantages(
        self, tokens: TermTokens, batch: PackedBatch, start_T: Tensor, measures: Measures
    ) -> Tensor:
        """Return the advantages [T] of the micro-batch, with the gaps at the start of the update added or as
        factors.
        """
        index_M, teacher_M = tokens.index_M, tokens.teacher.logprobs_T
        gap_M, own_M = teacher_M - start_T[index_M], batch.advantages_T[index_M]
        self._measure(tokens, gap_M, measures)
        if self.settings.form == "advantage_add":
            added_M = self._gaps_to_go(tokens, gap_M, batch)
            values_M = own_M + self.settings.weight * added_M
        else:
            values_M = scaled_advantages(own_M, gap_M, scale=self.scale, band=self.settings.scale_band)
        return batch.advantages_T.index_copy(0, index_M, values_M.to(batch.advantages_T))

    def losses(
        self,
        number: int,
        tokens: TermTokens,
        batch: PackedBatch,
        scores: TokenScores,
        start_T: Tensor,
        measures: Measures,
    ) -> TermLosses:
        """Return the term of micro-batch ``number``."""
        settings, index_M = self.settings, tokens.index_M
        own = scores.select(index_M)
        teacher_M, start_M = tokens.teacher.logprobs_T, start_T[index_M]
        gap_M = teacher_M - own.logprobs_T.detach()
        to_go_M = self._gaps_to_go(tokens, gap_M, batch) if settings.discount else None
        divergence_M = own.divergence_T
        if own.support_TK is not None:
            assert tokens.teacher.support_TK is not None
            divergence_M = divergence_per_token(
                own.support_TK, tokens.teacher.support_TK, alpha=settings.alpha, tail=settings.tail
            )
        losses_M = distill_losses(
            settings,
            logprobs_T=own.logprobs_T,
            teacher_T=teacher_M,
            start_T=start_M,
            gate_mean=self.gate_mean,
            to_go_T=to_go_M,
            divergence_T=divergence_M,
        )
        weights_M = self.weights[number].to(losses_M)[index_M]
        self._measure(tokens, gap_M, measures)
        ratio_M = log_ratio(logprobs=own.logprobs_T.detach(), reference_logprobs=start_M)
        measures.add_max("distill/step_ratio_max", float(ratio_M.max().exp()))
        if settings.gate != "none":
            measures.add("distill/gate_mean", float(gates(gap_M, settings).mean()), len(gap_M))
        if own.support_TK is not None and tokens.teacher.support_TK is not None:
            student_MK, teacher_MK = own.support_TK.detach(), tokens.teacher.support_TK
            measures.add("distill/top_mass_student", float(student_MK.exp().sum(-1).mean()), len(gap_M))
            measures.add("distill/top_mass_teacher", float(teacher_MK.exp().sum(-1).mean()), len(gap_M))
            # the support is in the teacher's order
            measures.add("distill/agree", float((student_MK.argmax(-1) == 0).double().mean()), len(gap_M))
        if settings.form in ("likelihood", "reverse_kl"):
            factor_M = factors(settings, gap_T=gap_M, log_step_ratio_T=ratio_M, gate_mean=self.gate_mean)
            push_M = weights_M * pushes(settings, factor_T=factor_M, gap_T=gap_M, to_go_T=to_go_M)
            succeeded_T = self.succeeded_R[batch.rollout_index_T].to(push_M.device)
            failed = float(push_M[~succeeded_T[index_M]].clamp(min=0.0).sum())
            if total := float(push_M.abs().sum()):
                measures.add("distill/pushed_up_failed", failed / total, total)
        return TermLosses(settings=settings, index_M=index_M, losses_M=losses_M, weights_M=weights_M)

    def measure_gate(
        self, batches: Sequence[PackedBatch], start: Sequence[TokenScores], ranks: Ranks
    ) -> None:
        """Set the mean gate over the mini-batch of all ranks."""
        total, num = 0.0, 0
        for number, (batch, scores) in enumerate(zip(batches, start, strict=True)):
            if (tokens := self.tokens(number, batch)) is not None:
                gap_M = tokens.teacher.logprobs_T - scores.logprobs_T[tokens.index_M]
                total += float(gates(gap_M, self.settings).double().sum())
                num += len(gap_M)
        shares = ranks.gather((total, num))
        self.gate_mean = sum(total for total, _ in shares) / max(1, sum(num for _, num in shares))

    def policy_factors(self, batch: PackedBatch) -> Tensor | None:
        """Return factors [T] of the policy term; None if all are 1."""
        inside, outside = self.settings.policy_weight, self.settings.policy_outside
        if inside == outside == 1.0:
            return None
        factors_R = torch.where(self.has_term_R, inside, outside).double()
        return factors_R[batch.rollout_index_T]

    def _gaps_to_go(self, tokens: TermTokens, gap_M: Tensor, batch: PackedBatch) -> Tensor:
        index_M = tokens.index_M.cpu()
        return gap_to_go(
            bounded(gap_M, self.settings.max_gap),
            discount=self.settings.discount,
            rollout_T=batch.rollout_index_T[index_M],
            ordinal_T=batch.ordinal_T[index_M],
        )

    def _measure(self, tokens: TermTokens, gap_M: Tensor, measures: Measures) -> None:
        num = len(gap_M)
        measures.add_sum("distill/num_tokens", float(num))
        measures.add("distill/gap_mean", float(gap_M.mean()), num)
        measures.add("distill/gap_abs", float(gap_M.abs().mean()), num)
        measures.add("distill/teacher_entropy", float(tokens.teacher.entropies_T.mean()), num)
        if (limit := self.settings.max_gap) is not None:
            measures.add_sum("distill/num_gap_cut", float((gap_M.abs() > limit).sum()))
