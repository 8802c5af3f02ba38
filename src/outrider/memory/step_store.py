"""The file of a step-trace buffer: records, history texts, and one SQLite database in WAL mode.

Every committed batch of whole tasks increments ``revision``. Trajectories have the revision that added them
and the one that removed them. Only a rollback deletes rows, so every earlier revision can be read or
restored. A marker row announces a batch in its own transaction and is deleted when the batch commits: a
marker without a living writer means that the batch was lost. A crash of the process loses at most that batch;
a power failure may also lose the commits since the last :meth:`StepStore.flush` (``synchronous=NORMAL``), but
does not damage the file.

A checksum covers every column that queries and rollbacks read, because SQLite itself does not detect changed
bytes. It detects damage, not manipulation.
"""

import functools
import hashlib
import os
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.errors import BufferCorrupt, CheckpointError, ConfigError, DataError
from outrider.files import FileLock, is_locked, replacing_by_name
from outrider.memory.embedders import replace_surrogates
from outrider.types import Message, Step

Scope = Literal["all", "same_task", "other_tasks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One off-policy step: key (``history_text``, everything before it) and value (``text`` and
    ``observation``).

    ``num_tokens`` counts the tokens of ``text`` and ``observation``; 0 if the buffer was built without a
    counter. ``step_id`` is unique within a buffer and stable; ``reward`` is the outcome of the whole
    trajectory.
    """

    step_id: int
    task_key: str
    trajectory_id: str
    step_index: int
    history_text: str
    text: str
    observation: str
    reward: float
    agent: str
    num_tokens: int
    is_terminal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFilter:
    """Which steps a query may return.

    A ``scope`` other than ``all`` needs ``task_key``; steps with ``other_key`` are of the same task. Terminal
    steps contain the answer and are excluded by default. ``exclude`` are the ids of steps that the rollout
    already contains.
    """

    scope: Scope = "all"
    task_key: str | None = None
    other_key: str | None = None
    include_terminal: bool = False
    exclude: frozenset[int] = frozenset()
    min_reward: float | None = None

    def __post_init__(self) -> None:
        if self.scope not in ("all", "same_task", "other_tasks"):
            raise ConfigError(f"retrieval scope {self.scope!r} is not one of all, same_task, other_tasks")
        if self.scope != "all" and self.task_key is None:
            raise ConfigError(f"retrieval scope {self.scope!r} needs a task key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A retrieved step and the cosine between its key and the query, in [-1, 1]."""

    record: StepRecord
    similarity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """Counts of one call of ``add_trajectories``.

    ``num_offered`` is the sum of ``num_inserted``, ``num_present`` (id already in the buffer),
    ``num_duplicate`` (id twice in the call), ``num_empty`` (no step), ``num_below_min_reward`` and
    ``num_outranked`` (K better ones exist). ``num_removed`` trajectories were replaced by better ones.
    ``num_repaired_texts`` texts had lone surrogates replaced.
    """

    num_offered: int
    num_inserted: int
    num_steps_inserted: int
    num_present: int
    num_duplicate: int
    num_empty: int
    num_below_min_reward: int
    num_outranked: int
    num_removed: int
    num_repaired_texts: int
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """Contents of a buffer. Quantiles are (minimum, 25 %, 50 %, 75 %, maximum) over trajectories; NaN if it
    is empty.
    """

    num_tasks: int
    num_trajectories: int
    num_steps: int
    num_tokens: int
    num_trajectories_by_agent: Mapping[str, int]
    num_steps_by_agent: Mapping[str, int]
    share_terminal: float
    steps_per_trajectory_quantiles: tuple[float, ...]
    reward_quantiles: tuple[float, ...]


TokenCounter: TypeAlias = Callable[[str], int]

HISTORY_FORMAT = 1
"""Increment it with any change of :func:`history_text`: stored vectors are keys of the old rendering."""


def history_text(question: str, steps: Sequence[Step]) -> str:
    """Return the retrieval key of the step after ``steps``: question, then every step and its observation.

    Used both for building and for querying, so that keys are comparable. Surrounding white space is removed
    because agents differ in it; lone surrogates become U+FFFD.
    """
    parts = [question]
    for step in steps:
        parts += (step.text, step.observation)
    return replace_surrogates("\n".join(stripped for part in parts if (stripped := part.strip())))


def question_key(question: str) -> str:
    """Return the task key for a record without one. Blanks at the ends, which data sets of questions lose,
    do not count.
    """
    return f"question-{text_digest(question.strip())}"


def text_digest(text: str) -> str:
    """A short digest of a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def prompt_question(prompt: Sequence[Message]) -> str:
    """Return the question in a prompt, for trajectories of unknown tasks: all user messages, or every message
    if there is none.
    """
    user_texts = [message.content for message in prompt if message.role == "user"]
    return "\n".join(user_texts or [message.content for message in prompt])


def select_best(candidates: Sequence[tuple[float, int]], num_best: int | None) -> set[int]:
    """Return the positions of the ``num_best`` best (None: all) ``candidates``, pairs of reward and number of
    tokens.

    Higher reward first, then fewer tokens, then the earlier position. An unknown number of tokens (0) is
    first among equals, because such a trajectory may be short. The order is total, so that filtering in
    portions selects the same trajectories as filtering everything at once.
    """
    ranked = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0], candidates[i][1], i))
    return set(ranked[:num_best])


_DAMAGE = ("malformed", "not a database", "could not decode")


def copy_database(source: Path, target: Path) -> None:
    """Make a consistent copy of a database that may be written concurrently; ``target`` appears atomically.

    Raises BufferCorrupt or DataError with a one-line message.
    """
    with (
        closing(Database(source, writable=False)) as reader,
        replacing_by_name(target) as partial,
        reader.guard() as db,
        closing(sqlite3.connect(partial)) as copy,
    ):
        db.backup(copy)


def connect(path: Path, *, writable: bool) -> sqlite3.Connection:
    """Open a connection in autocommit mode for any thread. ``path`` may be untrusted: functions in its schema
    that could do harm are disabled. Raises sqlite3.Error; DataError if the path is not a file.
    """
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a file")
    path = path.resolve()
    # A reader opens read-only, because it must not create a missing file.
    uri = f"{path.as_uri()}?mode={'rwc' if writable else 'ro'}"
    if not (writable or os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists()):
        uri += "&immutable=1"  # otherwise it creates files of the write-ahead log
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0)
    db.execute("PRAGMA trusted_schema = OFF")
    return db


class Database:
    """A connection in autocommit mode; a writable one creates the file and uses a write-ahead log.

    Use ``db`` only inside :meth:`guard`, which admits one thread at a time (it may be nested) and converts
    SQLite's errors to :class:`~outrider.errors.BufferCorrupt` (damage) or
    :class:`~outrider.errors.DataError` (everything else), with one-line messages.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        # Reentrant, because a guarded call may make another one.
        self._lock = threading.RLock()
        with self._our_errors():
            self.db = connect(path, writable=writable)
            if writable:
                self.db.execute("PRAGMA journal_mode = WAL")
                # A process crash loses nothing; StepStore.flush protects checkpoints from power failures.
                self.db.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Release the file; idempotent."""
        with self._lock:
            self.db.close()

    @contextmanager
    def guard(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for exclusive use by this thread."""
        with self._lock, self._our_errors():
            yield self.db

    @contextmanager
    def transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Yield the connection inside a transaction, which any exception rolls back."""
        with self.guard() as db:
            db.execute(begin)
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                # SQLite rolls back itself if a disk is full; a second ROLLBACK would hide that error.
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
    """Return the CRC-32 of length-prefixed parts; detects damage that leaves the file's structure intact."""
    value = 0
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # The length first, so that moving a character between parts changes the checksum.
        value = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), value))
    return value


_COUNTERS: Final = ("revision", "oldest_revision", "generation", "num_trajectories", "num_steps")
_TRAJECTORY_COLUMNS: Final = (
    "trajectory_row, added, removed, reward, checksum, num_tokens, first_step_id, num_steps, "
    "task_key, trajectory_id, agent, question"
)


def trajectory_checksum(
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
    numbers = struct.pack("<d5q", reward, num_tokens, first_step_id, num_steps, added, removed)
    return checksum(numbers, *texts)


def _vector_checksum(vector: bytes, *, step_id: int, row: int, num_tokens: int, is_terminal: int) -> int:
    """Return the checksum of a step's key and numbers; its texts have a separate checksum."""
    return zlib.crc32(vector, zlib.crc32(struct.pack("<4q", step_id, row, num_tokens, is_terminal)))


def _mark_removed(db: sqlite3.Connection, rows: Iterable[int], revision: int) -> None:
    """Set the revision that removed these trajectories, inside a transaction."""
    for trajectory_row in rows:
        query = f"SELECT {_TRAJECTORY_COLUMNS} FROM trajectories WHERE trajectory_row = ?"
        row, added, _, reward, _, num_tokens, first, num_steps, *texts = db.execute(
            query, (trajectory_row,)
        ).fetchone()
        crc = trajectory_checksum(
            reward=reward, texts=texts, num_tokens=num_tokens, first_step_id=first,
            num_steps=num_steps, added=added, removed=revision,
        )  # fmt: skip
        db.execute(
            "UPDATE trajectories SET removed = ?, checksum = ? WHERE trajectory_row = ?", (revision, crc, row)
        )


def _counters_checksum(db: sqlite3.Connection) -> int:
    entries = dict(db.execute("SELECT key, value FROM meta"))
    return checksum(*(str(entries.get(name)) for name in _COUNTERS))


def _write_counters_checksum(db: sqlite3.Connection) -> None:
    """Update the checksum of the counters, inside the transaction that changed them."""
    db.execute("INSERT OR REPLACE INTO meta VALUES ('counters_checksum', ?)", (_counters_checksum(db),))


FORMAT_VERSION: Final = 2
_APPLICATION_ID = 0x4F535442
_STATISTICS: Final = frozenset({"sqlite_stat1", "sqlite_stat4"})  # created by SQLite's ANALYZE
# Files store this text verbatim, so long lines use continuations instead of line breaks.
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
    """Return an entry of the metadata. Raises BufferCorrupt if it is missing."""
    with database.guard() as db:
        entry = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    if entry is None:
        raise BufferCorrupt(f"{database.path}: metadata entry {key!r} is missing")
    value: str | int = entry[0]
    return value


def check_schema(path: Path, db: sqlite3.Connection) -> None:
    """Check that the file has only our tables and indexes, before anything is read from them.

    A view in place of a table may be infinite, and triggers, checks, generated columns and expressions
    execute the author's code whenever a row is read or written. Raises DataError for a database that is not a
    step-trace buffer, and BufferCorrupt for the first unexpected object.
    """
    if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise DataError(f"{path}: not a step-trace buffer")
    objects = {
        name: (kind, _normalize_sql(sql))
        # a malformed catalogue is damage, which SQLite reports itself
        for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master")
        if name not in _STATISTICS or kind != "table"
    }
    expected = _expected_schema()
    # views and triggers first, because they are more important to report than a table or index
    order = sorted(objects.items(), key=lambda item: (item[1][0] in ("table", "index"), str(item[0])))
    for name, (kind, _) in order:
        if objects[name] != expected.get(name):
            raise BufferCorrupt(
                f"{path}: refused: the {kind} {str(name)[:80]!r} is not one that Outrider writes into a "
                "step-trace buffer"
            )
    if missing := sorted(expected.keys() - objects.keys()):
        raise BufferCorrupt(f"{path}: damaged: {missing[0]} is missing")


@functools.cache
def _expected_schema() -> dict[str, tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_SCHEMA)
        rows = db.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {name: (kind, _normalize_sql(sql)) for kind, name, sql in rows}


def _normalize_sql(sql: object) -> str:
    return " ".join(str(sql).split())


def check_file(path: Path, *, embedder: str, dim: int) -> bool:
    """Verify an existing file through a read-only connection, so that a damaged file is not changed.

    Returns whether a batch was announced and never committed. Raises DataError (not a buffer, another
    version), BufferCorrupt and ConfigError (another embedder).
    """
    with closing(Database(path, writable=False)) as database, database.guard() as db:
        check_schema(path, db)
        problem = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if problem != "ok":
            raise BufferCorrupt(f"{path}: damaged: {' '.join(str(problem).split())}")
        for key, readable in (("format_version", FORMAT_VERSION), ("history_format", HISTORY_FORMAT)):
            if (version := meta(database, key)) != readable:
                raise DataError(
                    f"{path}: {key} is {version}, this version of Outrider reads {readable}: build or "
                    "import the buffer again"
                )
        built = (meta(database, "embedder"), meta(database, "dim"))
        if built != (embedder, dim):
            raise ConfigError(
                f"{path}: built with embedder {built[0]!r} ({built[1]} dimensions), "
                f"opened with {embedder!r} ({dim}): name the first one (--embedder, buffer.embedder)"
            )
        return db.execute("SELECT 1 FROM meta WHERE key = 'open_batch'").fetchone() is not None


NEVER = 2**62
"""The ``removed`` revision of a row that has not been removed."""

ROW_DTYPE = np.dtype(
    [(name, "i8") for name in ("step_id", "trajectory", "task", "added", "removed")]
    + [("reward", "f8"), ("terminal", "?")]
)
"""Row of a step in the search index; the loader assigns the code ``task``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """All steps of the file, including removed ones: ``rows`` (:data:`ROW_DTYPE`), ``vectors`` ``[N, D]``,
    task codes.
    """

    rows: NDArray[np.void]
    vectors: NDArray[np.float32]
    tasks: dict[str, int]
    revision: int
    generation: int


def load_all(database: Database, *, dim: int) -> Loaded:
    """Load all steps, ordered by id. Raises BufferCorrupt if rows are missing or fail their checksum."""
    path = database.path
    # In one transaction, because another process may commit during the read.
    with _damage(path), database.transaction("BEGIN") as db:
        entry = db.execute("SELECT value FROM meta WHERE key = 'counters_checksum'").fetchone()
        if entry is None or entry[0] != _counters_checksum(db):
            raise BufferCorrupt(f"{path}: the counters fail their checksum")
        revision, generation = int(meta(database, "revision")), int(meta(database, "generation"))
        tasks: dict[str, int] = {}
        trajectories: dict[int, tuple[int, int, int, float]] = {}
        spans: dict[int, tuple[int, int]] = {}
        query = f"SELECT {_TRAJECTORY_COLUMNS} FROM trajectories ORDER BY trajectory_row"
        for row, added, removed, reward, crc, num_tokens, first, num_steps, *texts in db.execute(query):
            written = trajectory_checksum(
                reward=reward, texts=texts, num_tokens=num_tokens, first_step_id=first, num_steps=num_steps,
                added=added, removed=removed,
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
        # check before this number determines an allocation
        if db.execute("SELECT count(*) FROM steps").fetchone()[0] != num_steps:
            raise BufferCorrupt(f"{path}: the number of steps differs from the {num_steps} that were written")
        rows = np.empty(num_steps, ROW_DTYPE)
        vectors = np.empty((num_steps, dim), np.float32)
        _load_steps(database, trajectories, rows, vectors)
        # check now: later code uses a trajectory's range of steps without looking at the steps
        owners, first_rows, counts = np.unique(rows["trajectory"], return_index=True, return_counts=True)
        stored = zip(rows["step_id"][first_rows].tolist(), counts.tolist(), strict=True)
        stored_spans = dict(zip(owners.tolist(), stored, strict=True))
        for row, (first, count) in spans.items():
            if stored_spans.get(row, (first, 0)) != (first, count):
                raise BufferCorrupt(f"{path}: trajectory {row} does not have the steps that were written")
    return Loaded(rows=rows, vectors=vectors, tasks=tasks, revision=revision, generation=generation)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Report a column of another type, or a number out of range, as damage, because SQLite does not enforce
    column types.
    """
    try:
        yield
    except (struct.error, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        raise BufferCorrupt(f"{path}: damaged: {' '.join(str(error).split())}") from error


def _load_steps(
    database: Database,
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
        # The count was read in this transaction, so additional rows are damage, reported below.
        if end > len(rows):
            break
        for step_id, row, terminal, crc, vector, num in chunk:
            written = _vector_checksum(vector, step_id=step_id, row=row, num_tokens=num, is_terminal=terminal)
            if row not in trajectories or len(vector) != 4 * dim or crc != written:
                raise BufferCorrupt(f"{path}: step {step_id} fails its checksum")
        rows[done:end] = [(c[0], c[1], *trajectories[c[1]], bool(c[2])) for c in chunk]
        vectors[done:end] = np.frombuffer(b"".join(c[4] for c in chunk), "<f4").reshape(len(chunk), dim)
        done = end
    if done != len(rows) or cursor.fetchone() is not None:
        raise BufferCorrupt(f"{path}: the number of steps differs from the {len(rows)} that were written")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTrajectory:
    """A trajectory ready to be written: texts are valid, ``step_num_tokens`` has one entry per step."""

    trajectory_id: str
    task_key: str
    agent: str
    question: str
    reward: float
    num_tokens: int
    steps: tuple[Step, ...]
    step_num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory in the buffer as the reward-aware filter sees it."""

    row: int
    trajectory_id: str
    task_key: str
    reward: float
    num_tokens: int


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _writer_lock(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Retry, because a reader that checks whether the writer is alive briefly holds the lock.
    for _ in range(20):
        try:
            return FileLock(_lock_path(path))
        except BlockingIOError:
            time.sleep(0.05)
    raise ConfigError(f"{path}: another process or buffer object is writing to it")


def _is_blank(path: Path) -> bool:
    """Return whether the file is a database without tables: a writer died before its first commit."""
    with closing(Database(path, writable=False)) as database, database.guard() as db:
        return db.execute("SELECT 1 FROM sqlite_master").fetchone() is None


class StepStore:
    """The file, opened for reading or as its only writer. Methods may be called from any thread.

    Raises :class:`~outrider.errors.DataError` (missing, not a buffer, cannot be read or written),
    :class:`~outrider.errors.BufferCorrupt` (fails a check; nothing is changed) and
    :class:`~outrider.errors.ConfigError` (another embedder, a second writer).
    """

    def __init__(self, path: Path, *, embedder: str, dim: int, writable: bool) -> None:
        self.path = path
        self.lost_batch = False
        self._dim = dim
        self._writer_lock = _writer_lock(path) if writable else None
        try:
            is_new = not path.exists() or _is_blank(path)
            if is_new and not writable:
                raise DataError(f"{path}: no step-trace buffer there")
            if not is_new:
                is_announced = check_file(path, embedder=embedder, dim=dim)
                # check whether the writer of the announced batch is still alive
                self.lost_batch = is_announced and (writable or not is_locked(_lock_path(path)))
            self._database = Database(path, writable=writable)
            if is_new:
                self._create_tables(embedder)
        except BaseException:
            if self._writer_lock is not None:
                self._writer_lock.release()
            raise

    def _create_tables(self, embedder: str) -> None:
        entries = {
            "format_version": FORMAT_VERSION,
            "history_format": HISTORY_FORMAT,
            "embedder": embedder,
            "dim": self._dim,
            **dict.fromkeys(_COUNTERS, 0),
        }
        with self._database.transaction() as db:
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.executemany("INSERT INTO meta VALUES (?, ?)", entries.items())
            _write_counters_checksum(db)

    @property
    def revision(self) -> int:
        """Number of the last committed batch; 0 for a new buffer."""
        return self._meta("revision")

    @property
    def generation(self) -> int:
        """Incremented by every rollback. The same revision number in different generations may contain
        different rows.
        """
        return self._meta("generation")

    def close(self) -> None:
        """Release the file; idempotent."""
        self._database.close()
        if self._writer_lock is not None:
            self._writer_lock.release()

    def load(self) -> Loaded:
        """Load and verify everything that the search needs, ordered by step id."""
        return load_all(self._database, dim=self._dim)

    def live_trajectories(
        self, *, task_key: str | None = None, trajectory_id: str | None = None
    ) -> list[StoredTrajectory]:
        """Return the current trajectories with this task or this id, oldest first."""
        column, value = ("task_key", task_key) if trajectory_id is None else ("trajectory_id", trajectory_id)
        query = f"""SELECT trajectory_row, trajectory_id, task_key, reward, num_tokens FROM trajectories
                    WHERE {column} = ? AND removed = {NEVER} ORDER BY trajectory_row"""
        with self._database.guard() as db:
            rows = db.execute(query, (value,)).fetchall()
        return [
            StoredTrajectory(row=r, trajectory_id=i, task_key=k, reward=w, num_tokens=n)
            for r, i, k, w, n in rows
        ]

    def announce_batch(self) -> None:
        """Mark that a batch has started; :meth:`write_batch` removes the mark."""
        with self._database.guard() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('open_batch', 1)")

    def clear_lost_batch(self) -> None:
        """Remove the mark of a lost batch. Call this after it has been reported and the file has been read
        without errors.
        """
        with self._database.guard() as db:
            db.execute("DELETE FROM meta WHERE key = 'open_batch'")

    def write_batch(
        self, added: Sequence[NewTrajectory], vectors_ND: NDArray[np.float32], removed: Sequence[int]
    ) -> NDArray[np.void]:
        """Add trajectories (``vectors_ND``: the keys of all their steps) and remove others by row, in one
        transaction.

        Returns the new rows with ``task`` left at -1.
        """
        rows: list[tuple[int, int, int, int, int, float, bool]] = []
        with self._database.transaction() as db:
            revision = self.revision + 1
            _mark_removed(db, removed, revision)
            step_id = self._next_id("steps", "step_id")
            for row, item in enumerate(added, start=self._next_id("trajectories", "trajectory_row")):
                self._insert(
                    row, step_id, revision, item, vectors_ND[len(rows) : len(rows) + len(item.steps)]
                )
                for step in item.steps:
                    rows.append((step_id, row, -1, revision, NEVER, item.reward, step.is_terminal))
                    step_id += 1
            self._set_meta("revision", revision)
            self._set_meta("num_trajectories", self._meta("num_trajectories") + len(added))
            self._set_meta("num_steps", self._meta("num_steps") + len(rows))
            _write_counters_checksum(db)
            # In the transaction of the batch, so that a remaining mark means that the batch was lost.
            db.execute("DELETE FROM meta WHERE key = 'open_batch'")
        return np.array(rows, ROW_DTYPE)

    def flush(self) -> None:
        """Write the write-ahead log into the file and force it to disk."""
        with self._database.guard() as db:
            db.execute("PRAGMA wal_checkpoint(FULL)").fetchall()

    def rollback(self, revision: int) -> tuple[int, int]:
        """Permanently restore a revision; returns the numbers of trajectories dropped and restored."""
        self.require(revision)
        with self._database.transaction() as db:
            later = "SELECT trajectory_row FROM trajectories WHERE added > ?"
            # vectors first, because their ids are looked up among the steps
            for table in ("vectors", "steps"):
                ids = f"SELECT step_id FROM steps WHERE trajectory_row IN ({later})"
                db.execute(f"DELETE FROM {table} WHERE step_id IN ({ids})", (revision,))
            num_dropped = db.execute("DELETE FROM trajectories WHERE added > ?", (revision,)).rowcount
            query = f"SELECT trajectory_row FROM trajectories WHERE removed > ? AND removed < {NEVER}"
            restored = [row for (row,) in db.execute(query, (revision,)).fetchall()]
            _mark_removed(db, restored, NEVER)
            for table in ("trajectories", "steps"):
                count = f"(SELECT count(*) FROM {table})"
                db.execute(f"UPDATE meta SET value = {count} WHERE key = 'num_{table}'")
            self._set_meta("revision", revision)
            self._set_meta("generation", self.generation + 1)
            _write_counters_checksum(db)
        return num_dropped, len(restored)

    def require(self, revision: int) -> None:
        """Raise :class:`~outrider.errors.CheckpointError` unless this revision can be read."""
        oldest, newest = self._meta("oldest_revision"), self.revision
        if not oldest <= revision <= newest:
            raise CheckpointError(
                f"{self.path}: revision {revision} is not in the buffer, which contains {oldest} to {newest}"
            )

    def records(self, step_ids: Iterable[int], *, generation: int) -> list[StepRecord]:
        """Return the full records of steps, in the given order.

        Raises :class:`~outrider.errors.DataError` if the file is of another generation, because an id may
        then refer to a different step.
        """
        with self._database.guard():
            if self.generation != generation:
                raise DataError(f"{self.path}: rolled back since it was loaded here; open it again")
            with _damage(self.path):
                return [self._record(int(step_id)) for step_id in step_ids]

    def step_ids(self, trajectory_id: str, *, revision: int) -> range:
        """Return the ids of the steps of a trajectory at a revision; empty if it did not exist."""
        query = """SELECT first_step_id, num_steps FROM trajectories
                   WHERE trajectory_id = ? AND added <= ? AND removed > ?"""
        with self._database.guard() as db:
            row = db.execute(query, (trajectory_id, revision, revision)).fetchone()
        return range(row[0], row[0] + row[1]) if row else range(0)

    def trajectory_facts(self, revision: int) -> list[tuple[str, str, float, int, int]]:
        """Return task, agent, reward, steps and step tokens of every trajectory at a revision."""
        query = """SELECT t.task_key, t.agent, t.reward, t.num_steps, (SELECT sum(s.num_tokens) FROM steps s
                   WHERE s.step_id >= t.first_step_id AND s.step_id < t.first_step_id + t.num_steps)
                   FROM trajectories t WHERE t.added <= ? AND t.removed > ? ORDER BY t.trajectory_row"""
        with _damage(self.path), self._database.guard() as db:
            rows = db.execute(query, (revision, revision)).fetchall()
            return [
                (task, agent, float(reward), int(num), int(tokens))
                for task, agent, reward, num, tokens in rows
            ]

    def digest(self, revision: int) -> str:
        """Return the SHA-256 (hex) of the trajectories at a revision, in order, computed from the checksums
        of their steps.
        """
        query = """SELECT t.task_key, t.trajectory_id, t.agent, t.question, t.reward,
                   s.step_id, s.num_tokens, s.is_terminal, s.checksum, v.checksum
                   FROM steps s JOIN vectors v ON v.step_id = s.step_id
                   JOIN trajectories t ON t.trajectory_row = s.trajectory_row
                   WHERE t.added <= ? AND t.removed > ? ORDER BY s.step_id"""
        hasher = hashlib.sha256()
        with self._database.guard() as db:
            for row in db.execute(query, (revision, revision)):
                hasher.update(repr(row).encode("utf-8", "surrogatepass"))
        return hasher.hexdigest()

    def _insert(
        self,
        row: int,
        first_step_id: int,
        revision: int,
        item: NewTrajectory,
        vectors_TD: NDArray[np.float32],
    ) -> None:
        crc = trajectory_checksum(
            reward=item.reward,
            texts=(item.task_key, item.trajectory_id, item.agent, item.question), num_tokens=item.num_tokens,
            first_step_id=first_step_id, num_steps=len(item.steps), added=revision, removed=NEVER,
        )  # fmt: skip
        values = (item.trajectory_id, item.task_key, item.agent, item.question, item.reward, item.num_tokens)
        placement = (first_step_id, len(item.steps), revision, NEVER, crc)
        self._database.db.execute(
            "INSERT INTO trajectories VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", (row, *values, *placement)
        )
        steps, vectors = [], []
        for step_id, (step, num_tokens, vector) in enumerate(
            zip(item.steps, item.step_num_tokens, vectors_TD, strict=True), start=first_step_id
        ):
            crc = checksum(step.text, step.observation)
            steps.append((step_id, row, num_tokens, int(step.is_terminal), crc, step.text, step.observation))
            # Little-endian on every machine, so that files are portable.
            blob = vector.astype("<f4").tobytes()
            terminal = int(step.is_terminal)
            crc = _vector_checksum(
                blob, step_id=step_id, row=row, num_tokens=num_tokens, is_terminal=terminal
            )
            vectors.append((step_id, crc, blob))
        self._database.db.executemany("INSERT INTO steps VALUES (?,?,?,?,?,?,?)", steps)
        self._database.db.executemany("INSERT INTO vectors VALUES (?,?,?)", vectors)

    def _record(self, step_id: int) -> StepRecord:
        query = """SELECT t.trajectory_id, t.task_key, t.agent, t.question, t.reward, t.first_step_id
                   FROM steps s JOIN trajectories t ON t.trajectory_row = s.trajectory_row
                   WHERE s.step_id = ?"""
        trajectory = self._database.db.execute(query, (step_id,)).fetchone()
        if trajectory is None:
            raise DataError(f"{self.path}: step {step_id} is not in the buffer")
        trajectory_id, task_key, agent, question, reward, first = trajectory
        query = """SELECT checksum, num_tokens, text, observation, is_terminal FROM steps
                   WHERE step_id BETWEEN ? AND ? ORDER BY step_id"""
        until = self._database.db.execute(query, (first, step_id)).fetchall()
        # All steps up to this one, which make up its history.
        for index, (crc, _, text, observation, _) in enumerate(until):
            if crc != checksum(text, observation):
                raise BufferCorrupt(f"{self.path}: step {first + index} fails its checksum")
        steps = [Step(text=row[2], observation=row[3], is_terminal=bool(row[4])) for row in until]
        return StepRecord(
            step_id=step_id,
            task_key=task_key,
            trajectory_id=trajectory_id,
            step_index=step_id - first,
            history_text=history_text(question, steps[:-1]),
            text=steps[-1].text,
            observation=steps[-1].observation,
            reward=reward,
            agent=agent,
            num_tokens=until[-1][1],
            is_terminal=steps[-1].is_terminal,
        )

    def _next_id(self, table: str, column: str) -> int:
        return int(
            self._database.db.execute(f"SELECT coalesce(max({column}), 0) + 1 FROM {table}").fetchone()[0]
        )

    def _meta(self, key: str) -> int:
        value = meta(self._database, key)
        if not isinstance(value, int):
            raise BufferCorrupt(f"{self.path}: metadata entry {key!r} is no number")
        return value

    def _set_meta(self, key: str, value: int) -> None:
        self._database.db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))


_STEPS_AT_REVISION: Final = """
    FROM steps s JOIN trajectories t ON t.trajectory_row = s.trajectory_row
    WHERE t.added <= ? AND t.removed > ?
      AND (instr(lower(s.text), ?) OR instr(lower(s.observation), ?) OR instr(lower(t.task_key), ?))
"""
_COLUMNS: Final = ("item_id", "writer", "key", "agent", "score", "index", "text", "observation", "version")


def newest_revision(path: Path) -> int:
    """Return the newest revision of a buffer's file. Raises DataError if it cannot be read."""
    return int(_read(path, "SELECT value FROM meta WHERE key = 'revision'", ())[0][0])


def search_steps(path: Path, revision: int, words: str, *, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """Return how many steps of ``revision`` contain ``words`` in text, observation or task, and the first
    ``limit`` of them. Raises DataError.
    """
    lowered = words.lower()
    parameters = (revision, revision, lowered, lowered, lowered)
    [(total,)] = _read(path, f"SELECT count(*) {_STEPS_AT_REVISION}", parameters)
    rows = _read(
        path,
        "SELECT s.step_id, t.trajectory_id, t.task_key, t.agent, t.reward, s.step_id - t.first_step_id, "
        f"s.text, s.observation, t.added {_STEPS_AT_REVISION} ORDER BY s.step_id LIMIT ?",
        (*parameters, limit),
    )
    return int(total), [dict(zip(_COLUMNS, row, strict=True)) for row in rows]


def _read(path: Path, query: str, parameters: tuple[object, ...]) -> list[tuple[Any, ...]]:
    try:
        with closing(connect(path, writable=False)) as db:
            check_schema(path, db)
            return db.execute(query, parameters).fetchall()
    except sqlite3.Error as error:
        raise DataError(f"{path.name} cannot be read: {error}") from error
