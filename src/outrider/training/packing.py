"""Packing of trees of tokens into one row without padding: shared prefixes are computed once, and only policy
tokens are scored, and observations on request. :mod:`outrider.engines.local.attention` runs packed rows.

Shape letters: N packed tokens, U scored tokens, T entries: the scored policy tokens of every rollout, M the
scored observation tokens of every rollout.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.engines.local.attention import Segment, TreePlan
from outrider.trace import Node, split_contexts
from outrider.types import Origin

# Of a node in the packed trees: the number of its parent (-1: none) and its tokens.
_NodeKey = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPath:
    """One rollout to train on.

    Attributes:
        nodes: its nodes from the root.
        rollout_index: its number in the mini-batch of all ranks.
        rollout: its number in its group.
        group: the number of its group in the mini-batch; rollouts of one group share prefixes.
        nodes_with_tips: nodes of the rendering that the policy acted in, if the update leaves out tips.
        nodes_with_help: nodes of the rendering with help that only the teacher of self-distillation reads.
        succeeded: the environment's verdict.
        is_replayed: whether an earlier policy wrote it.
        is_pair: whether its turns only teach a context in which they were not sampled; their advantages are
            their weights, and they are in no policy term.
        first_ordinal: the number of the first trained token, if this is a part of a rollout.
        scores_observations: whether the environment's text is scored too (``Node.body_positions``).
    """

    nodes: Sequence[Node]
    rollout_index: int
    rollout: int = 0
    group: int = 0
    nodes_with_tips: Sequence[Node] | None = None
    nodes_with_help: Sequence[Node] | None = None
    succeeded: bool = False
    is_replayed: bool = False
    is_pair: bool = False
    first_ordinal: int = 0
    scores_observations: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch. Every trained token of every rollout is an entry T; a token that several rollouts
    share is computed once (U).

    ``predictors_U`` index the packed position whose output predicts each scored token. ``token_T`` is the
    scored token of an entry, ``ordinal_T`` its number among the trained tokens of its rollout, ``turn_T`` a
    number of its rollout's turn. ``is_off_policy_T`` marks tokens that the policy did not write in this step:
    demonstrations, whose engine log-prob is 0, and replayed rollouts. ``version_T`` is the version of the
    weights that sampled a token, or -1. ``observed_M`` are the scored tokens of the environment's text, one
    entry per rollout that contains the token; empty unless a rollout ``scores_observations``.
    """

    ids_N: Tensor
    positions_N: Tensor
    plan: TreePlan
    predictors_U: Tensor
    targets_U: Tensor
    token_T: Tensor
    advantages_T: Tensor
    ratio_scale_T: Tensor
    engine_logprobs_T: Tensor
    rollout_index_T: Tensor
    ordinal_T: Tensor
    turn_T: Tensor
    is_off_policy_T: Tensor
    version_T: Tensor
    observed_M: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def num_tokens(self) -> int:
        """Unique tokens that the model computes."""
        return len(self.ids_N)

    def like(self, scores_T: Tensor) -> "PackedBatch":
        """The same batch with the per-token values in the precision and on the device of the model's
        scores.
        """
        return replace(
            self,
            advantages_T=self.advantages_T.to(scores_T),
            ratio_scale_T=self.ratio_scale_T.to(scores_T),
            engine_logprobs_T=self.engine_logprobs_T.to(scores_T),
            is_off_policy_T=self.is_off_policy_T.to(scores_T.device),
            version_T=self.version_T.to(scores_T.device),
        )


@dataclass(slots=True)
class _Builder:
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    scored: list[tuple[int, int]] = field(default_factory=list)
    entries: list[tuple[int, float, float, float, int, int, int, bool, int]] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    # by rollout index and the first ordinal of its sample
    num_trained: dict[tuple[int, int], int] = field(default_factory=dict)
    num_turns: int = 0

    def add(
        self,
        sequences: Sequence[RolloutPath],
        depth: int,
        ancestors: tuple[int, ...],
        last: int | None,
        position: int,
    ) -> None:
        """Emit the nodes that all ``sequences`` share from ``depth`` on as one segment, then each branch.

        Nodes with equal tokens after equal tokens are computed once, also if different rollouts sampled them:
        siblings of a sharp policy, and rollouts that retrieved the same step, have common prefixes. Every
        rollout keeps its advantages and its sampler's log-probs. ``last`` is the packed position of the
        previous token, which predicts the first token here.
        """
        start = len(self.ids)
        # None marks a rollout that has ended, so that it branches off from the longer ones.
        while len({_tokens(sequence, depth) for sequence in sequences}) == 1 and depth < len(
            sequences[0].nodes
        ):
            last = self._emit(depth, sequences, last, position)
            position += len(sequences[0].nodes[depth].token_ids)
            depth += 1
        if len(self.ids) > start:
            self.segments.append(Segment(length=len(self.ids) - start, ancestors=ancestors))
            ancestors = (*ancestors, len(self.segments) - 1)
        # A dict, not a set: the order of the row, and so of every float sum over it, is that of the rollouts.
        branches: dict[tuple[int, ...] | None, list[RolloutPath]] = {}
        for sequence in sequences:
            if depth < len(sequence.nodes):
                branches.setdefault(_tokens(sequence, depth), []).append(sequence)
        for branch in branches.values():
            self.add(branch, depth, ancestors, last, position)

    def _emit(
        self, depth: int, sequences: Sequence[RolloutPath], previous: int | None, position: int
    ) -> int | None:
        # Nodes of the same tokens are one computation, but each has advantages of its own: by identity.
        paths_by_node: dict[int, list[RolloutPath]] = {}
        for sequence in sequences:
            paths_by_node.setdefault(id(sequence.nodes[depth]), []).append(sequence)
        training = [
            entry
            for paths in paths_by_node.values()
            for entry in advantages_by_rollout(paths[0].nodes[depth], paths)
        ]
        # One number per rollout that trains the turn: turn-level ratios and masks never mix two rollouts.
        first_turn, self.num_turns = self.num_turns, self.num_turns + len(training)
        bodies = [path.nodes[depth].body_positions for path in sequences if path.scores_observations]
        for offset, token in enumerate(sequences[0].nodes[depth].token_ids):
            num_observing = sum(offset in body for body in bodies)
            # Nothing predicts the first token of a root, so it has no log-prob.
            if (training or num_observing) and previous is not None:
                for turn, (sequence, advantages, scale) in enumerate(training, start=first_turn):
                    node = sequence.nodes[depth]
                    index = sequence.rollout_index
                    # Along the rollout, not the row: the same in any split and in the other rendering.
                    sample = (index, sequence.first_ordinal)
                    ordinal = self.num_trained.get(sample, sequence.first_ordinal)
                    self.num_trained[sample] = ordinal + 1
                    off_policy = sequence.is_replayed or sequence.is_pair or not node.trainable
                    # a demonstrator is assumed to have been certain
                    engine = node.logprobs[offset] if node.trainable else 0.0
                    version = -1 if node.weight_version is None else node.weight_version
                    self.entries.append(
                        (
                            len(self.scored),
                            advantages[offset],
                            scale,
                            engine,
                            index,
                            ordinal,
                            turn,
                            off_policy,
                            version,
                        )
                    )
                self.observed += [len(self.scored)] * num_observing
                # Once, however many entries refer to it.
                self.scored.append((previous, token))
            previous = len(self.ids)
            self.ids.append(token)
            self.positions.append(position + offset)
        return previous

    def batch(self) -> PackedBatch:
        predictors, targets = zip(*self.scored, strict=True)
        columns = zip(*self.entries, strict=True)
        tokens, advantages, scale, engine, owner, ordinal, turn, off_policy, version = columns
        return PackedBatch(
            ids_N=torch.tensor(self.ids),
            positions_N=torch.tensor(self.positions),
            plan=TreePlan(segments=tuple(self.segments)),
            predictors_U=torch.tensor(predictors),
            targets_U=torch.tensor(targets),
            token_T=torch.tensor(tokens),
            # As exact as on the trace: `like` rounds once, to the precision of the scores.
            advantages_T=torch.tensor(advantages, dtype=torch.float64),
            ratio_scale_T=torch.tensor(scale, dtype=torch.float64),
            engine_logprobs_T=torch.tensor(engine, dtype=torch.float64),
            rollout_index_T=torch.tensor(owner),
            ordinal_T=torch.tensor(ordinal),
            turn_T=torch.tensor(turn),
            is_off_policy_T=torch.tensor(off_policy),
            version_T=torch.tensor(version),
            observed_M=torch.tensor(self.observed, dtype=torch.long),
        )


def _tokens(sequence: RolloutPath, depth: int) -> tuple[int, ...] | None:
    return sequence.nodes[depth].token_ids if depth < len(sequence.nodes) else None


def advantages_by_rollout(
    node: Node, sequences: Sequence[RolloutPath]
) -> list[tuple[RolloutPath, Sequence[float], float]]:
    """Return the rollouts that train the node's tokens, with their advantages per token and ratio scales.

    Raises ValueError for a node that several rollouts share without advantages per rollout.
    """
    is_prefix = node.origin is Origin.DEMONSTRATION and node.credit is None
    if is_prefix or not node.receives_advantages:
        return []
    if node.shares is not None:
        shares = [
            (sequence, node.shares[sequence.rollout])
            for sequence in sequences
            if sequence.rollout in node.shares
        ]
        return [(sequence, share.credit, share.ratio_scale) for sequence, share in shares]
    if node.owner is None and len(sequences) > 1:
        raise ValueError(
            f"node {node.node_id} is shared by {len(sequences)} rollouts: shared-token credit is needed"
        )
    if node.credit is None:
        return []
    return [
        (sequence, node.credit, node.ratio_scale)
        for sequence in sequences
        if node.owner in (None, sequence.rollout)
    ]


def pack(
    sequences: Iterable[RolloutPath], *, max_tokens: int, whole_rollouts: bool = False
) -> Iterator[PackedBatch]:
    """Micro-batches of at most ``max_tokens`` unique tokens, in order.

    Rollouts that fall into one micro-batch share their common beginning; the loss is the same for any split.
    A rollout of more than ``max_tokens`` is split between its contexts, and a longer single context is a
    micro-batch of its own. With ``whole_rollouts`` the contexts of every rollout stay together.
    """
    waiting: list[RolloutPath] = []
    counted: dict[_NodeKey, int] = {}
    num_tokens = 0
    for sequence in sequences if whole_rollouts else _split_long(sequences, max_tokens):
        size = _count_new(sequence, counted)
        if waiting and num_tokens + size > max_tokens:
            yield _build_batch(waiting)
            waiting, counted, num_tokens = [], {}, 0
            size = _count_new(sequence, counted)
        waiting.append(sequence)
        num_tokens += size
    if waiting:
        yield _build_batch(waiting)


def _split_long(sequences: Iterable[RolloutPath], max_tokens: int) -> Iterator[RolloutPath]:
    """Replace each rollout of more than ``max_tokens`` by its contexts with trained tokens."""
    for sequence in sequences:
        if _count_new(sequence, {}) <= max_tokens or len(samples := _samples(sequence)) == 1:
            yield sequence
            continue
        for sample in samples:
            # The others predict nothing: without another sample in the micro-batch, it would be empty.
            if any(node.token_ids and advantages_by_rollout(node, [sample]) for node in sample.nodes):
                yield sample


def _count_new(sequence: RolloutPath, counted: dict[_NodeKey, int]) -> int:
    """Return the tokens that a rollout adds to the nodes in ``counted``, and add its nodes."""
    size, parent = 0, -1
    for node in sequence.nodes:
        if node.restarts:
            parent = -1
        key = (parent, node.token_ids)
        if key not in counted:
            counted[key] = len(counted)
            size += len(node.token_ids)
        parent = counted[key]
    return size


def _build_batch(sequences: Sequence[RolloutPath]) -> PackedBatch:
    builder = _Builder()
    trees: dict[tuple[int, ...], list[RolloutPath]] = {}
    for sequence in (sample for each in sequences for sample in _samples(each)):
        trees.setdefault(sequence.nodes[0].token_ids, []).append(sequence)
    for tree in trees.values():
        builder.add(tree, 0, (), None, 0)
    return builder.batch()


def _samples(sequence: RolloutPath) -> Sequence[RolloutPath]:
    """Split a rollout into one sample per context."""
    parts = split_contexts(sequence.nodes)
    if len(parts) == 1:
        return [sequence]
    samples, ordinal = [], sequence.first_ordinal
    for nodes in parts:
        samples.append(replace(sequence, nodes=nodes, first_ordinal=ordinal))
        ordinal += sum(len(node.token_ids) for node in nodes if advantages_by_rollout(node, [sequence]))
    return samples
