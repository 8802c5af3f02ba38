"""One group as a tree, and one rollout with a value for every token."""

import json
import math
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc

from outrider.errors import DataError
from outrider.types import Origin
from outrider.watch.rollout_rows import read_rollouts
from outrider.watch.step_files import StepFiles
from outrider.watch.traces import SCHEMA
from outrider.watch.viewer.rollout_query import rows_of_table

LONGEST_TEXT: Final = 200_000
"""Letters of a turn that are sent at once; the page asks for the whole of a longer one."""
VALUES: Final = ("entropies", "logprobs", "advantages", "ratios", "trainer_logprobs")


def group_view(run: Path, stem: str, trace_id: str) -> dict[str, Any]:
    """Nodes (without tokens) and rollouts of a group. Raises DataError."""
    nodes = [_node(row) for row in _rows(run, stem, trace_id)]
    table = read_rollouts(run, f"{stem}.parquet")
    rollouts = rows_of_table(
        table.filter(pc.equal(table["trace_id"], trace_id)).append_column(
            "where", [[stem] * _count(table, trace_id)]
        )
    )
    if not nodes and not rollouts:
        raise DataError(f"{stem} has no group {trace_id}")
    return {"where": stem, "trace_id": trace_id, "nodes": nodes, "rollouts": rollouts}


def tokens_view(run: Path, stem: str, trace_id: str, rollout: int) -> dict[str, Any]:
    """The tokens of the policy's nodes on the path of a rollout, with their values; by node. Raises
    DataError.
    """
    rows = {row["node_id"]: row for row in _rows(run, stem, trace_id)}
    table = read_rollouts(run, f"{stem}.parquet")
    [*leaves] = [
        row["node_id"]
        for row in table.select(["trace_id", "rollout", "node_id"]).to_pylist()
        if (row["trace_id"], row["rollout"]) == (trace_id, rollout)
    ]
    if not leaves:
        raise DataError(f"{stem} has no rollout {rollout} in group {trace_id}")
    nodes: dict[str, Any] = {}
    node_id = leaves[0]
    while node_id in rows and str(node_id) not in nodes:
        row = rows[node_id]
        nodes[str(node_id)] = {"tokens": row["tokens"]} | {
            name: [_short(value) for value in row[name]] for name in VALUES
        }
        node_id = row["parent_id"]
    return {"where": stem, "trace_id": trace_id, "rollout": rollout, "nodes": nodes}


def whole_text(run: Path, stem: str, trace_id: str, node_id: int) -> dict[str, Any]:
    """A turn that is longer than :data:`LONGEST_TEXT`. Raises DataError."""
    for row in _rows(run, stem, trace_id):
        if row["node_id"] == node_id:
            return {"text": row["text"]}
    raise DataError(f"{stem} has no node {node_id} in group {trace_id}")


def _rows(run: Path, stem: str, trace_id: str) -> list[dict[str, Any]]:
    table = StepFiles(run / "traces").read(f"{stem}.parquet", SCHEMA)
    rows: list[dict[str, Any]] = table.filter(pc.equal(table["trace_id"], trace_id)).to_pylist()
    return rows


def _count(table: Any, trace_id: str) -> int:
    return int(pc.sum(pc.equal(table["trace_id"], trace_id)).as_py() or 0)


def _node(row: dict[str, Any]) -> dict[str, Any]:
    text, entropies = row["text"], row["entropies"]
    try:
        metadata = json.loads(row["metadata"] or "{}")
    except (ValueError, RecursionError):
        metadata = {}
    return {
        "node_id": row["node_id"],
        "parent_id": row["parent_id"],
        "rollout": row["rollout"],
        "origin": row["origin"],
        "role": row["role"] or _ROLES[row["origin"]],
        "text": text[:LONGEST_TEXT],
        "num_hidden": max(0, len(text) - LONGEST_TEXT),
        "num_tokens": len(row["tokens"]),
        "mean_entropy": _short(sum(entropies) / len(entropies)) if entropies else None,
        "weight_version": row["weight_version"],
        "metadata": _clean(metadata) if isinstance(metadata, dict) else {},
    }


# of version 1, whose nodes do not say it
_ROLES: Final = {
    Origin.PROMPT: "user",
    Origin.POLICY: "assistant",
    Origin.ENVIRONMENT: "tool",
    Origin.BUFFER: "inline",
    Origin.MEMORY: "user",
    Origin.DEMONSTRATION: "assistant",
}


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _clean(value: Any) -> Any:
    """Numbers that JSON has not become null."""
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
