"""Every column that queries, rollbacks and selections read is under a checksum."""

import sqlite3
from pathlib import Path

import pytest

from outrider.errors import BufferCorrupt
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from tests.memory.builders import make_trajectory


def build(path: Path) -> Path:
    """Three tasks; one of them has lost a trajectory to a better one."""
    with StepTraceBuffer(path, HashEmbedder(), mode="write") as buffer:
        for reward in (0.5, 1.0):
            made = [
                make_trajectory(f"t{i}/{reward}", task=f"k{i}", num_steps=4, reward=reward) for i in range(3)
            ]
            buffer.add_trajectories(made, keep_best=1)
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(tmp_path_factory.mktemp("buffer") / "buffer.sqlite").read_bytes()


CHANGES = [
    "UPDATE trajectories SET added = added + 1 WHERE trajectory_row = 2",
    "UPDATE trajectories SET removed = 1 WHERE trajectory_row = 4",
    "UPDATE trajectories SET removed = 4611686018427387904 WHERE trajectory_row = 1",
    "UPDATE trajectories SET num_tokens = num_tokens + 1 WHERE trajectory_row = 5",
    "UPDATE trajectories SET first_step_id = first_step_id + 1 WHERE trajectory_row = 5",
    "UPDATE trajectories SET num_steps = num_steps - 1 WHERE trajectory_row = 5",
    "UPDATE steps SET is_terminal = 1 - is_terminal WHERE step_id = 3",
    "UPDATE steps SET num_tokens = num_tokens + 1 WHERE step_id = 3",
    "UPDATE steps SET trajectory_row = 2 WHERE step_id = 3",
    "UPDATE meta SET value = value - 1 WHERE key = 'revision'",
    "UPDATE meta SET value = value + 1 WHERE key = 'generation'",
    "UPDATE meta SET value = value + 1 WHERE key = 'oldest_revision'",
    "DELETE FROM meta WHERE key = 'counters_checksum'",
]


@pytest.mark.parametrize(
    "statement", CHANGES, ids=[one.replace("UPDATE ", "").partition(" WHERE")[0] for one in CHANGES]
)
def test_a_changed_column_is_found(statement: str, built: bytes, tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    path.write_bytes(built)
    with sqlite3.connect(path) as db:
        assert db.execute(statement).rowcount > 0
    db.close()
    for mode in ("read", "write"):
        with pytest.raises(BufferCorrupt, match="checksum"):
            StepTraceBuffer(path, HashEmbedder(), mode=mode)  # type: ignore[arg-type]


def test_removing_and_restoring_keep_the_checksums(tmp_path: Path) -> None:
    path = build(tmp_path / "buffer.sqlite")
    with StepTraceBuffer(path, HashEmbedder(), mode="write") as buffer:
        late = buffer.digest()
        assert buffer.rollback(1)[1] == 3
        early = buffer.digest()
    with StepTraceBuffer(path, HashEmbedder(), mode="write") as buffer:
        assert (buffer.revision, len(buffer), buffer.digest()) == (1, 12, early)
        buffer.add_trajectories(
            [make_trajectory(f"t{i}/1.0", task=f"k{i}", num_steps=4, reward=1.0) for i in range(3)],
            keep_best=1,
        )
        assert buffer.digest() == late != early
    with StepTraceBuffer(path, HashEmbedder(), mode="read") as buffer:
        assert buffer.digest() == late
