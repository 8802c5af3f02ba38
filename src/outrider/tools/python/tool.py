"""The Python tool: runs model-written code in a locked process and returns what it printed."""

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
from outrider.tools.base import FairPool, ToolContext, ToolOutput, uncounted
from outrider.tools.python import sandbox
from outrider.tools.python.server import REPLY, REQUEST, STATUSES, ServerSettings, receive

PythonStatus: TypeAlias = Literal["ok", "error", "timeout", "memory", "output_limit", "killed"]

_START_SECONDS = 120.0  # enough for a cold disk and a large package
_GRACE_SECONDS = 30.0  # on top of the wall limit, which the server itself enforces
# The server must be of the same source tree as this module, whatever else is installed.
_BOOT = """
import sys
sys.path.insert(0, sys.argv[2])
from outrider.tools.python.server import main
del sys.path[0]
main(sys.argv[1])
"""
SOURCE = str(Path(__file__).resolve().parents[3])
_COMMAND = (sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", _BOOT)
# A fixed hash seed, so that the same code gives the same output; one thread, because the server must not
# disturb the trainer's OpenMP threads.
ONE_THREAD = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# Nothing of the parent's environment may reach model code.
_ENVIRONMENT = ONE_THREAD | {"LC_ALL": "C.UTF-8"}
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
_FENCE: Final = re.compile(r"\s*(`{3,}|~{3,})[ \t]*[\w+.-]*[ \t]*\n(.*?)(?:\n[ \t]*\1`*\s*)?\Z", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonToolConfig:
    """Settings of :class:`PythonTool`; picklable. Seconds, bytes, characters."""

    wall_seconds: float = 10.0
    """Wall time of a call."""
    cpu_seconds: int = 10
    """Processor time of a call."""
    memory_bytes: int = 512 << 20
    """Address space of a call in addition to that of the preloaded modules."""
    disk_bytes: int = 32 << 20
    """All files of a call together, including files that it removed but still maps. The limit is the size of
    a file system in memory (tmpfs in a mount namespace). If the kernel does not allow one, all bytes written
    count, whether the file was removed or not.
    """
    output_bytes: int = 1 << 20
    """A call that prints more is stopped."""
    max_output_chars: int = 8000
    """A longer output loses its middle, where a mark is inserted."""
    packages: tuple[str, ...] = ()
    """Installed packages to preload, for example ``sympy`` and ``numpy``. Code cannot import or read any
    other installed package.
    """
    num_servers: int = 1
    """Calls that can run at the same time."""
    scratch_folder: str | None = None
    """Folder for scratch folders; None for the system's folder for temporary files."""
    allow_unsafe: bool = False
    """If the kernel lacks some of the locks, run without them and warn, instead of an error."""

    def __post_init__(self) -> None:
        # a resolved configuration writes None as NONE
        if self.scratch_folder == NONE:
            object.__setattr__(self, "scratch_folder", None)
        numbers = (self.wall_seconds, self.cpu_seconds, self.memory_bytes, self.disk_bytes, self.output_bytes)
        if min(*numbers, self.max_output_chars, self.num_servers) <= 0:
            raise ConfigError("python tool: every limit and the number of servers must be greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """Result of one call.

    ``output`` is standard output and standard error in the order written, followed by a note in brackets if
    a limit ended the call; a program that printed nothing has an empty output and the status ``ok``.
    ``seconds`` is wall time. ``truncated``: part of the output was cut. ``sandboxed`` is False only with
    ``allow_unsafe`` on a machine without the locks.
    """

    output: str
    status: PythonStatus
    seconds: float
    truncated: bool
    sandboxed: bool


class ServerLost(Exception):
    """The server did not start, exited, or did not reply in time."""


class _ServerProcess:
    """One fork server with its own scratch folder; not thread-safe. Starts at the first call and again after
    a loss.
    """

    def __init__(self, config: PythonToolConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._root = ""

    def start(self) -> socket.socket:
        """Start the server unless it runs. Raises :class:`ServerLost` with the reason, or OSError."""
        if self._sock is not None:
            return self._sock
        config = self._config
        self._root = tempfile.mkdtemp(
            prefix="outrider-python-", dir=config.scratch_folder and os.path.abspath(config.scratch_folder)
        )
        settings = ServerSettings(
            root=self._root,
            parent=os.getpid(),
            packages=config.packages,
            landlock=sandbox.landlock_abi() > 0,
            seccomp=sandbox.seccomp_works(),
            mounts=sandbox.may_mount(),
            limits=sandbox.Limits(
                wall_seconds=config.wall_seconds,
                cpu_seconds=config.cpu_seconds,
                memory_bytes=config.memory_bytes,
                disk_bytes=config.disk_bytes,
                output_bytes=config.output_bytes,
            ),
        )
        environment = dict(_ENVIRONMENT)
        if library_path := os.environ.get("LD_LIBRARY_PATH"):  # the interpreter itself may need it
            environment["LD_LIBRARY_PATH"] = library_path
        self._sock, server_sock = socket.socketpair()
        with server_sock:
            try:
                self._process = subprocess.Popen(
                    [*_COMMAND, json.dumps(dataclasses.asdict(settings)), SOURCE],
                    stdin=server_sock.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # Ctrl-C interrupts the parent only, which then stops the server
                )
            except OSError:
                self.stop()
                raise
        sock = self._sock
        status, _, output = self._exchange(sock, b"", _START_SECONDS)
        if status != "ready":
            self.stop()
            raise ServerLost(output.decode("utf-8", "replace"))
        return sock

    def call(self, code: bytes) -> tuple[str, float, bytes]:
        """Run ``code``: status, wall seconds, output. If it raises :class:`ServerLost`, the next call starts
        a new server.
        """
        return self._exchange(
            self.start(), REQUEST.pack(len(code)) + code, self._config.wall_seconds + _GRACE_SECONDS
        )

    def stop(self) -> None:
        """Kill the server and all its processes, and remove its scratch folder. May be called twice."""
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            self._process.kill()  # the kernel then kills the supervisor and the worker
            self._process.wait()
        if self._root and os.path.isdir(self._root):
            shutil.rmtree(self._root)
        self._sock, self._process, self._root = None, None, ""

    def _exchange(self, sock: socket.socket, request: bytes, seconds: float) -> tuple[str, float, bytes]:
        """Send a request and wait ``seconds`` for each part of the reply.

        After any failure, also an interrupt of this thread, the server is stopped: a late reply must not be
        read as that of the next call.
        """
        sock.settimeout(seconds)
        try:
            sock.sendall(request)
            index, took, length = REPLY.unpack(receive(sock, REPLY.size))
            return STATUSES[index], took, receive(sock, length)
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError | EOFError):
                raise ServerLost(f"the server exited or hung: {error}") from error
            raise


class PythonTool:
    """The plug-in ``python``: runs each call in a new process, folder and namespace; thread-safe.

    Limits: wall and processor time, memory, files, output; no network, processes, threads or signals. Files
    outside the call's own folder cannot be changed, and only the standard library and the preloaded packages
    can be read. The same code gives the same output: the hash seed is fixed, and so are random generators,
    also those without a seed. Exceptions are times, names of folders, addresses of objects (``print(map)``),
    and the order of a set of objects without a hash of their own. A bare last expression is printed
    (:func:`~outrider.tools.python.worker.print_last_expression`).

    Raises :class:`ToolUnavailable` if a lock or a package is missing; ``run`` raises :class:`ToolFault` if
    the server is lost twice in one call. Nothing that the code does raises an exception here.
    """

    name = "python"
    usage = "Write <python>code</python> to run Python; what the code prints comes back."
    description = "Run Python code; what it prints comes back."
    argument = "code"

    def __init__(self, config: PythonToolConfig) -> None:
        self.config = config
        self._owner = os.getpid()
        self.num_restarts = 0
        """Servers that were lost during a call and started again."""
        self._closed, self._lock = False, threading.Lock()
        missing = " and ".join(sandbox.problems())
        self._sandboxed = not missing
        if missing and not config.allow_unsafe:
            raise ToolUnavailable(
                f"python tool: this machine lacks {missing}; allow_unsafe=True runs without"
            )
        if missing:
            warnings.warn(
                f"python tool: NOT SANDBOXED, this machine lacks {missing}", RuntimeWarning, stacklevel=2
            )
        self._servers = FairPool([_ServerProcess(config) for _ in range(config.num_servers)])
        first = self._servers.acquire()
        try:
            first.start()
        except (ServerLost, OSError) as error:
            raise ToolUnavailable(f"python tool: {error}") from error
        finally:
            self._servers.release(first)

    @classmethod
    def build(cls, settings: Settings, context: ToolContext) -> Self:
        """Build from the section ``python`` of the environment. Raises ToolUnavailable."""
        tool = cls(context.environment.python)
        try:
            tool.check()  # before the first rollout, not after a program has used a hole in the sandbox
        except BaseException:
            tool.close()
            raise
        return tool

    def run_text(self, text: str) -> ToolOutput:
        """Run the code. If it prints nothing, the text reports that."""
        result = self.run(extract_code(text))
        return ToolOutput(
            text=result.output or "(no output)",
            failed=result.status != "ok",
            status={"ok": None if result.output else "empty", "timeout": "timeout"}.get(result.status),
        )

    def run(self, code: str) -> PythonResult:
        """Run ``code`` to its end. If all servers are busy, calls wait in the order of their arrival."""
        if os.getpid() != self._owner:
            raise ToolFault("python tool: belongs to another process; create one tool in each process")
        server = self._servers.acquire()
        try:
            if self._closed:
                raise ToolFault("python tool: closed")
            request = code.encode("utf-8", "surrogatepass")
            with uncounted():  # the tool has its own limit; this is no time of the environment's call
                try:
                    status, seconds, output = server.call(request)
                except ServerLost:
                    with self._lock:
                        self.num_restarts += 1
                    try:
                        status, seconds, output = server.call(request)
                    except ServerLost as error:
                        raise ToolFault(f"python tool: lost twice in one call: {error}") from error
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
        """Run a program that tries to read, write, connect and fork; ToolUnavailable unless all fail."""
        result = self.run(_PROBE)
        expected = "[True, True, True, True]"
        if result.status != "ok" or (self._sandboxed and result.output != expected):
            raise ToolUnavailable(
                f"python tool: the sandbox does not hold: {result.output!r} instead of {expected!r}"
            )

    def close(self) -> None:
        """Stop the servers after their calls have ended. May be called twice."""
        self._closed = True
        servers = [self._servers.acquire() for _ in range(self.config.num_servers)]
        for server in servers:
            server.stop()
            self._servers.release(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut(text: str, max_chars: int) -> tuple[str, bool]:
    """Replace the middle of a text longer than ``max_chars`` characters by a mark.

    Returns the text and whether it was cut. ``max_chars`` characters remain: the start shows what the
    program did, the end has the error.
    """
    if len(text) <= max_chars:
        return text, False
    tail = max_chars // 2
    mark = f"\n[... {len(text) - max_chars} of {len(text)} characters cut ...]\n"
    return text[: max_chars - tail] + mark + text[len(text) - tail :], True


def extract_code(text: str) -> str:
    """Strip a Markdown fence and an indentation shared by all lines from a model's text.

    A program that runs without the change is returned unchanged.
    """
    fenced = _FENCE.match(text)
    code = text if fenced is None or _is_python(text) else fenced[2]  # ``~~~x`` is an expression
    first = next((line for line in code.split("\n") if line.strip()), "")
    if first[:1] in (" ", "\t"):
        return code if _is_python(code) else textwrap.dedent(code)  # a comment may be indented
    head, _, rest = code.partition("\n")  # the parser of tags stripped the first line's indentation
    dedented = f"{head}\n{textwrap.dedent(rest)}"
    is_indented = rest[:1] in (" ", "\t") and dedented != code
    return dedented if is_indented and not _is_python(code) and _is_python(dedented) else code


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
