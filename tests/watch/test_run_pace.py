"""F5: the time left of a run has in it what comes besides steps, and is not told before it is known."""

import io
import json
from pathlib import Path

import pytest

from outrider.watch.progress import PlainProgress
from outrider.watch.run_pace import Ahead, RunPace, Work
from tests.watch.test_progress import Clock


def spend(pace: RunPace, clock: Clock, kind: Work, seconds: float) -> None:
    with pace.timed(kind):
        clock.now += seconds


def test_f5_steps_evaluations_and_checkpoints_count_at_their_own_pace() -> None:
    clock = Clock()
    pace = RunPace(clock)
    pace.ahead = Ahead(step=5, evaluation=2, checkpoint=3)
    spend(pace, clock, "evaluation", 100.0)
    spend(pace, clock, "checkpoint", 4.0)
    assert pace.left is None  # no step was measured
    spend(pace, clock, "step", 10.0)
    spend(pace, clock, "step", 20.0)
    assert pace.left == pytest.approx(5 * 15 + 2 * 100 + 3 * 4)


def test_f5_nothing_is_told_while_an_evaluation_that_comes_was_never_measured() -> None:
    clock = Clock()
    pace = RunPace(clock)
    spend(pace, clock, "step", 10.0)
    pace.ahead = Ahead(step=5, evaluation=1)
    assert pace.left is None
    pace.ahead = Ahead(step=5, checkpoint=2)
    assert pace.left == pytest.approx(50.0)
    pace.ahead = Ahead()
    assert pace.left == 0.0


def test_f5_it_runs_down_within_a_step_and_grows_when_the_step_is_late() -> None:
    clock = Clock()
    pace = RunPace(clock)
    spend(pace, clock, "evaluation", 100.0)
    spend(pace, clock, "step", 10.0)
    pace.ahead = Ahead(step=5, evaluation=1)
    with pace.timed("step"):
        clock.now += 6.0
        assert pace.left == pytest.approx(4 * 10 + 4 + 100)
        clock.now += 24.0  # 30 s: a step takes 20 s by now
        assert pace.left == pytest.approx(4 * 20 + 100)
        pace.ahead = Ahead(step=1)
        assert pace.left is None  # the last one is late: nothing is known about it


def test_f5_work_that_is_given_up_has_no_pace() -> None:
    clock = Clock()
    pace = RunPace(clock)
    with pytest.raises(KeyboardInterrupt), pace.timed("step"):
        clock.now += 1.0
        raise KeyboardInterrupt
    pace.ahead = Ahead(step=1)
    assert pace.left is None and pace.seconds("step") is None


def test_f5_a_resumed_run_knows_its_evaluations_and_checkpoints_and_measures_its_steps(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    records = [
        {"time/evaluation": 7.0},
        {"time/step": 3.0, "time/checkpoint": 2.0},
        {"time/evaluation": 9.0},
        {"time/evaluation": None},
    ]
    metrics.write_text("".join(json.dumps(one) + "\n" for one in records) + 'null\n{"time/checkpoint"')
    clock = Clock()
    pace = RunPace(clock)
    pace.recall(metrics)
    pace.ahead = Ahead(step=5, evaluation=1, checkpoint=1)
    assert pace.left is None
    spend(pace, clock, "step", 10.0)
    assert pace.left == pytest.approx(5 * 10 + 9 + 2)
    RunPace().recall(tmp_path / "none.jsonl")


def test_f5_the_display_tells_the_evaluation_at_the_end_and_never_nothing() -> None:
    """It was ``left 0:00`` at the last steps, with an evaluation of two minutes to come."""
    clock = Clock()
    pace, stream = RunPace(clock), io.StringIO()
    progress = PlainProgress(stream=stream, clock=clock, interval=0.0)
    spend(pace, clock, "evaluation", 120.0)
    for done in range(3):
        pace.ahead = Ahead(step=3 - done, evaluation=1)
        progress.stage("train", 3, done=done, left_by=lambda: pace.left)
        spend(pace, clock, "step", 10.0)
        pace.ahead = Ahead(step=2 - done, evaluation=1)
        progress.advance(done + 1)
    told = [
        line.partition("left ")[2]
        for line in stream.getvalue().splitlines()
        if " to do" not in line and " done" not in line
    ]
    assert told == ["2:20", "2:10", "2:00"]
    pace.ahead = Ahead()
    progress.advance(3)
    assert "left" not in stream.getvalue().splitlines()[-1]
