"""Rollouts on disk: ``rollouts/step-000012.parquet`` and ``rollouts/evaluation-002.parquet``, one row per
rollout, faulted ones with their reason: what tables and histograms need without a token being read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Final

import pyarrow as pa

from outrider.types import Origin, Outcome
from outrider.watch.step_files import EXPERTS_FILE, StepFiles, evaluation_file, step_file
from outrider.watch.traces import TraceRow, parse_metadata, read_rows, storable

ROLLOUTS: Final = "rollouts"
"""Name of the folder in a run directory."""

ROLLOUT_SCHEMA: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("task_key", pa.string(), nullable=False),
        pa.field("trace_id", pa.string(), nullable=False),
        pa.field("rollout", pa.int64(), nullable=False),
        pa.field("node_id", pa.int64(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("fault", pa.string(), nullable=False),
        pa.field("episode_return", pa.float64()),
        pa.field("success", pa.bool_()),
        pa.field("advantage", pa.float64()),
        pa.field("intrinsic", pa.float64(), nullable=False),
        pa.field("mode", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("num_turns", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("num_calls", pa.int64(), nullable=False),
        pa.field("mean_entropy", pa.float64()),
        pa.field("num_splices", pa.int64(), nullable=False),
        pa.field("num_tips", pa.int64(), nullable=False),
        pa.field("forked_from", pa.int64(), nullable=False),
        pa.field("metrics", pa.string()),
    ]
)
_values: Final = attrgetter(*ROLLOUT_SCHEMA.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout. ``node_id`` is its last node, -1 where a fault came before any; ``fault`` the reason of
    an outcome that is a fault, else empty.

    ``episode_return`` and ``success`` are None after a fault, ``advantage`` where none was given. ``kind`` is
    ``on-policy``, ``hybrid`` (a retrieved step), ``tips`` or ``demonstration``. Counted over its path, shared
    nodes too: policy turns, policy tokens, tool calls, retrieved steps, and tips. ``mean_entropy`` is in nats
    a token. ``forked_from`` is the rollout that wrote its first nodes, or itself. ``metrics`` are those that
    the environment or the agent program returned, as JSON; None after a fault.
    """

    step: int
    task_key: str
    trace_id: str
    rollout: int
    node_id: int
    outcome: Outcome
    fault: str = ""
    episode_return: float | None = None
    success: bool | None = None
    advantage: float | None = None
    intrinsic: float = 0.0
    mode: str = ""
    kind: str = "on-policy"
    num_turns: int = 0
    num_tokens: int = 0
    num_calls: int = 0
    mean_entropy: float | None = None
    num_splices: int = 0
    num_tips: int = 0
    forked_from: int = 0
    metrics: str | None = None


class RolloutWriter:
    """Writes the rollouts of steps and evaluations."""

    def __init__(self, run: Path) -> None:
        self._files = StepFiles(run / ROLLOUTS)

    def write(self, step: int, rows: Sequence[RolloutRow]) -> Path:
        """Of a training step. Raises OSError."""
        return self._files.write(step_file(step), rollout_table(rows))

    def write_evaluation(self, number: int, rows: Sequence[RolloutRow]) -> Path:
        """Of the evaluation in line ``number`` (from 0) of ``evaluations.jsonl``. Raises OSError."""
        return self._files.write(evaluation_file(number), rollout_table(rows))

    def write_experts(self, rows: Sequence[RolloutRow]) -> Path:
        """Of the experts of the cold start. Raises OSError."""
        return self._files.write(EXPERTS_FILE, rollout_table(rows))

    def resume(self, step: int) -> int:
        """Remove the files of steps after the checkpoint step; return how many."""
        return self._files.resume(step)


def rollout_table(rows: Sequence[RolloutRow]) -> pa.Table:
    """The rows as they are on file."""
    columns = zip(*(_values(row) for row in rows), strict=True) if rows else [()] * len(ROLLOUT_SCHEMA)
    arrays = [
        pa.array([storable(value) for value in column], field.type)
        for column, field in zip(columns, ROLLOUT_SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=ROLLOUT_SCHEMA)


def read_rollouts(run: Path, name: str) -> pa.Table:
    """The rollouts of a file's name; where version 1 wrote none, made from its nodes. Raises DataError."""
    if (run / ROLLOUTS / name).is_file():
        return StepFiles(run / ROLLOUTS).read(name, ROLLOUT_SCHEMA)
    return rollout_table(list(rollouts_from_traces(read_rows(run / "traces", name))))


def rollouts_from_traces(rows: Sequence[TraceRow]) -> Iterator[RolloutRow]:
    """The rollouts that ended at a leaf among these nodes, as far as version 1 of the records tells."""
    nodes = {(row.trace_id, row.node_id): row for row in rows}
    for leaf in rows:
        if leaf.outcome is None:
            continue
        path, node = [leaf], leaf
        while node.parent_id != -1 and (parent := nodes.get((leaf.trace_id, node.parent_id))) is not None:
            path.append(parent)
            node = parent
        yield rollout_row(path[::-1], leaf)


def rollout_row(
    path: Sequence[TraceRow],
    leaf: TraceRow,
    *,
    fault: str = "",
    success: bool | None = None,
    metrics: str | None = None,
) -> RolloutRow:
    """Of the rows from the root to ``leaf``, which has the outcome."""
    metadata = parse_metadata(leaf)
    policy = [row for row in path if row.origin is Origin.POLICY]
    entropies = [value for row in policy for value in row.entropies]
    assert leaf.outcome is not None
    generated = [row for row in path if row.origin is not Origin.PROMPT]
    return RolloutRow(
        step=leaf.step,
        task_key=leaf.task_key,
        trace_id=leaf.trace_id,
        rollout=leaf.rollout,
        node_id=leaf.node_id,
        outcome=leaf.outcome,
        fault=fault,
        episode_return=leaf.episode_return,
        success=success,
        advantage=leaf.advantage,
        intrinsic=_number(metadata.get("intrinsic")),
        mode=str(metadata.get("mode", "")),
        kind=_kind(path),
        num_turns=len(policy),
        num_tokens=sum(len(row.tokens) for row in policy),
        num_calls=int(sum(_number(parse_metadata(row).get("num_tool_calls")) for row in path)),
        mean_entropy=sum(entropies) / len(entropies) if entropies else None,
        num_splices=sum(row.origin is Origin.BUFFER for row in path),
        num_tips=sum(row.origin is Origin.MEMORY for row in path),
        forked_from=generated[0].rollout if generated else leaf.rollout,
        metrics=metrics,
    )


def _kind(path: Sequence[TraceRow]) -> str:
    origins = {row.origin for row in path}
    if Origin.DEMONSTRATION in origins:
        return "demonstration"
    if Origin.BUFFER in origins:
        return "hybrid"
    return "tips" if Origin.MEMORY in origins else "on-policy"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
