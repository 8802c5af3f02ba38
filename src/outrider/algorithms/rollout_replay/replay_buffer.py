"""Groups of earlier steps as plain ids and numbers: what a later update needs of them, and no more.

Only the nodes of rollouts with a return are kept. The texts are not: nobody reads them again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError
from outrider.trace import Leaf, Trace
from outrider.types import Message, Origin, Outcome, Task

_TEXT = Message(role="assistant", content="")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNode:
    """One node: its parent's place in the group (None: a root), who wrote it, its ids, and their log-probs
    where the policy did. ``restarts``: the context begins anew there.
    """

    parent: int | None
    origin: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    restarts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLeaf:
    """The end of one rollout; ``node`` is its last node's place."""

    rollout: int
    node: int
    outcome: str
    episode_return: float
    success: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """The rollouts of ``task_key`` in training step ``step``, with the log-probs of the policy that wrote
    them.
    """

    task_key: str
    step: int
    nodes: tuple[StoredNode, ...]
    leaves: tuple[StoredLeaf, ...]

    @classmethod
    def from_trace(cls, trace: Trace, *, step: int) -> "StoredGroup":
        """Copy what an update needs."""
        positions: dict[int, int] = {}
        nodes: list[StoredNode] = []
        leaves: list[StoredLeaf] = []
        for leaf, path in trace.rollouts():
            if leaf.episode_return is None:
                continue
            for node in path:
                if node.node_id not in positions:
                    positions[node.node_id] = len(nodes)
                    parent = None if node.parent is None else positions[node.parent]
                    nodes.append(
                        StoredNode(
                            parent=parent,
                            origin=node.origin.value,
                            token_ids=node.token_ids,
                            logprobs=node.logprobs,
                            restarts=node.restarts,
                        )
                    )
            leaves.append(
                StoredLeaf(
                    rollout=leaf.rollout,
                    node=positions[path[-1].node_id],
                    outcome=leaf.outcome.value,
                    episode_return=leaf.episode_return,
                    success=leaf.success,
                )
            )
        return cls(task_key=trace.task.key, step=step, nodes=tuple(nodes), leaves=tuple(leaves))

    def trace(self) -> Trace:
        """The group without credit, marked as replayed. Entropies are 0: those of its time say nothing about
        the policy now.
        """
        trace = Trace(task=Task(key=self.task_key, question=""))
        trace.is_replayed = True
        for node in self.nodes:
            trace.append(
                parent=node.parent,
                origin=Origin(node.origin),
                token_ids=node.token_ids,
                message=_TEXT,
                logprobs=node.logprobs,
                entropies=(0.0,) * len(node.logprobs),
                restarts=node.restarts,
            )
        for leaf in self.leaves:
            trace.finish(
                Leaf(
                    node_id=leaf.node,
                    rollout=leaf.rollout,
                    outcome=Outcome(leaf.outcome),
                    episode_return=leaf.episode_return,
                    success=leaf.success,
                )
            )
        return trace


def snapshot_groups(groups: Sequence[StoredGroup]) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Plain data, and the ids and log-probs of all groups in a row as arrays; nothing is rounded."""
    plain = [
        {
            "task_key": group.task_key,
            "step": group.step,
            "nodes": [
                [node.parent, node.origin, len(node.token_ids), *([True] if node.restarts else [])]
                for node in group.nodes
            ],
            "leaves": [
                [leaf.rollout, leaf.node, leaf.outcome, leaf.episode_return, leaf.success]
                for leaf in group.leaves
            ],
        }
        for group in groups
    ]
    ids = [token for group in groups for node in group.nodes for token in node.token_ids]
    logprobs = [value for group in groups for node in group.nodes for value in node.logprobs]
    arrays = {
        "replay_ids": np.array(ids, dtype=np.int64),
        "replay_logprobs": np.array(logprobs, dtype=np.float64),
    }
    return plain, arrays if ids else {}


def restore_groups(
    plain: Sequence[Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]]
) -> list[StoredGroup]:
    """Groups as :func:`snapshot_groups` got them. Raises CheckpointError where data and arrays do not belong
    together.
    """
    ids = arrays["replay_ids"].tolist() if "replay_ids" in arrays else []
    logprobs = arrays["replay_logprobs"].tolist() if "replay_logprobs" in arrays else []
    groups: list[StoredGroup] = []
    num_ids = num_logprobs = 0
    for entry in plain:
        nodes = []
        for parent, origin, length, *restarts in entry["nodes"]:
            num_own = length if origin == Origin.POLICY else 0
            nodes.append(
                StoredNode(
                    parent=parent,
                    origin=origin,
                    token_ids=tuple(ids[num_ids : num_ids + length]),
                    logprobs=tuple(logprobs[num_logprobs : num_logprobs + num_own]),
                    restarts=bool(restarts),
                )
            )
            num_ids, num_logprobs = num_ids + length, num_logprobs + num_own
        leaves = [
            StoredLeaf(rollout=rollout, node=node, outcome=outcome, episode_return=value, success=success)
            for rollout, node, outcome, value, success in entry["leaves"]
        ]
        groups.append(
            StoredGroup(
                task_key=entry["task_key"], step=entry["step"], nodes=tuple(nodes), leaves=tuple(leaves)
            )
        )
    if (num_ids, num_logprobs) != (len(ids), len(logprobs)):
        raise CheckpointError(
            f"stored groups of {num_ids} ids and {num_logprobs} log-probs with {len(ids)} and {len(logprobs)}"
        )
    return groups
