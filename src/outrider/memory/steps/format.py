"""The file format of the Step-Trace Buffer: its tables, how a new file is made, and what an existing one has
to prove.
"""

import contextlib
import functools
import sqlite3
from pathlib import Path
from typing import Final

from outrider.errors import BufferCorrupt, ConfigError, DataError
from outrider.memory.steps.checksums import COUNTERS, write_counters_checksum
from outrider.memory.steps.database import Database
from outrider.memory.steps.history import HISTORY_FORMAT

FORMAT_VERSION = 2
_READ = (1, 2)

_APPLICATION_ID = 0x4F535442
_STATISTICS: Final = frozenset({"sqlite_stat1", "sqlite_stat4"})  # of ANALYZE, written by SQLite alone
_STORED: Final = ("table", "index")  # told behind views and triggers, which matter more
# A file keeps this text letter by letter: a long line is continued, not broken.
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE trajectories (
    trajectory_row INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, task_key TEXT NOT NULL, \
agent TEXT NOT NULL,
    question TEXT NOT NULL, reward REAL NOT NULL, num_tokens INTEGER NOT NULL, first_step_id INTEGER NOT NULL,
    num_steps INTEGER NOT NULL, added INTEGER NOT NULL, removed INTEGER NOT NULL, checksum INTEGER NOT NULL);
CREATE INDEX trajectories_by_task ON trajectories (task_key);
CREATE INDEX trajectories_by_id ON trajectories (trajectory_id);
CREATE TABLE steps (
    step_id INTEGER PRIMARY KEY, trajectory_row INTEGER NOT NULL, num_tokens INTEGER NOT NULL, \
is_terminal INTEGER NOT NULL,
    checksum INTEGER NOT NULL, text TEXT NOT NULL, observation TEXT NOT NULL);
CREATE TABLE vectors (step_id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, vector BLOB NOT NULL);
"""


def meta(database: Database, key: str) -> str | int:
    """An entry of the metadata. Raises BufferCorrupt when it is missing."""
    with database.guard() as db:
        entry = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    if entry is None:
        raise BufferCorrupt(f"{database.path}: metadata entry {key!r} is missing")
    value: str | int = entry[0]
    return value


def is_blank(path: Path) -> bool:
    """Whether the file is a database without tables: a writer died before its first commit."""
    database = Database(path, writable=False)
    try:
        with database.guard() as db:
            return db.execute("SELECT 1 FROM sqlite_master").fetchone() is None
    finally:
        database.close()


def check_schema(path: Path, db: sqlite3.Connection) -> None:
    """Check that the file has our tables and indexes and nothing else, before anything is read from them.

    A view in a table's place may have no end, and triggers, checks, generated columns and expressions run
    whatever their author likes whenever a row is read or written. Raises DataError for a database that is no
    step-trace buffer and BufferCorrupt for the first object that is not ours.
    """
    if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise DataError(f"{path}: not a step-trace buffer")
    objects = {
        name: (kind, _normalize_sql(sql))
        # a catalogue of another shape is damage, which SQLite reports itself
        for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master")
        if name not in _STATISTICS or kind != "table"
    }
    expected = _expected_schema()
    for name, (kind, _) in sorted(objects.items(), key=lambda item: (item[1][0] in _STORED, str(item[0]))):
        if objects[name] != expected.get(name):
            raise BufferCorrupt(
                f"{path}: refused: the {kind} {str(name)[:80]!r} is not one that Outrider writes into a "
                "step-trace buffer"
            )
    if missing := sorted(expected.keys() - objects.keys()):
        raise BufferCorrupt(f"{path}: damaged: {missing[0]} is missing")


@functools.cache
def _expected_schema() -> dict[str, tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_SCHEMA)
        rows = db.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {name: (kind, _normalize_sql(sql)) for kind, name, sql in rows}


def _normalize_sql(sql: object) -> str:
    return " ".join(str(sql).split())


def check_file(path: Path, *, embedder: str, dim: int) -> bool:
    """Verify an existing file through a read-only connection, so that a damaged one is left as it is.

    Whether a batch was announced and never committed. Raises DataError (not a buffer, another version),
    BufferCorrupt and ConfigError (another embedder).
    """
    database = Database(path, writable=False)
    try:
        with database.guard() as db:
            check_schema(path, db)
            problem = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if problem != "ok":
                raise BufferCorrupt(f"{path}: damaged: {' '.join(str(problem).split())}")
            for key, readable in (("format_version", _READ), ("history_format", (HISTORY_FORMAT,))):
                if meta(database, key) not in readable:
                    raise DataError(
                        f"{path}: {key} is {meta(database, key)}, this version "
                        f"of Outrider reads {readable[-1]}"
                    )
            built = (meta(database, "embedder"), meta(database, "dim"))
            if built != (embedder, dim):
                raise ConfigError(
                    f"{path}: built with embedder {built[0]!r} ({built[1]} dimensions), "
                    f"opened with {embedder!r} ({dim})"
                )
            return db.execute("SELECT 1 FROM meta WHERE key = 'open_batch'").fetchone() is not None
    finally:
        database.close()


def create_tables(database: Database, *, embedder: str, dim: int) -> None:
    """Make an empty buffer, in one transaction."""
    entries = {
        "format_version": FORMAT_VERSION,
        "history_format": HISTORY_FORMAT,
        "embedder": embedder,
        "dim": dim,
    }
    counters = dict.fromkeys(COUNTERS, 0)
    with database.transaction() as db:
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        db.executemany("INSERT INTO meta VALUES (?, ?)", (entries | counters).items())
        write_counters_checksum(db, FORMAT_VERSION)
