"""A fault starts a rollout again. What its tries wrote alike is one piece of the tree: a fault changes no
sharing.
"""

from collections.abc import Hashable
from typing import Final

from outrider.trace import Node, Trace

_DECIDED: Final = ("entropy_change", "num_forks", "num_forks_wanted", "is_replayed")  # of a turn


def rejoin(trace: Trace) -> None:
    """Hang the rollouts that left a failed try under the same nodes of the try that counts, where it has
    them.

    Nodes are the same if one rollout wrote the same tokens in the same place. The try that counts is the
    rollout's last, or the first that came there where all of them failed. A failed try's own nodes stay in
    the trace, as what they cost. Call it before the nodes get their final numbers.
    """
    own = [
        node
        for leaf, path in trace.rollouts()
        for node in path
        if node.metadata.get("rollout") == leaf.rollout
    ]
    counts = {node.node_id for node in own}
    first: dict[Hashable, int] = {}  # what was written where -> the node that came first
    same: list[int] = []  # of every node, the first one that is the same
    representatives: dict[int, int] = {}  # that one -> the node that stands for all of them
    for node in trace.nodes:
        is_own = node.parent is not None and "rollout" in node.metadata
        parent = None if node.parent is None else same[node.parent]
        key = (parent, node.metadata["rollout"], node.origin, node.token_ids) if is_own else node.node_id
        same.append(first.setdefault(key, node.node_id))
        if node.node_id in counts or node.node_id == same[-1]:
            representatives[same[-1]] = node.node_id
    for node in trace.nodes:
        _move_decisions(node, trace.nodes[representatives[same[node.node_id]]])
        if node.parent is not None:
            node.parent = representatives[same[node.parent]]
    for leaf in trace.leaves.values():
        if leaf.node_id is not None:
            leaf.node_id = representatives[same[leaf.node_id]]


def _move_decisions(node: Node, other: Node) -> None:
    """A turn is decided about once; the report looks for that on the rollout's path."""
    if node is not other:
        other.metadata |= {name: node.metadata.pop(name) for name in _DECIDED if name in node.metadata}
