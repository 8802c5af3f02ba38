"""Kills, damage, mix-ups: the buffer says what happened and changes nothing that it cannot read."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.errors import BufferCorrupt, ConfigError, DataError
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import StepFilter, copy_database
from tests.memory.builders import make_trajectory

WRITER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from tests.memory.builders import make_trajectory
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
buffer = StepTraceBuffer(Path(sys.argv[1]), HashEmbedder(), mode="write")
start = buffer.revision
for i in range(100_000):
    report = buffer.add_trajectories([make_trajectory(f"t{start + i}", task=f"k{start + i}", num_steps=20)])
    print(report.revision, flush=True)
"""


def build(path: Path, num: int = 30) -> Path:
    with StepTraceBuffer(path, HashEmbedder(), mode="write") as buffer:
        buffer.add_trajectories([make_trajectory(f"t{i}", task=f"k{i}", num_steps=4) for i in range(num)])
    return path


def open_reader(path: Path) -> StepTraceBuffer:
    return StepTraceBuffer(path, HashEmbedder(), mode="read")


def test_a_buffer_in_a_folder_that_is_not_writable_can_be_read_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of a write-ahead log creates files beside the database, even if there is no log."""
    path = build(tmp_path / "read-only" / "buffer.sqlite")
    monkeypatch.setattr("outrider.memory.step_store.os.access", lambda path, mode: False)
    with open_reader(path) as buffer:
        assert buffer.revision == 1
        assert not list(path.parent.glob("*-shm"))
    copy_database(path, tmp_path / "copy.sqlite")
    with StepTraceBuffer(path, HashEmbedder(), mode="write") as writer:  # its log is read too
        writer.add_trajectories([make_trajectory("new", task="new", num_steps=4)])
        with open_reader(path) as buffer:
            assert buffer.revision == 2


def test_kill_while_writing_loses_at_most_the_open_batch(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    num_lost = 0
    for repetition in range(40):  # until a kill has fallen into a batch, and two at least
        if repetition >= 2 and num_lost:
            break
        paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        arguments = [sys.executable, "-c", WRITER, str(path), *paths]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            acknowledged = [process.stdout.readline() for _ in range(5)]
            time.sleep(0.02 + 0.013 * (repetition % 7))
            os.kill(process.pid, signal.SIGKILL)
            acknowledged += process.stdout.readlines()
        last = max(int(line) for line in acknowledged if line.endswith("\n"))
        with open_reader(path) as buffer:
            assert buffer.revision in (last, last + 1)
            assert buffer.stats().num_trajectories == buffer.revision
            assert buffer.stats().num_steps == 20 * buffer.revision == len(buffer)
            assert [r.step_index for r in buffer.trajectory(f"t{buffer.revision - 1}")] == list(range(20))
            num_lost += buffer.lost_batch
    assert num_lost > 0, "no kill fell into a batch; the test shows nothing"


class DyingEmbedder(HashEmbedder):
    """Fails in the middle of a build, as a process does that runs out of memory."""

    def embed(self, texts: list[str]) -> object:
        if any("t5 " in text for text in texts):
            raise MemoryError
        return super().embed(texts)


def test_lost_batch_is_reported_once_and_can_be_offered_again(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    trajectories = [make_trajectory(f"t{i}", task=f"k{i}", num_steps=4) for i in range(8)]
    with StepTraceBuffer(path, DyingEmbedder(), mode="write") as buffer, pytest.raises(MemoryError):
        buffer.add_trajectories(trajectories, batch_steps=8)
    with open_reader(path) as reader:
        assert reader.lost_batch and reader.stats().num_trajectories == 4
    with StepTraceBuffer(path, HashEmbedder(), mode="write") as buffer:
        assert buffer.lost_batch
        report = buffer.add_trajectories(trajectories, batch_steps=8)
        assert (report.num_present, report.num_inserted) == (4, 4)
    with open_reader(path) as reader:
        assert not reader.lost_batch and reader.stats().num_trajectories == 8


class AskingEmbedder(HashEmbedder):
    """Opens a reader in the middle of a batch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.answers: list[bool] = []

    def embed(self, texts: list[str]) -> object:
        with open_reader(self.path) as reader:
            self.answers.append(reader.lost_batch)
        return super().embed(texts)


def test_open_batch_of_a_living_writer_is_not_lost(tmp_path: Path) -> None:
    embedder = AskingEmbedder(tmp_path / "buffer.sqlite")
    with StepTraceBuffer(embedder.path, embedder, mode="write") as buffer:
        buffer.add_trajectories([make_trajectory("a")])
    assert embedder.answers == [False]


def test_second_writer_is_refused_until_the_first_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.memory.step_store.time.sleep", lambda seconds: None)
    path = build(tmp_path / "buffer.sqlite")
    with (
        StepTraceBuffer(path, HashEmbedder(), mode="write"),
        pytest.raises(ConfigError, match="is writing to it"),
    ):
        StepTraceBuffer(path, HashEmbedder(), mode="write")
    StepTraceBuffer(path, HashEmbedder(), mode="write").close()


def test_other_embedder_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path / "buffer.sqlite")
    for mode in ("read", "write"):
        with pytest.raises(ConfigError, match=r"built with embedder 'hash:256' .* opened with 'hash:128'"):
            StepTraceBuffer(path, HashEmbedder(128), mode=mode)  # type: ignore[arg-type]


def damage_header(data: bytearray) -> None:
    data[:16] = b"not a database!!"


def damage_truncate(data: bytearray) -> None:
    del data[len(data) // 2 :]


def damage_page(data: bytearray) -> None:
    data[4096 * 3 : 4096 * 4] = b"\xff" * 4096


def damage_vector(data: bytearray) -> None:
    vector = HashEmbedder().embed(["question of k7"])[0].tobytes()
    place = data.index(vector)
    data[place + 100] ^= 0x10


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("damage", [damage_header, damage_truncate, damage_page, damage_vector])
def test_damaged_file_is_refused_and_left_alone(tmp_path: Path, damage: object, mode: str) -> None:
    path = build(tmp_path / "buffer.sqlite")
    data = bytearray(path.read_bytes())
    damage(data)  # type: ignore[operator]
    path.write_bytes(data)
    with pytest.raises(BufferCorrupt) as caught:
        StepTraceBuffer(path, HashEmbedder(), mode=mode)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert path.read_bytes() == data


def test_damaged_text_is_found_when_it_is_read(tmp_path: Path) -> None:
    """Texts are not read at opening; a flipped bit in one must still never reach a rollout."""
    path = build(tmp_path / "buffer.sqlite")
    data = bytearray(path.read_bytes())
    data[data.index(b"t7 sees 1")] = ord("T")
    path.write_bytes(data)
    with open_reader(path) as buffer:
        assert buffer.query("question of k7")[0].record.task_key == "k7"
        with pytest.raises(BufferCorrupt, match="fails its checksum"):
            buffer.query("question of k7", StepFilter(scope="same_task", task_key="k7"), k=3)


def test_rows_that_vanish_are_noticed(tmp_path: Path) -> None:
    path = build(tmp_path / "buffer.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM vectors WHERE step_id = 5")
    db.close()
    with pytest.raises(BufferCorrupt, match="number of steps differs from the 120"):
        open_reader(path)


def test_other_files_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no step-trace buffer there"):
        open_reader(tmp_path / "missing.sqlite")
    assert not (tmp_path / "missing.sqlite").exists()
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    for mode in ("read", "write"):
        with pytest.raises(DataError, match="not a step-trace buffer"):
            StepTraceBuffer(other, HashEmbedder(), mode=mode)  # type: ignore[arg-type]


def test_writer_that_died_before_its_first_commit(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
    db.close()
    with pytest.raises(DataError, match="no step-trace buffer there"):
        open_reader(path)
    assert len(StepTraceBuffer(build(path), HashEmbedder(), mode="read")) == 120


@pytest.mark.parametrize("version", [1, 3])
def test_other_format_is_refused(tmp_path: Path, version: int) -> None:
    path = build(tmp_path / "buffer.sqlite")
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE meta SET value = {version} WHERE key = 'format_version'")
    db.close()
    told = f"format_version is {version}, this version of Outrider reads 2: build or import"
    for mode in ("read", "write"):
        with pytest.raises(DataError, match=told):
            StepTraceBuffer(path, HashEmbedder(), mode=mode)  # type: ignore[arg-type]


def test_closed_buffer_says_so(tmp_path: Path) -> None:
    buffer = open_reader(build(tmp_path / "buffer.sqlite"))
    buffer.close()
    buffer.close()
    with pytest.raises(DataError, match="closed"):
        buffer.query("question of k7")
