"""Rows of the record files of a run: nodes of trace trees, and rollouts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.environments.base import targets_json
from outrider.memory.tips import MemoryChange
from outrider.tokens import Tokenizer
from outrider.tokens.template import Continuation
from outrider.trace import DESCRIBED_TOOLS, Leaf, Node, Trace
from outrider.training.components import Components
from outrider.training.packing import RolloutPath, advantages_by_rollout
from outrider.training.update import Floats, TokenRecord, UpdateReport, make_mini_batches
from outrider.types import Origin
from outrider.viewer.records import (
    EXPERTS_FILE,
    MEMORY,
    ROLLOUT_SCHEMA,
    ROLLOUTS,
    SCHEMA,
    RolloutRow,
    StepFiles,
    TraceRow,
    changes_to_table,
    evaluation_file,
    rollout_row,
    step_file,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """The trainer's log-probs (nats) and the importance ratios of the tokens of one node."""

    trainer: Floats
    ratio: Floats


NodeValues = Mapping[tuple[int, int], TokenValues]
"""Values of trained tokens by identity of the node and rollout (:func:`values_by_node`)."""


@dataclass(slots=True)
class RecordRows:
    """The rows of a step: nodes, and rollouts in the order of groups and numbers."""

    nodes: list[TraceRow] = field(default_factory=list)
    rollouts: list[RolloutRow] = field(default_factory=list)


def trace_rows(
    traces: Sequence[Trace], *, step: int, tokenizer: Tokenizer, values: NodeValues | None = None
) -> RecordRows:
    """Return one row per node that belongs to a rollout. For a rollout that a fault ended, these are the
    nodes of its last try, without a leaf: only the row of the rollout has its outcome and reason.
    """
    records = RecordRows()
    pieces = Continuation(tokenizer)
    for number, trace in enumerate(traces):
        lost = {
            leaf.rollout: _last_try_nodes(trace, leaf.rollout)
            for leaf in trace.leaves.values()
            if leaf.node_id is None
        }
        firsts: dict[int, int] = {}  # the rollout that wrote a node, lost or not
        for finished, path in trace.rollouts():
            for node in [*path, *lost.get(finished.rollout, ())]:
                firsts.setdefault(node.node_id, finished.rollout)
        # No update trains on a lost rollout, so the values of its shared nodes belong to the others.
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
            own = [
                firsts[node.node_id]
                for node in whole
                if node.origin is not Origin.PROMPT and "is_prefix" not in node.metadata
            ]
            records.rollouts.append(replace(row_, forked_from=own[0] if own else leaf.rollout))
    return records


def _last_try_nodes(trace: Trace, rollout: int) -> list[Node]:
    """The path to the last node of a rollout that a fault ended; empty if it wrote none."""
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
        metadata=json.dumps(
            node.metadata | _tool_calls(node) | (_leaf_metadata(leaf, trace) if leaf else {}), default=str
        ),
        advantages=_token_advantages(node, owner),
        trainer_logprobs=() if seen is None or not node.trainable else tuple(seen.trainer.tolist()),
        ratios=() if seen is None or not node.trainable else tuple(seen.ratio.tolist()),
        weight_version=node.weight_version,
        role=node.message.role,
        seconds=tuple(math.nan if call.seconds is None else call.seconds for call in node.tool_calls),
    )


def _tool_calls(node: Node) -> dict[str, object]:
    """Metadata of the node's tool calls, without their seconds, which have a column of their own."""
    calls = [
        {"name": call.name, "arguments": call.arguments, "status": call.status} for call in node.tool_calls
    ]
    return {"tool_calls": calls} if calls else {}


def _text(node: Node, pieces: Continuation) -> str:
    """The text of the node. For a prompt with native tools, which its message does not describe, the full
    text that the policy saw.
    """
    if DESCRIBED_TOOLS in node.metadata:
        return pieces.decode(node.token_ids)
    return node.message.content


def _rollout(
    leaf: Leaf, path: Sequence[Node], trace: Trace, rows: Mapping[int, TraceRow], trace_id: str, step: int
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
    # the metadata of nodes count their calls; that of the end has only the rollout's own values
    row = rollout_row(
        on_file,
        end,
        fault=leaf.detail if is_fault else "",
        success=None if is_fault else leaf.success,
        metrics=None if is_fault else json.dumps(dict(leaf.metrics)),
    )
    grade: dict[str, Any] = dict(leaf.grade)
    if trace.task.answers:
        grade.setdefault("targets", targets_json(trace.task.answers))
    num_failed = sum(call.is_failed for node in path for call in node.tool_calls)
    return replace(row, num_failed_calls=num_failed, **grade)


def _placeholder_row(trace: Trace, trace_id: str, step: int) -> TraceRow:
    """The row of a rollout without nodes."""
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
    """Advantages of the rollout that the row belongs to; none for a demonstrator's tokens."""
    if not node.trainable:
        return ()
    if node.shares is not None:
        return node.shares[owner].credit if owner in node.shares else ()
    return node.credit or ()


def _leaf_metadata(leaf: Leaf, trace: Trace) -> dict[str, object]:
    """Mode, intrinsic reward and reflection of a leaf, and the help that only the teacher reads."""
    mode = trace.modes[leaf.rollout] if trace.modes else ""
    parts = trace.help.get(leaf.rollout, ())
    help_ = [
        {"node_id": part.node_id, "source": part.source, "text": part.text, "tokens": len(part.token_ids)}
        for part in parts
    ]
    metadata = {"mode": mode, "intrinsic": leaf.intrinsic, "remark": leaf.reflection, "help": help_}
    return {name: value for name, value in metadata.items() if value}


# The records of steps and evaluations in the run directory: nodes, rollouts, and changes of memories.


@dataclass(frozen=True, slots=True)
class RecordFiles:
    """Writes the records of a run directory."""

    run: Path

    def write_step(
        self, parts: Components, traces: Sequence[Trace], values: NodeValues, *, step: int
    ) -> None:
        """Write a finished training step; the traces, which mark it as done, come last. Raises OSError."""
        rows = trace_rows(traces, step=step, tokenizer=parts.renderer.tokenizer, values=values)
        changes = [*parts.algorithm.memory_changes()]
        if parts.buffer is not None:
            changes.append(MemoryChange(memory="steps", change="revision", version=parts.buffer.revision))
        if changes:
            StepFiles(self.run / MEMORY).write_table(step_file(step), changes_to_table(step, changes))
        self._write(step_file(step), rows)

    def write_evaluation(self, parts: Components, traces: Sequence[Trace], *, number: int, step: int) -> None:
        """Write the evaluation that will be line ``number`` of ``evaluations.jsonl``. Raises OSError."""
        rows = trace_rows(traces, step=step, tokenizer=parts.renderer.tokenizer)
        self._write(evaluation_file(number), rows)

    def write_experts(self, parts: Components, traces: Sequence[Trace]) -> None:
        """Write the expert rollouts of the cold start. Raises OSError."""
        self._write(EXPERTS_FILE, trace_rows(traces, step=0, tokenizer=parts.renderer.tokenizer))

    def _write(self, name: str, rows: RecordRows) -> None:
        StepFiles(self.run / ROLLOUTS).write_rows(name, rows.rollouts, ROLLOUT_SCHEMA)
        StepFiles(self.run / "traces").write_rows(name, rows.nodes, SCHEMA)


def collect_node_values(
    parts: Components, trained: Sequence[Trace], update_report: UpdateReport
) -> NodeValues:
    """Return the update's log-probs and ratios of the tokens of these groups, in the order of the update."""
    settings, first_step = parts.settings, update_report.first_step
    mini_batches = make_mini_batches(trained, settings.update, seed=settings.seed, first_step=first_step)
    return values_by_node(mini_batches, update_report.tokens)


def values_by_node(
    mini_batches: Sequence[Sequence[RolloutPath]], records: Sequence[TokenRecord]
) -> dict[tuple[int, int], TokenValues]:
    """Return values by the identity of the node and the rollout in its group; of several epochs, the last
    one counts.
    """
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
            offset = 0
            for node, start, end in _trained_nodes(path):
                lead = np.full(start, np.nan, np.float32)  # nothing predicts the first token of a root
                trainer, ratio = (
                    np.concatenate([lead, each[offset : offset + end - start]]) for each in values
                )
                node_values[id(node), path.rollout] = TokenValues(trainer=trainer, ratio=ratio)
                offset += end - start
    return node_values


def _trained_nodes(path: RolloutPath) -> list[tuple[Node, int, int]]:
    """The nodes with advantages, and the range of their scored tokens."""
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
            if (
                rollout not in sizes
            ):  # a pair of self-distillation: the node's own values are those of its rollout
                continue
            mine = record.rollout_T == rollout
            if rollout not in result:
                empty = np.full(sizes[rollout], np.nan, np.float32)
                result[rollout] = (empty, empty.copy())
            for values, measured in zip(result[rollout], (record.trainer_T, record.ratio_T), strict=True):
                values[record.ordinal_T[mine]] = measured[mine]
    return result
