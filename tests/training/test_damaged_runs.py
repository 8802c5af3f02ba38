"""What is damaged or gone is noticed before it is used, in one line. In process."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import files as json_lines
from outrider.errors import CheckpointError, DataError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.training.checkpoint import read_checksummed, write_checksummed
from tests.training.short_runs import assert_same, begin, interrupted, resume
from tests.training.tool_run import write_tool_run

EMPO2 = (
    "algorithm.type=empo2", "algorithm.memory_probability=0.6", "algorithm.memory.embedder=hash",
    "algorithm.memory.min_similarity=0.1", "algorithm.memory.max_shown_tokens=120",
    "algorithm.memory.max_tip_tokens=24",
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("made") / "data")


@pytest.fixture(scope="module")
def empo2(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose memory is in its checkpoints."""
    plain = recipe.with_name("plain.toml")
    plain.write_text(recipe.read_text().replace("num_hybrid = 2", ""))
    return begin(plain, tmp_path_factory.mktemp("empo2") / "run", *EMPO2)


@pytest.fixture
def killed(empo2: Path, tmp_path: Path) -> Path:
    """A copy for every test, killed in its second step."""
    return interrupted(Path(shutil.copytree(empo2, tmp_path / "run")))


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-000001" / "state.json"


def change_cursor(state: dict[str, Any]) -> None:
    state["task_cursor"] += 1


def change_tip(state: dict[str, Any]) -> None:
    """One letter of what the memory shows."""
    buffers = state["memory"]["tips"]["buffers"]
    tip = next(one for buffer in buffers.values() for one in buffer["tips"])
    tip["text"] = tip["text"] + "!"


@pytest.mark.parametrize("change", [change_cursor, change_tip])
def test_a_changed_value_of_the_state_is_not_continued_from(
    change: Callable[[dict[str, Any]], None], empo2: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It went on to other results; now the step before is where it goes on, to the same ones."""
    state = json.loads(newest(killed).read_text())
    change(state)
    newest(killed).write_text(json.dumps(state))
    resume(killed, progress="plain")
    told = capsys.readouterr().out
    assert "DAMAGED CHECKPOINT" in told and "the contents of state.json are not what was written" in told
    assert_same(empo2, killed)


@pytest.mark.parametrize(
    "content",
    [
        "null",
        "",
        '{"checksums": {}}',
        "[" * 100_000,
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("[]", "{}", '{"checksums": null}', "\x00")),
    ],
)
def test_a_state_that_is_none_falls_back_to_the_checkpoint_before(
    content: str, empo2: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest(killed).write_text(content)
    resume(killed, progress="plain")
    assert "DAMAGED CHECKPOINT, going back to an older one" in capsys.readouterr().out
    assert_same(empo2, killed)


@pytest.mark.parametrize(
    "key",
    [
        "step",
        "memory",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("num_policy_tokens", "num_metric_records", "hook_counts", "num_optimizer_steps")
        ),
    ],
)
def test_a_state_that_lacks_a_key_is_damaged(
    key: str, empo2: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = read_checksummed(newest(killed))
    del state[key]
    write_checksummed(newest(killed), state)
    resume(killed, progress="plain")
    assert f"state.json lacks '{key}'" in capsys.readouterr().out
    assert_same(empo2, killed)


def test_a_state_without_a_checksum_falls_back_to_the_checkpoint_before(
    empo2: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage that took the name of the checksum away would go unnoticed."""
    state = json.loads(newest(killed).read_text())
    state["own_checksun"] = state.pop("own_checksum")
    newest(killed).write_text(json.dumps(state))
    resume(killed, progress="plain")
    assert "going back to an older one" in (said := capsys.readouterr().out) and "no checksum" in said
    assert_same(empo2, killed)


def test_without_an_older_checkpoint_there_is_one_line(killed: Path) -> None:
    shutil.rmtree(killed / "checkpoints" / "step-000000")
    newest(killed).write_text("null")
    with pytest.raises(CheckpointError, match=r"step-000001 is damaged: state\.json holds no object"):
        resume(killed)


@pytest.mark.parametrize(
    "line", ["null", "[]", '{"label": "before training"}', "\x00" * 40, '{"label": null', "[" * 100_000]
)
@pytest.mark.parametrize("name", ["evaluations.jsonl", "metrics.jsonl"])
def test_a_line_that_is_no_record_is_named(name: str, line: str, killed: Path) -> None:
    _, *others = (killed / name).read_text().splitlines()
    (killed / name).write_text("".join(f"{one}\n" for one in [line, *others]))
    with pytest.raises(DataError, match=f"{name} line 1 is damaged"):
        resume(killed)


def test_a_full_disk_is_called_one(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "Bad file descriptor": of the metrics' file, which was closed before the new one was written."""

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json_lines, "replace_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        resume(killed)


def test_an_empty_buffer_that_was_given_is_not_the_experts_doing(recipe: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.sqlite"
    StepTraceBuffer(empty, load_embedder("hash"), mode="write").close()
    with pytest.raises(DataError, match=r"the step-trace buffer .*empty\.sqlite is empty$"):
        begin(recipe, tmp_path / "run", f"buffer.path={empty}")


def test_a_buffer_of_the_run_that_is_gone_is_missing(recipe: Path, tmp_path: Path) -> None:
    """A new one was made in its place, and then was empty because no expert had solved a task."""
    run = interrupted(begin(recipe, tmp_path / "run", "buffer.evolve=true"))
    (run / "buffer.sqlite").unlink()
    with pytest.raises(CheckpointError, match=r"buffer\.sqlite is missing"):
        resume(run)
    assert not (run / "buffer.sqlite").exists()


def test_a_missing_reference_is_missing_and_not_damaged(recipe: Path, tmp_path: Path) -> None:
    plain = recipe.with_name("kl.toml")
    plain.write_text(recipe.read_text().replace("num_hybrid = 2", ""))
    run = interrupted(begin(plain, tmp_path / "run", "algorithm.type=grpo", "algorithm.kl_weight=0.5"))
    (run / "reference.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"reference\.safetensors is missing"):
        resume(run)


def test_a_file_that_is_named_like_a_checkpoint_is_none_and_stays(empo2: Path, killed: Path) -> None:
    """Saving ended in "Not a directory", and so did the removal of old checkpoints."""
    notes = killed / "checkpoints" / "step-000002"
    notes.write_text("notes")
    (killed / "checkpoints" / "step-000009").write_text("more notes")
    (killed / "checkpoints" / ".step-000007.partial").write_text("half")
    resume(killed)
    assert_same(empo2, killed)
    assert notes.with_name("step-000002.not-a-checkpoint").read_text() == "notes"
    assert (killed / "checkpoints" / "step-000009").read_text() == "more notes"


@pytest.mark.parametrize("name", ["evaluations.jsonl", "metrics.jsonl"])
def test_lines_that_training_went_on_from_cannot_be_made_again(name: str, killed: Path) -> None:
    """A lost first line of the evaluations was made again, with the weights of now."""
    (killed / name).write_text("")
    with pytest.raises(
        CheckpointError, match=f"{name} has 0 lines, its checkpoint was saved at .*put the file back"
    ):
        resume(killed)
