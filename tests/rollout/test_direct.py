"""Texts played straight against an environment: what breaks or hangs is a typed fault, and the environment is
closed.
"""

import threading
import time
from collections.abc import Callable

import pytest

from outrider.environments.base import StepResult
from outrider.errors import EnvironmentFault, ToolFault
from outrider.rollout.episode import play_texts
from outrider.rollout.faults import run_timed
from outrider.types import Task
from tests.rollout.fakes import Factory, Fake, say

TASK = Task(key="t", question="q", answers=("a",))


def fake(on_step: Callable[[int, str], StepResult]) -> tuple[Factory, Fake]:
    environment = Fake(on_step=on_step)
    return Factory(lambda task, number: environment), environment


def test_it_plays_until_the_texts_or_the_episode_end() -> None:
    factory, environment = fake(
        lambda number, text: StepResult(message=None, done=True) if text == "end" else say(text.upper())
    )
    episode, _ = play_texts(factory, TASK, ["a", "b", "end", "never"], seed=7, timeout_s=5)
    assert [step.observation for step in episode.steps] == ["A", "B", ""]
    assert (environment.seeds, environment.texts, environment.num_closed) == ([7], ["a", "b", "end"], 1)
    episode, _ = play_texts(*_again(), ["a"], seed=0, timeout_s=5)
    assert len(episode.results) == 1


def _again() -> tuple[Factory, Task]:
    return fake(lambda number, text: say(text))[0], TASK


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ToolFault("no tool"), ToolFault, "no tool"),
        (ZeroDivisionError("by zero"), EnvironmentFault, "ZeroDivisionError: by zero"),
        (SystemExit(3), EnvironmentFault, "SystemExit: 3"),
    ],
)
def test_what_it_raises_is_a_typed_fault(error: BaseException, kind: type[Exception], says: str) -> None:
    def breaks(number: int, text: str) -> StepResult:
        raise error

    factory, environment = fake(breaks)
    with pytest.raises(kind, match=says):
        play_texts(factory, TASK, ["a"], seed=0, timeout_s=5)
    assert environment.num_closed == 1


def test_a_step_that_hangs_is_a_fault_in_time() -> None:
    release = threading.Event()

    def hangs(number: int, text: str) -> StepResult:
        release.wait(60)
        return say("late")

    factory, environment = fake(hangs)
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"no answer within 0\.2 s"):
        play_texts(factory, TASK, ["a"], seed=0, timeout_s=0.2)
    release.set()
    assert time.monotonic() - began < 30 and environment.num_closed == 1


def test_results_and_faults_come_through() -> None:
    assert run_timed(lambda one, other: one + other, 1, 2, timeout_s=5) == 3
    with pytest.raises(ToolFault):
        run_timed(_refuse, timeout_s=5)


def _refuse() -> None:
    raise ToolFault("no")
