"""``outrider push --dataset`` against a hub on this machine: downloads equal the data, foreign files and
secrets are not sent, and a broken upload continues.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import DatasetCard, HfApi, constants
from hypothesis import given
from hypothesis import strategies as st

from outrider.cli import main
from outrider.errors import BufferCorrupt, ConfigError, DataError, HubError
from outrider.evaluation.hub import push_dataset
from outrider.memory.chat_files import import_trajectories
from outrider.memory.embedders import HashEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.types import Origin, Outcome
from outrider.viewer.records import SCHEMA, StepFiles, TraceReader, TraceRow, step_file
from tests.hub_server import Hub, Repository, hub_server
from tests.memory.builders import make_trajectory

TOKEN = "hf_aTokenThatNobodyMaySee"
REPO = "acme/steps"
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
RECORD = {"question": "q", "messages": CHAT, "reward": 1.0}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server({}, token=TOKEN) as server:
        api = HfApi(endpoint=server.url, token=TOKEN)
        monkeypatch.setattr("outrider.evaluation.hub.HfApi", lambda **given: api)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("outrider.evaluation.hub.get_token", lambda: TOKEN)
        yield server


def files_of(hub: Hub) -> dict[str, bytes]:
    return dict(hub.repositories[f"datasets/{REPO}"].files)


def buffer_at(path: Path, *texts: str) -> Path:
    with StepTraceBuffer(path, HashEmbedder(), mode="write") as buffer:
        buffer.add_trajectories([make_trajectory(f"one {text}", task=text, agent="expert") for text in texts])
    return path


def traces_at(folder: Path, text: str = "hello") -> Path:
    row = TraceRow(step=1, task_key="t", trace_id="t", node_id=0, parent_id=-1, rollout=0,
                   origin=Origin.PROMPT, text=text, outcome=Outcome.FINISHED, episode_return=1.0)  # fmt: skip
    StepFiles(folder).write_rows(step_file(1), [row], SCHEMA)
    return folder


def lines_at(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_a_buffer_comes_back_with_every_step(hub: Hub, tmp_path: Path) -> None:
    path = buffer_at(tmp_path / "mine.sqlite", "a", "b")
    with StepTraceBuffer(path, HashEmbedder(), mode="write"):  # somebody may be writing
        pushed = push_dataset(path, REPO, private=True)
    files = files_of(hub)
    assert pushed.url == f"{hub.url}/datasets/{REPO}" and hub.repositories[f"datasets/{REPO}"].private
    assert set(files) == {"README.md", "buffer.sqlite"} == {name for name, _ in pushed.files}
    copy = tmp_path / "back.sqlite"
    copy.write_bytes(files["buffer.sqlite"])
    with (
        StepTraceBuffer(copy, HashEmbedder(), mode="read") as found,
        StepTraceBuffer(path, HashEmbedder(), mode="read") as own,
    ):
        assert found.stats() == own.stats() and found.digest() == own.digest()
        query = "question of a"
        assert found.query(query, k=3) == own.query(query, k=3)
    card = DatasetCard(files["README.md"].decode())
    assert "| steps | 6 |" in card.content and "| trajectories of expert | 2 |" in card.content
    assert str(tmp_path) not in card.content


def test_trajectories_come_back_and_columns_of_others_stay(hub: Hub, tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "b"}
    longer = {**RECORD, "messages": [*CHAT, tool, *CHAT], "note": "for me"}
    path = lines_at(tmp_path / "mine.jsonl", RECORD, longer)
    push_dataset(path, REPO)
    files = files_of(hub)
    back = tmp_path / "back.jsonl"
    back.write_bytes(files["trajectories.jsonl"])
    assert import_trajectories(back) == import_trajectories(path)
    assert b"for me" not in files["trajectories.jsonl"]
    assert DatasetCard(files["README.md"].decode()).data["configs"][0]["data_files"] == "trajectories.jsonl"


def test_traces_come_back(hub: Hub, tmp_path: Path) -> None:
    folder = traces_at(tmp_path / "traces")
    own = folder / "step-000001.parquet"
    pq.write_table(pq.read_table(own).append_column("mine", pa.array(["for me"])), own)
    push_dataset(folder, REPO)
    back = tmp_path / "back" / "step-000001.parquet"
    back.parent.mkdir()
    back.write_bytes(files_of(hub)["traces/step-000001.parquet"])
    assert TraceReader(back.parent).read(1) == TraceReader(folder).read(1)
    assert "mine" not in pq.read_schema(back).names


@contextmanager
def tempfile_of(record: object) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield lines_at(Path(folder) / "one.jsonl", record)


@given(st.lists(st.tuples(st.text(min_size=1), st.text()), min_size=1, max_size=4), st.floats(-9, 9))
def test_any_trajectory_is_written_as_it_is_read(turns: list[tuple[str, str]], reward: float) -> None:
    from outrider.evaluation.hub import _record

    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("assistant", "user"), turn, strict=True)
    ]
    with tempfile_of({**RECORD, "messages": messages, "reward": reward}) as path:
        imported = import_trajectories(path)
    [one] = imported.trajectories
    with tempfile_of(json.loads(_record(one, imported))) as path:
        assert import_trajectories(path) == imported


@pytest.mark.parametrize("kind", ["buffer", "lines", "traces"])
def test_a_secret_of_this_environment_is_found_before_anything_is_sent(
    kind: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = 'sk-"quoted"-key'
    monkeypatch.setenv("SOME_API_KEY", key)
    for value, name in ((key, r"the value of \$SOME_API_KEY"), (TOKEN, "the token of the hub")):
        place = tmp_path / value[:2]
        place.mkdir()
        text = f"curl -H {value} there"
        if kind == "buffer":
            path = buffer_at(place / "mine.sqlite", "a", text)
        elif kind == "lines":
            said = [{"role": "assistant", "content": text}]
            path = lines_at(place / "mine.jsonl", {**RECORD, "messages": said})
        else:
            path = traces_at(place / "traces", text)
        with pytest.raises(ConfigError, match=f"contains {name}; nothing was sent"):
            push_dataset(path, REPO)
    assert not hub.repositories and not hub.asked


def test_what_is_not_ours_is_not_sent(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "other.sqlite").write_bytes(b"something else")
    (tmp_path / "empty").mkdir()
    damaged = buffer_at(tmp_path / "damaged.sqlite", "a")
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 4096] = b"\xff" * 4096
    damaged.write_bytes(raw)
    for name, error in (
        ("other.sqlite", (DataError, BufferCorrupt)), ("damaged.sqlite", BufferCorrupt),
        ("empty", ConfigError), ("gone", DataError),
    ):  # fmt: skip
        with pytest.raises(error):  # type: ignore[arg-type]
            push_dataset(tmp_path / name, REPO)
    with pytest.raises(DataError, match="'reward' must be"):
        push_dataset(lines_at(tmp_path / "bad.jsonl", RECORD, {**RECORD, "reward": "x"}), REPO)
    assert not hub.asked


def test_a_broken_push_continues_and_a_public_one_is_refused(hub: Hub, tmp_path: Path) -> None:
    path = buffer_at(tmp_path / "mine.sqlite", "a")
    hub.failures = 1
    with pytest.raises(HubError, match="the same command continues"):
        push_dataset(path, REPO)
    push_dataset(path, REPO)
    assert sum(one.startswith("PUT /lfs/") for one in hub.asked) == 1 and "buffer.sqlite" in files_of(hub)
    hub.repositories["datasets/acme/public"] = Repository(files={})
    with pytest.raises(ConfigError, match="exists and is public"):
        push_dataset(path, "acme/public", private=True)
    assert not hub.repositories["datasets/acme/public"].files


def test_the_command(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(lines_at(tmp_path / "mine.jsonl", RECORD))
    assert main(["push", "--dataset", path, "--repo", REPO, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert (
        "# steps" in output and "trajectories.jsonl: " in output and f"nothing was sent to {REPO}" in output
    )
    assert not hub.asked
    assert main(["push", "--dataset", path, "--repo", REPO]) == 0
    assert f"pushed to {hub.url}/datasets/{REPO}" in capsys.readouterr().out
    for given_ in (["push", "--repo", REPO], ["push", "run", "--dataset", path, "--repo", REPO],
                   ["push", "--dataset", path, "--repo", REPO, "--checkpoint", "1"]):  # fmt: skip
        assert main(given_) == 2
