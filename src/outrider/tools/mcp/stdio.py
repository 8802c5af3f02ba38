"""A server's process and its pipes, as the transport of a session.

The client's own one keeps whatever a server writes without a line's end, prints a traceback for each line
that is no message, and leaves a server running whose parent was killed. Hence this one: bounded, quiet, and
with what the server wrote on stderr for the fault's line.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

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
