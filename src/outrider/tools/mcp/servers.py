"""The servers of one section: started at the first call, again after a fault, called from many threads."""

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Final

from anyio.from_thread import BlockingPortal, start_blocking_portal

from outrider.errors import OutriderError, ToolFault, ToolUnavailable
from outrider.tools.base import ToolOutput
from outrider.tools.mcp.link import Link
from outrider.tools.mcp.listing import Listing
from outrider.types import Json

if TYPE_CHECKING:
    from outrider.tools.mcp.settings import McpConfig

_LONGEST_WAIT_S: Final = 60.0


def fetch_listing(settings: "McpConfig") -> Listing:
    """What a server says of itself. It is ended behind that. Raises ToolUnavailable or ConfigError."""

    async def open_and_close() -> Listing:
        link, listing = await Link.open(settings)
        await link.close(gently=True)
        return listing

    try:
        with start_blocking_portal(name=f"mcp-{settings.name}-list") as portal:
            return portal.call(open_and_close)
    except ToolFault as fault:  # there is no rollout yet that it could be a fault of
        raise ToolUnavailable(str(fault)) from fault


class _Server:
    """One of them, in the event loop. ``num_calls``: those that it has or that wait for it."""

    def __init__(self, settings: "McpConfig", listing: Listing) -> None:
        self._settings, self._listing = settings, listing
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._changing = asyncio.Lock()
        self._link: Link | None = None
        self._num_lost = 0  # in a row
        self._closed = asyncio.Event()
        self.num_calls = 0

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolOutput:
        """Raises ToolFault."""
        self.num_calls += 1
        try:
            async with self._slots:
                link = await self._running()
                try:
                    output = await link.call(name, arguments)
                except ToolFault as fault:
                    raise ToolFault(f"{fault}{await self._check_after_fault(link)}") from fault
                self._num_lost = 0
                return output
        finally:
            self.num_calls -= 1

    async def close(self) -> None:
        """End it; may be called twice."""
        self._closed.set()
        async with self._changing:
            link, self._link = self._link, None
        if link is not None:
            await link.close(gently=True)

    async def _running(self) -> Link:
        """The session; begun anew where the last one was lost."""
        async with self._changing:
            if self._link is not None:
                return self._link
            name, limit = self._settings.name, self._settings.max_restarts
            if self._num_lost > limit:
                raise ToolFault(
                    f"MCP server {name} was lost {self._num_lost} times, no call between answered: given up"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s()):
                    await self._closed.wait()
            if self._closed.is_set():
                raise ToolFault(f"MCP server {name} is closed")
            try:
                link, listing = await Link.open(self._settings)
                if listing != self._listing:
                    await link.close(gently=False)
                    raise ToolFault(f"MCP server {name} tells other tools, or another version, than before")
            except OutriderError as error:
                self._num_lost += 1
                raise ToolFault(str(error)) from error
            self._link = link
            return link

    def _wait_s(self) -> float:
        """None before the first start, and none behind a server's first loss."""
        doubled = 2.0 ** max(0, self._num_lost - 1) - 1.0
        return min(self._settings.restart_wait_s * doubled, _LONGEST_WAIT_S)

    async def _check_after_fault(self, link: Link) -> str:
        """After a fault: a server that does not answer any more is ended. What is to be said of that."""
        async with self._changing:
            if self._link is not link:
                return ""  # another call's fault has ended it
            if await link.is_alive():
                return ""
            self._link = None
            self._num_lost += 1
            await link.close(gently=False)
            return "; it is started again for the next call"


class Servers:
    """All of them, and the thread whose event loop has their sessions."""

    def __init__(self, settings: "McpConfig", listing: Listing) -> None:
        self._name = settings.name
        self._stack = contextlib.ExitStack()
        self._closing = threading.Lock()
        self._portal: BlockingPortal = self._stack.enter_context(
            start_blocking_portal(name=f"mcp-{settings.name}")
        )
        # Also where nobody closes it: the portal's own end would wait for a thread that is gone by then.
        atexit.register(self.close)
        self._servers = [self._portal.call(_Server, settings, listing) for _ in range(settings.num_servers)]

    def call(self, name: str, arguments: Mapping[str, Json]) -> ToolOutput:
        """One call of a tool by the server's own name, from any thread. Raises ToolFault."""
        try:
            return self._portal.call(self._call, name, arguments)
        except (CancelledError, RuntimeError) as error:  # the portal has stopped, or stops
            raise ToolFault(f"MCP server {self._name}: {name} was called while it was closed") from error

    def close(self) -> None:
        """End all of them; calls under way are faults. May be called twice, from any thread."""
        with self._closing:
            with contextlib.suppress(CancelledError, RuntimeError):
                self._portal.call(self._close)
                self._portal.call(self._portal.stop, True)
            self._stack.close()
        atexit.unregister(self.close)

    async def _call(self, name: str, arguments: Mapping[str, Json]) -> ToolOutput:
        server = min(self._servers, key=lambda candidate: candidate.num_calls)
        return await server.call(name, arguments)

    async def _close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))
