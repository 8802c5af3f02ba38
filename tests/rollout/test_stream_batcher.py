"""Streaming engines: the same trees as in batches of rounds, whatever the latencies."""

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
from tests.rollout.fakes import (
    END,
    TOKENIZER,
    Factory,
    Fake,
    Forking,
    RawEngine,
    contents,
    say,
    scheduler,
    tasks,
)


class Streaming(RawEngine):
    """Draws ids from the seed of the request, and latencies from ``latency_seed``."""

    def __init__(self, latency_seed: int | None = None, *, num_broken: int = 0) -> None:
        super().__init__(TOKENIZER, self.drawn)
        self._latency_seed, self._num_broken = latency_seed, num_broken
        self.num_running = self.most_running = self.num_requests = 0

    @staticmethod
    def drawn(request: Request) -> Sequence[int]:
        draw = random.Random(request.seed)
        return [draw.randrange(10, 60) for _ in range(draw.randrange(1, 8))]

    async def stream(self, request: Request) -> Generation:
        self.num_requests += 1
        is_broken = self.num_requests <= self._num_broken
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        draw = random.Random(f"{self._latency_seed} {request.request_id}")
        await asyncio.sleep(draw.random() * 0.004)
        self.num_running -= 1
        if is_broken:
            raise EngineFault("broken")
        return self.generate([request])[0]


def play(
    engine: Streaming,
    *,
    streams: bool,
    latency_seed: int = 0,
    hooks: Sequence[Any] = (),
    max_concurrent: int = 64,
) -> RolloutReport:
    def make(task: Any, number: int) -> Fake:
        delay = random.Random(f"{latency_seed} {number}").random() * 0.004
        return Fake(
            on_step=lambda n, text: END if n == 3 or len(text) == 3 else say(f" {len(text)}"), delay=delay
        )

    runs = scheduler(engine, Factory(make), hooks=hooks, max_concurrent=max_concurrent)
    runs.streams = streams
    return runs.run(tasks(3), modes=("m",) * 4, training_step=1)


@pytest.mark.parametrize("max_concurrent", [pytest.param(1, marks=pytest.mark.slow), 4, 64])
@pytest.mark.parametrize("forks", [False, True])
def test_the_trees_are_those_of_rounds(max_concurrent: int, forks: bool) -> None:
    hooks = (Forking(lambda state: state.turn == 1, first_wave=2, wave=None),) if forks else ()
    rounds = contents(play(Streaming(), streams=False, hooks=hooks, max_concurrent=max_concurrent))
    for seed in range(2):
        engine = Streaming(seed)
        report = play(engine, streams=True, latency_seed=seed, hooks=hooks, max_concurrent=max_concurrent)
        assert contents(report) == rounds
        assert engine.most_running <= max_concurrent and engine.num_running == 0
        assert report.num_batches == engine.num_requests
    assert sum(len(nodes) for _, nodes, _ in rounds) > 20


def test_a_slow_environment_delays_only_its_own_rollout() -> None:
    ended: list[int] = []

    def make(task: Any, number: int) -> Fake:
        slow = task.key == "task 0"

        def step(n: int, text: str) -> Any:
            if n == 2:
                ended.append(number)
                return END
            return say(" o")

        return Fake(on_step=step, delay=0.05 if slow else 0.0)

    runs = scheduler(Streaming(0), Factory(make))
    runs.streams = True
    runs.run(tasks(3), modes=("m",) * 2, training_step=0)
    assert len(ended) == 6 and set(ended[-2:]) == {0, 1}


def test_a_fault_affects_one_request_and_is_retried() -> None:
    report = play(Streaming(0, num_broken=2), streams=True)
    assert report.num_retries == 2 and report.faults["engine_fault"] == 2
    assert all(leaf.outcome is Outcome.FINISHED for trace in report.traces for leaf in trace.leaves.values())


def test_a_bug_in_the_engine_is_raised() -> None:
    class Buggy(Streaming):
        async def stream(self, request: Request) -> Generation:
            await asyncio.sleep(0)
            raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        play(Buggy(), streams=True)


def test_a_blocked_event_loop_is_measured() -> None:

    class Holding(Streaming):
        async def stream(self, request: Request) -> Generation:
            await asyncio.sleep(0.06)  # the measurement's own wait has begun
            if self.num_requests == 0:
                time.sleep(0.3)
            self.num_requests += 1
            return self.generate([request])[0]

    lag = play(Holding(), streams=True).loop_lag_s
    assert lag is not None and lag >= 0.1
    assert play(Streaming(), streams=False).loop_lag_s is None


def test_the_largest_lag() -> None:
    assert largest([None, 0.25, 0.5]) == 0.5 and largest([None]) is None and largest([]) is None
    assert LoopLag([0.0] * 99 + [1.0]).p99 == pytest.approx(0.01) and LoopLag().p99 is None
