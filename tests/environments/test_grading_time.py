r"""Slow answers cost their own reward and nothing else: no fault, no retry, no reward of another rollout."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from outrider.engines.base import Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.grading import math_answers, math_worker
from outrider.environments.grading.answers import normalize_answer
from outrider.environments.grading.math_answers import MathPool, compare_math
from outrider.environments.tool_qa.environment import EpisodeConfig
from outrider.environments.tool_qa.rewards import RewardConfig
from outrider.errors import EnvironmentFault
from outrider.rollout.episode import Sampling
from outrider.rollout.faults import run_guarded, run_timed
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tools.base import CallAbandoned, FairPool, SingleFlightCache, uncounted
from outrider.tools.python.tool import PythonTool, PythonToolConfig
from outrider.tools.search import stream_safe, terms
from outrider.training.step_metrics import rollout_metrics
from outrider.types import Outcome, Task
from tests.rollout.fakes import TOKENIZER
from tests.tool_episodes import tool_factory


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[MathPool]:
    made = MathPool(num_processes=1, cpu_seconds=1)
    monkeypatch.setattr(math_answers, "math_pool", lambda: made)
    yield made
    made.close()


def slow_answer(number: int) -> str:
    """Needs minutes; each is another one, so that no cache knows it."""
    return rf"9999999999{number}\ln{{7}}"


def play(answers: list[str], *, step_timeout_s: float) -> RolloutReport:
    def script(request: Request, _: object) -> str:
        return f"<answer>\\boxed{{{answers[int(request.request_id.split('/')[1])]}}}</answer>"

    engine = ScriptedEngine(tokenizer=TOKENIZER, script=script)
    config = EpisodeConfig(reward=RewardConfig(answer="math", require_think=False))
    scheduler = Scheduler(
        engine=engine,
        renderer=ChatRenderer(TOKENIZER),
        run_seed=0,
        factory=tool_factory(tools=[], config=config, system_prompt=""),
        limits=Limits(step_timeout_s=step_timeout_s),
        sampling=Sampling(stop=("</answer>",)),
    )
    task = Task(key="q", question="1+2?", answers=("3",))
    return scheduler.run([task], modes=("m",) * len(answers), training_step=0)


@pytest.mark.long
def test_rollouts_whose_steps_wait_for_slow_gradings_of_others_get_their_reward(pool: MathPool) -> None:
    compare_math("0.5", "1/2")  # the process has started
    report = play([*map(slow_answer, range(3)), *["2+1"] * 2], step_timeout_s=1.5)
    leaves = [leaf for leaf, _ in report.traces[0].rollouts()]
    assert [leaf.outcome for leaf in leaves] == [Outcome.FINISHED] * 5
    assert [leaf.episode_return for leaf in leaves] == [0.0] * 3 + [1.0] * 2
    assert (report.num_retries, report.fault_reasons) == (0, ())
    assert rollout_metrics(report.traces)["rollout/num_undecided_answers"] == 3


def test_equal_pairs_of_several_rollouts_are_evaluated_once(
    pool: MathPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    evaluate = pool._evaluate
    monkeypatch.setattr(pool, "_evaluate", lambda pair: (seen.append(pair), evaluate(pair))[1])
    play([slow_answer(0)] * 6 + ["2+1"] * 2, step_timeout_s=60)
    assert sorted(seen) == sorted({(slow_answer(0), "3"), ("2+1", "3")})


LONG = (
    "1 ",
    "9",
    "x^",
    "(",
    "1,",
    "\\text{",
    "√(",
    "a ",
    "\\frac",
    "e\u0301\u0323",
    "- ",
    "1/ ",
    "[a](http://\\text{",
)


@pytest.mark.parametrize("part", LONG)
def test_long_answers_are_compared_in_bounded_time(part: str) -> None:
    begun = time.process_time()
    for text in ("5 " + part * 50_000, "\\text{" + " " * 50_000 + part * 10_000):
        compare_math(text, "3")
        compare_math(text, text)
        compare_math(text, f"{text}7")
    assert time.process_time() - begun < 2


def test_many_units_are_read_in_bounded_time() -> None:
    """They are read in the process of the trainer."""
    begun = time.process_time()
    compare_math("1" + r"\text{abc} " * 90 + "+", "5")
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("read", [normalize_answer, terms])
def test_many_combining_marks_are_read_in_bounded_time(read: Callable[[str], object]) -> None:
    begun = time.process_time()
    read("e" + "\u0301\u0323" * 200_000)
    assert time.process_time() - begun < 5
    for text in ("e" + "\u0301" * 30, "Vie\u0323\u0302t Nam " * 50):
        assert stream_safe(text) == text


def waits_for(event: threading.Event) -> str:
    with uncounted():
        event.wait(60)
    return "done"


def by_loop(call: Callable[..., str], *arguments: object, timeout_s: float) -> str:
    return asyncio.run(run_guarded(call, *arguments, timeout_s=timeout_s))


@pytest.mark.parametrize("run", [by_loop, run_timed])
def test_uncounted_time_does_not_count_towards_the_limit_of_a_call(run: Callable[..., str]) -> None:
    released = threading.Event()
    threading.Timer(0.6, released.set).start()
    assert run(waits_for, released, timeout_s=0.2) == "done"


@pytest.mark.parametrize("run", [by_loop, run_timed])
def test_the_clock_continues_after_a_wait(run: Callable[..., str]) -> None:
    never = threading.Event()

    def call() -> str:
        with uncounted():
            pass
        never.wait(60)
        return "too late"

    with pytest.raises(EnvironmentFault, match=r"no answer within 0\.2 s"):
        run(call, timeout_s=0.2)
    never.set()


def test_an_abandoned_call_leaves_the_queue() -> None:
    pool = FairPool(["only"])
    pool.acquire()
    left = threading.Event()

    def call() -> None:
        try:
            pool.acquire()
        except CallAbandoned:
            left.set()
            raise

    async def main() -> None:
        waiting = asyncio.ensure_future(run_guarded(call, timeout_s=60))
        while not pool._waiting:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert left.wait(10) and not pool._waiting
    pool.release("only")
    assert pool.acquire() == "only"


def test_the_next_caller_computes_a_value_whose_first_caller_was_abandoned() -> None:
    pool, values = FairPool(["only"]), SingleFlightCache[str](8)
    item = pool.acquire()
    first_waits = threading.Event()

    def make() -> str:
        first_waits.set()
        taken = pool.acquire()
        pool.release(taken)
        return taken

    async def main() -> str:
        first = asyncio.ensure_future(run_guarded(values.get, "key", make, timeout_s=60))
        while not pool._waiting:
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(run_guarded(values.get, "key", make, timeout_s=60))
        await asyncio.sleep(0.05)
        first.cancel()
        while not pool._waiting:
            await asyncio.sleep(0.01)
        pool.release(item)
        return await second

    assert asyncio.run(main()) == "only"


def test_code_of_the_policy_has_the_limits_of_its_tool_not_of_the_step() -> None:
    with PythonTool(PythonToolConfig(wall_seconds=3, allow_unsafe=True)) as tool:
        tool.run("1")
        code = "import time; time.sleep(0.5); print(1)"
        assert by_loop(lambda: tool.run(code).output, timeout_s=0.2) == "1"


def test_a_killed_grading_process_has_no_verdict() -> None:
    child = math_worker._Child(5, lambda left, right: threading.Event().wait(60))
    threading.Timer(0.3, os.kill, (child._pid, signal.SIGKILL)).start()
    assert child.compare("1", "2") == b""
    assert child.end() == signal.SIGKILL


def test_a_grading_process_that_exceeds_its_limit_ends_by_its_signal() -> None:
    child = math_worker._Child(1, burn)
    assert child.compare("", "") == b""
    assert child.end() == signal.SIGPROF


def burn(left: str, right: str) -> bool:
    while True:
        pass
