"""One SQLite connection with our errors, usable from any thread."""

import contextlib
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.atomic_io import replacing_by_name
from outrider.errors import BufferCorrupt, DataError

_DAMAGE = ("malformed", "not a database", "could not decode")


def copy_database(source: Path, target: Path) -> None:
    """A consistent copy of a database that others may be writing; ``target`` appears whole or not at all.

    Raises BufferCorrupt or DataError, one line.
    """
    with (
        contextlib.closing(Database(source, writable=False)) as reader,
        replacing_by_name(target) as partial,
        reader.guard() as db,
        contextlib.closing(sqlite3.connect(partial)) as copy,
    ):
        db.backup(copy)


def connect(path: Path, *, writable: bool) -> sqlite3.Connection:
    """A connection in autocommit mode for any thread. ``path`` may be anybody's file: its schema runs no
    functions that could do harm. Raises sqlite3.Error; DataError if there is something else than a file.
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a file")
    # A reader opens read-only: it must not make the file that it misses.
    uri = f"{path.resolve().as_uri()}?mode={'rwc' if writable else 'ro'}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0)
    db.execute("PRAGMA trusted_schema = OFF")
    return db


class Database:
    """A connection in autocommit mode; a writable one creates the file and uses a write-ahead log.

    Use ``db`` only inside :meth:`guard`, which admits one thread at a time (it may be nested) and turns
    SQLite's errors into :class:`~outrider.errors.BufferCorrupt` (damage) or
    :class:`~outrider.errors.DataError` (everything else), each one line.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        # Reentrant: a guarded call may make another one.
        self._lock = threading.RLock()
        with self._our_errors():
            self.db = connect(path, writable=writable)
            if writable:
                self.db.execute("PRAGMA journal_mode = WAL")
                # A crash of the process loses nothing; StepStore.flush forces what a checkpoint counts on.
                self.db.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Release the file; may be called twice."""
        with self._lock:
            self.db.close()

    @contextmanager
    def guard(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone."""
        with self._lock, self._our_errors():
            yield self.db

    @contextmanager
    def transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """The connection inside a transaction, which any exception rolls back."""
        with self.guard() as db:
            db.execute(begin)
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                # SQLite rolls back on its own where a disk is full; a second ROLLBACK would hide that error.
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            reason = " ".join(str(error).split())
            if any(sign in reason.lower() for sign in _DAMAGE):
                raise BufferCorrupt(f"{self.path}: damaged: {reason}") from error
            raise DataError(f"{self.path}: {reason}") from error


def checksum(*parts: str | bytes) -> int:
    """CRC-32 of length-prefixed parts; finds damage that keeps the file's structure intact."""
    value = 0
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # The length first, so that moving a letter from one part to the next shows.
        value = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), value))
    return value
