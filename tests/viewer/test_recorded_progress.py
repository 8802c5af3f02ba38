"""Where a run is, and what was told, are on disk; a disk that is full ends neither run nor display."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.viewer.progress import Progress
from outrider.viewer.run_reader import LIVE, NOTES, RecordedProgress, read_alarms, read_notes


class Told(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str, **details: Any) -> None:
        self.notes.append(text)


def test_the_state_is_written_once_a_second_and_at_every_stage(tmp_path: Path) -> None:
    now = [0.0]
    shown = RecordedProgress(Progress(), tmp_path, clock=lambda: now[0])

    def state() -> list[object]:
        read = json.loads((tmp_path / LIVE).read_text())
        return [read["stage"], read["total"], read["done"], read["fields"]]

    shown.stage("train", 9, done=1)
    assert state() == ["train", 9, 1, {}]
    shown.advance(2, **{"tokens/s": 7})
    assert state() == ["train", 9, 1, {}]
    now[0] = 1.0
    shown.advance(2, reward=0.5)
    assert state() == ["train", 9, 2, {"tokens/s": 7, "reward": 0.5}]
    shown.advance(3)
    shown.close()
    assert state()[2] == 3


def test_notes_have_the_step_that_they_name(tmp_path: Path) -> None:
    inner = Told()
    shown = RecordedProgress(inner, tmp_path)
    shown.note("ALARM: something before training")
    shown.stage("train", 9, done=4)
    shown.note("ALARM: every rollout of step 7 was lost")
    shown.note("NO PROGRESS for 60 s")
    shown.note("continuing from step 3")
    lines = [json.loads(line) for line in (tmp_path / NOTES).read_text().splitlines()]
    assert [line["step"] for line in lines] == [None, 7, 4, 3]
    assert [line["text"] for line in lines] == inner.notes
    assert [one["step"] for one in read_alarms(tmp_path)] == [None, 7, 4]


def test_an_alarm_that_a_resumed_run_repeats_is_read_once(tmp_path: Path) -> None:
    notes = [
        ("ALARM: low", 3, 1.0),
        ("ALARM: low", 4, 2.0),
        ("ALARM: low", 3, 3.0),
        ("ALARM: all lost", 3, 4.0),
    ]
    lines = [json.dumps({"text": text, "step": step, "time": time}) + "\n" for text, step, time in notes]
    (tmp_path / NOTES).write_text("".join(lines))
    assert [(one["step"], one["time"]) for one in read_alarms(tmp_path)] == [(4, 2.0), (3, 3.0), (3, 4.0)]


def test_the_first_note_after_a_torn_one_is_read(tmp_path: Path) -> None:
    (tmp_path / NOTES).write_text('{"text": "whole"}\n{"text": "to')
    shown = RecordedProgress(Progress(), tmp_path)
    shown.stage("train", 9)
    shown.note("continuing from step 3")
    shown.note("step 4")
    assert [note["text"] for note in read_notes(tmp_path)] == ["whole", "continuing from step 3", "step 4"]


def test_every_alarm_and_nothing_else_is_passed_on_with_its_step(tmp_path: Path) -> None:
    shown = RecordedProgress(Progress(), tmp_path)
    alarms: list[tuple[int | None, str]] = []
    shown.on_alarm = lambda step, text: alarms.append((step, text))
    shown.note("ALARM: something before training")
    shown.stage("train", 9, done=4)
    shown.note("a note")
    shown.note("step 7: 1 rollout was lost")
    shown.note("step 4: 50 % on 2 tasks, 1 rollout was lost", event="evaluation")
    shown.note("ALARM: again", event="summary")
    assert alarms == [(None, "ALARM: something before training"), (7, "step 7: 1 rollout was lost")]


def test_a_full_disk_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = Told()
    shown = RecordedProgress(inner, tmp_path / "gone")
    shown.stage("train", 1)
    shown.note("still told")
    shown.close()
    assert inner.notes == ["still told"] and len(caplog.records) == 1


def test_the_page_of_formats_names_every_field(tmp_path: Path) -> None:
    shown = RecordedProgress(Progress(), tmp_path)
    shown.stage("train", 9)
    shown.close()
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    table = page.partition("`live.json` contains")[2].partition("\n\n`notes.jsonl`")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(json.loads((tmp_path / LIVE).read_text()))
