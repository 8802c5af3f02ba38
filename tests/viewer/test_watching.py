"""A run from another terminal: whatever its state, in words, and no text of it steers the terminal."""

import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider import cli
from outrider.commands import watch as following
from outrider.files import FileLock
from outrider.viewer.progress import Progress
from outrider.viewer.run_reader import LIVE, NOTES, RecordedProgress
from outrider.viewer.summary import read_snapshot, summary_lines
from tests.viewer.synthetic_run import write_run

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\r\u202e"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", num_steps=12)


@contextmanager
def running(run: Path) -> Iterator[RecordedProgress]:
    with FileLock(run / "lock"):
        shown = RecordedProgress(Progress(), run)
        shown.stage("train", 40, done=12)
        yield shown


def wants(run: Path, steps: int) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text() + f"[train]\nnum_steps = {steps}\n")


def once(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["watch", str(run), "--once"]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_running_run_shows_stage_steps_and_notes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(run) as shown:
        shown.advance(12, generated=345)
        shown.note("ALARM: something in step 12")
        lines = once(run, capsys)
    assert lines[0] == f"{run}: running" and lines[1].startswith("train 12/40")
    assert [line.split("/")[0] for line in lines[2:7]] == [f"step {step:>1}" for step in range(8, 13)]
    assert lines[-1] == "> ALARM: something in step 12"


def test_a_run_that_is_silent_says_since_when(run: Path) -> None:
    with running(run):
        seen = read_snapshot(run, now=time.time() + 600)
    assert seen.status == "running" and "last heard of 10:00 ago" in seen.lines


def test_finished_stopped_and_killed_runs_are_distinguished(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(run):
        pass  # and its lock is free, without a word: a kill
    assert read_snapshot(run).status == "gone"
    assert "its process is gone" in (lines := once(run, capsys))[0] and "train --resume" in lines[0]
    with running(run) as shown:
        shown.close()
    assert read_snapshot(run).status == "stopped" and "train --resume" in once(run, capsys)[0]
    wants(run, 12)
    lines = once(run, capsys)
    assert lines[0] == f"{run}: finished"
    assert any(line.startswith("learned ") for line in lines) and f"outrider view {run}" in lines[-1]


def test_a_run_of_another_machine_says_which(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / LIVE).write_text(
        json.dumps({"host": platform.node() + "-2", "has_ended": False, "stage": "train"})
    )
    assert f"it ran on {platform.node()}-2" in once(run, capsys)[0]


def test_control_characters_of_a_run_are_not_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(run) as shown:
        shown.advance(12, reward=f"{ESCAPES}0.5", **{ESCAPES: 1})
        shown.note(f"ALARM: {ESCAPES}")
        text = "\n".join(once(run, capsys))
    text += "\n".join(once(run, capsys))
    assert "ALARM" in text and all(one.isprintable() for one in text.replace("\n", ""))


@pytest.mark.parametrize("live", ["", "[]", "null", '{"time": "x", "done": []}', '{"has_ended": 7}'])
def test_damaged_files_are_no_error(run: Path, live: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / LIVE).write_text(live)
    (run / NOTES).write_text('torn {"\nnull\n{"text": 3}\n')
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "reward/mean": "x"}\n{')
    assert once(run, capsys)
    with FileLock(run / "lock"):
        assert once(run, capsys)[0].endswith("running")


def test_it_follows_until_the_run_ends(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wants(run, 12)
    with running(run) as shown:
        todo = iter((lambda: None, lambda: shown.note("checkpoint"), shown.close))

        def sleep(seconds: float) -> None:
            act = next(todo, None)
            if act is None:
                (run / "lock").unlink()
            else:
                act()

        monkeypatch.setattr(following.time, "sleep", sleep)
        assert cli.main(["watch", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.count(": running") == 1 and out.count(": finished") == 1 and "learned " in out
    while_running = out.partition(": finished")[0].splitlines()
    assert len(set(while_running)) == len(while_running) and "> checkpoint" in while_running


def test_ctrl_c_ends_only_the_watching(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(following.time, "sleep", sleep)
    with running(run):
        assert cli.main(["watch", str(run)]) == 0
    assert "no longer watching" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(tmp_path)]) != 0
    assert "no run directory" in capsys.readouterr().err


def test_the_summary_has_scores_costs_and_alarms_within_80_columns(run: Path) -> None:
    with running(run) as shown:
        shown.note("ALARM: " + "long " * 40)
        shown.note("ALARM: every rollout of step 7 was lost")
    lines = summary_lines(run)
    text = "\n".join(lines)
    for part in (
        "after training",
        "58.0 % [54.0, 62.0]",
        "12 steps in 2:24",
        "48000 tokens written",
        "2 alarms, of 2 steps",
        "step 12: ALARM: long",
        "every rollout of step 7",
    ):
        assert part in text
    assert all(len(line) <= 80 for line in lines[:-1])


def test_a_run_without_anything_has_a_summary(tmp_path: Path) -> None:
    assert "no evaluation was recorded" in summary_lines(tmp_path)[0]
