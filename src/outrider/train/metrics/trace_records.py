"""Trace trees as rows for the trace files of a run directory."""

import json
from collections.abc import Sequence

from outrider.tokens import Tokenizer, text_of
from outrider.trace import Leaf, Node, Trace
from outrider.types import Origin
from outrider.watch.traces import TraceRow


def rows_of(traces: Sequence[Trace], *, step: int, tokenizer: Tokenizer) -> list[TraceRow]:
    """One row per node that belongs to a finished rollout; what a fault left behind is not written."""
    rows = []
    for number, trace in enumerate(traces):
        owners: dict[int, int] = {}
        for finished, path in trace.rollouts():
            for node in path:
                owners.setdefault(node.node_id, finished.rollout)
        leaves = {leaf.node_id: leaf for leaf in trace.leaves.values()}
        for node in trace.nodes:
            if node.node_id not in owners:
                continue
            leaf = leaves.get(node.node_id)
            rows.append(
                TraceRow(
                    step=step,
                    task_key=trace.task.key,
                    trace_id=f"{step}/{number}",
                    node_id=node.node_id,
                    parent_id=-1 if node.parent is None else node.parent,
                    rollout=owners[node.node_id],
                    origin=node.origin,
                    text=node.message.content,
                    tokens=_pieces(node, tokenizer),
                    logprobs=node.logprobs,
                    entropies=node.entropies,
                    outcome=leaf.outcome if leaf else None,
                    episode_return=leaf.episode_return if leaf else None,
                    advantage=leaf.advantage if leaf else None,
                    hybrid=any(n.origin is Origin.BUFFER for n in trace.path(node.node_id)) if leaf else None,
                    metadata=json.dumps(node.metadata | (_of_leaf(leaf, trace) if leaf else {}), default=str),
                )
            )
    return rows


def _of_leaf(leaf: Leaf, trace: Trace) -> dict[str, object]:
    """Reasons of a leaf's advantage beside its return, and its reflection."""
    mode = trace.modes[leaf.rollout] if trace.modes else ""
    found = {"mode": mode, "intrinsic": leaf.intrinsic, "remark": leaf.reflection}
    return {name: value for name, value in found.items() if value}


def _pieces(node: Node, tokenizer: Tokenizer) -> tuple[str, ...]:
    return (
        tuple(text_of(tokenizer, [token], skip_special_tokens=False) for token in node.token_ids)
        if node.trainable
        else ()
    )
