"""Collects the requests of all running episodes into one engine batch per round.

A batch is formed only when every running episode waits for the engine, and new episodes begin only then. So
its content depends on ids and never on how fast a tool answered, and the same seed gives the same bits.
"""

import asyncio
from collections.abc import Callable, Sequence

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
