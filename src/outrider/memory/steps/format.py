"""The file format of the Step-Trace Buffer: its tables, how a new file is made, and what an existing one has
to prove.
"""

from pathlib import Path

from outrider.errors import BufferCorrupt, ConfigError, DataError
from outrider.memory.steps.checksums import COUNTERS, seal_counters
from outrider.memory.steps.database import Database
from outrider.memory.steps.history import HISTORY_FORMAT

FORMAT_VERSION = 2
_READ = (1, 2)

_APPLICATION_ID = 0x4F535442
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
        found = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    if found is None:
        raise BufferCorrupt(f"{database.path}: metadata entry {key!r} is missing")
    value: str | int = found[0]
    return value


def is_blank(path: Path) -> bool:
    """Whether the file is a database without tables: a writer died before its first commit."""
    database = Database(path, writable=False)
    try:
        with database.guard() as db:
            return db.execute("SELECT 1 FROM sqlite_master").fetchone() is None
    finally:
        database.close()


def check_file(path: Path, *, embedder: str, dim: int) -> bool:
    """Verify an existing file through a read-only connection, so that a damaged one is left as it is.

    Whether a batch was announced and never committed. Raises DataError (not a buffer, another version),
    BufferCorrupt and ConfigError (another embedder).
    """
    database = Database(path, writable=False)
    try:
        with database.guard() as db:
            if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
                raise DataError(f"{path}: not a step-trace buffer")
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
        seal_counters(db, FORMAT_VERSION)
