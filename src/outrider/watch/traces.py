"""Traces on disk: one Parquet file per training step, one row per node of the trace tree."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from outrider.atomic_io import TEMPORARY, replacing
from outrider.errors import DataError
from outrider.types import Origin, Outcome

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
    ]
)

_row_values: Final = attrgetter(*SCHEMA.names)
_FILE_NAME: Final = re.compile(r"step-(\d{6,})\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One node. ``parent_id`` is -1 at the root; ``rollout`` is the first rollout of the group that the node
    belonged to.

    ``tokens`` (decoded pieces), ``logprobs`` and ``entropies`` (nats) have one value per token on policy
    nodes and are empty elsewhere. ``outcome``, ``episode_return``, ``advantage`` and ``hybrid`` are set on
    leaves; ``metadata`` is a JSON object.
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

    A file is either absent or whole.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, rows: Sequence[TraceRow]) -> Path:
        """Write the nodes of one step under a temporary name, then rename. Raises ``ValueError`` for rows of
        another step.
        """
        if any(row.step != step for row in rows):
            raise ValueError(f"a row belongs to another step than {step}")
        return self._write(self.directory / f"step-{step:06d}.parquet", rows)

    def write_evaluation(self, number: int, rows: Sequence[TraceRow]) -> Path:
        """Write the rollouts of the evaluation in line ``number`` (from 0) of ``evaluations.jsonl``."""
        return self._write(self.directory / evaluation_file(number), rows)

    def _write(self, path: Path, rows: Sequence[TraceRow]) -> Path:
        with replacing(path) as stream:
            pq.write_table(_table(rows), stream, compression="zstd")
        return path

    def resume(self, step: int) -> int:
        """Remove the files of steps after the checkpoint step, and what a kill left half written; return how
        many.
        """
        later = [path for number, path in _step_files(self.directory) if number > step]
        doomed = [*later, *sorted(self.directory.glob(TEMPORARY))]
        for path in doomed:
            path.unlink()
        return len(doomed)


class TraceReader:
    """Reads what :class:`TraceWriter` wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def steps(self) -> tuple[int, ...]:
        """Steps that have a file, ascending; empty when the directory is missing."""
        return tuple(number for number, _ in _step_files(self.directory))

    def read(self, step: int) -> tuple[TraceRow, ...]:
        """The nodes of a step in the order written. Raises :class:`~outrider.errors.DataError` for a missing
        or damaged file.
        """
        return self._read(self.directory / f"step-{step:06d}.parquet")

    def read_evaluation(self, number: int) -> tuple[TraceRow, ...]:
        """The rollouts of the evaluation in line ``number`` of ``evaluations.jsonl``. Raises as :meth:`read`
        does.
        """
        return self._read(self.directory / evaluation_file(number))

    def has_evaluation(self, number: int) -> bool:
        """Whether the rollouts of this evaluation are on file."""
        return (self.directory / evaluation_file(number)).exists()

    def _read(self, path: Path) -> tuple[TraceRow, ...]:
        try:
            # a stream, because messages about a path name the folders of this machine
            with path.open("rb") as stream:
                table = pq.read_table(stream).select(SCHEMA.names).cast(SCHEMA)
            return tuple(_row(values) for values in table.to_pylist())
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            reason = (
                "the file is missing"
                if isinstance(error, FileNotFoundError)
                else str(error).partition("\n")[0]
            )
            raise DataError(f"{path.name} cannot be read: {reason}") from error


def evaluation_file(number: int) -> str:
    """Name of the file with the rollouts of an evaluation, by its line in ``evaluations.jsonl``."""
    return f"evaluation-{number:03d}.parquet"


def _step_files(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    matches = ((_FILE_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _table(rows: Iterable[TraceRow]) -> pa.Table:
    values = [[_storable(value) for value in _row_values(row)] for row in rows]
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in values], schema=SCHEMA)


def _storable(value: Any) -> Any:
    """Plain Python values; a lone surrogate, which UTF-8 cannot hold, is spelled out as its escape."""
    if isinstance(value, str):
        return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, tuple):
        return [_storable(item) for item in value]
    return value


def _row(values: dict[str, Any]) -> TraceRow:
    for name in ("tokens", "logprobs", "entropies"):
        values[name] = tuple(values[name])
    values["origin"] = Origin(values["origin"])
    values["outcome"] = None if values["outcome"] is None else Outcome(values["outcome"])
    return TraceRow(**values)
