"""Damaged and missing files are noticed before they are used, in one line."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider import files as json_lines
from outrider.cli import main
from outrider.config import load_settings
from outrider.errors import CheckpointError, DataError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import open_buffer
from tests.log_lines import messages
from tests.training.short_runs import assert_same, begin, content, interrupted, resume, rewrite_state
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
    return run / "checkpoints" / "step-000001"


def write_state(text: str, checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text(text)


def change(edit: Callable[[dict[str, Any]], object], checkpoint: Path) -> None:
    """Without a new checksum."""
    state = json.loads((checkpoint / "state.json").read_text())
    edit(state)
    write_state(json.dumps(state), checkpoint)


def change_tip(state: dict[str, Any]) -> None:
    """One letter of what the memory shows."""
    buffers = state["memory"]["tips"]["buffers"]
    tip = next(one for buffer in buffers.values() for one in buffer["tips"])
    tip["text"] = tip["text"] + "!"


def leave_out(key: str, checkpoint: Path) -> None:
    with rewrite_state(checkpoint) as state:
        del state[key]


def truncate_weights(checkpoint: Path) -> None:
    path = checkpoint / "masters.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(checkpoint: Path) -> None:
    """In the last value: safetensors reads it without a word."""
    path = checkpoint / "optimizer.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)


NOT_WRITTEN = "are not what was written"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    *((partial(write_state, text), "") for text in ("null", "", "[]", "{}", "\x00", "[" * 100_000)),
    *((partial(write_state, f'{{"checksums": {value}}}'), "no checksum") for value in ("{}", "null")),
    (partial(change, lambda state: state.update(task_cursor=9)), NOT_WRITTEN),
    (partial(change, change_tip), NOT_WRITTEN),
    (partial(change, lambda state: state.update(own_checksun=state.pop("own_checksum"))), "no checksum"),
    *(
        (partial(leave_out, key), f"state.json lacks '{key}'")
        for key in ("step", "memory", "num_policy_tokens", "num_metric_records", "hook_counts",
                    "num_optimizer_steps")
    ),
    (truncate_weights, "masters.safetensors"),
    (flip_a_bit, "optimizer.safetensors"),
    (lambda checkpoint: (checkpoint / "state.json").unlink(), "state.json is missing"),
]  # fmt: skip


def test_damaged_checkpoints_give_way_to_an_older_one_and_the_bits_are_the_same(
    empo2: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Newer checkpoints with one damage each: the run goes back behind all of them."""
    for number, (damage, _) in enumerate(DAMAGES, start=11):
        damage(Path(shutil.copytree(newest(killed), newest(killed).with_name(f"step-{number:06d}"))))
    resume(killed, progress="plain")
    lines = messages(capsys.readouterr().out)
    for number, (_, reason) in enumerate(DAMAGES, start=11):
        [line] = [line for line in lines if f"step-{number:06d} is damaged: " in line]
        assert line.startswith("DAMAGED CHECKPOINT, going back to an older one: ") and reason in line
    assert "continuing from step 1" in lines
    assert_same(empo2, killed)


def test_only_damaged_checkpoints_are_one_line_and_nothing_starts_over(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint in (killed / "checkpoints").iterdir():
        truncate_weights(checkpoint)
    before = content(killed)
    assert main(["train", "--resume", str(killed), "--progress", "none"]) == 1
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and "is damaged" in output
    assert {name: content(killed)[name] for name in before} == before


@pytest.mark.parametrize(
    "line", ["null", "[]", '{"label": "before training"}', "\x00" * 40, '{"label": null', "[" * 100_000]
)
def test_an_evaluation_that_is_no_record_is_named(line: str, killed: Path) -> None:
    _, *others = (killed / "evaluations.jsonl").read_text().splitlines()
    (killed / "evaluations.jsonl").write_text("".join(f"{one}\n" for one in [line, *others]))
    with pytest.raises(DataError, match=r"evaluations\.jsonl line 1 is damaged"):
        RunDirectory(killed).finished_evaluations()


def test_damaged_metrics_and_a_full_disk_end_a_resumed_run(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = killed / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text(f"null\n{before}")
    with pytest.raises(DataError, match=r"metrics\.jsonl line 1 is damaged"):
        resume(killed)
    metrics.write_text(before)

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json_lines, "replace_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        resume(killed)


@pytest.mark.parametrize("name", ["evaluations.jsonl", "metrics.jsonl"])
def test_lines_from_before_the_checkpoint_cannot_be_made_again(name: str, killed: Path) -> None:
    """A lost first line of the evaluations was made again, with the weights of now."""
    (killed / name).write_text("")
    with pytest.raises(
        CheckpointError, match=f"{name} has 0 lines, its checkpoint was saved at .*put the file back"
    ):
        resume(killed)


def test_an_empty_buffer_and_one_that_is_gone_are_named(recipe: Path, tmp_path: Path) -> None:
    """No new buffer is made in place of a lost one."""
    empty = tmp_path / "empty.sqlite"
    StepTraceBuffer(empty, load_embedder("hash"), mode="write").close()
    for overrides, path, error, message in (
        ([f"buffer.path={empty}"], tmp_path / "unused", DataError, r"buffer .*empty\.sqlite is empty$"),
        (["buffer.evolve=true"], tmp_path / "gone.sqlite", CheckpointError, r"gone\.sqlite is missing"),
    ):
        settings = load_settings(RunSettings, file=recipe, overrides=overrides)
        with pytest.raises(error, match=message):
            open_buffer(
                settings, path=path, task_set=None, factory=None, train_tasks=(), resumed=True,  # type: ignore[arg-type]
                note=print, count_tokens=len,
            )  # fmt: skip
        assert not path.exists()


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
