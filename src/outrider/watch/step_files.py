"""A folder of Parquet files, one for each training step and one for each evaluation; a file is absent or
whole."""

import re
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from outrider.atomic_io import TEMPORARY, replacing
from outrider.errors import DataError

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
_LATER: Final = frozenset({"metrics"})
"""Columns that were added within version 2 of the records."""


class StepFiles:
    """The files of one kind of record. The folder is made with its first file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, name: str, table: pa.Table) -> Path:
        """Write under a temporary name, then rename. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / name
        with replacing(path) as stream:
            pq.write_table(table.replace_schema_metadata(FORMAT), stream, compression="zstd")
        return path

    def read(self, name: str, schema: pa.Schema) -> pa.Table:
        """The columns of ``schema``; one that an earlier version did not write is empty or null.

        Raises :class:`~outrider.errors.DataError` for a missing or damaged file.
        """
        try:
            # a stream, because messages about a path name the folders of this machine
            with (self.directory / name).open("rb") as stream:
                # half of what `read_table` takes for a small file, whose threads have no more to do
                table = pq.ParquetFile(stream).read(use_threads=False)
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
        """Remove the files of steps after the checkpoint step, and what a kill left half written; return how
        many.
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
    """Columns that earlier versions did not write. A file of version 2 without any other column is
    damaged.
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
