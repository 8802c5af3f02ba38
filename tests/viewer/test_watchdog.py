"""A run without progress says where it waits, once in a while, and goes on to the same result."""

import io
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from outrider.environments.base import StepResult
from outrider.rollout.hooks import RolloutStatus
from outrider.types import Message, Task
from outrider.viewer import progress
from outrider.viewer.progress import PlainProgress, Progress, WatchedProgress
from tests.log_lines import texts
from tests.rollout.fakes import Factory, Fake, contents, scheduler, scripted, tasks
from tests.viewer.test_progress import Clock

END = StepResult(message=None, done=True)


class Told(Progress):
    """Keeps the notes, and tells that there is one."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.has_one = threading.Event()

    def note(self, text: str, **details: Any) -> None:
        self.notes.append(text)
        self.has_one.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watched(
    clock: Clock, display: Told, whereabouts: RolloutStatus, *, after_s: float = 60.0
) -> WatchedProgress:
    return WatchedProgress(display, rollout_status=whereabouts, after_s=after_s, clock=clock)


def test_the_line_names_stage_calls_rollouts_and_times(clock: Clock) -> None:
    display, whereabouts = Told(), RolloutStatus(clock=clock)
    with closing(watched(clock, display, whereabouts)) as watchdog:
        watchdog.stage("train", 40)
        watchdog.advance(3)
        whereabouts.set("task 7/1", "an environment's step")
        clock.now += 2.0
        for rollout in range(3):
            whereabouts.set(f"task 8/{rollout}", "the wait for a batch")
        whereabouts.set("task 9/0", "an environment's step")
        whereabouts.remove("task 9/0")
        clock.now += 59.0
        watchdog.look()
        assert display.notes == []
        clock.now += 1.0
        watchdog.look()
        watchdog.look()  # said once
    [line] = display.notes
    assert line.startswith(
        "NO PROGRESS for 60 s in train 3/40; rollouts: 1 in an environment's step (longest: task 7/1, 62 s), "
        "3 in the wait for a batch (longest: task 8/0, 60 s); the main thread is "
        "in outrider.viewer.progress._program, line "
    )


@pytest.mark.parametrize("sign", ["a report", "a stage", "a note", "a rollout that goes on"])
def test_any_sign_of_progress_keeps_it_silent_and_silence_brings_it_again(clock: Clock, sign: str) -> None:
    display, whereabouts = Told(), RolloutStatus(clock=clock)
    with closing(watched(clock, display, whereabouts)) as watchdog:
        for _ in range(5):
            clock.now += 40.0
            if sign == "a report":
                watchdog.advance(0)
            elif sign == "a stage":
                watchdog.stage("evaluate", 3)
            elif sign == "a note":
                watchdog.note("seen")
            else:
                whereabouts.set("task 0/0", "an environment's step")
            watchdog.look()
        assert not any("NO PROGRESS" in line for line in display.notes)
        for _ in range(5):
            clock.now += 40.0
            watchdog.look()
    # after 80 and after 160 s of looking every 40
    assert sum("NO PROGRESS" in line for line in display.notes) == 2


def test_all_calls_are_forwarded() -> None:
    stream = io.StringIO()
    display = WatchedProgress(
        PlainProgress(stream=stream, heartbeat_s=0.0), rollout_status=RolloutStatus(), after_s=0.0
    )
    display.stage("train", 4, done=2)
    display.advance(3, reward=0.5)
    display.note("said")
    display.close()
    lines = texts(stream.getvalue())
    assert (
        lines[0] == "train: 2 of 4 done"
        and lines[1].startswith("train 3/4: reward 0.5")
        and lines[2] == "said"
    )


def test_a_step_that_hangs_is_named_while_it_hangs_and_the_result_is_the_same() -> None:
    """With real threads: the environment answers once the line is there."""
    display, whereabouts = Told(), RolloutStatus()

    class Slow(Fake):
        def step(self, message: Message) -> StepResult:
            assert display.has_one.wait(20)
            return super().step(message)

    def play(environment: type[Fake], given: RolloutStatus | None) -> Sequence[object]:
        def make(task: Task, number: int) -> Fake:
            kind = environment if task.key == "task 1" else Fake
            return kind(on_step=lambda n, t: END)

        runs = scheduler(scripted(lambda request, context: "a."), Factory(make))
        runs.rollout_status = given or RolloutStatus()
        return contents(runs.run(tasks(2), modes=("m",), training_step=0))

    with closing(WatchedProgress(display, rollout_status=whereabouts, after_s=0.1)) as watchdog:
        watchdog.stage("evaluate", 2)
        held = play(Slow, whereabouts)
    assert "in evaluate 0/2; rollouts: 1 in an environment's step (longest: task 1/0, " in display.notes[0]
    assert "the main thread is in outrider.rollout.scheduler.run_to_end, line " in display.notes[0]
    assert held == play(Fake, None) and whereabouts.snapshot() == []


def test_the_thread_calls_the_display_regularly_also_without_a_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ticked(Progress):
        def __init__(self) -> None:
            self.has_ticked = threading.Event()

        def tick(self) -> None:
            self.has_ticked.set()

    monkeypatch.setattr(progress, "_TICK_S", 0.01)
    display = Ticked()
    with closing(WatchedProgress(display, rollout_status=RolloutStatus(), after_s=0.0)):
        assert display.has_ticked.wait(10)


def test_no_thread_stays_behind() -> None:
    before = set(threading.enumerate())  # those of other tests may end at any time
    with closing(WatchedProgress(Progress(), rollout_status=RolloutStatus(), after_s=0.01)):
        [watching] = set(threading.enumerate()) - before
    watching.join(10)
    assert not watching.is_alive()
