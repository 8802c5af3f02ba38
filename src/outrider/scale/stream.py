"""An engine process that takes requests one by one, from all workers: what has come while it generated is its
next batch.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.engines.base import Generation, Request
from outrider.scale.engine import EngineActor
from outrider.scale.recipe import Recipe
from outrider.scale.weights import Carrier, Parcel

_EVERYBODY = ""


class StreamEngineActor:
    """See :class:`outrider.scale.engine.EngineActor`, whose methods run in a thread here, one at a time; all
    workers are one client.
    """

    def __init__(self, recipe: Recipe, number: int, folder: str | Path, carrier: Carrier) -> None:
        self._inner = EngineActor(recipe, number, str(folder), carrier)
        self._lock = asyncio.Lock()
        self._waiting: list[tuple[Request, int, bool, asyncio.Future[Generation]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def stream(self, request: Request, version: int, or_newer: bool = False) -> Generation:
        """One request. Raises what :meth:`outrider.scale.engine.EngineActor.generate` raises."""
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, version, or_newer, future))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        while self._waiting:
            entries, self._waiting = self._waiting, []
            newest = max(entry[1] for entry in entries)
            for version, or_newer in sorted(
                {(newest if entry[2] else entry[1], entry[2]) for entry in entries}
            ):
                batch = [
                    (request, future)
                    for request, own, newer, future in entries
                    if newer == or_newer and (newer or own == version)
                ]
                try:
                    generations = await self._call(
                        self._inner.generate, _EVERYBODY, [request for request, _ in batch], version, or_newer
                    )
                except Exception as error:  # each request's own: whoever waits for it decides
                    for _, future in batch:
                        future.set_exception(error)
                else:
                    for (_, future), generation in zip(batch, generations, strict=True):
                        future.set_result(generation)
        self._serving = None

    async def _call(self, method: Any, *arguments: Any) -> Any:
        async with self._lock:
            return await asyncio.to_thread(method, *arguments)

    async def build(self) -> tuple[int, int]:
        """See :class:`outrider.scale.engine.EngineActor`."""
        result: tuple[int, int] = await self._call(self._inner.build)
        return result

    async def load(self, parcel: Parcel) -> tuple[int, int]:
        """See :class:`outrider.scale.engine.EngineActor`."""
        result: tuple[int, int] = await self._call(self._inner.load, parcel)
        return result

    async def generate(self, client: str, requests: Sequence[Request], version: int) -> list[Generation]:
        """See :class:`outrider.scale.engine.EngineActor`."""
        generations: list[Generation] = await self._call(self._inner.generate, _EVERYBODY, requests, version)
        return generations

    async def release(self, client: str, cache_keys: Sequence[str]) -> None:
        """See :class:`outrider.scale.engine.EngineActor`."""
        await self._call(self._inner.release, _EVERYBODY, cache_keys)

    async def free_cache(self) -> None:
        """See :class:`outrider.scale.engine.EngineActor`."""
        await self._call(self._inner.free_cache)

    async def clear(self, client: str) -> None:
        """Nothing: what is kept is everybody's, and no bits are promised."""

    async def busy_s(self) -> float:
        """See :class:`outrider.scale.engine.EngineActor`."""
        return self._inner.busy_s()
