"""Which MCP server is asked, how it is reached, and within which limits."""

import asyncio
import atexit
import contextlib
import importlib.util
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Final, Literal
from urllib.parse import parse_qsl, urlsplit

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import Field, model_validator

from outrider.errors import OutriderError, ToolFault, ToolUnavailable
from outrider.plugins.imports import search_folders
from outrider.tools.base import Tool, ToolContext, ToolGroup, ToolOutput, ToolSettings
from outrider.tools.concurrency import SingleFlightCache
from outrider.tools.functions import CalledByText
from outrider.tools.mcp import LOOK_S
from outrider.tools.mcp.session import Link, ListedTool, Listing, tool_tag
from outrider.types import Json

if TYPE_CHECKING:
    from outrider.plugins.imports import Origin


_VARIABLE: Final = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_KEY: Final = re.compile(r"key|token|secret|passw|auth|credential", re.IGNORECASE)  # names in a url's query
_SHORTEST_KEY: Final = 4  # characters; a shorter value stands in other words too


class McpConfig(ToolSettings):
    """An MCP server, all or some of whose tools the policy can call. Its tools must keep no state that one
    episode could see of another: all episodes share its servers.
    """

    type: Literal["mcp"] = "mcp"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    """What lines and records call the server."""
    command: str | None = None
    """A program that is the server, speaking on stdin and stdout; ``args`` are its arguments."""
    script: str | None = None
    """A Python file in its place, run by this Python: looked for beside the recipe and in the current
    folder, and recorded as a plug-in's code is.
    """
    url: str | None = None
    """A running server instead, over streamable HTTP."""
    args: tuple[str, ...] = ()
    """Arguments of ``command`` or ``script``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server beside ``PATH``, ``HOME`` and their like. ``$NAME`` is replaced by
    a variable of yours, so that no key stands in a recipe.
    """
    cwd: Path | None = None
    """The folder in which the server runs; None is the current one."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers; each value names a variable: ``{Authorization = "Bearer $MY_TOKEN"}``."""
    only: tuple[str, ...] = ()
    """Names of the server's tools that are taken, in this order; empty takes all."""
    prefix: Annotated[str, Field(pattern=r"^([a-z][a-z0-9_]*)?$")] = ""
    """Put before the names of its tools, where those of two servers are the same."""
    num_servers: Annotated[int, Field(ge=1)] = 1
    """Processes of the server, or sessions over HTTP; a call goes to the one with the fewest calls."""
    max_concurrent: Annotated[int, Field(ge=1)] = 8
    """Calls that one of them gets at a time; further ones wait."""
    timeout_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds in which a call is answered; later it is a tool fault."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds in which the server has started and told its tools."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Starts in a row behind which no call was answered. After that every call is a tool fault."""
    restart_wait_s: Annotated[float, Field(ge=0)] = 1.0
    """Seconds before the second start of such a row; it doubles from start to start."""
    max_chars: Annotated[int, Field(ge=1)] = 20_000
    """Characters of a result that are shown."""
    max_bytes: Annotated[int, Field(ge=1024)] = 8 * 2**20
    """Bytes of a message of the server; a longer one ends the server."""

    @model_validator(mode="after")
    def _validate(self) -> "McpConfig":
        if [self.command, self.script, self.url].count(None) != 2:
            raise ValueError("set exactly one of command, script and url")
        if self.url is not None and (self.args or self.env or self.cwd is not None):
            raise ValueError("args, env and cwd are for a server that is started: with url it runs already")
        if self.url is None and self.headers:
            raise ValueError("headers are for a server with a url")
        if len(set(self.only)) != len(self.only):
            raise ValueError("only names a tool twice")
        if bare := [name for name, value in self.headers.items() if not _VARIABLE.search(value)]:
            raise ValueError(
                f"the header {bare[0]} names no variable: write $NAME in place of the key, which then "
                "comes from the environment"
            )
        if self.url is not None:
            _require_url(self.url)
        return self

    def waiting_s(self, num_concurrent: int) -> float:
        rounds = math.ceil(num_concurrent / (self.num_servers * self.max_concurrent))
        return rounds * (self.timeout_s + LOOK_S) + self.start_timeout_s

    def origins(self) -> "Mapping[str, Origin]":
        """The server, its script, its list of tools and every tool."""
        from outrider.tools.mcp.session import origins

        return origins(self, get_listing(self))

    def program(self) -> list[str]:
        """What is started. Raises ToolUnavailable where it is not there."""
        if self.script is not None:
            return [sys.executable, str(self.script_path()), *self.args]
        assert self.command is not None
        if (executable := shutil.which(self.command)) is None:
            raise ToolUnavailable(f"MCP server {self.name}: there is no program {self.command!r}")
        return [executable, *self.args]

    def script_path(self) -> Path:
        """Where the script lies. Raises ToolUnavailable where it is in no folder that is searched."""
        assert self.script is not None
        folders = [*search_folders(), Path.cwd()]
        for folder in folders:
            if (path := folder / self.script).is_file():
                return path
        searched_folders = ", ".join(dict.fromkeys(str(directory) for directory in folders))
        raise ToolUnavailable(
            f"MCP server {self.name}: there is no file {self.script!r} in {searched_folders}"
        )

    def sent_headers(self) -> dict[str, str]:
        """``headers`` with their variables' values. Raises ToolUnavailable, without the value, for what no
        header can carry.
        """
        sent = {name: value.strip() for name, value in self.filled(self.headers).items()}
        for name, value in sent.items():
            if not value.isascii() or not value.isprintable():
                raise ToolUnavailable(
                    f"MCP server {self.name}: the value of the header {name} holds characters that a header "
                    f"cannot have: look at the variable in {self.headers[name]!r}"
                )
        return sent

    def without_keys(self, text: str) -> str:
        """``text`` with ``$NAME`` in place of the values of variables that the recipe names: a server may
        repeat a key in its last words.
        """
        templates = [*self.env.values(), *self.headers.values()]
        for name in (variable.strip("${}") for value in templates for variable in _VARIABLE.findall(value)):
            if len(key := os.environ.get(name, "").strip()) >= _SHORTEST_KEY:
                text = text.replace(key, f"${name}")
        return text

    def filled(self, values: Mapping[str, str]) -> dict[str, str]:
        """``values`` with variables of the environment in place of ``$NAME``. Raises ToolUnavailable."""
        try:
            return {name: Template(value).substitute(os.environ) for name, value in values.items()}
        except KeyError as error:
            raise ToolUnavailable(
                f"MCP server {self.name}: the environment variable {error.args[0]} is not set"
            ) from error
        except ValueError as error:
            raise ToolUnavailable(
                f"MCP server {self.name}: a value of env or headers has a $ without a name ($$ is a dollar)"
            ) from error


def _require_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url must begin with http:// or https:// and name a host, not {url!r}")
    if parts.username or parts.password or any(_KEY.search(name) for name, _ in parse_qsl(parts.query)):
        raise ValueError("url must hold no key: use headers with a variable of the environment")


# The servers of one section: started at the first call, again after a fault, called from many threads.


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


# Asks a server for its tools, once a process.


_CACHE_SIZE: Final = 64  # servers
_listings: SingleFlightCache[Listing] = SingleFlightCache(_CACHE_SIZE)


def get_listing(settings: "McpConfig") -> Listing:
    """What a server says of itself; what was started for that is ended.

    Raises ToolUnavailable where it cannot be asked or has no such tool, ConfigError where two of its tools
    are one tag.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ToolUnavailable("the package mcp is not installed: pip install 'outrider[mcp]'")

    def request_listing() -> Listing:
        return fetch_listing(settings)

    return _listings.get(settings.model_dump_json(), request_listing)


# The plug-in ``mcp``: the tools of one server.


class McpTool(CalledByText):
    """One tool of a server, which it shares with the server's other tools."""

    def __init__(
        self,
        listed: ListedTool,
        call: Callable[[str, Mapping[str, Json]], ToolOutput],
        close: Callable[[], None],
    ) -> None:
        self.name = listed.name
        self.usage = listed.usage
        self.schema = listed.schema
        self._listed_name = listed.listed_name
        self._call, self._close = call, close

    def _run(self, arguments: Mapping[str, Json]) -> ToolOutput:
        return self._call(self._listed_name, arguments)

    def close(self) -> None:
        """End the server, for all of its tools; may be called twice."""
        self._close()


class McpServer(ToolGroup):
    """The tools of a section."""

    Settings = McpConfig

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools

    @classmethod
    def lines(cls, settings: McpConfig) -> Mapping[str, str]:
        """See :class:`outrider.tools.base.ToolGroup`. Asks the server, once a process."""
        return {tag: tool.usage for tag, tool in get_listing(settings).tools.items()}

    @classmethod
    def names(cls, settings: McpConfig) -> tuple[str, ...]:
        return tuple(tool_tag(settings, name) for name in settings.only) or super().names(settings)

    @classmethod
    def build(cls, settings: McpConfig, context: ToolContext) -> "McpServer":
        """Ask the server, which is started again for the first call. Raises ToolUnavailable."""
        listing = get_listing(settings)

        servers = Servers(settings, listing)
        return cls([McpTool(tool, servers.call, servers.close) for tool in listing.tools.values()])

    @property
    def tools(self) -> Sequence[Tool]:
        """In the order of the section."""
        return self._tools
