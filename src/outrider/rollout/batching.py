"""Collects the requests of all running episodes into one engine batch per round.

A batch is formed only when every running episode waits for the engine, and new episodes begin only then. So
its content depends on ids and never on how fast a tool answered, and the same seed gives the same bits.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from outrider.engines.base import Engine, Generation, Request
from outrider.errors import EngineFault


class RoundBatcher:
    """Shared by the workers of one scheduler run; each counts as running from :meth:`join` until it leaves.

    ``admit`` is called whenever all of them wait: it may let more join, which the batch then waits for.
    """

    def __init__(self, engine: Engine, *, admit: Callable[[int], None]) -> None:
        self.engine = engine
        self._admit = admit
        self._num_running = 0
        self._waiting: dict[str, tuple[Request, asyncio.Future[Generation]]] = {}
        self.num_batches = 0

    async def generate(self, request: Request) -> Generation:
        """Wait for the round's batch and return this request's part of it."""
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} is already waiting")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = (request, future)
        self._flush_if_complete()
        try:
            return await future
        finally:
            self._waiting.pop(request.request_id, None)  # nobody waits for a cancelled request

    def join(self) -> None:
        """One more worker runs."""
        self._num_running += 1

    def leave(self) -> None:
        """A worker's episode has ended."""
        self._num_running -= 1
        self._flush_if_complete()

    def _flush_if_complete(self) -> None:
        if len(self._waiting) < self._num_running:
            return
        # Whoever is let in now runs and has not asked yet: then the batch waits for it.
        self._admit(self._num_running)
        if not self._waiting or len(self._waiting) < self._num_running:
            return
        # By request id: the order of arrival is a matter of who was fast.
        entries = [self._waiting[key] for key in sorted(self._waiting)]
        self._waiting = {}
        self.num_batches += 1
        results: Sequence[Generation | EngineFault]
        try:
            results = self.engine.generate([request for request, _ in entries])
        except EngineFault as fault:
            # One object each: a raised exception collects the traceback of whoever raises it.
            results = [EngineFault(str(fault)) for _ in entries]
        # Through the loop: the worker whose request completed the batch must wait its turn too, or the
        # slowest acts first.
        asyncio.get_running_loop().call_soon(_deliver, [future for _, future in entries], results)


def _deliver(
    futures: Sequence[asyncio.Future[Generation]], results: Sequence[Generation | EngineFault]
) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(result, EngineFault):
            future.set_exception(result)
        else:
            future.set_result(result)


# Every request at once, to an engine that batches by itself: no turn waits for those of other rollouts.


class StreamingEngine(Engine, Protocol):
    """An engine that takes requests one by one, while others are under way."""

    async def stream(self, request: Request) -> Generation:
        """Sample one. Raises what :meth:`outrider.engines.base.Engine.generate` raises."""
        ...


class StreamBatcher:
    """In the place of :class:`outrider.rollout.batching.RoundBatcher`. Rollouts begin as soon as there is
    room.

    Which requests share a batch of the engine depends on who is fast, and so do the last bits of log-probs.
    The tree does not: forks are decided in an order that nobody's speed changes
    (:mod:`outrider.rollout.branching`).
    """

    def __init__(self, engine: StreamingEngine, *, admit: Callable[[int], None]) -> None:
        self.engine = engine
        self._admit = admit
        self._num_running = 0
        self.num_batches = 0  # requests: each is a batch of its own here

    async def generate(self, request: Request) -> Generation:
        """This request's continuation."""
        generation = await self.engine.stream(request)
        self.num_batches += 1
        self._admit(self._num_running)  # forks may be owed since this rollout asked
        return generation

    def join(self) -> None:
        """One more worker runs."""
        self._num_running += 1

    def leave(self) -> None:
        """A worker's episode has ended: there is room."""
        self._num_running -= 1
        self._admit(self._num_running)


# An event loop for a batch of rollouts, whether or not the caller has one.


T = TypeVar("T")


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, also where a loop runs in this thread already, as in a notebook: then in a thread of
    its own.

    An interruption cancels what runs there and is raised once that has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def run_main() -> T:
        if not started.set_running_or_notify_cancel():
            main.close()
            raise asyncio.CancelledError
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await main

    finished = threading.Event()

    def run_in_loop() -> T:
        try:
            return asyncio.run(run_main())
        finally:
            finished.set()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts") as pool:
        try:
            return pool.submit(run_in_loop).result()
        except BaseException:
            if not started.cancel():
                loop, task = started.result()
                assert task is not None  # a coroutine runs in one
                with suppress(RuntimeError):  # the loop has closed: it was the batch that broke
                    loop.call_soon_threadsafe(task.cancel)
                # An interruption within `submit` leaves the pool without the thread that it has started.
                finished.wait()
            raise


# How late the event loop comes back to what is due, while episodes are played in it: a loop that is held up
# makes every answer of an engine or an environment wait.


_EVERY_S: Final = 0.05
_QUANTILE: Final = 0.99


@dataclass(slots=True)
class LoopLag:
    """Seconds by which each of many short waits was too long."""

    seconds: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def measure(self) -> AsyncIterator[None]:
        """Measure, as long as this is open, in the loop that runs it."""
        watch = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.seconds.append(max(0.0, loop.time() - due))

    @property
    def p99(self) -> float | None:
        """The 99th percentile; None where there was no time for a wait."""
        return float(np.quantile(self.seconds, _QUANTILE)) if self.seconds else None


def largest(lags: list[float | None]) -> float | None:
    """Of several loops; None where none of them was measured."""
    return max((lag for lag in lags if lag is not None), default=None)
