"""In a rollout worker whose groups play several at a time while weights come and go: their engine, and their
places.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from outrider.engines.base import Generation, Request
from outrider.errors import ClusterFault
from outrider.scale.engine import RemoteEngine


class AsyncGroupEngine(RemoteEngine):
    """The engine of one group: of the weights that the group began with, or newer ones. ``step`` tells its
    rollouts from those of the same task in another step that is under way.
    """

    or_newer: ClassVar[bool] = True

    def __init__(self, *args: Any, step: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step = step

    async def stream(self, request: Request) -> Generation:
        """See :class:`RemoteEngine`. Raises ClusterFault for a turn of older weights than an earlier one's:
        engines never go back.
        """
        key = None if request.cache_key is None else self._scoped_key(request.cache_key)
        own = replace(request, request_id=self._scoped_key(request.request_id), cache_key=key)
        generation = await super().stream(own)
        if generation.weight_version < self.weight_version:
            raise ClusterFault(
                f"a turn of a group that began with weights {self.weight_version} has those of "
                f"{generation.weight_version}"
            )
        return generation

    def release(self, cache_keys: Sequence[str]) -> None:
        """See :class:`RemoteEngine`."""
        super().release([self._scoped_key(key) for key in cache_keys])

    def _scoped_key(self, key: str) -> str:
        return f"step {self._step}/{key}"


class RolloutSlots:
    """Places for ``size`` rollouts. Whole groups take them, in the order in which they come; one that is
    larger plays alone.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = threading.Semaphore(size)
        self._door = threading.Lock()

    @contextmanager
    def reserve(self, num: int) -> Iterator[None]:
        """Wait for the places of ``num`` rollouts, and have them."""
        num = min(num, self.size)
        with self._door:  # who waits here holds up those behind
            for _ in range(num):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(num)
