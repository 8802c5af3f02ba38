"""Records of a run in Parquet: nodes of rollouts, rollouts, and changes of memories.

Each folder has one file per training step and per evaluation; a file is absent or whole.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from outrider.errors import DataError
from outrider.files import TEMPORARY, replacing
from outrider.memory.tips import MemoryChange
from outrider.trace import EPISODE
from outrider.types import Origin, Outcome

FORMAT: Final = {b"outrider.format": b"2"}
"""Version of the records, in the metadata of every file; files without one are of version 1."""

_STEP: Final = re.compile(r"step-(\d{6,})\.parquet")
_EVALUATION: Final = re.compile(r"evaluation-(\d{3,})\.parquet")


def step_file(step: int) -> str:
    """Name of the file of a training step."""
    return f"step-{step:06d}.parquet"


def evaluation_file(number: int) -> str:
    """Name of the file of an evaluation, by its line in ``evaluations.jsonl`` (from 0)."""
    return f"evaluation-{number:03d}.parquet"


EXPERTS_FILE: Final = "cold-start.parquet"
"""Expert rollouts of the cold start."""
_LATER: Final = frozenset(
    {"metrics", "targets", "answer", "reward_parts", "reason", "num_failed_calls", "seconds"}
)
"""Columns that were added within version 2 of the records."""


class StepFiles:
    """The files of one kind of record. The first write creates the folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write_table(self, name: str, table: pa.Table) -> Path:
        """Write a file as a whole. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / name
        with replacing(path) as stream:
            pq.write_table(table.replace_schema_metadata(FORMAT), stream, compression="zstd")
        return path

    def write_rows(self, name: str, rows: Sequence[Any], schema: pa.Schema) -> Path:
        """Write dataclass objects as a file. Raises OSError."""
        return self.write_table(name, rows_to_table(rows, schema))

    def read_table(self, name: str, schema: pa.Schema) -> pa.Table:
        """The columns of ``schema``; one that an earlier version did not write is empty or null.

        Raises :class:`~outrider.errors.DataError` for a missing or damaged file.
        """
        try:
            # a stream, because messages about a path name the folders of this machine
            with (self.directory / name).open("rb") as stream:
                # single-threaded: half the time of `pq.read_table` for these small files
                file = pq.ParquetFile(stream)
                written = set(file.schema_arrow.names)
                names = [name for name in schema.names if name in written]
                table = file.read(columns=names, use_threads=False)
            added = _added(table, schema)
            columns = [added[name] if name in added else table[name] for name in schema.names]
            return pa.table(columns, schema.names).cast(schema)
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            is_missing = isinstance(error, FileNotFoundError)
            reason = "the file is missing" if is_missing else str(error).partition("\n")[0]
            raise DataError(f"{name} cannot be read: {reason}") from error

    def steps(self) -> tuple[int, ...]:
        """Training steps that have a file, ascending; empty when the folder is missing."""
        return self._numbers(_STEP)

    def evaluations(self) -> tuple[int, ...]:
        """Numbers of the evaluations that have a file, ascending."""
        return self._numbers(_EVALUATION)

    def resume(self, step: int) -> int:
        """Remove the files of steps after the checkpoint ``step``, and files that a killed process left
        half-written. Returns the number of removed files.
        """
        later = [self.directory / step_file(number) for number in self.steps() if number > step]
        obsolete = [*later, *sorted(self.directory.glob(TEMPORARY))]
        for path in obsolete:
            path.unlink()
        return len(obsolete)

    def _numbers(self, pattern: re.Pattern[str]) -> tuple[int, ...]:
        if not self.directory.is_dir():
            return ()
        matches = (pattern.fullmatch(path.name) for path in self.directory.iterdir())
        return tuple(sorted(int(match[1]) for match in matches if match))


def _added(table: pa.Table, schema: pa.Schema) -> dict[str, pa.Array]:
    """Default values for columns that earlier versions did not write. Apart from these columns, a file of
    version 2 that lacks a column is damaged.
    """
    is_first = b"outrider.format" not in (table.schema.metadata or {})
    added = [
        field
        for field in schema
        if field.name not in table.column_names
        and (field.name in _LATER or (is_first and (field.nullable or pa.types.is_list(field.type))))
    ]
    return {
        field.name: pa.array([[] if pa.types.is_list(field.type) else None] * len(table), field.type)
        for field in added
    }


_TYPES: Final[Mapping[object, pa.DataType]] = {
    int: pa.int64(), float: pa.float64(), bool: pa.bool_(),
    tuple[str, ...]: pa.list_(pa.string()), tuple[float, ...]: pa.list_(pa.float64()),
}  # fmt: skip


def schema_of(row: type, *, single_precision: Sequence[str] = ()) -> pa.Schema:
    """The columns of a dataclass: one per field; a field that may be None is nullable, and enumerations are
    strings. Token values in ``single_precision`` are float32.
    """
    fields = []
    for name, hint in get_type_hints(row).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        column = pa.list_(pa.float32()) if name in single_precision else _TYPES.get(kinds[0], pa.string())
        fields.append(pa.field(name, column, nullable=NoneType in kinds))
    return pa.schema(fields)


def rows_to_table(rows: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """Dataclass objects as a table in the schema of the files."""
    read = attrgetter(*schema.names)
    columns = zip(*map(read, rows), strict=True) if rows else [()] * len(schema)
    arrays = [
        pa.array([storable(value) for value in column], field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


# Traces on disk: one Parquet file per training step, one row per node of the trace tree.


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One node of a trace tree. ``parent_id`` is -1 at the root. ``rollout`` is the first rollout of the
    group that contains the node; rollouts with a return come before faulted ones.

    ``tokens`` (decoded pieces), ``logprobs`` and ``entropies`` (nats) have one value per token on policy
    nodes and are empty elsewhere. ``outcome``, ``episode_return``, ``advantage`` and ``hybrid`` are set on
    leaves; ``metadata`` is a JSON object.

    ``advantages``, ``trainer_logprobs`` (the trainer's, before its first optimiser step) and ``ratios`` (the
    importance ratio of the last pass that trained the token, times its scale) have one value per token, or
    are empty if the update did not train the node. If several rollouts share the node, the values are those
    of ``rollout``. ``weight_version`` is the version of the weights that sampled the tokens, ``role`` the
    role of the message. ``seconds`` are the wall times of the ``tool_calls`` in the metadata, NaN if unknown:
    a column of its own that is not compared, because a resumed run repeats all others.
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
    seconds: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.entropies):
            raise ValueError(f"node {self.node_id}: tokens, log-probs and entropies differ in number")
        if self.tokens and self.origin is not Origin.POLICY:
            raise ValueError(
                f"node {self.node_id}: only policy nodes have token values, this one is {self.origin.value}"
            )


# for display only: float32 halves the size
SCHEMA: Final = schema_of(TraceRow, single_precision=("advantages", "trainer_logprobs", "ratios", "seconds"))
_LISTS: Final = [field.name for field in SCHEMA if pa.types.is_list(field.type)]


class TraceReader(StepFiles):
    """Reads nodes of rollouts. Raises :class:`~outrider.errors.DataError` for a missing or damaged file."""

    def read(self, step: int) -> tuple[TraceRow, ...]:
        """The nodes of a step in the order written."""
        return read_rows(self.directory, step_file(step))

    def read_evaluation(self, number: int) -> tuple[TraceRow, ...]:
        """The rollouts of the evaluation in line ``number`` of ``evaluations.jsonl``."""
        return read_rows(self.directory, evaluation_file(number))

    def has_evaluation(self, number: int) -> bool:
        """Whether the rollouts of this evaluation are stored."""
        return (self.directory / evaluation_file(number)).exists()


def parse_metadata(row: TraceRow) -> dict[str, Any]:
    """The row's metadata, or an empty dict if it is not a JSON object."""
    try:
        metadata = json.loads(row.metadata or "{}")
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def path_to_leaf(nodes: Mapping[tuple[str, int], TraceRow], leaf: TraceRow) -> list[TraceRow]:
    """The rows from the root to a leaf, as far as they are in ``nodes`` (by trace and node id)."""
    path = [leaf]
    while (parent := nodes.get((leaf.trace_id, path[-1].parent_id))) is not None and len(path) <= len(nodes):
        path.append(parent)
    return path[::-1]


def whole_rollouts(rows: Sequence[TraceRow]) -> Iterator[list[TraceRow]]:
    """The rollouts of a trace file in its order, each with its rows from root to leaf. Raises DataError for a
    missing node.
    """
    nodes = {(row.trace_id, row.node_id): row for row in rows}
    for row in rows:
        if row.outcome is not None:
            path = path_to_leaf(nodes, row)
            if (missing := path[0].parent_id) != -1:
                raise DataError(f"trace {row.trace_id}: node {missing} is missing from the record")
            yield path


def last_episode(path: Sequence[TraceRow]) -> Sequence[TraceRow]:
    """The rows of the last episode of a rollout (LaMer); all rows if it has one."""
    starts = [
        n for n, row in enumerate(path) if row.origin is Origin.PROMPT and EPISODE in parse_metadata(row)
    ]
    return path[starts[-1] :] if starts else path


def read_rows(directory: Path, name: str) -> tuple[TraceRow, ...]:
    """The nodes of a file. Raises :class:`~outrider.errors.DataError`."""
    table = StepFiles(directory).read_table(name, SCHEMA)
    try:
        return tuple(_row(values) for values in table.to_pylist())
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} cannot be read: {str(error).partition(chr(10))[0]}") from error


def storable(value: Any) -> Any:
    """Convert to plain Python values. Lone surrogates, which UTF-8 cannot encode, become escape sequences."""
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


# Rollouts on disk: ``rollouts/step-000012.parquet`` and ``rollouts/evaluation-002.parquet``, one row per
# rollout. Faulted rollouts have a row with their reason. Tables and histograms read only these files.


ROLLOUTS: Final = "rollouts"
"""Name of the folder in a run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout. ``node_id`` is its last node, or -1 if it faulted before its first node. ``fault`` is the
    reason of a faulted rollout, else empty.

    ``episode_return`` and ``success`` are None after a fault; ``advantage`` is None if none was computed.
    ``kind`` is ``on-policy``, ``hybrid`` (a retrieved step), ``tips``, ``guided`` (behind a prefix) or
    ``demonstration``. Policy turns, policy tokens, tool calls, retrieved steps, and tips are counted over the
    whole path, including shared nodes. ``mean_entropy`` is in nats per token. ``forked_from`` is the rollout
    that wrote its first nodes, or the rollout itself. ``metrics`` is a JSON object with the metrics that the
    environment or the agent program returned; None after a fault.

    ``targets`` (a JSON list of accepted answers), ``answer`` (the one that was graded), ``reward_parts`` (a
    JSON object of numbers) and ``reason`` (one line) explain the return; None if unknown.
    ``num_failed_calls`` counts the tool calls that were refused, or ended with an error or at a time limit;
    None in older records.
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
    targets: str | None = None
    answer: str | None = None
    reward_parts: str | None = None
    reason: str | None = None
    num_failed_calls: int | None = None


ROLLOUT_SCHEMA: Final = schema_of(RolloutRow)


def read_rollouts(run: Path, name: str) -> pa.Table:
    """Read the rollouts of a step or evaluation. For records of version 1, which have no rollout files,
    derive them from the nodes.

    Raises DataError.
    """
    if (run / ROLLOUTS / name).is_file():
        return StepFiles(run / ROLLOUTS).read_table(name, ROLLOUT_SCHEMA)
    return rows_to_table(list(rollouts_from_traces(read_rows(run / "traces", name))), ROLLOUT_SCHEMA)


def rollouts_from_traces(rows: Sequence[TraceRow]) -> Iterator[RolloutRow]:
    """Derive the rollouts that end at a leaf among these nodes, as far as version 1 recorded them."""
    nodes = {(row.trace_id, row.node_id): row for row in rows}
    return (rollout_row(path_to_leaf(nodes, row), row) for row in rows if row.outcome is not None)


def rollout_row(
    path: Sequence[TraceRow],
    leaf: TraceRow,
    *,
    fault: str = "",
    success: bool | None = None,
    metrics: str | None = None,
) -> RolloutRow:
    """Summarize the ``path`` of rows from the root to ``leaf``, which has the outcome."""
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
        kind=_kind(path, mode=str(metadata.get("mode", ""))),
        num_turns=len(policy),
        num_tokens=sum(len(row.tokens) for row in policy),
        num_calls=int(sum(_number(parse_metadata(row).get("num_tool_calls")) for row in path)),
        mean_entropy=sum(entropies) / len(entropies) if entropies else None,
        num_splices=sum(row.origin is Origin.BUFFER for row in path),
        num_tips=sum(row.origin is Origin.MEMORY for row in path),
        forked_from=generated[0].rollout if generated else leaf.rollout,
        metrics=metrics,
    )


def _kind(path: Sequence[TraceRow], *, mode: str) -> str:
    origins = {row.origin for row in path}
    if not origins - {Origin.PROMPT}:  # lost before its first turn
        return next((part for part in mode.split("+") if part in ("guided", "demonstration")), "on-policy")
    if Origin.DEMONSTRATION in origins:
        return "guided" if Origin.POLICY in origins else "demonstration"
    if Origin.BUFFER in origins:
        return "hybrid"
    return "tips" if Origin.MEMORY in origins else "on-policy"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# Memories on disk: ``memory/step-000012.parquet`` has one row for each tip or stored step that was added or
# removed since the previous training step.


MEMORY: Final = "memory"
"""Name of the folder in a run directory."""

MEMORY_SCHEMA: Final = pa.schema([pa.field("step", pa.int64(), nullable=False), *schema_of(MemoryChange)])


def changes_to_table(step: int, changes: Sequence[MemoryChange]) -> pa.Table:
    """The changes of a step in the schema of the files."""
    table = rows_to_table(changes, pa.schema(list(MEMORY_SCHEMA)[1:]))
    return table.add_column(0, MEMORY_SCHEMA.field("step"), pa.array([step] * len(changes), pa.int64()))


def read_changes(run: Path, *, until: int) -> Iterator[tuple[int, MemoryChange]]:
    """Steps and changes up to training step ``until``, in order. Raises DataError for a damaged file."""
    files = StepFiles(run / MEMORY)
    for step in files.steps():
        if step <= until:
            for row in files.read_table(step_file(step), MEMORY_SCHEMA).to_pylist():
                yield row.pop("step"), MemoryChange(**row)
