"""How late the event loop comes back to what is due, while episodes are played in it: a loop that is held up
makes every answer of an engine or an environment wait.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np

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
