"""Trace trees as rows for the trace files of a run directory, and their rollouts as rows of their own."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.memory.tips import MemoryChange
from outrider.tokens import Tokenizer
from outrider.tokens.template import Continuation
from outrider.trace import DESCRIBED_TOOLS, Leaf, Node, Trace
from outrider.training.components import Components
from outrider.training.update import UpdateReport, split_mini_batches
from outrider.training.update_metrics import TokenValues, values_by_node
from outrider.types import Origin
from outrider.viewer.records import (
    MemoryWriter,
    RolloutRow,
    RolloutWriter,
    TraceRow,
    TraceWriter,
    rollout_row,
)

NodeValues = Mapping[tuple[int, int], TokenValues]
"""What the update saw (:func:`~outrider.training.update_metrics.values_by_node`)."""


@dataclass(slots=True)
class RecordRows:
    """The rows of a step: nodes, and rollouts in the order of groups and numbers."""

    nodes: list[TraceRow] = field(default_factory=list)
    rollouts: list[RolloutRow] = field(default_factory=list)


def trace_rows(
    traces: Sequence[Trace], *, step: int, tokenizer: Tokenizer, values: NodeValues | None = None
) -> RecordRows:
    """One row per node that belongs to a rollout. Of one that a fault ended they are those of its last try;
    no leaf is among them, only the rollout's own row has its outcome and its reason.
    """
    records = RecordRows()
    pieces = Continuation(tokenizer)
    for number, trace in enumerate(traces):
        lost = {
            leaf.rollout: _last_try_nodes(trace, leaf.rollout)
            for leaf in trace.leaves.values()
            if leaf.node_id is None
        }
        firsts: dict[int, int] = {}  # the rollout that wrote a node, whatever became of it
        for finished, path in trace.rollouts():
            for node in [*path, *lost.get(finished.rollout, ())]:
                firsts.setdefault(node.node_id, finished.rollout)
        # An update trains on no lost rollout: of what one shares, the others have the values.
        owners: dict[int, int] = {}
        for finished, path in trace.scored_rollouts():
            for node in path:
                owners.setdefault(node.node_id, finished.rollout)
        owners = firsts | owners
        leaves = {leaf.node_id: leaf for leaf in trace.leaves.values()}
        rows: dict[int, TraceRow] = {}
        for node in trace.nodes:
            if node.node_id in owners:
                row = _row(node, trace, owners[node.node_id], leaves.get(node.node_id), pieces, values or {})
                rows[node.node_id] = replace(row, step=step, trace_id=f"{step}/{number}")
        records.nodes += rows.values()
        for leaf, path in trace.rollouts():
            whole = path or lost[leaf.rollout]
            row_ = _rollout(leaf, whole, trace, rows, f"{step}/{number}", step)
            own = [firsts[node.node_id] for node in whole if node.origin is not Origin.PROMPT]
            records.rollouts.append(replace(row_, forked_from=own[0] if own else leaf.rollout))
    return records


def _last_try_nodes(trace: Trace, rollout: int) -> list[Node]:
    """The path to the last node that a rollout wrote which a fault ended; empty where it wrote none."""
    rollout_nodes = {node.node_id for _, path in trace.rollouts() for node in path}
    own = [
        node.node_id
        for node in trace.nodes
        if node.node_id not in rollout_nodes and node.metadata.get("rollout") == rollout
    ]
    return trace.path(own[-1]) if own else []


def _row(
    node: Node, trace: Trace, owner: int, leaf: Leaf | None, pieces: Continuation, values: NodeValues
) -> TraceRow:
    seen = values.get((id(node), owner))
    return TraceRow(
        step=0,
        task_key=trace.task.key,
        trace_id="",
        node_id=node.node_id,
        parent_id=-1 if node.parent is None else node.parent,
        rollout=owner,
        origin=node.origin,
        text=_text(node, pieces),
        tokens=tuple(pieces.decode([token_id]) for token_id in node.token_ids) if node.trainable else (),
        logprobs=node.logprobs,
        entropies=node.entropies,
        outcome=leaf.outcome if leaf else None,
        episode_return=leaf.episode_return if leaf else None,
        advantage=leaf.advantage if leaf else None,
        hybrid=any(n.origin is Origin.BUFFER for n in trace.path(node.node_id)) if leaf else None,
        metadata=json.dumps(node.metadata | (_leaf_metadata(leaf, trace) if leaf else {}), default=str),
        advantages=_token_advantages(node, owner),
        trainer_logprobs=() if seen is None or not node.trainable else tuple(seen.trainer.tolist()),
        ratios=() if seen is None or not node.trainable else tuple(seen.ratio.tolist()),
        weight_version=node.weight_version,
        role=node.message.role,
    )


def _text(node: Node, pieces: Continuation) -> str:
    """What the node says; of a prompt with native tools, which the environment does not describe, all that
    the policy saw.
    """
    if DESCRIBED_TOOLS in node.metadata:
        return pieces.decode(node.token_ids)
    return node.message.content


def _rollout(
    leaf: Leaf, path: Iterable[Node], trace: Trace, rows: Mapping[int, TraceRow], trace_id: str, step: int
) -> RolloutRow:
    on_file = [rows[node.node_id] for node in path]
    last = on_file[-1] if on_file else _placeholder_row(trace, trace_id, step)
    is_fault = leaf.outcome.is_fault
    end = replace(
        last,
        rollout=leaf.rollout,
        outcome=leaf.outcome,
        episode_return=leaf.episode_return,
        advantage=leaf.advantage,
        metadata=json.dumps(_leaf_metadata(leaf, trace), default=str),
    )
    # of a node the metadata counts its calls, of the end only what is the rollout's own
    return rollout_row(
        on_file,
        end,
        fault=leaf.detail if is_fault else "",
        success=None if is_fault else leaf.success,
        metrics=None if is_fault else json.dumps(dict(leaf.metrics)),
    )


def _placeholder_row(trace: Trace, trace_id: str, step: int) -> TraceRow:
    """Stands for the nodes of a rollout that wrote none."""
    return TraceRow(
        step=step,
        task_key=trace.task.key,
        trace_id=trace_id,
        node_id=-1,
        parent_id=-1,
        rollout=0,
        origin=Origin.PROMPT,
        text="",
    )


def _token_advantages(node: Node, owner: int) -> tuple[float, ...]:
    """Of the rollout that the row belongs to; a demonstrator's tokens have no values of their own on file."""
    if not node.trainable:
        return ()
    if node.shares is not None:
        return node.shares[owner].credit if owner in node.shares else ()
    return node.credit or ()


def _leaf_metadata(leaf: Leaf, trace: Trace) -> dict[str, object]:
    """Reasons of a leaf's advantage beside its return, and its reflection."""
    mode = trace.modes[leaf.rollout] if trace.modes else ""
    metadata = {"mode": mode, "intrinsic": leaf.intrinsic, "remark": leaf.reflection}
    return {name: value for name, value in metadata.items() if value}


# What a step and an evaluation leave in the run directory beside metrics: nodes, rollouts, and what changed
# in memories.


@dataclass(frozen=True, slots=True)
class RecordFiles:
    """The three folders of a run."""

    traces: TraceWriter
    rollouts: RolloutWriter
    memory: MemoryWriter

    @classmethod
    def from_run(cls, run: Path) -> "RecordFiles":
        """Below a run directory."""
        return cls(TraceWriter(run / "traces"), RolloutWriter(run), MemoryWriter(run))

    def resume(self, step: int) -> int:
        """Remove what came after the checkpoint step; return how many files."""
        return sum(writer.resume(step) for writer in (self.traces, self.rollouts, self.memory))

    def write_step(
        self, parts: Components, traces: Sequence[Trace], values: NodeValues, *, step: int
    ) -> None:
        """Of a training step that has ended; what tells that it was played comes last. Raises OSError."""
        rows = trace_rows(traces, step=step, tokenizer=parts.renderer.tokenizer, values=values)
        changes = [*parts.algorithm.memory_changes()]
        if parts.buffer is not None:
            changes.append(MemoryChange(memory="steps", change="revision", version=parts.buffer.revision))
        self.memory.write(step, changes)
        self.rollouts.write(step, rows.rollouts)
        self.traces.write(step, rows.nodes)

    def write_evaluation(self, parts: Components, traces: Sequence[Trace], *, number: int, step: int) -> None:
        """Of the evaluation that will be line ``number`` of ``evaluations.jsonl``. Raises OSError."""
        rows = trace_rows(traces, step=step, tokenizer=parts.renderer.tokenizer)
        self.rollouts.write_evaluation(number, rows.rollouts)
        self.traces.write_evaluation(number, rows.nodes)

    def write_experts(self, parts: Components, traces: Sequence[Trace]) -> None:
        """The expert rollouts of the cold start. Raises OSError."""
        rows = trace_rows(traces, step=0, tokenizer=parts.renderer.tokenizer)
        self.rollouts.write_experts(rows.rollouts)
        self.traces.write_experts(rows.nodes)


def collect_node_values(
    parts: Components, trained: Sequence[Trace], update_report: UpdateReport
) -> NodeValues:
    """What the update saw of the tokens of these groups, which it trained on in this order."""
    mini_batches = split_mini_batches(trained, parts.settings.update.num_mini_batches)
    return values_by_node(mini_batches, update_report.tokens)
