"""``outrider`` in processes that are killed and stopped, begun where the imports are done.

A real ``python -m outrider`` (:func:`tests.training.tool_run.outrider`) imports torch and transformers first,
which takes seconds of processor time. Here every command is a child of one process that has imported them
(:mod:`tests.training.forked_imports`).
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

from outrider import cli
from tests.training.tool_run import ENVIRONMENT

_READY, _OVER = "ready", "over"


class ForkedOutrider:
    """A running command, with what these tests use of ``subprocess.Popen``.

    ``prepare`` is called in the child before the command line, with a folder of this process.
    """

    def __init__(self, *arguments: str | Path, prepare: Callable[[Path], None] | None = None) -> None:
        self.args = ["outrider", *map(str, arguments)]
        self._written = tempfile.TemporaryDirectory()
        self.folder = Path(self._written.name)
        self._process = _server().Process(target=_run, args=(self.args[1:], self._written.name, prepare))
        self._process.start()

    @property
    def is_ready(self) -> bool:
        """Whether the command line is about to be called: from then on a signal meets what it meets in
        ``outrider``.
        """
        return (self.folder / _READY).exists()

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all its threads; 0 once it has been waited for."""
        assert self._process.pid is not None
        with contextlib.suppress(OSError):
            # what clock_getcpuclockid(3) gives for a process
            return time.clock_gettime(~self._process.pid << 3 | 2)
        return 0.0

    @property
    def returned(self) -> tuple[float, int] | None:
        """When the command line returned, on :func:`time.monotonic`, and its status; None where it did
        not.
        """
        when, _, status = self._read(_OVER).partition(" ")
        return (float(when), int(status)) if status else None

    @property
    def returncode(self) -> int | None:
        """None while it runs; below 0 the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        """To no process where it has ended."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def stdout_so_far(self) -> str:
        """What it has flushed."""
        return self._read("stdout")

    def communicate(self, timeout: float = 240.0) -> tuple[str, str]:
        """What it wrote until its end. Raises TimeoutError, after a SIGKILL."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"{self.args} did not end in {timeout} s")
        stdout, stderr = (self._read(name) for name in ("stdout", "stderr"))
        return stdout, stderr

    def _read(self, name: str) -> str:
        """Nothing where a signal came before the first thing that the child does."""
        written = Path(self._written.name, name)
        return written.read_text() if written.exists() else ""


def forked_outrider(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line in a child, to its end."""
    process = ForkedOutrider(*arguments)
    stdout, stderr = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@functools.cache
def _server() -> ForkServerContext:
    """One a test process; it ends with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.forked_imports"])
    with mock.patch.dict(os.environ, ENVIRONMENT):  # read while torch and the hub's client are imported
        forkserver.ensure_running()
    return context


def _run(arguments: Sequence[str], folder: str, prepare: Callable[[Path], None] | None) -> None:
    # a shell's background jobs inherit that the first is ignored
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler if stop == signal.SIGINT else signal.SIG_DFL)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    if prepare is not None:
        prepare(Path(folder))
    Path(folder, _READY).touch()
    status = cli.main(arguments)
    # What follows is multiprocessing's own end and no part of ``outrider``.
    Path(folder, _OVER).write_text(f"{time.monotonic()} {status}")
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    sys.exit(status)
