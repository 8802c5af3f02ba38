"""Watches one locked worker from outside until it has ended or must be ended: wall time, output and files on
disk.
"""

import contextlib
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.tools.python_worker import EXIT_MEMORY, EXIT_OK
from outrider.tools.sandbox import Limits

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
