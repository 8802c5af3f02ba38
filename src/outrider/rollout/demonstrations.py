"""A demonstrator's rollout as a member of the policy's group: in the same tree, with its own mark on rollout
and tokens.
"""

from dataclasses import replace
from typing import Final

from outrider.trace import Node, Trace
from outrider.types import Origin

DEMONSTRATION: Final = "demonstration"


def join_demonstration(trace: Trace, demonstration: Trace) -> None:
    """Add the one rollout of ``demonstration`` to the group ``trace`` under the next number.

    Its turns become ``Origin.DEMONSTRATION`` nodes, without log-probs and entropies: nobody measured the
    demonstrator's. It begins at the group's prompt where that is the same. Its return, or its fault, stays
    what it was. Raises ValueError unless ``demonstration`` holds exactly one rollout.
    """
    [(leaf, path)] = demonstration.rollouts()
    rollout = len(trace.modes)
    trace.modes = (*trace.modes, DEMONSTRATION)
    last_node: Node | None = None
    for node in path:
        last_node = _add_node(trace, last_node, node, rollout)
    trace.finish(
        replace(
            leaf,
            node_id=None if last_node is None else last_node.node_id,
            rollout=rollout,
            is_demonstration=True,
        )
    )


def _add_node(trace: Trace, parent: Node | None, node: Node, rollout: int) -> Node:
    if parent is None:
        for root in trace.nodes:
            if root.parent is None and root.token_ids == node.token_ids:
                return root
    return trace.append(
        parent=None if parent is None else parent.node_id,
        origin=Origin.DEMONSTRATION if node.trainable else node.origin,
        token_ids=node.token_ids,
        message=node.message,
        reward=node.reward,
        restarts=node.restarts,
        metadata=node.metadata | ({"rollout": rollout} if parent is not None else {}),
    )
