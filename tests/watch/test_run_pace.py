"""F5: the time left of a run has in it what comes besides steps, and is not told before it is known."""

import io
import json
from pathlib import Path

import pytest

from outrider.viewer.progress import PlainProgress, RemainingWork, RunPace, Span, Work
from tests.watch.test_progress import Clock


def spend(pace: RunPace, clock: Clock, kind: Work, seconds: float) -> None:
    with pace.timed(kind):
        clock.now += seconds


def steps(pace: RunPace, clock: Clock, *seconds: float) -> None:
    for one in seconds:
        spend(pace, clock, "step", one)


def told(pace: RunPace) -> Span:
    assert pace.left is not None
    return pace.left


def test_f5_steps_evaluations_and_checkpoints_count_at_their_own_pace() -> None:
    clock = Clock()
    pace = RunPace(clock)
    pace.remaining = RemainingWork(step=5, evaluation=2, checkpoint=3)
    spend(pace, clock, "evaluation", 90.0)
    spend(pace, clock, "checkpoint", 3.0)
    assert pace.left is None  # no step was measured
    steps(pace, clock, 10.0, 10.0, 10.0)
    assert 5 * 10 * 0.5 + 2 * 60 + 3 * 2 < told(pace).low < 5 * 10 + 2 * 60 + 3 * 2
    assert 5 * 10 + 2 * 135 + 3 * 4.5 < told(pace).high < 5 * 10 * 1.5 + 2 * 135 + 3 * 4.5


def test_f5_nothing_is_told_while_an_evaluation_that_comes_was_never_measured() -> None:
    clock = Clock()
    pace = RunPace(clock)
    steps(pace, clock, 10.0, 10.0, 10.0)
    pace.remaining = RemainingWork(step=5, evaluation=1)
    assert pace.left is None
    pace.remaining = RemainingWork(step=5, checkpoint=2)
    assert told(pace).low < 50.0 < told(pace).high and told(pace).text is not None
    pace.remaining = RemainingWork()
    assert pace.left == Span(0.0, 0.0)


def test_f5_it_runs_down_within_a_step_and_grows_when_the_step_is_late() -> None:
    clock = Clock()
    pace = RunPace(clock)
    steps(pace, clock, *[10.0] * 10)
    pace.remaining = RemainingWork(step=50)
    whole = told(pace)
    with pace.timed("step"):
        clock.now += 6.0
        assert (told(pace).low, told(pace).high) == pytest.approx((whole.low - 6.0, whole.high - 6.0))
        clock.now += 194.0
        assert told(pace).high > 2 * whole.high
        pace.remaining = RemainingWork(step=1)
        assert told(pace).text is None  # the last one is late: nothing is known about it


def test_steps_that_grow_get_no_estimate_instead_of_one_that_is_too_small() -> None:
    """Four steps of 16, 26, 35 and 59 s had ``left 0:53, 0:46, 0:42``."""
    clock = Clock()
    pace = RunPace(clock)
    for done, seconds in enumerate((16.0, 26.0, 35.0), start=1):
        steps(pace, clock, seconds)
        pace.remaining = RemainingWork(step=4 - done)
        assert told(pace).text is None


def test_f5_work_that_is_given_up_has_no_pace() -> None:
    clock = Clock()
    pace = RunPace(clock)
    with pytest.raises(KeyboardInterrupt), pace.timed("step"):
        clock.now += 1.0
        raise KeyboardInterrupt
    pace.remaining = RemainingWork(step=1)
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
    pace.remaining = RemainingWork(step=5, evaluation=1, checkpoint=1)
    assert pace.left is None
    steps(pace, clock, 10.0, 10.0, 10.0)
    assert told(pace).low < 5 * 10 + 9 + 2 < told(pace).high
    RunPace().recall(tmp_path / "none.jsonl")


def test_f5_the_display_tells_the_evaluation_at_the_end_and_never_nothing() -> None:
    """It was ``left 0:00`` at the last steps, with an evaluation of two minutes to come."""
    clock = Clock()
    pace, stream = RunPace(clock), io.StringIO()
    progress = PlainProgress(stream=stream, clock=clock, interval=0.0)
    for _ in range(3):
        spend(pace, clock, "evaluation", 120.0)
    for done in range(5):
        pace.remaining = RemainingWork(step=5 - done, evaluation=1)
        progress.stage("train", 5, done=done, time_left=lambda: pace.left)
        spend(pace, clock, "step", 10.0)
        pace.remaining = RemainingWork(step=4 - done, evaluation=1)
        progress.advance(done + 1)
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("train ")]
    assert [line.partition("left ")[2].strip() for line in lines] == [
        "",
        "",
        "1:59-2:41",
        "1:50-2:30",
        "1:41-2:19",
    ]
    pace.remaining = RemainingWork()
    progress.advance(5)
    assert "left" not in stream.getvalue().splitlines()[-1]
