"""``queue.jsonl`` of a checkpoint: the groups of the next step where they were played beside the update, so
that a run that is continued trains on the very same ones.

The first line holds what belongs to the whole step, every other one a group. Floats are written so that the
same bits are read; nothing is pickled.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter

from outrider.json_lines import parsed, whole_lines
from outrider.trace import Leaf, Node, Trace
from outrider.train.data.task_sampling import SampledStep
from outrider.types import Task

QUEUE: Final = "queue.jsonl"
_ValueT = TypeVar("_ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedStep:
    """A step that was played and not yet trained on. ``counts`` are the algorithm's from before, ``seconds``
    what the rollouts took.
    """

    sampled: SampledStep
    counts: Sequence[Mapping[str, int]]
    seconds: float


def write_queue(folder: Path, queued: QueuedStep) -> None:
    """Into a checkpoint that is being written. Raises OSError."""
    sampled = queued.sampled
    trained = {id(trace) for trace in sampled.trained}
    head = {
        "is_filtered": sampled.is_filtered,
        "faults": dict(sampled.faults),
        "fault_reasons": list(sampled.fault_reasons),
        "num_extra_batches": sampled.num_extra_batches,
        "cursor": sampled.cursor,
        "loop_lag_s": sampled.loop_lag_s,
        "counts": [dict(entry) for entry in queued.counts],
        "seconds": queued.seconds,
    }
    groups = [group_to_dict(trace) | {"is_trained": id(trace) in trained} for trace in sampled.traces]
    # What a foreign environment put into a node's metadata may be any object: as the trace files have it.
    lines = [json.dumps(entry, default=str) + "\n" for entry in (head, *groups)]
    (folder / QUEUE).write_text("".join(lines), encoding="utf-8")


def read_queue(folder: Path) -> QueuedStep | None:
    """Of a checkpoint whose files are known to be whole; None where nothing was ahead. Raises OSError, and
    ValueError, KeyError or TypeError for damage.
    """
    lines = [parsed(line) for line in whole_lines(folder / QUEUE)]
    if not lines:
        return None
    head, *groups = lines
    traces = [read_group(group) for group in groups]
    sampled = SampledStep(
        is_filtered=bool(head["is_filtered"]),
        traces=traces,
        trained=[trace for trace, group in zip(traces, groups, strict=True) if group["is_trained"]],
        faults=Counter(head["faults"]),
        fault_reasons=tuple(head["fault_reasons"]),
        num_extra_batches=int(head["num_extra_batches"]),
        cursor=int(head["cursor"]),
        loop_lag_s=head.get("loop_lag_s"),
    )
    return QueuedStep(sampled=sampled, counts=head["counts"], seconds=float(head["seconds"]))


def group_to_dict(trace: Trace) -> dict[str, Any]:
    """A group as plain values."""
    return {
        "task": asdict(trace.task),
        "modes": list(trace.modes),
        "without_memory": trace.without_memory,
        "is_replayed": trace.is_replayed,
        "pruned": sorted(trace.pruned),
        "nodes": [_dump(Node, node) for node in trace.nodes],
        # in the order in which they ended: nothing reads it, and nothing has to be told apart
        "leaves": [_dump(Leaf, leaf) for leaf in trace.leaves.values()],
    }


def read_group(group: Mapping[str, Any]) -> Trace:
    """The group of these values. Raises ValueError, KeyError or TypeError for damage."""
    trace = Trace(task=read_task(group["task"]), modes=group["modes"])
    trace.without_memory = bool(group["without_memory"])
    trace.is_replayed = bool(group["is_replayed"])
    trace.pruned = frozenset(group["pruned"])
    trace.nodes = [_parse(Node, node) for node in group["nodes"]]
    for leaf in group["leaves"]:
        trace.finish(_parse(Leaf, leaf))
    return trace


def read_task(values: Mapping[str, Any]) -> Task:
    """The task of these values. Raises KeyError or TypeError for damage."""
    return Task(**{**values, "answers": tuple(values["answers"])})


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _dump(kind: type, value: object) -> Any:
    return _adapter(kind).dump_python(value, mode="json", fallback=str)


def _parse(kind: Callable[..., _ValueT], value: object) -> _ValueT:
    result: _ValueT = _adapter(kind).validate_python(value)
    return result
