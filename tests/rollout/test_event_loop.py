"""Calls of environments in threads, their time limits, cancellation, and the event loop of a batch."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from outrider.environments.base import StepResult
from outrider.errors import EnvironmentFault, InvalidResult, OutriderError, ToolFault
from outrider.rollout.episode import play_texts
from outrider.rollout.faults import run_guarded, run_timed
from outrider.rollout.scheduler import run_to_end
from outrider.tools.base import is_timeout
from outrider.types import Task
from tests.rollout.fakes import END, Factory, Fake, say, scheduler, scripted, tasks


async def _thread() -> int:
    await asyncio.sleep(0)
    return threading.get_ident()


async def _broken() -> None:
    await asyncio.sleep(0)
    raise LookupError("of the batch")


async def _inside(main: "asyncio._CoroutineLike[object]") -> object:
    return run_to_end(main)  # blocks the loop that calls it, as a cell of a notebook does


def test_a_batch_runs_in_this_thread_or_beside_a_running_loop() -> None:
    assert run_to_end(_thread()) == threading.get_ident()
    assert asyncio.run(_inside(_thread())) not in (None, threading.get_ident())


@pytest.mark.parametrize("inside", [False, True])
def test_errors_of_a_batch_are_raised(inside: bool) -> None:
    with pytest.raises(LookupError, match="of the batch"):
        asyncio.run(_inside(_broken())) if inside else run_to_end(_broken())


def test_an_interruption_ends_the_batch_and_is_raised() -> None:
    ended = threading.Event()

    async def endless() -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def notebook_kernel() -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                run_to_end(endless())
        finally:
            signal.signal(signal.SIGINT, before)
        assert ended.is_set()

    asyncio.run(notebook_kernel())


def test_a_result_in_time_counts_even_if_the_loop_was_blocked_past_the_limit() -> None:
    async def main() -> str:
        has_returned = threading.Event()

        def call() -> str:
            has_returned.set()
            return "in time"

        waiting = asyncio.ensure_future(run_guarded(call, timeout_s=0.05))
        await asyncio.sleep(0)  # starts the call
        assert has_returned.wait(10)
        time.sleep(0.2)  # a prefill that blocks the loop for longer than the limit
        return await waiting

    assert asyncio.run(main()) == "in time"


def test_a_call_over_its_limit_is_a_fault() -> None:
    release = threading.Event()
    try:
        with pytest.raises(EnvironmentFault, match=r"no answer within 0\.05 s"):
            asyncio.run(run_guarded(lambda: release.wait(60), timeout_s=0.05))
    finally:
        release.set()


def test_run_timed_returns_results_and_raises_faults() -> None:
    def refuse() -> None:
        raise ToolFault("no")

    assert run_timed(lambda one, other: one + other, 1, 2, timeout_s=5) == 3
    with pytest.raises(ToolFault):
        run_timed(refuse, timeout_s=5)


@pytest.mark.parametrize("kind", [ToolFault, EnvironmentFault, InvalidResult])
def test_a_fault_in_a_group_of_exceptions_keeps_its_kind(kind: type[OutriderError]) -> None:
    fault = kind("no")
    fault.__cause__ = TimeoutError()

    def refuse() -> None:
        raise ExceptionGroup("several", [ValueError("a"), ExceptionGroup("inner", [KeyError("b"), fault])])

    with pytest.raises(kind) as raised:
        run_timed(refuse, timeout_s=5)
    assert raised.value is fault and is_timeout(fault)
    with pytest.raises(kind, match="no"):
        asyncio.run(run_guarded(refuse, timeout_s=5))


def test_the_first_of_a_group_of_exceptions_is_reported() -> None:
    def fail() -> None:
        raise BaseExceptionGroup("several", [ValueError("a"), SystemExit(1)])

    with pytest.raises(EnvironmentFault, match=r"^ValueError: a$"):
        run_timed(fail, timeout_s=5)


# Cancellation in the same tick in which a call returns.


class StopRequested(Exception):
    """Raised by the callback of a stopped trainer."""


@dataclass(slots=True)
class Held:
    """A call that returns when ``let_go`` is set."""

    thread: threading.Thread | None = None
    has_begun: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, *arguments: object) -> StepResult:
        self.thread = threading.current_thread()
        self.has_begun.set()
        self.let_go.wait(30)
        return say("go on")

    def finish(self) -> None:
        """Wait until the result is on its way to the event loop, which has not processed it."""
        assert self.has_begun.wait(30) and self.thread is not None
        self.let_go.set()
        self.thread.join(30)


def test_a_cancellation_in_the_tick_of_the_result_is_not_lost() -> None:
    """``wait_for`` of Python 3.11 swallows such a cancellation."""

    async def main() -> list[str]:
        continued, held = [], Held()

        async def worker() -> None:
            await run_guarded(held, timeout_s=30.0)
            continued.append("the worker continued")

        task = asyncio.create_task(worker())
        await asyncio.sleep(0)  # starts the call
        held.finish()
        await asyncio.sleep(0)  # delivers the result
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return continued

    assert asyncio.run(main()) == []


def test_a_step_that_returns_in_the_tick_of_a_stop_does_not_block_the_batch() -> None:
    """Its rollout would wait for a batch that never forms, because the one that raised does not leave."""
    held = Held()

    def make(task: Task, number: int) -> Fake:
        return Fake(on_step=lambda n, t: END if task.key == "task 0" else held())

    runs = scheduler(scripted(lambda request, context: "a."), Factory(make))

    def stop(done: int, total: int) -> None:
        held.finish()
        raise StopRequested

    runs.on_finished = stop

    def run() -> str:
        with pytest.raises(StopRequested):
            runs.run(tasks(2), modes=("m",), training_step=0)
        return "stopped"

    assert run_timed(run, timeout_s=20.0) == "stopped"


# Episodes of recorded texts.

TASK = Task(key="t", question="q", answers=("a",))


def fake(on_step: Callable[[int, str], StepResult]) -> tuple[Factory, Fake]:
    environment = Fake(on_step=on_step)
    return Factory(lambda task, number: environment), environment


def test_texts_are_played_until_they_or_the_episode_end() -> None:
    factory, environment = fake(lambda number, text: END if text == "end" else say(text.upper()))
    episode, _ = play_texts(factory, TASK, ["a", "b", "end", "never"], seed=7, timeout_s=5)
    assert [step.observation for step in episode.steps] == ["A", "B", ""]
    assert (environment.seeds, environment.texts, environment.num_closed) == ([7], ["a", "b", "end"], 1)
    episode, _ = play_texts(fake(lambda number, text: say(text))[0], TASK, ["a"], seed=0, timeout_s=5)
    assert len(episode.results) == 1


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ToolFault("no tool"), ToolFault, "no tool"),
        (ZeroDivisionError("by zero"), EnvironmentFault, "ZeroDivisionError: by zero"),
        (SystemExit(3), EnvironmentFault, "SystemExit: 3"),
    ],
)
def test_exceptions_of_a_step_become_typed_faults(
    error: BaseException, kind: type[Exception], message: str
) -> None:
    def breaks(number: int, text: str) -> StepResult:
        raise error

    factory, environment = fake(breaks)
    with pytest.raises(kind, match=message):
        play_texts(factory, TASK, ["a"], seed=0, timeout_s=5)
    assert environment.num_closed == 1


def test_a_hanging_step_of_a_recorded_text_is_a_fault() -> None:
    release = threading.Event()

    def hangs(number: int, text: str) -> StepResult:
        release.wait(60)
        return say("late")

    factory, environment = fake(hangs)
    start = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"no answer within 0\.1 s"):
        play_texts(factory, TASK, ["a"], seed=0, timeout_s=0.1)
    release.set()
    assert time.monotonic() - start < 30 and environment.num_closed == 1
