"""What verifiers keeps for many episodes."""

import asyncio
from typing import Any


class Serving:
    """What verifiers keeps for many episodes (tool servers, the server that agents ask), and its users."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.begun = 0
        self._running = 0
        self._is_retired = False
        self._over = asyncio.Event()
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.holder = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        """In a task of its own: what is opened here has to be closed by the same task."""
        from verifiers.v1.utils.loaders import load_environment

        try:
            env = load_environment(self._config)
            async with env.serving():
                self.ready.set_result(env)
                await self._over.wait()
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)

    def enter(self) -> None:
        """An episode begins."""
        self.begun += 1
        self._running += 1

    def leave(self) -> None:
        """An episode has ended."""
        self._running -= 1
        self._end_if_unused()

    def retire(self) -> None:
        """No episode begins any more."""
        self._is_retired = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_retired and self._running == 0:
            self._over.set()
