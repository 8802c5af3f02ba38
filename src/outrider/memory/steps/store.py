"""The Step-Trace Buffer on disk: one SQLite file in WAL mode, written in transactions of whole tasks.

Every committed batch raises ``revision`` by one. Trajectories carry the revision that added them and the one
that removed them; a rollback alone deletes, so any revision before it can be read or restored. A batch is
announced by a marker row in its own transaction and takes the marker away when it commits: a marker without a
living writer is a batch that died. Process crashes lose at most that batch; a power failure may also lose the
commits since the last :meth:`StepStore.flush` (``synchronous=NORMAL``), never the file.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import BufferCorrupt, CheckpointError, DataError
from outrider.memory.lock import writer_is_alive, writer_lock
from outrider.memory.steps.checksums import (
    mark_removed,
    trajectory_checksum,
    vector_checksum,
    write_counters_checksum,
)
from outrider.memory.steps.database import Database, checksum
from outrider.memory.steps.format import check_file, create_tables, is_blank, meta
from outrider.memory.steps.history import history_text
from outrider.memory.steps.load import NEVER, ROW_DTYPE, Loaded, damage, load_all
from outrider.memory.steps.records import StepRecord
from outrider.types import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTrajectory:
    """A trajectory ready to be written: texts are well-formed, ``step_num_tokens`` has one entry per step."""

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
        self._writer_lock = writer_lock(path) if writable else None
        try:
            is_new = not path.exists() or is_blank(path)
            if is_new and not writable:
                raise DataError(f"{path}: no step-trace buffer there")
            if not is_new:
                announced = check_file(path, embedder=embedder, dim=dim)
                self.lost_batch = announced and (writable or not writer_is_alive(path))
            self._database = Database(path, writable=writable)
            if is_new:
                create_tables(self._database, embedder=embedder, dim=dim)
            self._format = self._meta("format_version")
        except BaseException:
            if self._writer_lock is not None:
                self._writer_lock.release()
            raise

    @property
    def revision(self) -> int:
        """Number of the last committed batch; 0 for a new buffer."""
        return self._meta("revision")

    @property
    def generation(self) -> int:
        """Raised by every rollback: the same revision of another generation may hold other
        rows.
        """
        return self._meta("generation")

    def close(self) -> None:
        """Release the file; may be called twice."""
        self._database.close()
        if self._writer_lock is not None:
            self._writer_lock.release()

    def load(self) -> Loaded:
        """Read and verify everything that the search needs, in order of step id."""
        return load_all(self._database, dim=self._dim)

    def live_trajectories(
        self, *, task_key: str | None = None, trajectory_id: str | None = None
    ) -> list[StoredTrajectory]:
        """Trajectories now in the buffer with this task or this id, oldest first."""
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
        """Mark that a batch is being made; :meth:`write_batch` takes the mark away."""
        with self._database.guard() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('open_batch', 1)")

    def clear_lost_batch(self) -> None:
        """Take away the mark of a batch that died, once it has been reported and the file has been read
        without fault.
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
            mark_removed(db, self._format, removed, revision)
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
            write_counters_checksum(db, self._format)
            # In the batch's own transaction: a marker that is still there means that the batch is not.
            db.execute("DELETE FROM meta WHERE key = 'open_batch'")
        return np.array(rows, ROW_DTYPE)

    def flush(self) -> None:
        """Move the write-ahead log into the file and force it to disk."""
        with self._database.guard() as db:
            db.execute("PRAGMA wal_checkpoint(FULL)").fetchall()

    def rollback(self, revision: int) -> tuple[int, int]:
        """Restore an earlier revision for good; returns the numbers of trajectories dropped and restored."""
        self.require(revision)
        with self._database.transaction() as db:
            later = "SELECT trajectory_row FROM trajectories WHERE added > ?"
            dropped = self._delete(later, revision)
            query = f"SELECT trajectory_row FROM trajectories WHERE removed > ? AND removed < {NEVER}"
            restored = [row for (row,) in db.execute(query, (revision,)).fetchall()]
            mark_removed(db, self._format, restored, NEVER)
            self._set_meta("revision", revision)
            self._count_again()
        return dropped, len(restored)

    def require(self, revision: int) -> None:
        """Raise :class:`~outrider.errors.CheckpointError` unless this revision can be read."""
        oldest, newest = self._meta("oldest_revision"), self.revision
        if not oldest <= revision <= newest:
            raise CheckpointError(
                f"{self.path}: revision {revision} is not in the buffer, which holds {oldest} to {newest}"
            )

    def records(self, step_ids: Iterable[int], *, generation: int) -> list[StepRecord]:
        """The full records of steps, in the given order.

        Raises :class:`~outrider.errors.DataError` if the file is of another generation: an id may then mean
        another step.
        """
        with self._database.guard():
            if self.generation != generation:
                raise DataError(f"{self.path}: rolled back since it was loaded here; open it again")
            with damage(self.path):
                return [self._record(int(step_id)) for step_id in step_ids]

    def step_ids(self, trajectory_id: str, *, revision: int) -> range:
        """Ids of the steps of the trajectory that had this id at a revision; empty if there was none."""
        query = """SELECT first_step_id, num_steps FROM trajectories
                   WHERE trajectory_id = ? AND added <= ? AND removed > ?"""
        with self._database.guard() as db:
            row = db.execute(query, (trajectory_id, revision, revision)).fetchone()
        return range(row[0], row[0] + row[1]) if row else range(0)

    def trajectory_facts(self, revision: int) -> list[tuple[str, str, float, int, int]]:
        """Task, agent, reward, steps and step tokens of every trajectory in the buffer at a revision."""
        query = """SELECT t.task_key, t.agent, t.reward, t.num_steps, (SELECT sum(s.num_tokens) FROM steps s
                   WHERE s.step_id >= t.first_step_id AND s.step_id < t.first_step_id + t.num_steps)
                   FROM trajectories t WHERE t.added <= ? AND t.removed > ? ORDER BY t.trajectory_row"""
        with damage(self.path), self._database.guard() as db:
            rows = db.execute(query, (revision, revision)).fetchall()
            return [
                (task, agent, float(reward), int(num), int(tokens))
                for task, agent, reward, num, tokens in rows
            ]

    def digest(self, revision: int) -> str:
        """SHA-256 (hex) over the trajectories in the buffer at a revision, in order, through the checksums of
        their steps.
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
            self._format, reward=item.reward,
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
            # Little-endian whatever the machine: the file may move.
            blob = vector.astype("<f4").tobytes()
            terminal = int(step.is_terminal)
            crc = vector_checksum(
                self._format, blob, step_id=step_id, row=row, num_tokens=num_tokens, is_terminal=terminal
            )
            vectors.append((step_id, crc, blob))
        self._database.db.executemany("INSERT INTO steps VALUES (?,?,?,?,?,?,?)", steps)
        self._database.db.executemany("INSERT INTO vectors VALUES (?,?,?)", vectors)

    def _delete(self, trajectory_rows: str, revision: int) -> int:
        # Vectors first: their ids are looked up among the steps.
        for table in ("vectors", "steps"):
            ids = f"SELECT step_id FROM steps WHERE trajectory_row IN ({trajectory_rows})"
            self._database.db.execute(f"DELETE FROM {table} WHERE step_id IN ({ids})", (revision,))
        statement = f"DELETE FROM trajectories WHERE trajectory_row IN ({trajectory_rows})"
        return self._database.db.execute(statement, (revision,)).rowcount

    def _count_again(self) -> None:
        """After a deletion: the numbers of rows that the next opening has to find, and a new generation."""
        for table in ("trajectories", "steps"):
            self._database.db.execute(
                f"UPDATE meta SET value = (SELECT count(*) FROM {table}) WHERE key = 'num_{table}'"
            )
        self._set_meta("generation", self.generation + 1)
        write_counters_checksum(self._database.db, self._format)

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
        # All steps up to this one: its history is made of them.
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
