"""What an update saw of every token that it trained, for the trace files: the trainer's log-prob and the
importance ratio.

Shape letters: T scored tokens of a micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.algorithms.common.token_loss import TokenLossInputs
from outrider.trace import Node
from outrider.train.update.pack import PackedBatch, RolloutPath, advantages_by_rollout

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """One micro-batch. ``rollout_T`` numbers the rollouts of the mini-batch ``number``, ``ordinal_T`` the
    trained tokens of a rollout.
    """

    number: int
    rollout_T: Integers
    ordinal_T: Integers
    trainer_T: Floats
    ratio_T: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """Of one node, a value per token: natural logs, and pure numbers."""

    trainer: Floats
    ratio: Floats


def token_record(number: int, batch: PackedBatch, inputs: TokenLossInputs) -> TokenRecord:
    """Of a pass: the trainer's log-probs where the engine sampled, and the ratio with its scale."""
    ratio_T = (inputs.logprobs_T.detach() - inputs.old_T).exp() * inputs.ratio_scale_T
    return TokenRecord(
        number=number,
        rollout_T=batch.rollout_index_T.numpy().astype(np.int32),
        ordinal_T=batch.ordinal_T.numpy().astype(np.int32),
        trainer_T=inputs.old_logprobs.trainer_T.float().cpu().numpy(),
        ratio_T=ratio_T.float().cpu().numpy(),
    )


def values_by_node(
    mini_batches: Sequence[Sequence[RolloutPath]], records: Sequence[TokenRecord]
) -> dict[tuple[int, int], TokenValues]:
    """By the identity of the node and the rollout of its group; of several passes the last one counts."""
    node_values: dict[tuple[int, int], TokenValues] = {}
    for number, paths in enumerate(mini_batches):
        sizes = {
            path.rollout_index: sum(end - start for _, start, end in _trained_nodes(path)) for path in paths
        }
        known = _values_by_rollout(sizes, [record for record in records if record.number == number])
        for path in paths:
            values = known.get(path.rollout_index)
            if values is None:
                continue
            for offset, (node, start, end) in _nodes_with_offsets(path):
                lead = np.full(start, np.nan, np.float32)  # nothing predicts the first token of a root
                trainer, ratio = (
                    np.concatenate([lead, each[offset : offset + end - start]]) for each in values
                )
                node_values[id(node), path.rollout] = TokenValues(trainer=trainer, ratio=ratio)
    return node_values


def _nodes_with_offsets(path: RolloutPath) -> Iterator[tuple[int, tuple[Node, int, int]]]:
    offset = 0
    for trained in _trained_nodes(path):
        yield offset, trained
        offset += trained[2] - trained[1]


def _trained_nodes(path: RolloutPath) -> list[tuple[Node, int, int]]:
    """The nodes with credit, and which of their tokens are scored."""
    return [
        (node, int(number == 0), len(node.token_ids))
        for number, node in enumerate(path.nodes)
        if advantages_by_rollout(node, [path])
    ]


def _values_by_rollout(
    sizes: dict[int, int], records: Sequence[TokenRecord]
) -> dict[int, tuple[Floats, Floats]]:
    result: dict[int, tuple[Floats, Floats]] = {}
    for record in records:
        for rollout in np.unique(record.rollout_T).tolist():
            mine = record.rollout_T == rollout
            if rollout not in result:
                empty = np.full(sizes[rollout], np.nan, np.float32)
                result[rollout] = (empty, empty.copy())
            for values, measured in zip(result[rollout], (record.trainer_T, record.ratio_T), strict=True):
                values[record.ordinal_T[mine]] = measured[mine]
    return result
