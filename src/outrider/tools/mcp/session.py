"""A result of a call as text: what is no text is said in words."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import Client, MCPError
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    AudioContent,
    CallToolResult,
    ContentBlock,
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
from outrider.errors import ConfigError, OutriderError, ToolFault, ToolUnavailable
from outrider.plugins.imports import Origin
from outrider.tokens.tool_calls import Arguments, find_schema_flaw
from outrider.tools.base import ToolOutput, usage_line
from outrider.tools.mcp import LOOK_S
from outrider.types import Json, ToolSchema

if TYPE_CHECKING:
    from outrider.tools.mcp.tool import McpConfig


def to_tool_output(result: CallToolResult, max_chars: int) -> ToolOutput:
    """Texts in order, a line apart; structured content where there is no text."""
    parts = list(_parts(result.content))
    if not any(isinstance(block, TextContent) for block in result.content) and result.structured_content:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = cut("\n".join(parts), max_chars)
    is_error = bool(result.is_error)
    return ToolOutput(text=text or ("The call failed." if is_error else ""), failed=is_error)


def cut(text: str, max_chars: int) -> str:
    """The beginning of a text that is too long, and how much there is more."""
    left = len(text) - max_chars
    return text if left <= 0 else f"{text[:max_chars]}\n[{left} more characters]"


def _parts(blocks: list[ContentBlock]) -> Iterator[str]:
    for block in blocks:
        match block:
            case TextContent():
                yield block.text
            case ImageContent() | AudioContent():
                yield _bytes(block.mime_type, block.data)
            case ResourceLink():
                yield f"[{block.name}: {block.uri}]"
            case EmbeddedResource(resource=TextResourceContents() as inside):
                yield inside.text
            case EmbeddedResource(resource=inside):
                yield _bytes(inside.mime_type or "a file", _blob(inside))


def _blob(resource: Any) -> str:
    return str(resource.blob)


def _bytes(kind: str, base64: str) -> str:
    padding = len(base64) - len(base64.rstrip("="))
    return f"[{kind}, {len(base64) * 3 // 4 - padding} bytes]"


# A server over streamable HTTP, as the transport of a session.


class _Bounded(httpx2.AsyncByteStream):
    """A body that breaks off where it is longer than a message may be."""

    def __init__(self, inside: Any, max_bytes: int) -> None:
        self._inside, self._max_bytes = inside, max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num = 0
        async for chunk in self._inside:
            num += len(chunk)
            if num > self._max_bytes:
                raise httpx2.ReadError(f"an answer of more than {self._max_bytes:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        """Close the connection's own stream."""
        await self._inside.aclose()


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Bounds every answer but streams of events, whose events have a bound of their own."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """One request."""
        response = await super().handle_async_request(request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Bounded(response.stream, self._max_bytes)
        return response


@asynccontextmanager
async def http_server(
    url: str, *, headers: Mapping[str, str], timeout_s: float, max_bytes: int
) -> AsyncIterator[Any]:
    """The streams of a session. Proxies of the environment are not used: a server is named by its url."""
    limits = httpx2.Timeout(timeout_s, read=None)  # how long an answer may take, the call itself bounds
    transport = _BoundedTransport(max_bytes)
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=limits, transport=transport) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams


# A server's process and its pipes, as the transport of a session.
#
# The client's own one keeps whatever a server writes without a line's end, prints a traceback for each line
# that is no message, and leaves a server running whose parent was killed. Hence this one: bounded, quiet, and
# with what the server wrote on stderr for the fault's line.


Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]

_MAX_GARBAGE: Final = 100  # lines in a row that are no message: some servers print a banner
_STDERR_BYTES: Final = 2000  # bytes of stderr that are kept
_STDERR_CHARS: Final = 200  # characters of it that are told
_GRACE_S: Final = 2.0  # for a server to end by itself once its stdin is closed, and again once it is asked to
_TICK_S: Final = 0.01
# The kernel ends the server when this process is killed; the process that asks for it becomes the server.
# What a worker of Ray's starts has SIGINT blocked.
_TIED_LAUNCHER: Final = (
    "import ctypes,os,signal,sys;ctypes.CDLL(None).prctl(1,9);signal.pthread_sigmask(2,());"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);os.execv(sys.argv[2],sys.argv[2:])"
)


class ServerProcess:
    """One process of a server."""

    def __init__(self, program: Sequence[str], *, env: dict[str, str], cwd: str | None, max_bytes: int):
        self._program = program
        self._env, self._cwd = env, cwd
        self._max_bytes = max_bytes
        self._stderr = b""
        self._problem = ""
        self._garbage = b""
        self._process: Process | None = None
        self.is_ending_gently = True

    def describe_failure(self) -> str:
        """What is known of a failure: how it ended, what was wrong with its output, its last words."""
        process = self._process
        code = None if process is None else process.returncode
        garbage = self._garbage[:80].decode("utf-8", "replace").strip()
        words = self._stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][-_STDERR_CHARS:]
        parts = (
            self._problem or ("" if code is None else f"it ended with status {code}"),
            garbage and f"it wrote {garbage!r} where messages belong",
            words and f"its last words: {words}",
        )
        return "; ".join(part for part in parts if part)

    async def wait_for_exit(self) -> None:
        """Wait a little for the end of a process that has hung up, so that its status can be told."""
        if self._process is not None and not self._problem:
            await _wait_until_exited(self._process, _GRACE_S)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[Incoming, Outgoing]]:
        """Start it; nothing of it runs afterwards. Raises OSError."""
        loop = asyncio.get_running_loop()
        # By hand what asyncio.create_subprocess_exec does: it keeps the transport, which has to be closed
        # where a descendant holds the pipes.
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(limit=self._max_bytes, loop=loop),
            *_tie_to_parent(self._program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=get_default_environment() | self._env,
            cwd=self._cwd,
            start_new_session=True,  # Ctrl-C is for the run, which then ends the server
        )
        self._process = process = Process(transport, protocol, loop)
        inbound, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, outbound = anyio.create_memory_object_stream[SessionMessage](0)
        tasks = [
            asyncio.create_task(self._read(process, inbound)),
            asyncio.create_task(_write(process, outbound, inbound)),
            asyncio.create_task(self._listen(process)),
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
        self,
        process: Process,
        inbound: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        """Hand over messages until the server ends or is no longer worth reading, and then hang up."""
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

    async def _listen(self, process: Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(_STDERR_BYTES):
            self._stderr = (self._stderr + chunk)[-_STDERR_BYTES:]


def _tie_to_parent(program: Sequence[str]) -> Sequence[str]:
    """The same program, ended together with this process where the kernel can do that."""
    if sys.platform != "linux":
        return program
    return [sys.executable, "-I", "-S", "-c", _TIED_LAUNCHER, str(os.getpid()), *program]


async def _write(
    process: Process,
    outbound: MemoryObjectReceiveStream[SessionMessage],
    inbound: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    """Send messages; a server that takes none any more is hung up on, so that nobody waits for it."""
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
    """End the process and its descendants: first by closing its stdin, then by asking, then by force."""
    if gently and process.stdin is not None:
        process.stdin.close()
        if not await _wait_until_exited(process, _GRACE_S):
            _signal(process, signal.SIGTERM)
            await _wait_until_exited(process, _GRACE_S)
    _signal(process, signal.SIGKILL)  # what is left of its group
    await _wait_until_exited(process, _GRACE_S)


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _wait_until_exited(process: Process, seconds: float) -> bool:
    """Looked at, and not waited for: a descendant that holds its pipes would be waited for too."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while process.returncode is None:
                await asyncio.sleep(_TICK_S)
    return process.returncode is not None


# What a server says of itself: its name, its version and its tools. Fixed over a run.


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """A tool: ``listed_name`` is the server's own name, the schema has the tag's name."""

    listed_name: str
    schema: ToolSchema

    @property
    def name(self) -> str:
        """The tag name."""
        return str(self.schema["name"])

    @property
    def usage(self) -> str:
        """The line of the system prompt."""
        return usage_line(self.schema)

    def digest(self) -> str:
        """SHA-256 (hex) of all that a policy is told."""
        return hashlib.sha256(json.dumps(self.schema, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The tools that a run takes of a server, by tag name and in order."""

    server: str
    version: str
    tools: Mapping[str, ListedTool]


def select_tools(settings: "McpConfig", *, server: str, version: str, tools: Mapping[str, Any]) -> Listing:
    """What a run takes of all ``tools`` (the client's own objects, by name)."""
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


def tool_tag(settings: "McpConfig", name: str) -> str:
    """The tag of a server's tool: lower case, and ``_`` for what a tag cannot have."""
    return settings.prefix + re.sub(r"[^a-z0-9_]", "_", name.lower())


def _schema(settings: "McpConfig", name: str, tool: Any) -> ToolSchema:
    """What is told of a tool. Raises ConfigError for arguments of which no template can tell."""
    # a server may write null for what is not there; of $schema a policy has no use
    parameters = {
        key: value for key, value in tool.input_schema.items() if value is not None and key != "$schema"
    }
    if flaw := find_schema_flaw(parameters):
        raise ConfigError(
            f"MCP server {settings.name}: the schema of {name!r} cannot be told to a model: {flaw}: "
            "leave the tool out with only"
        )
    parameters.setdefault("type", "object")
    declared = Arguments.from_schema({"parameters": parameters})
    properties, required = declared.properties, list(declared.required)
    if "$ref" in parameters and properties:  # they are listed below
        del parameters["$ref"]
    if "properties" not in tool.input_schema and not properties and not declared.is_closed:
        parameters.setdefault("additionalProperties", {})
    if required and required != parameters.get("required"):
        parameters["required"] = required
    # Templates list the properties at the top. A schema may also be true or false: anything, nothing.
    parameters["properties"] = {
        key: value if isinstance(value, dict) else {} for key, value in properties.items()
    }
    description = tool.description or tool.title or f"The tool {tool.name}."
    text = " ".join(description.split())
    return {"name": tool_tag(settings, name), "description": text, "parameters": parameters}


def origins(settings: "McpConfig", listing: Listing) -> dict[str, Origin]:
    """For a run's record: the server and its list in words, its script and each tool as digests."""
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
    tools = listing.tools.items()
    return records | {
        f"{settings.name}.{tag}": Origin(target=target, digest=tool.digest()) for tag, tool in tools
    }


# One session with a server, owned by a task of the event loop that opened it.


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
