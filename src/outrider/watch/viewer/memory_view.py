"""What the memories of a run held at a step, what is nearest to a query, and what was shown when."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from outrider.errors import DataError
from outrider.memory.changes import MemoryChange
from outrider.memory.embedder import load_embedder
from outrider.memory.steps.browse import newest_revision, search_steps
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.watch.memory_rows import read_changes
from outrider.watch.run_directory import read_run
from outrider.watch.step_files import StepFiles, step_file

MOST: Final = 500
_EMBEDDERS: Final = ("algorithm.memory.embedder", "algorithm.tips.memory.embedder")


def memory_view(run: Path, step: int, words: str = "") -> dict[str, Any]:
    """Steps and tips that were held after training ``step`` and have ``words``, at most :data:`MOST` of
    each. Raises DataError.
    """
    revision, tips = _state_at_step(run, step)
    query = words.lower()
    matches = [tip for tip in tips if query in tip.text.lower() or query in tip.key.lower()]
    view: dict[str, Any] = {
        "step": step,
        "tips": {"total": len(matches), "items": [_tip(match) for match in matches[:MOST]]},
        "steps": {"total": 0, "items": [], "revision": revision},
    }
    path = run / "buffer.sqlite"
    if path.is_file():
        revision = newest_revision(path) if revision is None else revision
        total, items = search_steps(path, revision, words, limit=MOST)
        view["steps"] = {"total": total, "items": items, "revision": revision}
    return view


def neighbours(run: Path, step: int, words: str, *, memory: str, k: int = 20) -> list[dict[str, Any]]:
    """The ``k`` nearest steps by their key, or tips by their own text, with the cosine. Raises DataError,
    and what the run's embedder raises where it is not installed.
    """
    config = read_run(run).settings
    revision, tips = _state_at_step(run, step)
    if memory == "steps":
        embedder = load_embedder(config.get("buffer.embedder", "minilm"))
        with StepTraceBuffer(run / "buffer.sqlite", embedder, mode="read", revision=revision) as buffer:
            return [_hit(hit.record, hit.similarity) for hit in buffer.query(words, k=k)]
    embedder = load_embedder(next((config[name] for name in _EMBEDDERS if name in config), "minilm"))
    if not tips:
        return []
    vectors = embedder.embed([words, *(tip.text for tip in tips)])
    similarities = vectors[1:].astype(np.float64) @ vectors[0].astype(np.float64)
    best = np.argsort(-similarities, kind="stable")[:k]
    return [_tip(tips[i]) | {"similarity": float(similarities[i])} for i in best.tolist()]


def insertions(
    run: Path, *, until: int | None = None, memory: str = "", key: str = "", item: int = -1
) -> list[dict[str, Any]]:
    """Where retrieved steps and tips were put into rollouts, newest first, at most :data:`MOST`: of training
    step ``until`` alone, or of one ``item`` over the run.
    """
    steps = [until] if until is not None else list(reversed(StepFiles(run / "traces").steps()))
    rows: list[dict[str, Any]] = []
    for step in steps:
        rows += [
            row for row in _insertions_at_step(run, step) if item < 0 or _matches_item(row, memory, key, item)
        ]
        if len(rows) >= MOST:
            break
    return rows[:MOST]


def _state_at_step(run: Path, step: int) -> tuple[int | None, list[MemoryChange]]:
    """The revision of the steps, None where no file tells it, and the tips that were held."""
    revision: int | None = None
    tips: dict[tuple[str, int], MemoryChange] = {}
    for _, change in read_changes(run, until=step):
        if change.memory == "steps":
            revision = change.version
        elif change.change == "added":
            tips[change.key, change.item_id] = change
        else:
            tips.pop((change.key, change.item_id), None)
    return revision, list(tips.values())


def _insertions_at_step(run: Path, step: int) -> Iterator[dict[str, Any]]:
    columns = ["step", "task_key", "trace_id", "rollout", "node_id", "origin", "metadata", "text"]
    name = step_file(step)
    try:
        with (run / "traces" / name).open("rb") as stream:
            table = pq.read_table(stream, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{name} cannot be read: {str(error).partition(chr(10))[0]}") from error
    for row in table.filter(pc.is_in(table["origin"], pa.array(["buffer", "memory"]))).to_pylist():
        metadata = json.loads(row.pop("metadata") or "{}")
        row["text"] = row["text"][:300]
        yield row | {
            "where": name.removesuffix(".parquet"),
            "ids": metadata.get("step_ids") or metadata.get("tip_ids") or [],
            "similarity": _number(metadata.get("similarity", metadata.get("similarities"))),
            "source": metadata.get("source") or ", ".join(map(str, metadata.get("writers", ()))),
        }


def _matches_item(row: dict[str, Any], memory: str, key: str, item: int) -> bool:
    """A tip's number counts within its buffer, which with the scope ``task`` is the task's."""
    is_same_memory = row["origin"] == ("buffer" if memory == "steps" else "memory")
    return is_same_memory and item in row["ids"] and (memory == "steps" or key in (row["task_key"], "all"))


def _number(value: object) -> float | None:
    number = max(value, default=None) if isinstance(value, list) else value
    return float(number) if isinstance(number, int | float) and number == number else None


def _tip(tip: MemoryChange) -> dict[str, Any]:
    names = ("item_id", "key", "text", "score", "writer", "written_at", "version")
    return {name: getattr(tip, name) for name in names}


def _hit(record: Any, similarity: float) -> dict[str, Any]:
    return {
        "item_id": record.step_id,
        "writer": record.trajectory_id,
        "key": record.task_key,
        "agent": record.agent,
        "score": record.reward,
        "index": record.step_index,
        "text": record.text,
        "observation": record.observation,
        "similarity": similarity,
    }
