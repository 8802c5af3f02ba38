"""Every request at once, to an engine that batches by itself: no turn waits for those of other rollouts."""

from collections.abc import Callable
from typing import Protocol

from outrider.engines.base import Engine, Generation, Request


class StreamingEngine(Engine, Protocol):
    """An engine that takes requests one by one, while others are under way."""

    async def stream(self, request: Request) -> Generation:
        """Sample one. Raises what :meth:`outrider.engines.base.Engine.generate` raises."""
        ...


class StreamBatcher:
    """In the place of :class:`outrider.rollout.batcher.RoundBatcher`. Rollouts begin as soon as there is
    room.

    Which requests share a batch of the engine depends on who is fast, and so do the last bits of log-probs.
    The tree does not: forks are decided in an order that nobody's speed changes
    (:mod:`outrider.rollout.group_book`).
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
