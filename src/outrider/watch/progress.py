"""Live progress of a run: a display on a terminal, one plain line per event in a log, or nothing."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Final, Literal, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outrider.errors import ConfigError
from outrider.printing import one_line
from outrider.stopping import STOPPING, clear_before_exit
from outrider.terminal import Terminal
from outrider.watch.span import duration
from outrider.watch.stage_clock import Clock, Field, StageClock, StageClocks, TimeLeft, format_field

_BAR_LEAST: Final = 5
_BAR_MOST: Final = 30  # columns
_GAPS: Final = 8  # between four cells, and one behind the last
_log = logging.getLogger(__name__)

SET_UP: Final = "set-up"
"""The stage before anything is written."""


class Progress(Protocol):
    """Display of a run's stages, which report to it: nothing here changes a run, and no method raises."""

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        num_parallel: int = 1,
        time_left: TimeLeft | None = None,
    ) -> None:
        """Begin a stage (set-up, buffer, cold start, evaluate, train), or take one up again; ``total`` units,
        None where unknown.

        ``done`` of them are done already; ``num_parallel`` are under way at a time. ``time_left`` gives the
        seconds left where more comes than these units; it is asked again for every display. Such a stage is
        the run's own, and each of its units has a line.
        """

    def advance(self, done: int, **fields: Field) -> None:
        """``done`` units of the stage are complete; a field named ``reward`` is shown as a moving mean."""

    def note(self, text: str) -> None:
        """One message for the person who watches."""

    def stopping(self) -> bool:
        """A stop was asked for: show it from now on. False where the caller must tell it.

        Called in a signal handler: it takes no lock and writes nothing itself.
        """

    def close(self) -> None:
        """End the display; may be called twice."""


class NullProgress:
    """Shows nothing."""

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        num_parallel: int = 1,
        time_left: TimeLeft | None = None,
    ) -> None:
        """Ignored."""

    def advance(self, done: int, **fields: Field) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""

    def stopping(self) -> bool:
        """Shows nothing, so somebody else must."""
        return False

    def close(self) -> None:
        """Nothing to release."""


class PlainProgress:
    """One line per event, for logs. Reports that come faster than ``interval`` seconds are thinned out.

    The first and the last report of a stage, every stage and every note are always printed, so with work
    being reported the log is never silent for longer than ``interval`` plus one report. A stream that breaks
    (a closed pipe) ends the display and not the run.
    """

    def __init__(
        self, *, stream: TextIO | None = None, interval: float = 5.0, clock: Clock = time.monotonic
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._interval = interval
        self._clock = clock
        self._clocks = StageClocks(clock)
        self._stage: StageClock | None = None
        self._last_print = clock()
        self._has_unprinted = False
        self._is_broken = False

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        num_parallel: int = 1,
        time_left: TimeLeft | None = None,
    ) -> None:
        """Print the end of the stage before, if it was thinned out, and the beginning of this one."""
        self._flush()
        self._stage = self._clocks.begin(
            name, total, done=done, num_parallel=num_parallel, time_left=time_left
        )
        status = "start" if total is None else f"{done} of {total} done" if done else f"start, {total} to do"
        self._print(f"{name}: {status}")

    def advance(self, done: int, **fields: Field) -> None:
        """Print the state of the stage, unless the last line is younger than the interval."""
        if self._stage is None:
            self.stage("run", None)
        stage = self._stage
        assert stage is not None
        is_step = done != stage.done and stage.time_left is not None
        stage.advance(done, dict(fields))
        self._has_unprinted = True
        if (
            stage.num_reports == 1
            or is_step
            or done == stage.total
            or self._clock() - self._last_print >= self._interval
        ):
            self._flush()

    def note(self, text: str) -> None:
        """Print the message on one line."""
        self._print(one_line(text))

    def stopping(self) -> bool:
        """A handler may have interrupted this stream in the middle of a line: stderr says it."""
        return False

    def close(self) -> None:
        """Print the last report if it was thinned out."""
        self._flush()

    def _flush(self) -> None:
        if self._has_unprinted and self._stage is not None:
            self._has_unprinted = False
            self._print(one_line(self._stage.summary()))

    def _print(self, line: str) -> None:
        self._last_print = self._clock()
        if self._is_broken:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._is_broken = True
            _log.warning("progress display stopped, the run goes on: %s", error)


class RichProgress:
    """A live display that redraws itself: stage, bar, fields, elapsed and left, and the last message under
    it.
    """

    def __init__(self, *, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        self._console = console if console is not None else Terminal()
        self._clocks = StageClocks(clock)
        self._stage: StageClock | None = None
        self._message = ""
        self._is_broken = False
        self._is_stopping = False
        self._has_printed_summary = False  # the last report of the stage has its line
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True
        )
        self._live.start()
        self._unregister_cleanup = clear_before_exit(self._live.stop)

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        num_parallel: int = 1,
        time_left: TimeLeft | None = None,
    ) -> None:
        """Leave one line for the finished stage and begin the next."""
        self._print_summary()
        self._stage = self._clocks.begin(
            name, total, done=done, num_parallel=num_parallel, time_left=time_left
        )
        self._message = ""

    def advance(self, done: int, **fields: Field) -> None:
        """Update the numbers; the display redraws on its own clock."""
        if self._stage is None:
            self.stage("run", None)
        stage = self._stage
        assert stage is not None
        self._has_printed_summary = done != stage.done and stage.time_left is not None
        stage.advance(done, dict(fields))
        if self._has_printed_summary:
            self._print(one_line(stage.summary()))

    def note(self, text: str) -> None:
        """Keep the message above the display and show it as the last one."""
        self._message = one_line(text)
        self._print(self._message)

    def stopping(self) -> bool:
        """The next redraw has the line, and every later one."""
        self._is_stopping = self._live.is_started and not self._is_broken
        return self._is_stopping

    def close(self) -> None:
        """Stop redrawing and leave the line of the last stage."""
        self._print_summary()
        self._stage = None
        self._guarded(self._live.stop)
        self._unregister_cleanup()

    def _print_summary(self) -> None:
        if self._stage is not None and not self._has_printed_summary:
            self._print(one_line(self._stage.summary()))
        self._has_printed_summary = False

    def _print(self, line: str) -> None:
        self._guarded(lambda: self._console.print(Text(line)))

    def _guarded(self, draw: Callable[[], object]) -> None:
        """A terminal that went away must not end the run."""
        if self._is_broken:
            return
        try:
            draw()
        except (OSError, ValueError) as error:
            self._is_broken = True
            _log.warning("progress display stopped, the run goes on: %s", error)

    def _render(self) -> Group:
        stage = self._stage
        footer = [Text(STOPPING, style="bold")] if self._is_stopping else []
        if stage is None:
            return Group(Text("starting"), *footer)
        grid = Table.grid(padding=(0, 2))
        count = f"{stage.done}/{stage.total}" if stage.total is not None else str(stage.done)
        left = stage.left_text
        times = f"elapsed {duration(stage.elapsed)}" + (f"  left {left}" if left is not None else "")
        name = Text(stage.name, style="bold", overflow="ellipsis", no_wrap=True)
        room = self._console.width - len(stage.name) - len(count) - len(times) - _GAPS
        if room >= _BAR_LEAST:
            width = min(_BAR_MOST, room)
            bar = ProgressBar(total=stage.total, completed=stage.done, width=width, pulse=stage.total is None)
            grid.add_row(name, bar, Text(count, no_wrap=True), Text(times, no_wrap=True))
        else:
            grid.add_row(name, Text(count, no_wrap=True), Text(times, no_wrap=True))
        entries = list(stage.fields.items())  # at once: the run's thread adds to them while this one draws
        fields = "  ".join(f"{name} {format_field(value)}" for name, value in entries)
        message = Text(self._message, style="dim", overflow="ellipsis", no_wrap=True)
        shown_fields = Text(one_line(fields), overflow="ellipsis", no_wrap=True)
        return Group(grid, shown_fields, message, *footer)


def make_progress(mode: Literal["auto", "rich", "plain", "none"] = "auto") -> Progress:
    """The display for a mode; ``auto`` is ``rich`` on a terminal that can redraw and ``plain`` elsewhere.

    Raises :class:`~outrider.errors.ConfigError` for any other mode.
    """
    if mode == "none":
        return NullProgress()
    if mode == "plain":
        return PlainProgress()
    if mode in ("auto", "rich"):
        console = Terminal()
        can_redraw = console.is_terminal and not console.is_dumb_terminal
        return RichProgress(console=console) if mode == "rich" or can_redraw else PlainProgress()
    raise ConfigError(f"progress mode {mode!r} is not one of auto, rich, plain, none")
