"""The fork server behind the Python tool: one process that preloads modules and forks a locked child for
every call.

Three generations, so that a call sees nothing of another one, not even in freed memory: the *server* never
reads from the socket itself; for each request it forks a *supervisor*, which reads the code, forks the locked
*worker*, watches its limits, answers and ends. Requests and answers are length-prefixed bytes on the socket
at file descriptor 0.
"""

import contextlib
import gc
import importlib
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
from typing import NoReturn

from outrider.tools.python import sandbox
from outrider.tools.python import sandbox as sandbox_paths
from outrider.tools.python.sandbox import Limits, filter_program, mount_scratch, unmount
from outrider.tools.python.worker import EXIT_ERROR, EXIT_MEMORY, EXIT_OK, run_program

# Watches one locked worker from outside until it has ended or must be ended: wall time, output and files on
# disk.


_TICK = 0.02  # seconds between two looks at the disk; bounds by how much a fast writer can overshoot


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a worker ended: a status of the Python tool and, where a limit ended it, which one (for the model
    to read).
    """

    status: str
    note: str = ""


@contextlib.contextmanager
def wall_limit(worker: int, seconds: float) -> Iterator[None]:
    """Has the kernel interrupt whatever this process waits for, and then kills the worker: nobody can park
    this limit.
    """

    def kill(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    # again and again: a first one may come between two calls
    signal.setitimer(signal.ITIMER_REAL, seconds, _TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def watch(
    worker: int, source: socket.socket, parent: socket.socket, folder: str, limits: Limits, *, sized: bool
) -> tuple[Ending, bytes]:
    """Collect the worker's output from ``source`` until it ends; no process of it is left afterwards.

    ``sized``: the file system of ``folder`` keeps the limits on files itself. Otherwise files are counted
    where they can be seen, and bytes are charged as they are written. Ends this process at once (and with it
    the worker) when ``parent`` hangs up.
    """
    output = bytearray()
    source.setblocking(False)
    deadline = time.monotonic() + limits.wall_seconds
    next_disk_check = time.monotonic() + _TICK
    ready = select.poll()
    ready.register(source, select.POLLIN)
    ready.register(parent, 0)
    cause = None
    reading, exited_pid = True, 0
    while not exited_pid and cause is None:
        now = time.monotonic()
        if now >= deadline:
            cause = Ending(status="timeout", note=f"stopped: ran longer than {limits.wall_seconds:g} s")
        elif now >= next_disk_check and not sized:
            cause = _disk_excess(worker, folder, limits)
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
    if not exited_pid:
        os.kill(worker, signal.SIGKILL)
        _, status, usage = os.wait4(worker, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)  # its children, where no filter forbade them
    # does not wait for others who may hold it open
    while len(output) <= limits.output_bytes and (chunk := _read(source)):
        output += chunk
    if len(output) > limits.output_bytes:
        cause = Ending(status="output_limit", note=f"stopped: printed more than {limits.output_bytes} bytes")
    return cause or _judge(status, usage.ru_utime + usage.ru_stime, limits), bytes(
        output[: limits.output_bytes]
    )


def _read(source: socket.socket) -> bytes | None:
    """Reads what is there now; None for nothing yet, and nothing at all at the end."""
    try:
        return source.recv(1 << 16)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def _judge(status: int, cpu_seconds: float, limits: Limits) -> Ending:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_seconds >= limits.cpu_seconds):
            return Ending(
                status="timeout", note=f"stopped: used more than {limits.cpu_seconds} s of processor time"
            )
        return Ending(status="killed", note=f"ended by {signal.Signals(number).name}")
    code = os.WEXITSTATUS(status)
    if code == EXIT_MEMORY:
        return Ending(status="memory", note=f"out of memory: the limit is {limits.memory_bytes} bytes")
    return Ending(status="ok" if code == EXIT_OK else "error")


def _disk_excess(worker: int, folder: str, limits: Limits) -> Ending | None:
    """An ending when the worker keeps too many files or bytes: in its folder, or open but no longer in any
    folder.
    """
    sizes = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(_size(entry.stat(follow_symlinks=False)))
    descriptors_folder = f"/proc/{worker}/fd"
    # A process that is just ending may not be looked into (PermissionError); one that runs cannot hide, since
    # prctl and exec are forbidden to it.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        for descriptor in os.listdir(descriptors_folder):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                info = os.stat(os.path.join(descriptors_folder, descriptor))
                if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
                    sizes.append(_size(info))
    # A file that was removed and closed, but is mapped, is in neither place; what was written to it was
    # written.
    if max(sum(sizes), _written(worker, limits)) > limits.disk_bytes:
        return Ending(status="killed", note=f"stopped: wrote more than {limits.disk_bytes} bytes of files")
    if len(sizes) > limits.num_files:
        return Ending(status="killed", note=f"stopped: made more than {limits.num_files} files")
    return None


def _size(info: os.stat_result) -> int:
    return max(info.st_size, 512 * info.st_blocks)


def _written(worker: int, limits: Limits) -> int:
    """Bytes that the worker has written to files so far, also to those that it removed; 0 where the kernel
    does not count.
    """
    try:
        with open(f"/proc/{worker}/io", encoding="ascii") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
        return max(int(counts["write_bytes"]), int(counts["wchar"]) - limits.output_bytes)
    except (OSError, KeyError):
        return 0


REQUEST = struct.Struct("<I")
"""Number of code bytes; the code follows."""
REPLY = struct.Struct("<BdI")
"""Index into :data:`STATUSES`, wall seconds, number of output bytes; the output follows."""
STATUSES = ("ready", "fault", "ok", "error", "timeout", "memory", "output_limit", "killed")
_LOCKED = b"\x01"
# What the worker says on a pipe of its own, which is closed before the code starts, once the locks are on.
# Anything else is a fault, and never the code's doing.

# seconds after which the kernel's clock ends a worker that its supervisor should have ended
_WALL_GRACE = 2.0
_NUM_SERVER_FILES = 256  # no descriptor of the server is larger, so a worker can close all of them

# Small and asked for all the time; imported once here instead of once per call.
_PRELOADED = (
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "typing",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the server, handed over on its command line. ``root`` is an empty folder that the server
    owns.
    """

    root: str
    parent: int
    packages: tuple[str, ...]
    landlock: bool
    seccomp: bool
    mounts: bool
    limits: sandbox.Limits

    @classmethod
    def from_json(cls, text: str) -> "ServerSettings":
        """Inverse of ``json.dumps(dataclasses.asdict(settings))``."""
        fields = json.loads(text)
        limits = sandbox.Limits(**fields.pop("limits"))
        return cls(**fields | {"packages": tuple(fields["packages"]), "limits": limits})


def main(argument: str) -> None:
    """Serve until the parent closes the socket or ends; then remove the scratch folder."""
    settings = ServerSettings.from_json(argument)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_NUM_SERVER_FILES, _NUM_SERVER_FILES))
    with socket.socket(fileno=os.dup(0)) as sock:
        _null_input()
        try:
            limits = settings.limits
            num_files = limits.num_files + 1  # the folder of the call
            sized = settings.mounts and mount_scratch(
                settings.root, num_bytes=limits.disk_bytes, num_files=num_files
            )
            lock = _prepare(settings)
        except (ImportError, OSError) as error:
            with contextlib.suppress(ConnectionError):
                _answer(sock, "fault", 0.0, f"{type(error).__name__}: {error}".encode())
            return
        try:
            _answer(sock, "ready", 0.0, b"")
            _serve(sock, settings, lock, sized)
        except ConnectionError:
            pass  # the parent was killed, and there is nobody to tell
        finally:
            if sized:
                unmount(settings.root)
            shutil.rmtree(settings.root, ignore_errors=True)


def _prepare(settings: ServerSettings) -> Callable[[str, int], int]:
    """Load everything, close the rest of the installed packages, and return the function that locks a worker
    into a folder.
    """
    for stream in (sys.__stdout__, sys.__stderr__):
        # a lone surrogate must not fail, and a killed call shows the lines that it printed
        if stream is not None:
            stream.reconfigure(errors="replace", line_buffering=True)
    for name in (*_PRELOADED, *settings.packages):
        importlib.import_module(name)
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(0)
    readable = sandbox_paths.standard_paths() + sandbox_paths.package_paths(
        sandbox_paths.loaded_packages("outrider")
    )
    sys.path[:] = sandbox_paths.standard_search_path()
    reading = sandbox.read_ruleset([settings.root, *readable]) if settings.landlock else None
    program = filter_program(platform.machine()) if settings.seccomp else None
    gc.collect()
    gc.freeze()  # the children must not copy these pages only because a collection touches them

    def lock(folder: str, descriptor: int) -> int:
        """Returns the only descriptor beside the standard ones that stays open: ``descriptor``, under a new
        number.
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


def _serve(
    sock: socket.socket, settings: ServerSettings, lock: Callable[[str, int], int], sized: bool
) -> None:
    requests = select.poll()
    requests.register(sock, select.POLLIN)
    # A death signal would come when the *thread* that started this server ends, and episodes run in
    # short-lived threads. So: end of file on the socket, and, in case another child of the parent holds its
    # end open, a look at the parent's id.
    while os.getppid() == settings.parent:
        if not requests.poll(1000):
            continue
        if not sock.recv(1, socket.MSG_PEEK):
            return
        supervisor = os.fork()
        if supervisor == 0:
            _supervise(sock, settings, lock, sized)
        _, status = os.waitpid(supervisor, 0)
        if status != 0:
            return  # the parent sees the closed socket and starts another server


def _supervise(
    sock: socket.socket, settings: ServerSettings, lock: Callable[[str, int], int], sized: bool
) -> NoReturn:
    """Answer one request and end this process; status 1 where that was not possible."""
    status = 1
    try:
        sandbox.die_with_parent()
        _handle(sock, settings, lock, sized)
        status = 0
    except (ConnectionError, EOFError):
        pass  # the parent was killed, and there is nobody to tell
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _handle(
    sock: socket.socket, settings: ServerSettings, lock: Callable[[str, int], int], sized: bool
) -> None:
    """Read one request, run it in a locked child, remove its folder, answer."""
    (length,) = REQUEST.unpack(_receive(sock, REQUEST.size))
    code = _receive(sock, length).decode("utf-8", "surrogatepass")
    folder = os.path.join(settings.root, "call")
    os.mkdir(folder, 0o700)
    # A socket and no pipe: the code could open its end of a pipe again by /proc/self/fd and read there what
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
            ending, output = watch(worker, source, sock, folder, settings.limits, sized=sized)
    finally:
        shutil.rmtree(folder)
    seconds = time.monotonic() - start
    message = os.read(status_reader, 1 << 12)  # its writers have ended
    if message == _LOCKED:
        _answer(sock, ending.status, seconds, output + _note(ending, output))
    else:
        _answer(
            sock, "fault", seconds, (message or b"the worker ended before it was locked") + _note(ending, b"")
        )


def _work(code: str, sink: int, status_writer: int, folder: str, lock: Callable[[str, int], int]) -> NoReturn:
    """The worker: locks itself in, says so, runs the code and ends."""
    status = EXIT_ERROR
    try:
        sandbox.die_with_parent()
        os.setsid()
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(HOME=folder, TMPDIR=folder)
        sys.argv = [""]
        random.seed(0)  # the same code gives the same output
        status_writer = lock(folder, status_writer)
        for name in [name for name in sys.modules if name.partition(".")[0] == "outrider"]:
            del sys.modules[name]
    except BaseException as error:
        os.write(status_writer, f"cannot lock the worker: {error}".encode())
        os._exit(status)
    os.write(status_writer, _LOCKED)
    os.close(status_writer)
    status = run_program(code)
    os._exit(status)


def _note(ending: Ending, output: bytes) -> bytes:
    start = "" if not output or output.endswith(b"\n") else "\n"
    return f"{start}[{ending.note}]".encode() if ending.note else b""


def _answer(sock: socket.socket, status: str, seconds: float, output: bytes) -> None:
    sock.sendall(REPLY.pack(STATUSES.index(status), seconds, len(output)) + output)


def _receive(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = sock.recv(length - len(data))
        if not chunk:
            raise EOFError("the parent closed the socket")
        data += chunk
    return data


def _null_input() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
