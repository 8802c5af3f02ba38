"""A stop ends a batch of rollouts at once, also where an environment answers in the same tick of the loop."""

import asyncio
import threading
from dataclasses import dataclass, field

import pytest

from outrider.environments.base import StepResult
from outrider.rollout.faults import run_guarded, run_timed
from outrider.types import Task
from tests.rollout.fakes import Factory, Fake, say, scheduler, scripted, tasks


class StopAsked(Exception):
    """What the trainer raises where it may leave."""


@dataclass(slots=True)
class Held:
    """A call that answers when it is let go, and not before."""

    thread: threading.Thread | None = None
    has_begun: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, *arguments: object) -> StepResult:
        self.thread = threading.current_thread()
        self.has_begun.set()
        self.let_go.wait(30)
        return say("go on")

    def answer(self) -> None:
        """Return only when the answer is on its way to the event loop, which has not seen it."""
        assert self.has_begun.wait(30) and self.thread is not None
        self.let_go.set()
        self.thread.join(30)


def test_a_cancellation_that_meets_the_answer_gets_through() -> None:
    """The answer is delivered and the worker not yet woken when it is cancelled: Python 3.11's ``wait_for``
    swallows that."""

    async def main() -> list[str]:
        said, held = [], Held()

        async def worker() -> None:
            await run_guarded(held, timeout_s=30.0)
            said.append("the worker goes on")

        task = asyncio.create_task(worker())
        await asyncio.sleep(0)  # begins the call
        held.answer()
        await asyncio.sleep(0)  # the answer is delivered
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return said

    assert asyncio.run(main()) == []


def test_a_step_that_answers_in_the_tick_of_the_stop_does_not_keep_the_batch() -> None:
    """Its rollout would wait for a batch that never forms: the one that raised neither waits nor leaves."""
    held = Held()

    def make(task: Task, number: int) -> Fake:
        return Fake(
            on_step=lambda n, t: StepResult(message=None, done=True) if task.key == "task 0" else held()
        )

    runs = scheduler(scripted(lambda request, context: "a."), Factory(make))

    def leave(done: int, total: int) -> None:
        held.answer()
        raise StopAsked

    runs.on_finished = leave

    def play() -> str:
        with pytest.raises(StopAsked):
            runs.run(tasks(2), modes=("m",), training_step=0)
        return "left"

    assert run_timed(play, timeout_s=20.0) == "left"
