"""The parent's end of one fork server: start, one call at a time, stop."""

import ast
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias, cast

from outrider.config import NONE, Settings
from outrider.errors import ConfigError, ToolFault, ToolUnavailable
from outrider.tools.base import ToolContext, ToolOutput
from outrider.tools.concurrency import FairPool, uncounted
from outrider.tools.python import sandbox
from outrider.tools.python import sandbox as sandbox_mounts
from outrider.tools.python.sandbox import Limits
from outrider.tools.python.server import REPLY, REQUEST, STATUSES, ServerSettings

_START_SECONDS = 120.0  # a cold disk and a large package
_GRACE_SECONDS = 30.0  # on top of the wall limit, which the server itself keeps
# The server must be of the same source tree as this module, whatever else is installed.
_BOOT = """
import sys
sys.path.insert(0, sys.argv[2])
from outrider.tools.python.server import main
del sys.path[0]
main(sys.argv[1])
"""
_SOURCE = str(Path(__file__).resolve().parents[3])
# Nothing of the parent's environment may reach model code. One thread: a helper must not disturb the
# trainer's OpenMP team.
_ENVIRONMENT = (
    ("PYTHONHASHSEED", "0"),
    ("OMP_NUM_THREADS", "1"),
    ("OPENBLAS_NUM_THREADS", "1"),
    ("MKL_NUM_THREADS", "1"),
    ("LC_ALL", "C.UTF-8"),
)


class ServerLost(Exception):
    """The server did not start, ended, or did not answer in time."""


class ServerProcess:
    """One fork server with its own scratch folder. Not thread-safe; starts at the first call and again after
    a loss.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        packages: tuple[str, ...],
        landlock: bool,
        seccomp: bool,
        mounts: bool,
        folder: str | None,
    ) -> None:
        self._limits, self._packages, self._folder = limits, packages, folder
        self._landlock, self._seccomp, self._mounts = landlock, seccomp, mounts
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._root = ""

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server unless it runs. Raises :class:`ServerLost` with the reason."""
        if self._sock is not None:
            return
        self._root = tempfile.mkdtemp(
            prefix="outrider-python-", dir=self._folder and os.path.abspath(self._folder)
        )
        settings = ServerSettings(
            root=self._root,
            parent=os.getpid(),
            packages=self._packages,
            landlock=self._landlock,
            seccomp=self._seccomp,
            mounts=self._mounts,
            limits=self._limits,
        )
        self._sock, theirs = socket.socketpair()
        library_path = os.environ.get("LD_LIBRARY_PATH")  # the interpreter itself may need it
        command = [
            sys.executable,
            "-s",
            "-P",
            "-B",
            "-X",
            "utf8",
            "-c",
            _BOOT,
            json.dumps(dataclasses.asdict(settings)),
            _SOURCE,
        ]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=dict(_ENVIRONMENT) | ({"LD_LIBRARY_PATH": library_path} if library_path else {}),
                    start_new_session=True,  # Ctrl-C is for the parent, which then stops the server
                )
            except OSError:
                self.stop()
                raise
        status, _, output = self._exchange(self._sock, b"", _START_SECONDS)
        if status != "ready":
            self.stop()
            raise ServerLost(output.decode("utf-8", "replace"))

    def call(self, code: bytes) -> tuple[str, float, bytes]:
        """Run ``code``: status, wall seconds, output. Raises :class:`ServerLost`, after which the next call
        starts afresh.
        """
        self.start()
        assert self._sock is not None
        return self._exchange(
            self._sock, REQUEST.pack(len(code)) + code, self._limits.wall_seconds + _GRACE_SECONDS
        )

    def stop(self) -> None:
        """End the server and whatever it runs, and remove its scratch folder. May be called twice."""
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            self._process.kill()  # the kernel then ends the supervisor and the worker
            self._process.wait()
        if self._root and os.path.isdir(self._root):
            shutil.rmtree(self._root)
        self._sock, self._process, self._root = None, None, ""

    def _exchange(self, sock: socket.socket, request: bytes, seconds: float) -> tuple[str, float, bytes]:
        """Send, and wait ``seconds`` for each part of the answer. After any failure the server is gone, also
        when this thread was interrupted: the late answer must not become that of the next call.
        """
        done = False
        sock.settimeout(seconds)
        try:
            sock.sendall(request)
            index, took, length = REPLY.unpack(_receive(sock, REPLY.size))
            reply = STATUSES[index], took, _receive(sock, length)
            done = True
        except (OSError, EOFError) as error:
            raise ServerLost(f"the server ended or hung: {error}") from error
        finally:
            if not done:
                self.stop()
        return reply


def _receive(sock: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = sock.recv(min(length - len(data), 1 << 16))
        if not chunk:
            raise EOFError("it closed the connection")
        data += chunk
    return bytes(data)


# The Python tool: runs model-written code in a locked process of its own and returns what it printed.


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
    expression is printed (:func:`~outrider.tools.python.worker.print_last_expression`). Nothing is run twice
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


# The sandboxed Python tool behind the tool contract.


_FENCE: Final = re.compile(r"\s*(`{3,}|~{3,})[ \t]*[\w+.-]*[ \t]*\n(.*?)(?:\n[ \t]*\1`*\s*)?\Z", re.DOTALL)


class PythonAdapter:
    """Python in a sandbox; what a program prints comes back."""

    name = "python"
    usage = "Write <python>code</python> to run Python; what the code prints comes back."
    description = "Run Python code; what it prints comes back."
    argument = "code"

    def __init__(self, tool: PythonTool) -> None:
        self._tool = tool

    @classmethod
    def build(cls, settings: Settings, context: ToolContext) -> "PythonAdapter":
        """By the section ``python`` of the environment. Raises ToolUnavailable where it cannot run here."""
        tool = PythonTool(context.environment.python)
        try:
            tool.check()  # before the first rollout, and not when a program walks through an open door
        except BaseException:
            tool.close()
            raise
        return cls(tool)

    def run_text(self, text: str) -> ToolOutput:
        """Run the code once. A program that prints nothing is no failure; the text says so."""
        result = self._tool.run(extract_code(text))
        return ToolOutput(text=result.output or "(no output)", failed=result.status != "ok")

    def close(self) -> None:
        """Stop the tool's processes; may be called twice."""
        self._tool.close()


def extract_code(text: str) -> str:
    """The program in what a model wrote: without a Markdown fence around it, and without an indentation that
    all lines share. Neither can be Python, so nothing that runs is changed.
    """
    fenced = _FENCE.match(text)
    code = text if fenced is None else fenced[2]
    first = next((line for line in code.split("\n") if line.strip()), "")
    if first[:1] in (" ", "\t"):
        return textwrap.dedent(code)
    head, _, rest = code.partition("\n")  # the first line lost its indentation when its tag was read
    dedented = f"{head}\n{textwrap.dedent(rest)}"
    is_indented = rest[:1] in (" ", "\t") and dedented != code
    return dedented if is_indented and not _is_python(code) and _is_python(dedented) else code


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
