"""The time left: from the units that are to do and the measured pace, never nothing while something
is to do."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from outrider.viewer.progress import PlainProgress, RichProgress, StageClock
from tests.log_lines import texts
from tests.viewer.test_progress import Clock


def test_time_left_of_an_even_pace() -> None:
    clock = Clock()
    stage = StageClock(name="train", total=10, clock=clock)
    assert stage.left is None
    for done in range(1, 5):
        clock.now += 3.0
        stage.advance(done, {})
    assert stage.left == pytest.approx(6 * 3.0)
    clock.now += 1.0  # the estimate runs down between reports
    assert stage.left == pytest.approx(6 * 3.0 - 1.0)


def test_a_late_unit_makes_the_estimate_grow() -> None:
    """It ran down to 0:00 with five steps to go."""
    clock = Clock()
    stage = StageClock(name="train", total=10, clock=clock)
    for done in range(1, 6):
        clock.now += 3.0
        stage.advance(done, {})
    estimates = []
    for _ in range(10):
        clock.now += 30.0
        estimates.append(stage.left)
    assert estimates == sorted(estimates) and estimates[0] is not None and estimates[0] > 4 * 3.0
    stage.advance(9, {})
    clock.now += 1e4  # the last one is late: nothing is known about it
    assert stage.left is None and "left" not in stage.summary()


def test_rollouts_that_end_in_bursts_have_the_pace_of_the_bursts_and_their_waits() -> None:
    """200 rollouts, 64 at a time, a minute each: the pace within a burst said that nothing was left."""
    clock = Clock()
    stage = StageClock(name="evaluate", total=200, num_parallel=64, clock=clock)
    for burst in range(3):
        clock.now += 60.0
        for number in range(64):
            clock.now += 0.01
            stage.advance(64 * burst + number + 1, {})
            assert stage.left is not None or (burst, number) < (0, 63)
        left = stage.left
        assert left is not None
        waves = (200 - 64 * (burst + 1)) / 64
        assert 0.9 * 60.0 * waves <= left <= 1.1 * 60.7 * waves
        clock.now += 59.0
        assert stage.left is not None and stage.left > 5.0
        clock.now -= 59.0


def test_rollouts_that_all_run_at_once_have_an_estimate_from_the_half_on() -> None:
    clock = Clock()
    stage = StageClock(name="evaluate", total=10, num_parallel=64, clock=clock)
    has_estimate = []
    for done in range(1, 10):
        clock.now += 1.0
        stage.advance(done, {})
        has_estimate.append(stage.left is not None)
    assert has_estimate == [False] * 4 + [True] * 5


@pytest.mark.parametrize("before", [1, 90])
def test_time_left_of_a_resumed_stage_uses_only_its_own_pace(before: int) -> None:
    clock = Clock()
    stage = StageClock(name="train", total=100, done=before, clock=clock)
    clock.now += 25.0
    stage.advance(before, {})
    assert stage.left is None
    stage.advance(before + 1, {})
    assert stage.left == pytest.approx((99 - before) * 25.0)


def test_time_left_follows_a_change_of_pace() -> None:
    clock = Clock()
    stage = StageClock(name="train", total=200, clock=clock)
    for done in range(1, 101):
        clock.now += 1.0 if done <= 60 else 5.0
        stage.advance(done, {})
    assert stage.left == pytest.approx(100 * 5.0)


def test_reports_within_a_step_do_not_wash_out_the_pace_of_steps() -> None:
    clock = Clock()
    stage = StageClock(name="train", total=10, clock=clock)
    for done in range(1, 4):
        for _ in range(50):  # rollouts of the step come in
            clock.now += 0.1
            stage.advance(done - 1, {"generated": 5})
        stage.advance(done, {})
    assert stage.left == pytest.approx(7 * 5.0)


@given(
    total=st.integers(1, 60), before=st.integers(0, 30), num_parallel=st.integers(1, 80),
    reports=st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 5), st.floats(0, 1e4)), max_size=30),
)  # fmt: skip
def test_the_estimate_is_never_zero_while_units_are_left(
    total: int, before: int, num_parallel: int, reports: list[tuple[float, int, float]]
) -> None:
    clock = Clock()
    done = min(before, total)
    stage = StageClock(name="s", total=total, done=done, num_parallel=num_parallel, clock=clock)
    for pause, units, silence in reports:
        clock.now += pause
        done = min(total, done + units)
        stage.advance(done, {})
        clock.now += silence
        assert stage.left is None or stage.left >= 0.0
        if done < total:
            assert "left 0:00" not in stage.summary()
        else:
            assert "left" not in stage.summary()


def displays(clock: Clock) -> tuple[PlainProgress, RichProgress, io.StringIO]:
    stream = io.StringIO()
    rich = RichProgress(
        console=Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None), clock=clock
    )
    return PlainProgress(stream=stream, clock=clock, heartbeat_s=0.0), rich, stream


def shown(rich: RichProgress, plain: io.StringIO) -> tuple[str, str]:
    console = Console(width=120, color_system=None, file=io.StringIO())
    with console.capture() as capture:
        console.print(rich._render())
    return plain.getvalue().splitlines()[-1], capture.get()


def test_both_displays_count_the_evaluations_between_the_steps() -> None:
    """Ten steps of 10 s with an evaluation of 100 s after each second one: a step costs a minute."""
    clock = Clock()
    plain, rich, stream = displays(clock)
    for done in range(10):
        for display in (plain, rich):
            if done % 2 == 0:
                display.stage("train", 20, done=done)
        clock.now += 10.0
        for display in (plain, rich):
            display.advance(done + 1)
        if done % 2 == 1:
            for display in (plain, rich):
                display.stage(f"evaluate step {done}", 4, num_parallel=64)
            clock.now += 100.0
    for display in (plain, rich):
        display.stage("train", 20, done=10)
    clock.now += 10.0
    for display in (plain, rich):
        display.advance(11)
    line, drawn = shown(rich, stream)
    rich.close()
    assert "elapsed 10:10" in drawn
    for text in (line, drawn):
        minutes, seconds = text.split("left ")[1].split()[0].split(":")
        assert 0.6 * 9 * 60 <= 60 * int(minutes) + int(seconds) <= 1.4 * 9 * 60


def test_a_resumed_run_shows_no_estimate_before_its_first_step() -> None:
    clock = Clock()
    plain, rich, stream = displays(clock)
    for display in (plain, rich):
        display.stage("train", 40, done=35)
    assert texts(stream.getvalue()) == ["train: 35 of 40 done"]
    clock.now += 50.0
    for display in (plain, rich):
        display.advance(35, generated=100)
    line, drawn = shown(rich, stream)
    assert "left" not in line and "left" not in drawn and "35/40" in drawn
    for display in (plain, rich):
        display.advance(36)
    line, drawn = shown(rich, stream)
    rich.close()
    assert "left 3:20" in line and "left 3:20" in drawn


def test_the_mean_of_the_last_twenty_rewards_is_shown_with_the_reward_of_the_step() -> None:
    stage = StageClock(name="train", total=None, clock=Clock())
    for done in range(1, 31):
        stage.advance(done, {"reward": float(done)})
    assert stage.fields["reward"] == 30.0
    assert stage.reward_mean == (pytest.approx(sum(range(11, 31)) / 20), 20)
    assert "reward 30.00 (mean 20.50 of 20)" in stage.summary()
    assert stage.left is None
