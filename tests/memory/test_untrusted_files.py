"""Step-trace buffers of others: unknown objects in the file are errors of one line, before they are read."""

import functools
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from outrider.errors import BufferCorrupt, DataError, OutriderError
from outrider.evaluation.hub import push_dataset
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import newest_revision, search_steps
from tests.memory.builders import make_trajectory

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"

SCHEMAS = {
    "vectors without an end": "ALTER TABLE vectors RENAME TO v2; "
    f"CREATE VIEW vectors AS {ENDLESS} SELECT n AS step_id, 0 AS checksum, x'00' AS vector FROM r",
    "steps without an end": "ALTER TABLE steps RENAME TO s2; "
    f"CREATE VIEW steps AS {ENDLESS} SELECT n AS step_id, 1 AS trajectory_row, "
    "0 AS num_tokens, 0 AS is_terminal, 0 AS checksum, '' AS text, '' AS observation FROM r",
    "trajectories without an end": "ALTER TABLE trajectories RENAME TO t2; "
    f"CREATE VIEW trajectories AS {ENDLESS} SELECT * FROM r, t2",
    "meta without an end": "ALTER TABLE meta RENAME TO m2; "
    f"CREATE VIEW meta AS {ENDLESS} SELECT n AS key, n AS value FROM r",
    "another view": "CREATE VIEW anything AS SELECT 1",
    "a trigger": f"CREATE TRIGGER t AFTER INSERT ON steps BEGIN DELETE FROM meta WHERE key IN ({ENDLESS} "
    "SELECT n FROM r); END",
    "a trigger on an update": "CREATE TRIGGER t AFTER UPDATE ON meta BEGIN DELETE FROM steps; END",
    "a virtual table": "CREATE VIRTUAL TABLE found USING fts5(text)",
    "a table of others": "CREATE TABLE notes (text)",
    "a generated column": "ALTER TABLE steps ADD COLUMN more AS (length(text))",
    "another column": "ALTER TABLE steps ADD COLUMN more",
    "an index on an expression": "CREATE INDEX more ON steps (printf('%100000d', step_id))",
    "an index on a part": "CREATE INDEX more ON steps (text) WHERE length(text) > 3",
    "an index of ours on something else": "DROP INDEX trajectories_by_id; "
    "CREATE INDEX trajectories_by_id ON trajectories (agent)",
    "a view in the place of statistics": "PRAGMA writable_schema = ON; INSERT INTO sqlite_master VALUES "
    f"('view', 'sqlite_stat1', 'sqlite_stat1', 0, 'CREATE VIEW sqlite_stat1 AS {ENDLESS} "
    "SELECT n AS tbl, n AS idx, n AS stat FROM r')",
    "a check": "DROP TABLE vectors; CREATE TABLE vectors (step_id INTEGER PRIMARY KEY, "
    "checksum INTEGER NOT NULL, vector BLOB NOT NULL CHECK (length(zeroblob(100000000)) > 0))",
    "a missing index": "DROP INDEX trajectories_by_id",
    "a missing table": "DROP TABLE vectors",
}  # fmt: skip


@functools.cache
def buffer_bytes() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "buffer.sqlite"
        with StepTraceBuffer(path, HashEmbedder(), mode="write") as buffer:
            buffer.add_trajectories([make_trajectory("a", task="k", num_steps=3)])
        return path.read_bytes()


def changed_buffer(folder: Path, sql: str) -> Path:
    path = folder / "buffer.sqlite"
    path.write_bytes(buffer_bytes())
    with sqlite3.connect(path) as db:
        db.executescript(sql)
    db.close()
    return path


READERS: dict[str, Callable[[Path], object]] = {
    "read": lambda path: StepTraceBuffer(path, HashEmbedder(), mode="read"),
    "write": lambda path: StepTraceBuffer(path, HashEmbedder(), mode="write"),
    "browse": newest_revision,
    "steps_at": lambda path: search_steps(path, 1, "", limit=3),
    "push": lambda path: push_dataset(path, "someone/steps", private=True, dry_run=True),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_unknown_objects_are_errors_before_anything_is_read(tmp_path: Path, name: str) -> None:
    path = changed_buffer(tmp_path, SCHEMAS[name])
    before = path.read_bytes()
    for read in READERS.values():
        with pytest.raises(BufferCorrupt, match=r"refused: the \w+ '.*' is not one|is missing") as error:
            read(path)
        assert "\n" not in str(error.value)
        assert path.read_bytes() == before


@pytest.mark.parametrize("sql", ["VACUUM", "ANALYZE", "REINDEX", "PRAGMA journal_mode = DELETE"])
def test_maintenance_by_sqlite_is_accepted(tmp_path: Path, sql: str) -> None:
    path = changed_buffer(tmp_path, sql)
    for mode in ("read", "write"):
        with StepTraceBuffer(path, HashEmbedder(), mode=mode) as buffer:  # type: ignore[arg-type]
            assert len(buffer) == 3


@pytest.mark.parametrize("reader", READERS)
def test_another_database_is_no_buffer(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE meta (key, value)")
    db.close()
    with pytest.raises(DataError, match="not a step-trace buffer"):
        READERS[reader](path)


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_an_error_without_waiting(tmp_path: Path, reader: str) -> None:
    os.mkfifo(tmp_path / "buffer.sqlite")
    with pytest.raises(OutriderError, match=r"not a file|no file|neither"):
        READERS[reader](tmp_path / "buffer.sqlite")


@pytest.mark.parametrize("column", ["num_steps", "first_step_id"])
def test_numbers_of_steps_that_others_wrote_are_checked_against_the_steps(
    tmp_path: Path, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with a valid checksum: no code may loop over 2**40 steps."""
    path = changed_buffer(tmp_path, f"UPDATE trajectories SET {column} = {2**40}")
    monkeypatch.setattr("outrider.memory.step_store.trajectory_checksum", _recorded(path))
    with pytest.raises(BufferCorrupt, match="trajectory 1 does not have the steps"):
        StepTraceBuffer(path, HashEmbedder(), mode="read")


def _recorded(path: Path) -> Callable[..., int]:
    db = sqlite3.connect(path)
    [(checksum,)] = db.execute("SELECT checksum FROM trajectories").fetchall()
    db.close()
    return lambda *_, **__: int(checksum)
