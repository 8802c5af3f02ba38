"""The task that is shown before and after: failed by the start, solved by the end, on one panel."""

import dataclasses
from pathlib import Path

import pytest

from outrider.types import Origin, Outcome
from outrider.viewer.records import SCHEMA, StepFiles, TraceReader, TraceRow, evaluation_file, step_file
from outrider.viewer.report import pick_before_after
from outrider.viewer.run_reader import Evaluation


def _rows(step: int, returns: dict[str, float]) -> list[TraceRow]:
    shared = {"step": step, "rollout": 0}
    rows: list[TraceRow] = []
    for number, (key, value) in enumerate(returns.items()):
        at = {**shared, "task_key": key, "trace_id": f"{step}/{number}"}
        rows.append(TraceRow(**at, node_id=0, parent_id=-1, origin=Origin.PROMPT, text=f"question {key}"))
        leaf = {
            "origin": Origin.POLICY,
            "outcome": Outcome.FINISHED,
            "episode_return": value,
            "hybrid": False,
        }
        rows.append(TraceRow(**at, node_id=1, parent_id=0, text=f"answer {key} at {step}", **leaf))
    return rows


def _evaluation(label: str, step: int, scores: dict[str, float]) -> Evaluation:
    return Evaluation(
        label=label,
        split="test",
        num_tasks=len(scores),
        interval=None,
        step=step,
        temperature=1.0,
        panel_hash="p",
        task_scores=scores,
    )


BEFORE = {"a": 0.0, "b": 1.0, "c": 0.0}
AFTER = {"a": 0.0, "b": 1.0, "c": 1.0}


@pytest.fixture
def evaluations(tmp_path: Path) -> list[Evaluation]:
    writer = StepFiles(tmp_path)
    writer.write_rows(evaluation_file(1), _rows(0, BEFORE), SCHEMA)
    writer.write_rows(evaluation_file(2), _rows(5, AFTER), SCHEMA)
    return [
        _evaluation("before training", 0, BEFORE),
        _evaluation("cold", 0, BEFORE),
        _evaluation("end", 5, AFTER),
    ]


def test_the_first_task_that_was_gained_is_shown_from_both_sides(
    tmp_path: Path, evaluations: list[Evaluation]
) -> None:
    notes: list[str] = []
    before, after = pick_before_after(tmp_path, evaluations, notes)
    assert [sample.path[-1].text for sample in (before, after)] == ["answer c at 0", "answer c at 5"]
    assert (before.leaf.episode_return, after.leaf.episode_return) == (0.0, 1.0) and not notes


def test_nothing_is_shown_where_nothing_can_be(tmp_path: Path, evaluations: list[Evaluation]) -> None:
    notes: list[str] = []
    other = dataclasses.replace(evaluations[-1], panel_hash="q")
    unchanged = dataclasses.replace(evaluations[-1], task_scores=BEFORE)
    for several in (
        evaluations[:2],
        [*evaluations[:2], other],
        [*evaluations[:2], unchanged],
        evaluations[2:],
        [],
    ):
        assert pick_before_after(tmp_path, several, notes) == ()
    (tmp_path / "evaluation-001.parquet").unlink()  # a run of an earlier version has none
    assert pick_before_after(tmp_path, evaluations, notes) == () and not notes


def test_a_damaged_file_is_a_note(tmp_path: Path, evaluations: list[Evaluation]) -> None:
    (tmp_path / "evaluation-002.parquet").write_bytes(b"PAR1 nothing")
    notes: list[str] = []
    assert pick_before_after(tmp_path, evaluations, notes) == ()
    assert len(notes) == 1 and "evaluation-002.parquet cannot be read" in notes[0]


def test_evaluations_are_no_training_steps(tmp_path: Path, evaluations: list[Evaluation]) -> None:
    StepFiles(tmp_path).write_rows(step_file(5), _rows(5, AFTER), SCHEMA)
    assert TraceReader(tmp_path).steps() == (5,)
    assert StepFiles(tmp_path).resume(0) == 1 and TraceReader(tmp_path).read_evaluation(2)
