"""The fork server of the Python tool: preloads modules and forks a locked child process for every call.

Three generations of processes keep calls apart, also in freed memory. The *server* never reads a request;
for each one it forks a *supervisor*, which reads the code, forks the locked *worker*, enforces its limits,
sends the reply and exits. Requests and replies are length-prefixed bytes on the socket at file descriptor 0.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import platform
import random
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from outrider.tools.python import sandbox
from outrider.tools.python.worker import EXIT_ERROR, EXIT_MEMORY, EXIT_OK, EXIT_TIMEOUT, run_program

REQUEST = struct.Struct("<I")
"""Number of code bytes; the code follows."""
REPLY = struct.Struct("<BdI")
"""Index into :data:`STATUSES`, wall seconds, number of output bytes; the output follows."""
STATUSES = ("ready", "fault", "ok", "error", "timeout", "memory", "output_limit", "killed")

# The worker writes this on a pipe of its own, which is closed before the code starts, once the locks are on.
# Anything else on the pipe is a fault of the tool, never of the code.
_LOCKED = b"\x01"
_TICK = 0.02  # seconds between checks of the disk; bounds how far a fast writer can exceed its limit
_FLUSH_GRACE = 0.1  # seconds for a worker at its time limit to write what it has buffered
_WALL_GRACE = 2.0  # seconds after which a kernel timer kills a worker that its supervisor should have ended
_NUM_SERVER_FILES = 256  # no descriptor of the server is larger, so a worker can close all of them

# Small modules that programs import often; imported once here instead of once per call.
_PRELOADED = (
    "bisect, cmath, collections, copy, datetime, decimal, fractions, functools, heapq, itertools, json, "
    "math, operator, random, re, statistics, string, textwrap, typing"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the server, passed on its command line. ``root`` is an empty folder owned by the server."""

    root: str
    parent: int
    packages: tuple[str, ...]
    landlock: bool
    seccomp: bool
    mounts: bool
    limits: sandbox.Limits


def main(argument: str) -> None:
    """Serve until the parent closes the socket or exits; then remove the scratch folder.

    ``argument`` is ``json.dumps(dataclasses.asdict(settings))``.
    """
    fields = json.loads(argument)
    settings = ServerSettings(**fields | {"limits": sandbox.Limits(**fields["limits"])})
    limits = settings.limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (_NUM_SERVER_FILES, _NUM_SERVER_FILES))
    with socket.socket(fileno=os.dup(0)) as sock:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        try:
            has_sized_disk = settings.mounts and sandbox.mount_scratch(
                settings.root,
                num_bytes=limits.disk_bytes,
                num_files=limits.num_files + 1,  # one more for the folder of the call
            )
            lock = _prepare(settings)
        except (ImportError, OSError) as error:
            with contextlib.suppress(ConnectionError):
                _reply(sock, "fault", 0.0, f"{type(error).__name__}: {error}".encode())
            return
        try:
            _reply(sock, "ready", 0.0, b"")
            _serve(sock, settings, lock, has_sized_disk)
        except ConnectionError:
            pass  # the parent was killed
        finally:
            if has_sized_disk:
                sandbox.unmount(settings.root)
            shutil.rmtree(settings.root, ignore_errors=True)


class _ErrorFile(io.FileIO):
    """Standard error, unbuffered; what standard output has buffered is written before it."""

    def write(self, data: Any, /) -> int:
        flush_output()
        return super().write(data)


def flush_output() -> None:
    """Write what standard output has buffered, unless it is closed or being written to."""
    with contextlib.suppress(AttributeError, ValueError, RuntimeError, OSError):
        sys.__stdout__.flush()  # type: ignore[union-attr]


def _stop_at_time_limit(*_: object) -> None:
    try:
        flush_output()
    finally:
        os._exit(EXIT_TIMEOUT)


def _prepare(settings: ServerSettings) -> Callable[[str, int], int]:
    """Import all modules, hide the other installed packages, and return the function that locks a worker."""
    # a lone surrogate must not fail, and a killed call shows the lines that it printed
    if sys.__stdout__ is not None:
        sys.__stdout__.reconfigure(errors="replace", line_buffering=True)
    errors = io.TextIOWrapper(_ErrorFile(2, "w", closefd=False), "utf-8", "replace", write_through=True)
    sys.stderr = sys.__stderr__ = errors  # type: ignore[misc]
    entropy = _replace_entropy()
    for name in (*_PRELOADED.split(", "), *settings.packages):
        importlib.import_module(name)
    entropy.seed(0)
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(0)
    if "sympy" in sys.modules:
        importlib.import_module("sympy.core.random").seed(0)
    readable = sandbox.standard_paths() + sandbox.package_paths("outrider")
    sys.path[:] = sandbox.standard_search_path()
    reading = sandbox.read_ruleset([settings.root, *readable]) if settings.landlock else None
    program = sandbox.filter_program(platform.machine()) if settings.seccomp else None
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a child would copy these pages

    def lock(folder: str, descriptor: int) -> int:
        """Lock this process into ``folder``; returns ``descriptor``'s new number.

        All other descriptors except the standard ones are closed.
        """
        sandbox.drop_capabilities()
        sandbox.set_limits(settings.limits)
        if reading is not None:
            writing = sandbox.write_ruleset(folder)
            sandbox.restrict(reading)
            sandbox.restrict(writing)
        os.dup2(descriptor, 3)
        os.closerange(4, _NUM_SERVER_FILES)
        if program is not None:
            sandbox.install_filter(program)
        return 3

    return lock


def _replace_entropy() -> random.Random:
    """Replace the system's entropy, from which generators without a seed are seeded, by a generator."""
    entropy = random.Random(0)
    seed = random.Random.seed

    def seed_reproducibly(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, entropy.getrandbits(256) if a is None else a, version)

    os.urandom = entropy.randbytes
    random._urandom = entropy.randbytes  # type: ignore[attr-defined]  # of SystemRandom, and so of secrets
    random.Random.seed = seed_reproducibly  # type: ignore[method-assign]
    random.seed = random._inst.seed
    return entropy


def _serve(
    sock: socket.socket, settings: ServerSettings, lock: Callable[[str, int], int], has_sized_disk: bool
) -> None:
    """Fork a supervisor for each request."""
    requests = select.poll()
    requests.register(sock, select.POLLIN)
    # A parent-death signal would arrive when the *thread* that started this server ends, and episodes run in
    # short-lived threads. Instead: end of file on the socket, and, in case another child of the parent keeps
    # its end open, the parent's process id.
    while os.getppid() == settings.parent:
        if not requests.poll(1000):
            continue
        if not sock.recv(1, socket.MSG_PEEK):
            return
        supervisor = os.fork()
        if supervisor == 0:
            status = 1
            try:
                sandbox.die_with_parent()
                _handle(sock, settings, lock, has_sized_disk)
                status = 0
            except (ConnectionError, EOFError):
                pass  # the parent was killed
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        _, status = os.waitpid(supervisor, 0)
        if status != 0:
            return  # the parent sees the closed socket and starts another server


def _handle(
    sock: socket.socket, settings: ServerSettings, lock: Callable[[str, int], int], has_sized_disk: bool
) -> None:
    """Read one request, run it in a locked child, remove its folder, reply."""
    (length,) = REQUEST.unpack(receive(sock, REQUEST.size))
    code = receive(sock, length).decode("utf-8", "surrogatepass")
    folder = os.path.join(settings.root, "call")
    os.mkdir(folder, 0o700)
    # A socket, not a pipe: the code could reopen its end of a pipe through /proc/self/fd and read back what
    # it wrote.
    source, sink = socket.socketpair()
    status_reader, status_writer = os.pipe()
    start = time.monotonic()
    worker = os.fork()
    if worker == 0:
        _work(code, sink.fileno(), status_writer, folder, lock)
    sink.close()
    os.close(status_writer)
    try:
        with wall_limit(worker, settings.limits.wall_seconds + _WALL_GRACE):
            status, note, output = _watch(worker, source, sock, folder, settings, has_sized_disk)
    finally:
        shutil.rmtree(folder)
    seconds = time.monotonic() - start
    message = os.read(status_reader, 1 << 12)  # its writers have exited
    if message != _LOCKED:
        status, note, output = "fault", "", message or b"the worker ended before it was locked"
    elif status == "fault":
        note, output = "", note.encode()
    if note:
        line_end = "" if not output or output.endswith(b"\n") else "\n"
        output += f"{line_end}[{note}]".encode()
    _reply(sock, status, seconds, output)


def _work(code: str, sink: int, status_writer: int, folder: str, lock: Callable[[str, int], int]) -> NoReturn:
    """Lock this process, confirm it on the status pipe, run the code and exit."""
    try:
        sandbox.die_with_parent()
        os.setsid()
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.chdir(folder)
        # libraries that the code loads must not start threads, which the filter forbids
        threads = {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
        os.environ.clear()
        os.environ.update(threads, HOME=folder, TMPDIR=folder)
        sys.argv = [""]
        signal.signal(signal.SIGXCPU, _stop_at_time_limit)
        random.seed(0)  # the same code gives the same output
        status_writer = lock(folder, status_writer)
        for name in [name for name in sys.modules if name.partition(".")[0] == "outrider"]:
            del sys.modules[name]
    except BaseException as error:
        os.write(status_writer, f"cannot lock the worker: {error}".encode())
        os._exit(EXIT_ERROR)
    os.write(status_writer, _LOCKED)
    os.close(status_writer)
    os._exit(run_program(code))


@contextlib.contextmanager
def wall_limit(worker: int, seconds: float) -> Iterator[None]:
    """Kill the worker after ``seconds`` by a kernel timer, even if this process is blocked in a call."""

    def kill(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    # repeated: the first signal may arrive between two system calls
    signal.setitimer(signal.ITIMER_REAL, seconds, _TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _watch(
    worker: int,
    source: socket.socket,
    parent: socket.socket,
    folder: str,
    settings: ServerSettings,
    has_sized_disk: bool,
) -> tuple[str, str, bytes]:
    """Collect the worker's output until it ends or exceeds a limit; none of its processes remains.

    Returns the status of the call, a note for the model that names the limit (or ""), and the output. If
    ``has_sized_disk``, the file system enforces the limits on files. Otherwise files are counted where they
    are visible and bytes are charged as they are written. Exits this process, and with it the worker, if
    ``parent`` hangs up.
    """
    output, limits = bytearray(), settings.limits
    source.setblocking(False)
    deadline = time.monotonic() + limits.wall_seconds
    too_long = "timeout", f"stopped: ran longer than {limits.wall_seconds:g} s"
    next_disk_check = time.monotonic() + _TICK
    ready = select.poll()
    ready.register(source, select.POLLIN)
    ready.register(parent, 0)
    cause: tuple[str, str] | None = None
    reading, exited_pid = True, 0
    while not exited_pid and cause is None:
        now = time.monotonic()
        if now >= deadline:
            cause = too_long
        elif now >= next_disk_check and not has_sized_disk:
            if excess := _disk_excess(worker, folder, limits):
                cause = "killed", excess
            next_disk_check = time.monotonic() + _TICK
        for descriptor, _ in ready.poll(1000 * (_TICK if reading else 0.001)):
            if descriptor == parent.fileno():
                os._exit(1)
            chunk = _read(source)
            output += chunk or b""
            if chunk == b"":
                reading = False
                ready.unregister(source)
        if len(output) > limits.output_bytes:
            break
        exited_pid, status, usage = os.wait4(worker, os.WNOHANG)
    if not exited_pid and cause == too_long:
        os.kill(worker, signal.SIGXCPU)
        end = time.monotonic() + _FLUSH_GRACE
        while not exited_pid and time.monotonic() < end:
            time.sleep(0.001)
            exited_pid, status, usage = os.wait4(worker, os.WNOHANG)
    if not exited_pid:
        os.kill(worker, signal.SIGKILL)
        _, status, usage = os.wait4(worker, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)  # its children, if no filter forbade them
    # read what is there, without waiting for other processes that may keep the socket open
    while len(output) <= limits.output_bytes and (chunk := _read(source)):
        output += chunk
    if len(output) > limits.output_bytes:
        cause = "output_limit", f"stopped: printed more than {limits.output_bytes} bytes"
    elif cause is None and os.WIFSIGNALED(status) and time.monotonic() >= deadline:
        cause = too_long  # by the timer of the caller
    elif cause is None:
        cause = _exit_cause(status, usage.ru_utime + usage.ru_stime, settings)
    return *cause, bytes(output[: limits.output_bytes])


def _read(source: socket.socket) -> bytes | None:
    """Read available bytes: None if there are none yet, b"" at the end of the stream."""
    try:
        return source.recv(1 << 16)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def _exit_cause(status: int, cpu_seconds: float, settings: ServerSettings) -> tuple[str, str]:
    limits = settings.limits
    too_long = "timeout", f"stopped: used more than {limits.cpu_seconds} s of processor time"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_seconds >= limits.cpu_seconds):
            return too_long
        if number == signal.SIGKILL and settings.seccomp:  # the filter forbids the code to send signals
            return "fault", "something outside killed the worker (SIGKILL); is the machine out of memory?"
        return "killed", f"ended by {signal.Signals(number).name}"
    code = os.WEXITSTATUS(status)
    # The kernel compares ticks of its clock with the limit; on a busy machine they exceed the usage by far.
    if code == EXIT_TIMEOUT and cpu_seconds > 0.2 * limits.cpu_seconds:
        return too_long
    if code == EXIT_MEMORY:
        return "memory", f"out of memory: the limit is {limits.memory_bytes} bytes"
    return ("ok" if code == EXIT_OK else "error"), ""


def _disk_excess(worker: int, folder: str, limits: sandbox.Limits) -> str:
    """Describe a limit on files that the worker exceeds, or return ""."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                files.append(entry.stat(follow_symlinks=False))
    # Files that are open but were removed. A process that is just exiting may not be inspected
    # (PermissionError); a running one cannot hide, because prctl and exec are forbidden to it.
    descriptors_folder = f"/proc/{worker}/fd"
    with contextlib.suppress(FileNotFoundError, PermissionError):
        for descriptor in os.listdir(descriptors_folder):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                info = os.stat(os.path.join(descriptors_folder, descriptor))
                if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
                    files.append(info)
    # A file that was removed and closed but is still mapped is in neither list; the kernel's count of
    # written bytes covers it (if the kernel counts).
    num_written = 0
    with contextlib.suppress(OSError, KeyError), open(f"/proc/{worker}/io", encoding="ascii") as file:
        counts = dict(line.split(": ") for line in file.read().splitlines())
        num_written = max(int(counts["write_bytes"]), int(counts["wchar"]) - limits.output_bytes)
    num_bytes = sum(max(info.st_size, 512 * info.st_blocks) for info in files)
    if max(num_bytes, num_written) > limits.disk_bytes:
        return f"stopped: wrote more than {limits.disk_bytes} bytes of files"
    return f"stopped: made more than {limits.num_files} files" if len(files) > limits.num_files else ""


def _reply(sock: socket.socket, status: str, seconds: float, output: bytes) -> None:
    sock.sendall(REPLY.pack(STATUSES.index(status), seconds, len(output)) + output)


def receive(sock: socket.socket, length: int) -> bytes:
    """Read exactly ``length`` bytes. Raises EOFError if the connection is closed before."""
    data = bytearray()
    while len(data) < length:
        chunk = sock.recv(min(length - len(data), 1 << 16))
        if not chunk:
            raise EOFError("the connection was closed")
        data += chunk
    return bytes(data)
