"""The Python tool: runs model-written code in a locked process of its own and returns what it printed."""

import os
import threading
import warnings
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, cast

from outrider.config import NONE
from outrider.errors import ConfigError, ToolFault, ToolUnavailable
from outrider.tools import sandbox, sandbox_mounts
from outrider.tools.call_clock import uncounted
from outrider.tools.fair_pool import FairPool
from outrider.tools.python_process import ServerLost, ServerProcess

PythonStatus: TypeAlias = Literal["ok", "error", "timeout", "memory", "output_limit", "killed"]

_PROBE = """
import os, socket
def denied(attempt):
    try:
        attempt()
    except PermissionError:
        return True
    return False
[denied(lambda: os.listdir('/')), denied(lambda: open('../x', 'w')), denied(socket.socket), denied(os.fork)]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonToolConfig:
    """Settings of :class:`PythonTool`; picklable. Seconds, bytes, characters."""

    wall_seconds: float = 10.0
    """Wall time of a call."""
    cpu_seconds: int = 10
    """Processor time of a call."""
    memory_bytes: int = 512 << 20
    """Address space of a call beyond what the preloaded modules take."""
    disk_bytes: int = 32 << 20
    """All files of a call together, also those that it removed but still maps. Kept by a file system of this
    size in memory (tmpfs in a mount namespace); where the kernel does not allow one, by charging what is
    written, removed or not.
    """
    output_bytes: int = 1 << 20
    """A call that prints more is stopped."""
    max_output_chars: int = 8000
    """A longer output is cut in the middle, with a mark."""
    packages: tuple[str, ...] = ()
    """Installed packages to preload, such as ``sympy`` and ``numpy``. No other installed package can be
    imported or read.
    """
    num_servers: int = 1
    """Calls that can run at the same time."""
    scratch_folder: str | None = None
    """Where scratch folders are made; None for the system's folder for temporary files."""
    allow_unsafe: bool = False
    """Run with fewer locks where the kernel lacks them, with a warning, instead of refusing."""

    def __post_init__(self) -> None:
        # as every settings class reads it: the resolved configuration of a run says so
        if self.scratch_folder == NONE:
            object.__setattr__(self, "scratch_folder", None)
        numbers = (self.wall_seconds, self.cpu_seconds, self.memory_bytes, self.disk_bytes, self.output_bytes)
        if min(*numbers, self.max_output_chars, self.num_servers) <= 0:
            raise ConfigError("python tool: every limit and the number of servers must be greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """Result of one call.

    ``output`` is standard output and standard error in the order written, then a note in brackets where a
    limit ended the call. ``seconds`` is wall time. ``truncated``: part of the output was cut. ``sandboxed``
    is False only under ``allow_unsafe`` on a machine without the locks. An empty output with status ``ok`` is
    a program that printed nothing.
    """

    output: str
    status: PythonStatus
    seconds: float
    truncated: bool
    sandboxed: bool


class PythonTool:
    """Runs model-written code, each call in a fresh process, folder and namespace; safe to call from several
    threads.

    Limits: wall and processor time, memory, files, output; no network, processes, threads or signals; files
    outside the call's own folder can be neither changed nor, except the standard library and the preloaded
    packages, read. The same code gives the same output: hash seed and random streams are fixed. A last bare
    expression is printed (:func:`~outrider.tools.python_worker.print_last_expression`). Nothing is run twice
    because its output was empty.

    Raises :class:`ToolUnavailable` when a lock or a package is missing, :class:`ToolFault` from ``run`` when
    the machinery broke twice in a row; what the code does never raises.
    """

    def __init__(self, config: PythonToolConfig) -> None:
        self.config = config
        self._owner = os.getpid()
        self._num_restarts, self._closed, self._lock = 0, False, threading.Lock()
        missing = sandbox.problems()
        self._sandboxed = not missing
        if missing and not config.allow_unsafe:
            raise ToolUnavailable(
                f"python tool: this machine lacks {' and '.join(missing)}; allow_unsafe=True runs without"
            )
        if missing:
            warnings.warn(
                f"python tool: NOT SANDBOXED, this machine lacks {' and '.join(missing)}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._servers = FairPool([_server(config) for _ in range(config.num_servers)])
        first = self._servers.acquire()
        try:
            first.start()
        except (ServerLost, OSError) as error:
            raise ToolUnavailable(f"python tool: {error}") from error
        finally:
            self._servers.release(first)

    @property
    def num_restarts(self) -> int:
        """Servers that were lost during a call and started again."""
        return self._num_restarts

    def run(self, code: str) -> PythonResult:
        """Run ``code`` and wait for its end; waits first while all servers are busy, in the order of
        asking.
        """
        if os.getpid() != self._owner:
            raise ToolFault("python tool: belongs to another process; make one tool in every process")
        server = self._servers.acquire()
        try:
            if self._closed:
                raise ToolFault("python tool: closed")
            # What the code takes is limited by the tool, and is not the time of an environment's call.
            with uncounted():
                status, seconds, output = self._call(server, code.encode("utf-8", "surrogatepass"))
        finally:
            self._servers.release(server)
        if status == "fault":
            raise ToolFault(f"python tool: {output.decode('utf-8', 'replace')}")
        text, truncated = cut(output.decode("utf-8", "replace").rstrip(), self.config.max_output_chars)
        return PythonResult(
            output=text,
            status=cast(PythonStatus, status),
            seconds=seconds,
            truncated=truncated or status == "output_limit",
            sandboxed=self._sandboxed,
        )

    def check(self) -> None:
        """Run a program that tries to read, write, connect and fork; raises :class:`ToolUnavailable` unless
        all of it fails.
        """
        result = self.run(_PROBE)
        expected = "[True, True, True, True]"
        if result.status != "ok" or (self._sandboxed and result.output != expected):
            raise ToolUnavailable(
                f"python tool: the lock does not hold: {result.output!r} instead of {expected!r}"
            )

    def close(self) -> None:
        """Stop the servers once their calls have ended. May be called twice."""
        self._closed = True
        servers = [self._servers.acquire() for _ in range(self.config.num_servers)]
        for server in servers:
            server.stop()
            self._servers.release(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, server: ServerProcess, code: bytes) -> tuple[str, float, bytes]:
        try:
            return server.call(code)
        except ServerLost:
            with self._lock:
                self._num_restarts += 1
        try:
            return server.call(code)
        except ServerLost as error:
            raise ToolFault(f"python tool: lost twice in one call: {error}") from error


def cut(text: str, max_chars: int) -> tuple[str, bool]:
    """``text`` with its middle replaced by a mark where it has more than ``max_chars`` characters, and
    whether that was so.

    The start shows what the program did, the end holds the error; ``max_chars`` characters of the text stay.
    """
    if len(text) <= max_chars:
        return text, False
    tail = max_chars // 2
    mark = f"\n[... {len(text) - max_chars} of {len(text)} characters cut ...]\n"
    return text[: max_chars - tail] + mark + text[len(text) - tail :], True


def _server(config: PythonToolConfig) -> ServerProcess:
    return ServerProcess(
        limits=sandbox.Limits(
            wall_seconds=config.wall_seconds,
            cpu_seconds=config.cpu_seconds,
            memory_bytes=config.memory_bytes,
            disk_bytes=config.disk_bytes,
            output_bytes=config.output_bytes,
        ),
        packages=config.packages,
        landlock=sandbox.landlock_abi() > 0,
        seccomp=sandbox.seccomp_works(),
        mounts=sandbox_mounts.may_mount(),
        folder=config.scratch_folder,
    )
