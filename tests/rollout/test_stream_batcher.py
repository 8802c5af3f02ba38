"""Requests that go to the engine one by one: the same trees as in rounds whoever is fast, no rollout without
an outcome, no more at a time than there is room for.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.engines.base import Generation, Request
from outrider.errors import EngineFault
from outrider.rollout.scheduler import LoopLag, RolloutReport, largest
from outrider.types import Outcome
from tests.rollout.fakes import TOKENIZER, Factory, Fake, RawEngine, say, scheduler, tasks
from tests.rollout.test_branch import Forking
from tests.rollout.test_scheduler import END, facts


class Streaming(RawEngine):
    """Ids by the request's seed; every answer takes as long as ``latency_seed`` draws for it."""

    def __init__(self, latency_seed: int | None = None, *, num_broken: int = 0) -> None:
        super().__init__(TOKENIZER, self.drawn)
        self._latency_seed, self._num_broken = latency_seed, num_broken
        self.num_now = self.most_at_once = self.num_requests = 0

    @staticmethod
    def drawn(request: Request) -> Sequence[int]:
        draw = random.Random(request.seed)
        return [draw.randrange(10, 60) for _ in range(draw.randrange(1, 8))]

    async def stream(self, request: Request) -> Generation:
        self.num_requests += 1
        is_broken = self.num_requests <= self._num_broken
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        draw = random.Random(f"{self._latency_seed} {request.request_id}")
        await asyncio.sleep(draw.random() * 0.004)
        self.num_now -= 1
        if is_broken:
            raise EngineFault("broken")
        return self.generate([request])[0]


def played(
    engine: Streaming, *, streams: bool, latency_seed: int = 0, hooks: Sequence[Any] = (), room: int = 64
) -> RolloutReport:
    def make(task: Any, number: int) -> Fake:
        delay = random.Random(f"{latency_seed} {number}").random() * 0.004
        return Fake(
            on_step=lambda n, text: END if n == 3 or len(text) == 3 else say(f" {len(text)}"), delay=delay
        )

    runs = scheduler(engine, Factory(make), hooks=hooks, max_concurrent=room)
    runs.streams = streams
    return runs.run(tasks(3), modes=("m",) * 4, training_step=1)


@pytest.mark.parametrize("room", [pytest.param(1, marks=pytest.mark.slow), 4, 64])
@pytest.mark.parametrize("forks", [False, True])
def test_the_trees_are_those_of_rounds_whatever_the_latencies(room: int, forks: bool) -> None:
    hooks = (Forking(lambda state: state.turn == 1, first_wave=2, wave=None),) if forks else ()
    rounds = facts(played(Streaming(), streams=False, hooks=hooks, room=room))
    for seed in range(4):
        engine = Streaming(seed)
        found = played(engine, streams=True, latency_seed=seed, hooks=hooks, room=room)
        assert facts(found) == rounds
        assert engine.most_at_once <= room and engine.num_now == 0
        assert found.num_batches == engine.num_requests
    assert sum(len(nodes) for _, nodes, _ in rounds) > 20


def test_nobody_waits_for_the_turns_of_others() -> None:
    """In rounds one slow environment holds all; here only its own rollout waits."""
    ended: list[int] = []

    def make(task: Any, number: int) -> Fake:
        slow = task.key == "task 0"

        def step(n: int, text: str) -> Any:
            if n == 2:
                ended.append(number)
                return END
            return say(" o")

        return Fake(on_step=step, delay=0.15 if slow else 0.0)

    runs = scheduler(Streaming(0), Factory(make))
    runs.streams = True
    runs.run(tasks(3), modes=("m",) * 2, training_step=0)
    assert len(ended) == 6 and set(ended[-2:]) == {0, 1}


def test_a_fault_hits_the_request_alone_and_is_retried() -> None:
    report = played(Streaming(0, num_broken=2), streams=True)
    assert report.num_retries == 2 and report.faults["engine_fault"] == 2
    assert all(leaf.outcome is Outcome.FINISHED for trace in report.traces for leaf in trace.leaves.values())


def test_a_bug_in_the_engine_ends_the_run_loudly() -> None:
    class Buggy(Streaming):
        async def stream(self, request: Request) -> Generation:
            await asyncio.sleep(0)
            raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        played(Buggy(), streams=True)


def test_a_loop_that_is_held_up_is_noticed() -> None:
    """An engine that holds the loop, and not only its own request: the clock is that of the loop."""

    class Holding(Streaming):
        async def stream(self, request: Request) -> Generation:
            await asyncio.sleep(0.06)  # the measurement's own wait has begun
            if self.num_requests == 0:
                time.sleep(0.3)
            self.num_requests += 1
            return self.generate([request])[0]

    lag = played(Holding(), streams=True).loop_lag_s
    assert lag is not None and lag >= 0.1
    assert played(Streaming(), streams=False).loop_lag_s is None


def test_the_largest_lag_counts() -> None:
    assert largest([None, 0.25, 0.5]) == 0.5 and largest([None]) is None and largest([]) is None
    assert LoopLag([0.0] * 99 + [1.0]).p99 == pytest.approx(0.01) and LoopLag().p99 is None
