"""The Step-Trace Buffer on disk: one SQLite file in WAL mode, written in transactions of whole tasks.

Every committed batch raises ``revision`` by one. Trajectories carry the revision that added them and the one that removed
them; nothing is deleted before :meth:`StepStore.compact`, so any revision since then can be read or restored. A batch is
announced by a marker row in its own transaction and takes the marker away when it commits: a marker without a living
writer is a batch that died. Process crashes lose at most that batch; a power failure may also lose the last commits
(``synchronous=NORMAL``), never the file.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import BufferCorrupt, CheckpointError, ConfigError, DataError
from outrider.memory.database import Database, checksum
from outrider.memory.history import HISTORY_FORMAT, history_text
from outrider.memory.lock import WriterLock, writer_is_alive
from outrider.memory.records import StepRecord
from outrider.types import Step

FORMAT_VERSION = 1
NEVER = 2**62
"""The ``removed`` revision of a row that is still in the buffer."""

ROW_DTYPE = np.dtype(
    [(name, "i8") for name in ("step_id", "trajectory", "task", "added", "removed")] + [("reward", "f8"), ("terminal", "?")]
)
"""What the search needs to know of a step; ``task`` is a code given by the loader."""

_APPLICATION_ID = 0x4F535442
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE trajectories (
    trajectory_row INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, task_key TEXT NOT NULL, agent TEXT NOT NULL,
    question TEXT NOT NULL, reward REAL NOT NULL, num_tokens INTEGER NOT NULL, first_step_id INTEGER NOT NULL,
    num_steps INTEGER NOT NULL, added INTEGER NOT NULL, removed INTEGER NOT NULL, checksum INTEGER NOT NULL);
CREATE INDEX trajectories_by_task ON trajectories (task_key);
CREATE INDEX trajectories_by_id ON trajectories (trajectory_id);
CREATE TABLE steps (
    step_id INTEGER PRIMARY KEY, trajectory_row INTEGER NOT NULL, num_tokens INTEGER NOT NULL, is_terminal INTEGER NOT NULL,
    checksum INTEGER NOT NULL, text TEXT NOT NULL, observation TEXT NOT NULL);
CREATE TABLE vectors (step_id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, vector BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTrajectory:
    """A trajectory ready to be written: texts are well-formed, ``step_num_tokens`` has one entry a step."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """All steps of the file, removed ones included: ``rows`` (:data:`ROW_DTYPE`), ``vectors`` ``[N, D]``, task codes."""

    rows: NDArray[np.void]
    vectors: NDArray[np.float32]
    tasks: dict[str, int]
    revision: int
    generation: int


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
        self._writer_lock = WriterLock(path) if writable else None
        try:
            is_new = not path.exists() or self._is_blank()
            if is_new and not writable:
                raise DataError(f"{path}: no step-trace buffer there")
            if not is_new:
                self._check(embedder)
            self._database = Database(path, writable=writable)
            if is_new:
                self._create(embedder)
        except BaseException:
            if self._writer_lock is not None:
                self._writer_lock.release()
            raise

    @property
    def revision(self) -> int:
        """Number of the last committed batch; 0 for a new buffer."""
        return int(self._meta("revision"))

    @property
    def generation(self) -> int:
        """Raised by every rollback and compaction: the same revision of another generation may hold other rows."""
        return int(self._meta("generation"))

    def close(self) -> None:
        """Release the file; may be called twice."""
        self._database.close()
        if self._writer_lock is not None:
            self._writer_lock.release()

    def load(self) -> Loaded:
        """Read and verify everything that the search needs, in order of step id."""
        # One transaction: a writer elsewhere may commit while this reads.
        with self._database.transaction("BEGIN") as db:
            revision, generation = self.revision, self.generation
            tasks: dict[str, int] = {}
            trajectories: dict[int, tuple[int, int, int, float]] = {}
            query = """SELECT trajectory_row, added, removed, reward, checksum, task_key, trajectory_id, agent, question
                       FROM trajectories ORDER BY trajectory_row"""
            for row, added, removed, reward, crc, task_key, *texts in db.execute(query):
                if crc != checksum(struct.pack("<d", reward), task_key, *texts):
                    raise BufferCorrupt(f"{self.path}: trajectory {row} fails its checksum")
                trajectories[row] = (tasks.setdefault(task_key, len(tasks)), added, removed, reward)
            num_steps, num_trajectories = int(self._meta("num_steps")), int(self._meta("num_trajectories"))
            if len(trajectories) != num_trajectories:
                raise BufferCorrupt(f"{self.path}: {len(trajectories)} trajectories where {num_trajectories} were written")
            rows = np.empty(num_steps, ROW_DTYPE)
            vectors = np.empty((num_steps, self._dim), np.float32)
            self._load_steps(trajectories, rows, vectors)
        return Loaded(rows=rows, vectors=vectors, tasks=tasks, revision=revision, generation=generation)

    def live_trajectories(self, *, task_key: str | None = None, trajectory_id: str | None = None) -> list[StoredTrajectory]:
        """Trajectories now in the buffer with this task or this id, oldest first."""
        column, value = ("task_key", task_key) if trajectory_id is None else ("trajectory_id", trajectory_id)
        query = f"""SELECT trajectory_row, trajectory_id, task_key, reward, num_tokens FROM trajectories
                    WHERE {column} = ? AND removed = {NEVER} ORDER BY trajectory_row"""
        with self._database.guard() as db:
            found = db.execute(query, (value,)).fetchall()
        return [StoredTrajectory(row=r, trajectory_id=i, task_key=k, reward=w, num_tokens=n) for r, i, k, w, n in found]

    def announce_batch(self) -> None:
        """Mark that a batch is being made; :meth:`write_batch` takes the mark away."""
        with self._database.guard() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('open_batch', 1)")

    def forget_lost_batch(self) -> None:
        """Take away the mark of a batch that died, once it has been reported and the file has been read without fault."""
        with self._database.guard() as db:
            db.execute("DELETE FROM meta WHERE key = 'open_batch'")

    def write_batch(
        self, added: Sequence[NewTrajectory], vectors_ND: NDArray[np.float32], removed: Sequence[int]
    ) -> NDArray[np.void]:
        """Add trajectories (``vectors_ND``: the keys of all their steps) and remove others by row, in one transaction.

        Returns the new rows with ``task`` left at -1.
        """
        rows: list[tuple[int, int, int, int, int, float, bool]] = []
        with self._database.transaction() as db:
            revision = self.revision + 1
            update = "UPDATE trajectories SET removed = ? WHERE trajectory_row = ?"
            db.executemany(update, [(revision, row) for row in removed])
            step_id = self._next_id("steps", "step_id")
            for row, item in enumerate(added, start=self._next_id("trajectories", "trajectory_row")):
                self._insert(row, step_id, revision, item, vectors_ND[len(rows) : len(rows) + len(item.steps)])
                for step in item.steps:
                    rows.append((step_id, row, -1, revision, NEVER, item.reward, step.is_terminal))
                    step_id += 1
            self._set_meta("revision", revision)
            self._set_meta("num_trajectories", int(self._meta("num_trajectories")) + len(added))
            self._set_meta("num_steps", int(self._meta("num_steps")) + len(rows))
            db.execute("DELETE FROM meta WHERE key = 'open_batch'")
        return np.array(rows, ROW_DTYPE)

    def rollback(self, revision: int) -> tuple[int, int]:
        """Restore an earlier revision for good; returns the numbers of trajectories dropped and restored."""
        self.require(revision)
        with self._database.transaction() as db:
            later = "SELECT trajectory_row FROM trajectories WHERE added > ?"
            dropped = self._delete(later, revision)
            query = f"UPDATE trajectories SET removed = {NEVER} WHERE removed > ? AND removed < {NEVER}"
            restored = db.execute(query, (revision,)).rowcount
            self._set_meta("revision", revision)
            self._count_again()
        return dropped, restored

    def compact(self, oldest_revision: int) -> int:
        """Delete trajectories that were removed at or before this revision; older revisions can then not be read again."""
        self.require(oldest_revision)
        with self._database.transaction():
            num_deleted = self._delete("SELECT trajectory_row FROM trajectories WHERE removed <= ?", oldest_revision)
            self._set_meta("oldest_revision", oldest_revision)
            self._count_again()
        return num_deleted

    def require(self, revision: int) -> None:
        """Raise :class:`~outrider.errors.CheckpointError` unless this revision can be read."""
        oldest, newest = int(self._meta("oldest_revision")), self.revision
        if not oldest <= revision <= newest:
            raise CheckpointError(f"{self.path}: revision {revision} is not in the buffer, which holds {oldest} to {newest}")

    def records(self, step_ids: Iterable[int], *, generation: int) -> list[StepRecord]:
        """The full records of steps, in the given order.

        Raises :class:`~outrider.errors.DataError` if the file is of another generation: an id may then mean another step.
        """
        with self._database.guard():
            if self.generation != generation:
                raise DataError(f"{self.path}: rolled back or compacted since it was loaded here; call refresh or open it again")
            return [self._record(int(step_id)) for step_id in step_ids]

    def step_ids(self, trajectory_id: str) -> range:
        """Ids of the steps of the live trajectory with this id; empty if there is none."""
        query = f"SELECT first_step_id, num_steps FROM trajectories WHERE trajectory_id = ? AND removed = {NEVER}"
        with self._database.guard() as db:
            found = db.execute(query, (trajectory_id,)).fetchone()
        return range(found[0], found[0] + found[1]) if found else range(0)

    def trajectory_facts(self, revision: int) -> list[tuple[str, str, float, int, int]]:
        """Task, agent, reward, steps and step tokens of every trajectory in the buffer at a revision."""
        query = """SELECT t.task_key, t.agent, t.reward, t.num_steps, (SELECT sum(s.num_tokens) FROM steps s
                   WHERE s.step_id >= t.first_step_id AND s.step_id < t.first_step_id + t.num_steps)
                   FROM trajectories t WHERE t.added <= ? AND t.removed > ? ORDER BY t.trajectory_row"""
        with self._database.guard() as db:
            return db.execute(query, (revision, revision)).fetchall()

    def _is_blank(self) -> bool:
        """Whether the file is a database without tables: a writer died before its first commit."""
        self._database = Database(self.path, writable=False)
        try:
            with self._database.guard() as db:
                return db.execute("SELECT 1 FROM sqlite_master").fetchone() is None
        finally:
            self._database.close()

    def _check(self, embedder: str) -> None:
        """Verify an existing file through a read-only connection, so that a damaged one is left as it is."""
        self._database = Database(self.path, writable=False)
        try:
            with self._database.guard() as db:
                if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
                    raise DataError(f"{self.path}: not a step-trace buffer")
                problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
                if problem != "ok":
                    raise BufferCorrupt(f"{self.path}: damaged: {' '.join(str(problem).split())}")
                for key, wanted in (("format_version", FORMAT_VERSION), ("history_format", HISTORY_FORMAT)):
                    if self._meta(key) != wanted:
                        raise DataError(f"{self.path}: {key} is {self._meta(key)}, this version of Outrider reads {wanted}")
                if (self._meta("embedder"), self._meta("dim")) != (embedder, self._dim):
                    built = f"{self._meta('embedder')!r} ({self._meta('dim')} dimensions)"
                    raise ConfigError(f"{self.path}: built with embedder {built}, opened with {embedder!r} ({self._dim})")
                marked = db.execute("SELECT 1 FROM meta WHERE key = 'open_batch'").fetchone() is not None
            self.lost_batch = marked and (self._writer_lock is not None or not writer_is_alive(self.path))
        finally:
            self._database.close()

    def _create(self, embedder: str) -> None:
        meta = {"format_version": FORMAT_VERSION, "history_format": HISTORY_FORMAT, "embedder": embedder, "dim": self._dim}
        counters = {"revision": 0, "oldest_revision": 0, "generation": 0, "num_trajectories": 0, "num_steps": 0}
        with self._database.transaction() as db:
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.executemany("INSERT INTO meta VALUES (?, ?)", (meta | counters).items())

    def _load_steps(
        self, trajectories: dict[int, tuple[int, int, int, float]], rows: NDArray[np.void], vectors: NDArray[np.float32]
    ) -> None:
        query = """SELECT s.step_id, s.trajectory_row, s.is_terminal, v.checksum, v.vector
                   FROM steps s JOIN vectors v ON v.step_id = s.step_id ORDER BY s.step_id"""
        cursor = self._database.db.execute(query)
        done = 0
        while chunk := cursor.fetchmany(4096):
            end = done + len(chunk)
            if end > len(rows):
                break
            for step_id, row, _, crc, vector in chunk:
                if row not in trajectories or len(vector) != 4 * self._dim or zlib.crc32(vector) != crc:
                    raise BufferCorrupt(f"{self.path}: step {step_id} fails its checksum")
            rows[done:end] = [(c[0], c[1], *trajectories[c[1]], bool(c[2])) for c in chunk]
            vectors[done:end] = np.frombuffer(b"".join(c[4] for c in chunk), "<f4").reshape(len(chunk), self._dim)
            done = end
        if done != len(rows) or cursor.fetchone() is not None:
            raise BufferCorrupt(f"{self.path}: the number of steps differs from the {len(rows)} that were written")

    def _insert(self, row: int, first_step_id: int, revision: int, item: NewTrajectory, vectors_TD: NDArray[np.float32]) -> None:
        crc = checksum(struct.pack("<d", item.reward), item.task_key, item.trajectory_id, item.agent, item.question)
        values = (item.trajectory_id, item.task_key, item.agent, item.question, item.reward, item.num_tokens)
        where = (first_step_id, len(item.steps), revision, NEVER, crc)
        self._database.db.execute("INSERT INTO trajectories VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", (row, *values, *where))
        steps, vectors = [], []
        for step_id, (step, num_tokens, vector) in enumerate(
            zip(item.steps, item.step_num_tokens, vectors_TD, strict=True), start=first_step_id
        ):
            crc = checksum(step.text, step.observation)
            steps.append((step_id, row, num_tokens, int(step.is_terminal), crc, step.text, step.observation))
            blob = vector.astype("<f4").tobytes()
            vectors.append((step_id, zlib.crc32(blob), blob))
        self._database.db.executemany("INSERT INTO steps VALUES (?,?,?,?,?,?,?)", steps)
        self._database.db.executemany("INSERT INTO vectors VALUES (?,?,?)", vectors)

    def _delete(self, trajectory_rows: str, revision: int) -> int:
        for table in ("vectors", "steps"):
            ids = f"SELECT step_id FROM steps WHERE trajectory_row IN ({trajectory_rows})"
            self._database.db.execute(f"DELETE FROM {table} WHERE step_id IN ({ids})", (revision,))
        statement = f"DELETE FROM trajectories WHERE trajectory_row IN ({trajectory_rows})"
        return self._database.db.execute(statement, (revision,)).rowcount

    def _count_again(self) -> None:
        """After a deletion: the numbers of rows that the next opening has to find, and a new generation."""
        for table in ("trajectories", "steps"):
            self._database.db.execute(f"UPDATE meta SET value = (SELECT count(*) FROM {table}) WHERE key = 'num_{table}'")
        self._set_meta("generation", self.generation + 1)

    def _record(self, step_id: int) -> StepRecord:
        query = """SELECT t.trajectory_id, t.task_key, t.agent, t.question, t.reward, t.first_step_id FROM steps s
                   JOIN trajectories t ON t.trajectory_row = s.trajectory_row WHERE s.step_id = ?"""
        found = self._database.db.execute(query, (step_id,)).fetchone()
        if found is None:
            raise DataError(f"{self.path}: step {step_id} is not in the buffer")
        trajectory_id, task_key, agent, question, reward, first = found
        query = """SELECT checksum, num_tokens, text, observation, is_terminal FROM steps
                   WHERE step_id BETWEEN ? AND ? ORDER BY step_id"""
        until = self._database.db.execute(query, (first, step_id)).fetchall()
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
        return int(self._database.db.execute(f"SELECT coalesce(max({column}), 0) + 1 FROM {table}").fetchone()[0])

    def _meta(self, key: str) -> str | int:
        with self._database.guard() as db:
            found = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if found is None:
            raise BufferCorrupt(f"{self.path}: metadata entry {key!r} is missing")
        value: str | int = found[0]
        return value

    def _set_meta(self, key: str, value: int) -> None:
        self._database.db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))
