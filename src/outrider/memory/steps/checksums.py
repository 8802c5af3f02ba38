"""Checksums of the rows of a Step-Trace Buffer, by the file's format. They find damage, not malice.

Format 1 had texts, rewards and vectors under them; format 2 has every column that queries and rollbacks read.
A file stays in the format that it was made in.
"""

import sqlite3
import struct
import zlib
from collections.abc import Iterable
from typing import Final

from outrider.memory.steps.database import checksum

COUNTERS: Final = ("revision", "oldest_revision", "generation", "num_trajectories", "num_steps")
TRAJECTORY_COLUMNS: Final = (
    "trajectory_row, added, removed, reward, checksum, num_tokens, first_step_id, num_steps, "
    "task_key, trajectory_id, agent, question"
)
"""Columns of :func:`trajectory_checksum`, in the order in which it takes them."""

_COUNTERS_CHECKSUM: Final = "counters_checksum"


def trajectory_checksum(
    file_format: int,
    *,
    reward: float,
    texts: Iterable[str],
    num_tokens: int,
    first_step_id: int,
    num_steps: int,
    added: int,
    removed: int,
) -> int:
    """``texts``: task key, trajectory id, agent, question."""
    numbers = struct.pack("<d", reward)
    if file_format > 1:
        numbers += struct.pack("<5q", num_tokens, first_step_id, num_steps, added, removed)
    return checksum(numbers, *texts)


def vector_checksum(
    file_format: int, vector: bytes, *, step_id: int, row: int, num_tokens: int, is_terminal: int
) -> int:
    """Of a step's key and, from format 2 on, of the step's numbers; its texts have one of their own."""
    seed = zlib.crc32(struct.pack("<4q", step_id, row, num_tokens, is_terminal)) if file_format > 1 else 0
    return zlib.crc32(vector, seed)


def mark_removed(db: sqlite3.Connection, file_format: int, rows: Iterable[int], revision: int) -> None:
    """Set the revision that removed these trajectories, inside a transaction."""
    for trajectory_row in rows:
        query = f"SELECT {TRAJECTORY_COLUMNS} FROM trajectories WHERE trajectory_row = ?"
        row, added, _, reward, _, num_tokens, first, num_steps, *texts = db.execute(
            query, (trajectory_row,)
        ).fetchone()
        crc = trajectory_checksum(
            file_format, reward=reward, texts=texts, num_tokens=num_tokens, first_step_id=first,
            num_steps=num_steps, added=added, removed=revision,
        )  # fmt: skip
        db.execute(
            "UPDATE trajectories SET removed = ?, checksum = ? WHERE trajectory_row = ?", (revision, crc, row)
        )


def write_counters_checksum(db: sqlite3.Connection, file_format: int) -> None:
    """Inside the transaction that changed them."""
    if file_format > 1:
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_COUNTERS_CHECKSUM, _counters(db)))


def counters_are_whole(db: sqlite3.Connection, file_format: int) -> bool:
    """Whether they are what was written; format 1 cannot tell."""
    if file_format == 1:
        return True
    entry = db.execute("SELECT value FROM meta WHERE key = ?", (_COUNTERS_CHECKSUM,)).fetchone()
    return entry is not None and entry[0] == _counters(db)


def _counters(db: sqlite3.Connection) -> int:
    entries = dict(db.execute("SELECT key, value FROM meta"))
    return checksum(*(str(entries.get(name)) for name in COUNTERS))
