"""Moments at which a signal is sent to a run: at some processor time, or just before one of its writes to
disk.

The first kind rarely hits a checkpoint, which takes a hundredth of a run. For the second kind, every file
that Python opens for writing, every rename, removal, new folder, fsync and SQL statement is a moment.
"""

import functools
import itertools
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.training.forked import ForkedOutrider

_WRITES: Final = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
_SENT, _COUNTED = "sent", "counted"
_PAUSE_S = 0.001


def num_writes(process: ForkedOutrider) -> int:
    """The moments of an ended process that was prepared with :func:`count`."""
    return len((process.folder / _COUNTED).read_bytes())


def sent_before(process: ForkedOutrider) -> str:
    """Return the write before which the signal of :func:`send` was sent; empty if the run ended first."""
    sent = process.folder / _SENT
    return str(json.loads(sent.read_text())) if sent.exists() else ""


def count(folder: Path) -> None:
    """In the child: append one byte per moment to a file of ``folder``."""
    counted = os.open(folder / _COUNTED, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _watch(folder, lambda name: os.write(counted, b"."))


def send(folder: Path, *, sent: signal.Signals, at: int) -> None:
    """In the child: send the signal before write number ``at``, from 0."""
    numbers = itertools.count()  # one thread at a time draws the next number

    def watch(name: str) -> None:
        if next(numbers) == at:
            (folder / _SENT).write_text(json.dumps(name))
            os.kill(os.getpid(), sent)

    _watch(folder, watch)


def _watch(own: Path, on_write: Callable[[str], object]) -> None:
    """Call a function before every write of this process except those to ``own``, in its thread."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if str(path).startswith(str(own)):
                return
            if flags & (os.O_WRONLY | os.O_RDWR) or (mode and set(mode) & set("wax+")):
                on_write("open")
        elif event in _WRITES:
            on_write(event)

    # Only the first process that imports a module would write its compiled code.
    sys.dont_write_bytecode = True
    sys.addaudithook(hook)
    force, connect = os.fsync, sqlite3.connect

    @functools.wraps(force)
    def fsync(file: Any) -> None:
        on_write("fsync")
        force(file)

    @functools.wraps(connect)
    def connected(*arguments: Any, **named: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **named)
        connection.set_trace_callback(lambda statement: on_write(statement.split()[0].lower()))
        return connection

    os.fsync, sqlite3.connect = fsync, connected


def wait_until_ready(process: ForkedOutrider) -> float:
    """Until the child is about to call the command line; its processor time by then."""
    while process.poll() is None and not process.is_ready:
        time.sleep(_PAUSE_S)
    return process.cpu_seconds


def wait_for_cpu(process: ForkedOutrider, seconds: float) -> None:
    """Until it has used so much processor time since it was ready, or has ended."""
    until = wait_until_ready(process) + seconds
    while process.poll() is None and process.returned is None and process.cpu_seconds < until:
        time.sleep(_PAUSE_S)
