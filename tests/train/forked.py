"""``outrider`` in processes that are killed and stopped, begun where the imports are done.

A real ``python -m outrider`` (:func:`tests.train.tool_run.outrider`) imports torch and transformers first, which takes seconds of
processor time. Here every command is a child of one process that has imported them and has computed nothing.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

from outrider import cli
from tests.train.tool_run import ENVIRONMENT

_IMPORTED = [
    "outrider.train.start", "outrider.train.replay", "outrider.watch.report", "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_fast", "pyarrow.parquet", "bm25s",
]  # fmt: skip


class ForkedOutrider:
    """A running command, with what these tests use of ``subprocess.Popen``."""

    def __init__(self, *arguments: str | Path) -> None:
        self.args = ["outrider", *map(str, arguments)]
        self._written = tempfile.TemporaryDirectory()
        self._process = _server().Process(target=_run, args=(self.args[1:], self._written.name))
        self._process.start()

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
    context.set_forkserver_preload(_IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT):  # read while torch and the hub's client are imported
        forkserver.ensure_running()
    return context


def _run(arguments: Sequence[str], folder: str) -> None:
    for stop in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs inherit that the first is ignored
        signal.signal(stop, signal.default_int_handler if stop == signal.SIGINT else signal.SIG_DFL)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.exit(cli.main(arguments))
