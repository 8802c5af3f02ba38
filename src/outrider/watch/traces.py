"""Traces on disk: one Parquet file per training step, one row per node of the trace tree."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from outrider.errors import DataError
from outrider.types import Origin, Outcome
from outrider.watch.step_files import EXPERTS_FILE, StepFiles, evaluation_file, step_file

_VALUES: Final = pa.list_(pa.float32())  # of a token: what a person looks at, and half the size

SCHEMA: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("task_key", pa.string(), nullable=False),
        pa.field("trace_id", pa.string(), nullable=False),
        pa.field("node_id", pa.int64(), nullable=False),
        pa.field("parent_id", pa.int64(), nullable=False),
        pa.field("rollout", pa.int64(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("tokens", pa.list_(pa.string()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float64()), nullable=False),
        pa.field("entropies", pa.list_(pa.float64()), nullable=False),
        pa.field("outcome", pa.string()),
        pa.field("episode_return", pa.float64()),
        pa.field("advantage", pa.float64()),
        pa.field("hybrid", pa.bool_()),
        pa.field("metadata", pa.string(), nullable=False),
        # since version 2 of the format
        pa.field("advantages", _VALUES, nullable=False),
        pa.field("trainer_logprobs", _VALUES, nullable=False),
        pa.field("ratios", _VALUES, nullable=False),
        pa.field("weight_version", pa.int64()),
        pa.field("role", pa.string()),
    ]
)

_row_values: Final = attrgetter(*SCHEMA.names)
_LISTS: Final = [field.name for field in SCHEMA if pa.types.is_list(field.type)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One node. ``parent_id`` is -1 at the root; ``rollout`` is the first rollout of the group that goes
    through the node: of those with a return, else of those that a fault ended.

    ``tokens`` (decoded pieces), ``logprobs`` and ``entropies`` (nats) have one value per token on policy
    nodes and are empty elsewhere. ``outcome``, ``episode_return``, ``advantage`` and ``hybrid`` are set on
    leaves; ``metadata`` is a JSON object.

    ``advantages``, ``trainer_logprobs`` (the trainer's, before its first optimiser step) and ``ratios`` (the
    importance ratio of the last pass that trained the token, times its scale) have one value per token, or
    none where the update did not train the node; of a node that several rollouts share they are those of
    ``rollout``. ``weight_version`` is that of the weights which sampled the tokens,
    ``role`` the message's.
    """

    step: int
    task_key: str
    trace_id: str
    node_id: int
    parent_id: int
    rollout: int
    origin: Origin
    text: str
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    outcome: Outcome | None = None
    episode_return: float | None = None
    advantage: float | None = None
    hybrid: bool | None = None
    metadata: str = "{}"
    advantages: tuple[float, ...] = ()
    trainer_logprobs: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    weight_version: int | None = None
    role: str | None = None

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.entropies):
            raise ValueError(f"node {self.node_id}: tokens, log-probs and entropies differ in number")
        if self.tokens and self.origin is not Origin.POLICY:
            raise ValueError(
                f"node {self.node_id}: only policy nodes have token values, this one is {self.origin.value}"
            )


class TraceWriter:
    """Writes ``step-000012.parquet`` files, one per training step, and ``evaluation-002.parquet``, one per
    evaluation.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = StepFiles(directory)
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, rows: Sequence[TraceRow]) -> Path:
        """Write the nodes of one step under a temporary name, then rename. Raises ``ValueError`` for rows of
        another step.
        """
        if any(row.step != step for row in rows):
            raise ValueError(f"a row belongs to another step than {step}")
        return self.files.write(step_file(step), node_table(rows))

    def write_evaluation(self, number: int, rows: Sequence[TraceRow]) -> Path:
        """Write the rollouts of the evaluation in line ``number`` (from 0) of ``evaluations.jsonl``."""
        return self.files.write(evaluation_file(number), node_table(rows))

    def write_experts(self, rows: Sequence[TraceRow]) -> Path:
        """Write the expert rollouts of the cold start."""
        return self.files.write(EXPERTS_FILE, node_table(rows))

    def resume(self, step: int) -> int:
        """Remove the files of steps after the checkpoint step, and what a kill left half written; return how
        many.
        """
        return self.files.resume(step)


class TraceReader:
    """Reads what :class:`TraceWriter` wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = StepFiles(directory)

    def steps(self) -> tuple[int, ...]:
        """Steps that have a file, ascending; empty when the directory is missing."""
        return self.files.steps()

    def read(self, step: int) -> tuple[TraceRow, ...]:
        """The nodes of a step in the order written. Raises :class:`~outrider.errors.DataError` for a missing
        or damaged file.
        """
        return read_rows(self.directory, step_file(step))

    def read_evaluation(self, number: int) -> tuple[TraceRow, ...]:
        """The rollouts of the evaluation in line ``number`` of ``evaluations.jsonl``. Raises as :meth:`read`
        does.
        """
        return read_rows(self.directory, evaluation_file(number))

    def has_evaluation(self, number: int) -> bool:
        """Whether the rollouts of this evaluation are on file."""
        return (self.directory / evaluation_file(number)).exists()


def parse_metadata(row: TraceRow) -> dict[str, Any]:
    """What the row's metadata says; empty where it is no JSON object."""
    try:
        metadata = json.loads(row.metadata or "{}")
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def read_rows(directory: Path, name: str) -> tuple[TraceRow, ...]:
    """The nodes of a file. Raises :class:`~outrider.errors.DataError`."""
    table = StepFiles(directory).read(name, SCHEMA)
    try:
        return tuple(_row(values) for values in table.to_pylist())
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} cannot be read: {str(error).partition(chr(10))[0]}") from error


def node_table(rows: Iterable[TraceRow]) -> pa.Table:
    """The rows as they are on file."""
    values = [[storable(value) for value in _row_values(row)] for row in rows]
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in values], schema=SCHEMA)


def storable(value: Any) -> Any:
    """Plain Python values; a lone surrogate, which UTF-8 cannot hold, is spelled out as its escape."""
    if isinstance(value, str):
        return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, tuple):
        return [storable(item) for item in value]
    return value


def _row(values: dict[str, Any]) -> TraceRow:
    for name in _LISTS:
        values[name] = tuple(values[name])
    values["origin"] = Origin(values["origin"])
    values["outcome"] = None if values["outcome"] is None else Outcome(values["outcome"])
    return TraceRow(**values)
