"""Sessions with an MCP server: transports, the list of its tools, calls, restarts.

All sessions live in the event loop of one thread; calls come from many threads (:class:`Servers`).
"""

import asyncio
import atexit
import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
import threading
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import anyio
import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import Client, MCPError
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    Implementation,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
    jsonrpc_message_adapter,
)

from outrider import __version__
from outrider.errors import ConfigError, OutriderError, ToolFault, ToolUnavailable, unwrap_group
from outrider.plugins.imports import Origin
from outrider.tokens.tool_calls import Arguments, find_schema_flaw
from outrider.tools.base import ToolOutput, usage_line
from outrider.types import Json, ToolSchema

if TYPE_CHECKING:
    from outrider.tools.mcp.tool import McpConfig

_MAX_PAGES: Final = 100  # of a list of tools
_MAX_GARBAGE: Final = 100  # lines in a row that are no message: some servers print a banner
_STDERR_BYTES: Final = 2000  # the end of stderr that is stored
_STDERR_CHARS: Final = 200  # the end of stderr that is reported
_GRACE_S: Final = 2.0  # for a server to exit after its stdin is closed, and again after SIGTERM
_CLOSE_S: Final = 8.0  # more than a process has to exit by itself
_MAX_CANCELS: Final = 3
_TICK_S: Final = 0.01
_LONGEST_WAIT_S: Final = 60.0
# The kernel kills the server if this process is killed; the launcher that requests this becomes the server.
# Processes started by a Ray worker have SIGINT blocked.
_TIED_LAUNCHER: Final = (
    "import ctypes,os,signal,sys;ctypes.CDLL(None).prctl(1,9);signal.pthread_sigmask(2,());"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);os.execv(sys.argv[2],sys.argv[2:])"
)
for _name in ("mcp", "client"):  # the client's loggers: problems are reported as faults
    logging.getLogger(_name).addHandler(logging.NullHandler())

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


def _to_tool_output(result: CallToolResult, max_chars: int) -> ToolOutput:
    """Join the texts of a result, one per line; structured content is used if there is no text."""

    def describe_bytes(kind: str, base64: str) -> str:
        padding = len(base64) - len(base64.rstrip("="))
        return f"[{kind}, {len(base64) * 3 // 4 - padding} bytes]"

    parts = []
    for block in result.content:
        match block:
            case TextContent():
                parts.append(block.text)
            case ImageContent() | AudioContent():
                parts.append(describe_bytes(block.mime_type, block.data))
            case ResourceLink():
                parts.append(f"[{block.name}: {block.uri}]")
            case EmbeddedResource(resource=TextResourceContents() as inside):
                parts.append(inside.text)
            case EmbeddedResource(resource=BlobResourceContents() as inside):
                parts.append(describe_bytes(inside.mime_type or "a file", inside.blob))
    has_text = any(isinstance(block, TextContent) and block.text.strip() for block in result.content)
    if not has_text and result.structured_content:
        parts = [part for part in parts if part.strip()]
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = _cut("\n".join(parts), max_chars)
    is_error = bool(result.is_error)
    return ToolOutput(text=text or ("The call failed." if is_error else ""), failed=is_error)


def _cut(text: str, max_chars: int) -> str:
    left = len(text) - max_chars
    return text if left <= 0 else f"{text[:max_chars]}\n[{left} more characters]"


# --- Streamable HTTP as the transport of a session ---


class _Bounded(httpx2.AsyncByteStream):
    """A response body that raises once it is longer than a message may be."""

    def __init__(self, inside: Any, max_bytes: int) -> None:
        self._inside, self._max_bytes = inside, max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num = 0
        async for chunk in self._inside:
            num += len(chunk)
            if num > self._max_bytes:
                raise httpx2.ReadError(f"a response of more than {self._max_bytes:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._inside.aclose()


@asynccontextmanager
async def _http_streams(settings: "McpConfig") -> AsyncIterator[Any]:
    """Open the streams of a session. Proxies of the environment are ignored: the url names the server."""
    limits = httpx2.Timeout(settings.timeout_s, read=None)  # the call itself limits the time of a response
    transport, headers = httpx2.AsyncHTTPTransport(), settings.sent_headers()

    async def limit_size(response: httpx2.Response) -> None:  # event streams have a limit per event
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Bounded(response.stream, settings.max_bytes)

    hooks = {"response": [limit_size]}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=limits, transport=transport, event_hooks=hooks) as client,
        streamable_http_client(
            str(settings.url), http_client=client, max_sse_event_size=settings.max_bytes
        ) as streams,
    ):
        yield streams


# --- A server's process and its pipes as the transport of a session ---


class ServerProcess:
    """One process of a server.

    The client's own transport buffers without limit whatever a server writes without a line end, prints a
    traceback for each line that is no message, and leaves the server running if the parent is killed. This
    one is bounded, quiet, and stores the end of the server's stderr for the message of a fault.
    """

    def __init__(self, settings: "McpConfig") -> None:
        self._program = settings.program()
        self._env = settings.filled(settings.env)
        self._cwd = None if settings.cwd is None else str(settings.cwd)
        self._max_bytes = settings.max_bytes
        self._stderr = b""
        self._problem = ""
        self._garbage = b""
        self._process: Process | None = None
        self.is_ending_gently = True

    def describe_failure(self) -> str:
        """Describe how it ended, what was wrong with its output, and the last line of its stderr."""
        code = None if self._process is None else self._process.returncode
        garbage = self._garbage[:80].decode("utf-8", "replace").strip()
        words = self._stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][-_STDERR_CHARS:]
        parts = (
            self._problem or ("" if code is None else f"it ended with status {code}"),
            garbage and f"it wrote {garbage!r} where messages belong",
            words and f"the end of its stderr: {words}",
        )
        return "; ".join(part for part in parts if part)

    async def wait_for_exit(self) -> None:
        """Wait briefly for a process that closed its pipes to exit, so that its status can be reported."""
        if self._process is not None and not self._problem:
            await _wait_until_exited(self._process, _GRACE_S)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[Incoming, Outgoing]]:
        """Start the process; on exit from the context it and its descendants are killed. Raises OSError."""
        program = self._program
        if sys.platform == "linux":
            program = [sys.executable, "-I", "-S", "-c", _TIED_LAUNCHER, str(os.getpid()), *program]
        loop = asyncio.get_running_loop()
        # asyncio.create_subprocess_exec by hand: it hides the transport, which must be closed if a descendant
        # keeps the pipes open.
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(limit=self._max_bytes, loop=loop),
            *program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=get_default_environment() | self._env,
            cwd=self._cwd,
            start_new_session=True,  # Ctrl-C interrupts the run only, which then ends the server
        )
        self._process = process = Process(transport, protocol, loop)
        inbound, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, outbound = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [
            asyncio.create_task(self._read(process, inbound)),
            asyncio.create_task(self._write(process, outbound, inbound)),
            asyncio.create_task(self._read_stderr(process)),
        ]
        try:
            yield incoming, outgoing
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process, gently=self.is_ending_gently)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for stream in (inbound, incoming, outgoing, outbound):
                    stream.close()
                transport.close()

    async def _read(
        self, process: Process, inbound: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        """Pass messages on until the server exits or writes garbage, then close the stream."""
        assert process.stdout is not None
        num_garbage = 0
        with inbound, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while num_garbage <= _MAX_GARBAGE:
                try:
                    line = await process.stdout.readuntil(b"\n")
                except asyncio.IncompleteReadError as end:
                    self._garbage = end.partial.strip() or self._garbage
                    return
                except asyncio.LimitOverrunError:
                    self._problem = f"it wrote a line of more than {self._max_bytes:,} bytes"
                    return
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    self._garbage = line.strip() or self._garbage
                    num_garbage += bool(line.strip())
                    continue
                num_garbage = 0
                await inbound.send(SessionMessage(message))
            self._problem = f"it wrote {_MAX_GARBAGE} lines in a row that are no message"

    async def _read_stderr(self, process: Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(_STDERR_BYTES):
            self._stderr = (self._stderr + chunk)[-_STDERR_BYTES:]

    async def _write(
        self,
        process: Process,
        outbound: MemoryObjectReceiveStream[SessionMessage],
        inbound: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        """Send messages. If the server closed its stdin, close the session so that no call waits for it."""
        assert process.stdin is not None
        with outbound:
            try:
                async for session_message in outbound:
                    line = session_message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(line.encode() + b"\n")
                    await process.stdin.drain()
            except OSError:
                inbound.close()


async def _end(process: Process, *, gently: bool) -> None:
    """End the process and its descendants: close its stdin, then SIGTERM, then SIGKILL."""

    def send_to_group(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)

    if gently and process.stdin is not None:
        process.stdin.close()
        if not await _wait_until_exited(process, _GRACE_S):
            send_to_group(signal.SIGTERM)
            await _wait_until_exited(process, _GRACE_S)
    send_to_group(signal.SIGKILL)
    await _wait_until_exited(process, _GRACE_S)


async def _wait_until_exited(process: Process, seconds: float) -> bool:
    """Poll, because ``process.wait()`` would also wait for descendants that keep the pipes open."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while process.returncode is None:
                await asyncio.sleep(_TICK_S)
    return process.returncode is not None


# --- The server's name, version and tools, which must not change during a run ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """A tool: ``listed_name`` is its name on the server, ``name`` its tag."""

    listed_name: str
    schema: ToolSchema

    @property
    def name(self) -> str:
        return str(self.schema["name"])

    @property
    def usage(self) -> str:
        """The line of the system prompt."""
        return usage_line(self.schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A server and those of its tools that a run uses, by tag and in order."""

    server: str
    version: str
    tools: Mapping[str, ListedTool]


def select_tools(settings: "McpConfig", *, server: str, version: str, tools: Mapping[str, Any]) -> Listing:
    """Select the tools of a run from all ``tools`` (the client's objects, by name)."""
    names = settings.only or tuple(tools)
    if missing := [name for name in names if name not in tools]:
        raise ToolUnavailable(
            f"MCP server {settings.name} has no tool {missing[0]!r}: it has {', '.join(tools) or 'none'}"
        )
    if not names:
        raise ToolUnavailable(f"MCP server {settings.name} has no tool")
    listed = [ListedTool(listed_name=name, schema=_schema(settings, name, tools[name])) for name in names]
    tools_by_tag = {tool.name: tool for tool in listed}
    if len(tools_by_tag) < len(listed):
        duplicate = next(tool for tool in listed if tools_by_tag[tool.name] is not tool)
        raise ConfigError(
            f"MCP server {settings.name}: {duplicate.listed_name!r} and "
            f"{tools_by_tag[duplicate.name].listed_name!r} are "
            f"both the tag {duplicate.name!r}: choose one of them with only"
        )
    return Listing(server=server, version=version, tools=tools_by_tag)


def _schema(settings: "McpConfig", name: str, tool: Any) -> ToolSchema:
    """Build a tool's schema. Raises ConfigError if a chat template cannot render its arguments."""
    # a server may write null for a missing key; $schema is of no use to a policy
    parameters = {
        key: value for key, value in tool.input_schema.items() if value is not None and key != "$schema"
    }
    if flaw := find_schema_flaw(parameters):
        raise ConfigError(
            f"MCP server {settings.name}: the schema of {name!r} cannot be given to a model: {flaw}: "
            "exclude the tool with only"
        )
    parameters.setdefault("type", "object")
    declared = Arguments.from_schema({"parameters": parameters})
    properties, required = declared.properties, list(declared.required)
    if "$ref" in parameters and properties:  # its properties are listed below
        del parameters["$ref"]
    if "properties" not in tool.input_schema and not properties and not declared.is_closed:
        parameters.setdefault("additionalProperties", {})
    if required and required != parameters.get("required"):
        parameters["required"] = required
    # Templates list the top-level properties. A schema may also be true or false (anything, nothing).
    parameters["properties"] = {
        key: value if isinstance(value, dict) else {} for key, value in properties.items()
    }
    description = tool.description or tool.title or f"The tool {tool.name}."
    text = " ".join(description.split())
    return {"name": settings.tag(name), "description": text, "parameters": parameters}


def origins(settings: "McpConfig", listing: Listing) -> dict[str, Origin]:
    """Describe the server, its list of tools, its script and each tool for the record of a run."""
    target = settings.url or settings.script or settings.command or ""
    label = f"{listing.server} {listing.version}".strip()
    records = {
        settings.name: Origin(
            target=target, package=f"MCP server {listing.server}", version=listing.version, digest=label
        ),
        f"{settings.name}.tools": Origin(target=target, digest=", ".join(listing.tools)),
    }
    if settings.script is not None:
        path, script = settings.script_path().absolute(), PurePath(settings.script)
        num_up = 0 if script.is_absolute() else len(script.parts) - 1
        records[f"{settings.name}.script"] = Origin(
            target=settings.script,
            file=str(path),
            folder=str(path.parents[num_up]),
            digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        )
    for tag, tool in listing.tools.items():
        digest = hashlib.sha256(json.dumps(tool.schema, sort_keys=True).encode()).hexdigest()
        records[f"{settings.name}.{tag}"] = Origin(target=target, digest=digest)
    return records


# --- One session, owned by a task of the event loop that opened it ---


class Link:
    """A session, opened by :meth:`open`; :meth:`close` leaves no process running."""

    def __init__(self, settings: "McpConfig") -> None:
        self._settings = settings
        self._process = None if settings.url is not None else ServerProcess(settings)
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[tuple[Client, Listing]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live())

    @classmethod
    async def open(cls, settings: "McpConfig") -> tuple["Link", Listing]:
        """Open a session. Raises ToolFault, ToolUnavailable or ConfigError."""
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
        """Call a tool. Raises ToolFault for any error that is not the caller's."""
        client, _ = self._opened.result()
        limit = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError as error:
            raise self._fault(f"no answer to {name} within {limit:g} s") from error
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                text = _cut(error.message, self._settings.max_chars)
                return ToolOutput(text=text or "The call failed.", failed=True)
            if error.code != CONNECTION_CLOSED:
                raise self._fault(f"{name} was not answered: {_describe_error(error)}") from error
            if self._process is not None:
                await self._process.wait_for_exit()
            raise self._fault(f"{name} was not answered: it closed the connection") from error
        except Exception as error:  # a result that does not fit its own schema, a broken connection
            raise self._fault(f"{name} was not answered: {_describe_error(error)}") from error
        if not isinstance(result, CallToolResult):
            raise self._fault(f"the response to {name} is no result of a tool")
        return _to_tool_output(result, self._settings.max_chars)

    async def is_alive(self) -> bool:
        """Whether the server still answers."""
        client, _ = self._opened.result()
        try:
            async with asyncio.timeout(self._settings.LOOK_S):
                await client.list_tools(cache_mode="bypass")
        except Exception:  # any error means that the session is lost
            return False
        return not self._task.done()

    async def close(self, *, gently: bool) -> None:
        """End the session and the process; ``gently`` lets it exit by itself. May be called twice."""
        if self._process is not None:
            self._process.is_ending_gently = gently
        self._closing.set()
        if not gently:
            self._task.cancel()
        for _ in range(_MAX_CANCELS):  # a server over HTTP may not respond to the end of the session
            done, _ = await asyncio.wait([self._task], timeout=_CLOSE_S)
            if done:
                return
            self._task.cancel()

    async def _live(self) -> None:
        """Open and close everything in this one task, as the client's cancel scopes require."""
        settings = self._settings
        streams: Any = _http_streams(settings) if self._process is None else self._process.connected()
        about = Implementation(name="outrider", version=__version__)
        try:
            async with Client(streams, client_info=about) as client:
                self._opened.set_result((client, await self._request_listing(client)))
                await self._closing.wait()
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(_first(error))
                self._opened.exception()  # retrieved, because no caller may be waiting
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise

    async def _request_listing(self, client: Client) -> Listing:
        tools: dict[str, Tool] = {}
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if cursor is None:
                break
        else:
            raise ToolUnavailable(f"MCP server {self._settings.name}: its list of tools does not end")
        server = client.server_info
        return select_tools(
            self._settings,
            server="" if server is None else server.name,
            version="" if server is None else server.version,
            tools=tools,
        )

    def _fault(self, reason: str) -> ToolFault:
        details = self._process.describe_failure() if self._process is not None else ""
        text = self._settings.without_keys(f"{reason} ({details})" if details else reason)
        return ToolFault(f"MCP server {self._settings.name}: {text}")


def _first(error: BaseException) -> BaseException:
    """The first of several errors that occurred at once; one of ours is first."""
    error = unwrap_group(error, OutriderError)
    return ToolFault("it was ended") if isinstance(error, asyncio.CancelledError) else error


def _describe_error(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        words = " ".join(str(_first(error)).split())
        return words[:300] or type(error).__name__
    return type(error).__name__


# --- The servers of one section: started at the first call and again after a fault ---


def fetch_listing(settings: "McpConfig") -> Listing:
    """Start a server, request its tools and end it. Raises ToolUnavailable or ConfigError."""

    async def open_and_close() -> Listing:
        link, listing = await Link.open(settings)
        await link.close(gently=True)
        return listing

    try:
        with start_blocking_portal(name=f"mcp-{settings.name}-list") as portal:
            return portal.call(open_and_close)
    except ToolFault as fault:  # before the first rollout this is no fault of a rollout
        raise ToolUnavailable(str(fault)) from fault


class _Server:
    """One server, restarted after a fault. ``num_calls`` counts running and waiting calls."""

    def __init__(self, settings: "McpConfig", listing: Listing) -> None:
        self._settings, self._listing = settings, listing
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._changing = asyncio.Lock()
        self._link: Link | None = None
        self._num_lost = 0  # in a row
        self._closed = asyncio.Event()
        self.num_calls = 0

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolOutput:
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
        self._closed.set()
        async with self._changing:
            link, self._link = self._link, None
        if link is not None:
            await link.close(gently=True)

    async def _running(self) -> Link:
        """Return the session; start a new one if the last one was lost."""
        async with self._changing:
            if self._link is not None:
                return self._link
            name, limit = self._settings.name, self._settings.max_restarts
            if self._num_lost > limit:
                raise ToolFault(
                    f"MCP server {name} was lost {self._num_lost} times without an answered call: it is not "
                    "started again"
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
                    raise ToolFault(f"MCP server {name} has other tools, or another version, than before")
            except OutriderError as error:
                self._num_lost += 1
                raise ToolFault(str(error)) from error
            self._link = link
            return link

    def _wait_s(self) -> float:
        """Seconds before the next start: 0 for the first start and after the first loss."""
        doubled = 2.0 ** max(0, self._num_lost - 1) - 1.0
        return min(self._settings.restart_wait_s * doubled, _LONGEST_WAIT_S)

    async def _check_after_fault(self, link: Link) -> str:
        """End a server that does not respond any more; returns an addition to the fault's message."""
        async with self._changing:
            if self._link is not link:
                return ""  # ended after the fault of another call
            if await link.is_alive():
                return ""
            self._link = None
            self._num_lost += 1
            await link.close(gently=False)
            return "; it is started again for the next call"


class Servers:
    """All servers of one section, and the thread whose event loop runs their sessions."""

    def __init__(self, settings: "McpConfig", listing: Listing) -> None:
        self._name = settings.name
        self._stack = contextlib.ExitStack()
        self._closing = threading.Lock()
        self._portal: BlockingPortal = self._stack.enter_context(
            start_blocking_portal(name=f"mcp-{settings.name}")
        )
        # If it stays open, the portal's own atexit handler waits for a thread that has ended by then.
        atexit.register(self.close)
        self._servers = [self._portal.call(_Server, settings, listing) for _ in range(settings.num_servers)]

    def call(self, name: str, arguments: Mapping[str, Json]) -> ToolOutput:
        """Call a tool by its name on the server, from any thread. Raises ToolFault."""
        try:
            return self._portal.call(self._call, name, arguments)
        except (CancelledError, RuntimeError) as error:  # the portal has stopped or is stopping
            raise ToolFault(f"MCP server {self._name}: {name} was called while it was closed") from error

    def close(self) -> None:
        """End all servers; pending calls raise. May be called twice, from any thread."""
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
