"""A pseudo-terminal: a command of ours on its other end, and what a person sees on its screen."""

import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from outrider import cli
from tests.training.forked import _server

ROWS, COLUMNS = 50, 240
_CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|([\r\n\b])|(.)", re.DOTALL)


class Screen:
    """Lines as a terminal shows them, of the controls that rich and a line discipline use; any other is an
    error."""

    def __init__(self) -> None:
        self.lines = [""]
        self.is_cursor_shown = True
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        """Write to the screen."""
        for given, action, move, char in _CONTROL.findall(text):
            if action:
                self._control(given, action)
            elif move == "\n":
                self._row += 1
                self.lines += [""] * (self._row == len(self.lines))
            elif move == "\r":
                self._column = 0
            elif char:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + char + line[self._column + 1 :]
                self._column += 1

    def _control(self, given: str, action: str) -> None:
        if action == "A":
            self._row = max(0, self._row - int(given or 1))
        elif action == "K" and given == "2":
            self.lines[self._row] = ""
        elif given == "?25" and action in "hl":
            self.is_cursor_shown = action == "h"
        elif action != "m":  # colours change no text
            raise ValueError(f"control {given}{action}")

    @property
    def shown(self) -> list[str]:
        """The lines that are not empty."""
        return [line.rstrip() for line in self.lines if line.strip()]


class OnTerminal:
    """``outrider`` as the foreground process of a terminal, begun where the imports are done. ``prepare``
    runs in it first.
    """

    def __init__(self, *arguments: str | Path, prepare: Callable[[], None] | None = None) -> None:
        self.screen = Screen()
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (ROWS, COLUMNS))
        self._process: ForkServerProcess = _server().Process(
            target=_run, args=([*map(str, arguments)], os.ttyname(slave), prepare)
        )
        self._process.start()
        self._slave = slave  # open until the command is, or a read fails

    def press_ctrl_c(self) -> None:
        """The key: the terminal makes a signal of it, for every process in the foreground."""
        os.write(self._master, b"\x03")

    def wait_for(self, *texts: str, seconds: float = 240.0) -> None:
        """Read until the screen shows all of them."""
        self._read(
            lambda: all(any(text in line for line in self.screen.lines) for text in texts), seconds, texts
        )

    def wait_for_redraws(self, count: int, seconds: float = 60.0) -> None:
        """Read until the live display was drawn so often again."""
        left = [count]

        def redrawn() -> bool:
            left[0] -= 1
            return left[0] < 0

        self._read(redrawn, seconds, ("redraws",))

    def end(self, seconds: float = 240.0) -> int:
        """Read to the end; the exit status."""
        os.close(self._slave)
        self._read(lambda: False, seconds, ("the end",))
        self._process.join(seconds)
        os.close(self._master)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        """For a test that failed."""
        self._process.kill()

    def _read(self, is_enough: Callable[[], bool], seconds: float, wanted: tuple[str, ...]) -> None:
        patience = time.monotonic() + seconds
        while not is_enough():
            left = patience - time.monotonic()
            if left <= 0 or not select.select([self._master], [], [], left)[0]:
                raise TimeoutError(f"no {wanted} on the screen: {self.screen.shown}")
            try:
                read = os.read(self._master, 65536)
            except OSError:  # EIO: the last process at the other end is gone
                return
            self.screen.feed(read.decode("utf-8", "replace"))


def _run(arguments: list[str], terminal: str, prepare: Callable[[], None] | None) -> None:
    os.setsid()  # so the terminal becomes this process's own when it is opened
    opened = os.open(terminal, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(opened, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    if prepare is not None:
        prepare()
    sys.exit(cli.main(arguments))
