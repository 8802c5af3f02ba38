"""One session with a server, owned by a task of the event loop that opened it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from mcp import Client, MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, CallToolResult, Implementation, Tool

from outrider import __version__
from outrider.errors import OutriderError, ToolFault, ToolUnavailable
from outrider.tools.base import ToolOutput
from outrider.tools.mcp import LOOK_S
from outrider.tools.mcp.content import cut, to_tool_output
from outrider.tools.mcp.http import http_server
from outrider.tools.mcp.listing import Listing, select_tools
from outrider.tools.mcp.stdio import ServerProcess
from outrider.types import Json

if TYPE_CHECKING:
    from outrider.tools.mcp.settings import McpConfig

_MAX_PAGES: Final = 100  # of a list of tools
_CLOSE_S: Final = 8.0  # more than a process is given to end by itself
_MAX_CANCELS: Final = 3
for _name in ("mcp", "client"):  # the client's loggers: what goes wrong is told as a fault
    logging.getLogger(_name).addHandler(logging.NullHandler())


class Link:
    """An open session. Made by :meth:`open`; ended by :meth:`close`, which leaves nothing running."""

    def __init__(self, settings: "McpConfig") -> None:
        self._settings = settings
        self._process = None if settings.url is not None else _process(settings)
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[tuple[Client, Listing]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live())

    @classmethod
    async def open(cls, settings: "McpConfig") -> tuple["Link", Listing]:
        """A session, and what the server says of itself. Raises ToolFault, ToolUnavailable or ConfigError."""
        link = cls(settings)
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                _, listing = await asyncio.shield(link._opened)
        except BaseException as error:
            await link.close(gently=False)
            if isinstance(error, OutriderError):
                raise
            if isinstance(error, TimeoutError):
                raise link._fault(f"it has not started within {settings.start_timeout_s:g} s") from error
            if isinstance(error, Exception):
                raise link._fault(f"it cannot be reached: {_describe_error(error)}") from error
            raise
        return link, listing

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolOutput:
        """One call. Raises ToolFault for whatever is not the caller's."""
        client, _ = self._opened.result()
        limit = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError as error:
            raise self._fault(f"no answer to {name} within {limit:g} s") from error
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                text = cut(error.message, self._settings.max_chars)
                return ToolOutput(text=text or "The call failed.", failed=True)
            if error.code != CONNECTION_CLOSED:
                raise self._fault(f"{name} was not answered: {_describe_error(error)}") from error
            if self._process is not None:
                await self._process.wait_for_exit()
            raise self._fault(f"{name} was not answered: it hung up") from error
        except Exception as error:  # a result that does not fit its own schema, a broken connection
            raise self._fault(f"{name} was not answered: {_describe_error(error)}") from error
        if not isinstance(result, CallToolResult):
            raise self._fault(f"{name} answered with what is no result")
        return to_tool_output(result, self._settings.max_chars)

    async def is_alive(self) -> bool:
        """Whether the server still answers."""
        client, _ = self._opened.result()
        try:
            async with asyncio.timeout(LOOK_S):
                await client.list_tools(cache_mode="bypass")
        except Exception:  # whatever it is, the session is of no use
            return False
        return not self._task.done()

    async def close(self, *, gently: bool) -> None:
        """End the session and the process; ``gently`` lets it end by itself. May be called twice."""
        if self._process is not None:
            self._process.is_ending_gently = gently
        self._closing.set()
        if not gently:
            self._task.cancel()
        for _ in range(_MAX_CANCELS):  # a server over HTTP is told of the end, and may not answer to that
            done, _ = await asyncio.wait([self._task], timeout=_CLOSE_S)
            if done:
                return
            self._task.cancel()

    async def _live(self) -> None:
        """Everything is opened and closed by this one task, as the client's scopes ask for."""
        try:
            async with _client(self._settings, self._process) as client:
                listing = await _listing(self._settings, client)
                self._opened.set_result((client, listing))
                await self._closing.wait()
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(_first(error))
                self._opened.exception()  # looked at: nobody may be waiting any more
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise

    def _fault(self, reason: str) -> ToolFault:
        details = self._process.describe_failure() if self._process is not None else ""
        text = self._settings.without_keys(f"{reason} ({details})" if details else reason)
        return ToolFault(f"MCP server {self._settings.name}: {text}")


@asynccontextmanager
async def _client(settings: "McpConfig", process: ServerProcess | None) -> AsyncIterator[Client]:
    if process is not None:
        streams: Any = process.connected()
    else:
        assert settings.url is not None
        streams = http_server(
            settings.url,
            headers=settings.sent_headers(),
            timeout_s=settings.timeout_s,
            max_bytes=settings.max_bytes,
        )
    about = Implementation(name="outrider", version=__version__)
    async with Client(streams, client_info=about) as client:
        yield client


def _process(settings: "McpConfig") -> ServerProcess:
    return ServerProcess(
        settings.program(),
        env=settings.filled(settings.env),
        cwd=None if settings.cwd is None else str(settings.cwd),
        max_bytes=settings.max_bytes,
    )


async def _listing(settings: "McpConfig", client: Client) -> Listing:
    tools: dict[str, Tool] = {}
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools |= {tool.name: tool for tool in page.tools}
        cursor = page.next_cursor
        if cursor is None:
            break
    else:
        raise ToolUnavailable(f"MCP server {settings.name}: its list of tools does not end")
    about = client.server_info
    return select_tools(
        settings,
        server="" if about is None else about.name,
        version="" if about is None else about.version,
        tools=tools,
    )


def _first(error: BaseException) -> BaseException:
    """The first cause of several that came at once."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return ToolFault("it was ended") if isinstance(error, asyncio.CancelledError) else error


def _describe_error(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        words = " ".join(str(_first(error)).split())
        return words[:300] or type(error).__name__
    return type(error).__name__
