"""Memories on disk: ``memory/step-000012.parquet`` has what came into tips and steps and went since the step
before, one row a change."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

import pyarrow as pa

from outrider.memory.changes import MemoryChange
from outrider.watch.step_files import StepFiles, step_file
from outrider.watch.traces import storable

MEMORY: Final = "memory"
"""Name of the folder in a run directory."""

MEMORY_SCHEMA: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("memory", pa.string(), nullable=False),
        pa.field("change", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("item_id", pa.int64(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("score", pa.float64(), nullable=False),
        pa.field("writer", pa.string(), nullable=False),
        pa.field("written_at", pa.int64(), nullable=False),
    ]
)
_values: Final = attrgetter(*MEMORY_SCHEMA.names[1:])


class MemoryWriter:
    """Writes the changes of steps."""

    def __init__(self, run: Path) -> None:
        self._files = StepFiles(run / MEMORY)

    def write(self, step: int, changes: Sequence[MemoryChange]) -> Path | None:
        """No file where nothing has changed. Raises OSError."""
        if not changes:
            return None
        rows = [dict(zip(MEMORY_SCHEMA.names, (step, *_stored(change)), strict=True)) for change in changes]
        return self._files.write(step_file(step), pa.Table.from_pylist(rows, schema=MEMORY_SCHEMA))

    def resume(self, step: int) -> int:
        """Remove the files of steps after the checkpoint step; return how many."""
        return self._files.resume(step)


def read_changes(run: Path, *, until: int) -> Iterator[tuple[int, MemoryChange]]:
    """Steps and changes up to training step ``until``, in order. Raises DataError for a damaged file."""
    files = StepFiles(run / MEMORY)
    for step in files.steps():
        if step <= until:
            for row in files.read(step_file(step), MEMORY_SCHEMA).to_pylist():
                yield row.pop("step"), MemoryChange(**row)


def _stored(change: MemoryChange) -> tuple[object, ...]:
    return tuple(storable(value) for value in _values(change))
