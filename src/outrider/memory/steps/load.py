"""Reads a whole Step-Trace Buffer into memory and verifies it: what the search needs to know of every
step.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import BufferCorrupt
from outrider.memory.steps.checksums import (
    TRAJECTORY_COLUMNS,
    counters_are_whole,
    trajectory_checksum,
    vector_checksum,
)
from outrider.memory.steps.database import Database
from outrider.memory.steps.format import meta

NEVER = 2**62
"""The ``removed`` revision of a row that is still in the buffer."""

ROW_DTYPE = np.dtype(
    [(name, "i8") for name in ("step_id", "trajectory", "task", "added", "removed")]
    + [("reward", "f8"), ("terminal", "?")]
)
"""A step as the search needs it; ``task`` is a code given by the loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """All steps of the file, removed ones included: ``rows`` (:data:`ROW_DTYPE`), ``vectors`` ``[N, D]``,
    task codes.
    """

    rows: NDArray[np.void]
    vectors: NDArray[np.float32]
    tasks: dict[str, int]
    revision: int
    generation: int


def load_all(database: Database, *, dim: int) -> Loaded:
    """Everything, in order of step id. Raises BufferCorrupt for what fails its checksum or is not there."""
    path = database.path
    # One transaction: a writer elsewhere may commit while this reads.
    with damage(path), database.transaction("BEGIN") as db:
        file_format = int(meta(database, "format_version"))
        if not counters_are_whole(db, file_format):
            raise BufferCorrupt(f"{path}: the counters fail their checksum")
        revision, generation = int(meta(database, "revision")), int(meta(database, "generation"))
        tasks: dict[str, int] = {}
        trajectories: dict[int, tuple[int, int, int, float]] = {}
        spans: dict[int, tuple[int, int]] = {}
        query = f"SELECT {TRAJECTORY_COLUMNS} FROM trajectories ORDER BY trajectory_row"
        for row, added, removed, reward, crc, num_tokens, first, num_steps, *texts in db.execute(query):
            written = trajectory_checksum(
                file_format, reward=reward, texts=texts, num_tokens=num_tokens, first_step_id=first,
                num_steps=num_steps, added=added, removed=removed,
            )  # fmt: skip
            if crc != written:
                raise BufferCorrupt(f"{path}: trajectory {row} fails its checksum")
            spans[row] = (first, num_steps)
            trajectories[row] = (tasks.setdefault(texts[0], len(tasks)), added, removed, reward)
        num_steps, num_trajectories = (
            int(meta(database, "num_steps")),
            int(meta(database, "num_trajectories")),
        )
        if len(trajectories) != num_trajectories:
            raise BufferCorrupt(
                f"{path}: {len(trajectories)} trajectories where {num_trajectories} were written"
            )
        # before it decides what is allocated
        if db.execute("SELECT count(*) FROM steps").fetchone()[0] != num_steps:
            raise BufferCorrupt(f"{path}: the number of steps differs from the {num_steps} that were written")
        rows = np.empty(num_steps, ROW_DTYPE)
        vectors = np.empty((num_steps, dim), np.float32)
        _load_steps(database, file_format, trajectories, rows, vectors)
        _check_spans(path, rows, spans)
    return Loaded(rows=rows, vectors=vectors, tasks=tasks, revision=revision, generation=generation)


def _check_spans(path: Path, rows: NDArray[np.void], spans: dict[int, tuple[int, int]]) -> None:
    """A trajectory's numbers of steps are followed later without a look at the steps themselves."""
    owners, first_rows, counts = np.unique(rows["trajectory"], return_index=True, return_counts=True)
    first_and_count = zip(rows["step_id"][first_rows].tolist(), counts.tolist(), strict=True)
    trajectory_steps = dict(zip(owners.tolist(), first_and_count, strict=True))
    for row, (first, num_steps) in spans.items():
        if trajectory_steps.get(row, (first, 0)) != (first, num_steps):
            raise BufferCorrupt(f"{path}: trajectory {row} does not have the steps that were written")


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """A column of another type, or a number out of its range, is damage: SQLite stores whatever it is
    given.
    """
    try:
        yield
    except (struct.error, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        raise BufferCorrupt(f"{path}: damaged: {' '.join(str(error).split())}") from error


def _load_steps(
    database: Database,
    file_format: int,
    trajectories: dict[int, tuple[int, int, int, float]],
    rows: NDArray[np.void],
    vectors: NDArray[np.float32],
) -> None:
    query = """SELECT s.step_id, s.trajectory_row, s.is_terminal, v.checksum, v.vector, s.num_tokens
               FROM steps s JOIN vectors v ON v.step_id = s.step_id ORDER BY s.step_id"""
    path, dim = database.path, vectors.shape[1]
    cursor = database.db.execute(query)
    done = 0
    while chunk := cursor.fetchmany(4096):
        end = done + len(chunk)
        # The count was read in this transaction: more rows than that are damage, told below.
        if end > len(rows):
            break
        for step_id, row, terminal, crc, vector, num in chunk:
            written = vector_checksum(
                file_format, vector, step_id=step_id, row=row, num_tokens=num, is_terminal=terminal
            )
            if row not in trajectories or len(vector) != 4 * dim or crc != written:
                raise BufferCorrupt(f"{path}: step {step_id} fails its checksum")
        rows[done:end] = [(c[0], c[1], *trajectories[c[1]], bool(c[2])) for c in chunk]
        vectors[done:end] = np.frombuffer(b"".join(c[4] for c in chunk), "<f4").reshape(len(chunk), dim)
        done = end
    if done != len(rows) or cursor.fetchone() is not None:
        raise BufferCorrupt(f"{path}: the number of steps differs from the {len(rows)} that were written")
