"""Live progress of a run: a display on a terminal, one plain line per event in a log, or nothing."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, Protocol, TextIO, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outrider.errors import ConfigError

Field: TypeAlias = float | int | str
Clock: TypeAlias = Callable[[], float]

_WINDOW: Final = 20  # advances that the moving reward and the time left look back on
_log = logging.getLogger(__name__)


class Progress(Protocol):
    """What stages of a run report to. Display only: nothing here changes a run, and no method raises."""

    def stage(self, name: str, total: int | None) -> None:
        """Begin a stage (set-up, buffer, cold start, evaluate, train); ``total`` units, None where unknown."""

    def advance(self, done: int, **fields: Field) -> None:
        """``done`` units of the stage are complete; a field named ``reward`` is shown as a moving mean."""

    def note(self, text: str) -> None:
        """One message for the person who watches."""

    def close(self) -> None:
        """End the display; may be called twice."""


class StageClock:
    """Arithmetic of one stage: elapsed time, time left, moving reward. A resumed stage may begin above zero."""

    def __init__(self, *, name: str, total: int | None, clock: Clock) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.num_reports = 0
        self.fields: dict[str, Field] = {}
        self._clock = clock
        self._started = clock()
        self._marks: deque[tuple[float, int]] = deque(maxlen=_WINDOW + 1)
        self._rewards: deque[float] = deque(maxlen=_WINDOW)

    def advance(self, done: int, fields: dict[str, Field]) -> None:
        """Take a report; a mean over the last rewards replaces the field ``reward``."""
        if not self._marks and done <= 1:  # a resumed stage has no pace yet: what was done before took no time here
            self._marks.append((self._started, 0))
        if not self._marks or done != self._marks[-1][1]:  # reports within a unit say nothing about the pace of units
            self._marks.append((self._clock(), done))
        self.done = done
        self.num_reports += 1
        self.fields.update(fields)
        reward = fields.get("reward")
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))
            self.fields["reward"] = sum(self._rewards) / len(self._rewards)

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return self._clock() - self._started

    @property
    def left(self) -> float | None:
        """Estimated seconds to the end from the pace of the last reports; None where there is no basis."""
        if self.total is None or not self._marks:
            return None
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        if last <= first:
            return None
        estimate = (end - start) / (last - first) * (self.total - last)
        return max(0.0, estimate - (self._clock() - end))

    def summary(self) -> str:
        """One line without control characters: ``train 3/40  reward 0.41  …  elapsed 0:12  left 2:28``."""
        count = f"{self.done}/{self.total}" if self.total is not None else str(self.done)
        parts = [f"{self.name} {count}", *(f"{name} {_shown(value)}" for name, value in self.fields.items())]
        parts.append(f"elapsed {_duration(self.elapsed)}")
        if self.left is not None and self.done != self.total:
            parts.append(f"left {_duration(self.left)}")
        return one_line("  ".join(parts))


class NullProgress:
    """Shows nothing."""

    def stage(self, name: str, total: int | None) -> None:
        """Ignored."""

    def advance(self, done: int, **fields: Field) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""

    def close(self) -> None:
        """Nothing to release."""


class PlainProgress:
    """One line per event, for logs. Reports that come faster than ``interval`` seconds are thinned out.

    The first and the last report of a stage, every stage and every note are always printed, so with work being reported
    the log is never silent for longer than ``interval`` plus one report. A stream that breaks (a closed pipe) ends the
    display and not the run.
    """

    def __init__(self, *, stream: TextIO | None = None, interval: float = 5.0, clock: Clock = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._interval = interval
        self._clock = clock
        self._stage: StageClock | None = None
        self._last_print = clock()
        self._has_unprinted = False
        self._is_broken = False

    def stage(self, name: str, total: int | None) -> None:
        """Print the end of the stage before, if it was thinned out, and the beginning of this one."""
        self._flush()
        self._stage = StageClock(name=name, total=total, clock=self._clock)
        self._print(f"{name}: start" if total is None else f"{name}: start, {total} to do")

    def advance(self, done: int, **fields: Field) -> None:
        """Print the state of the stage, unless the last line is younger than the interval."""
        if self._stage is None:
            self.stage("run", None)
        stage = self._stage
        assert stage is not None
        stage.advance(done, dict(fields))
        self._has_unprinted = True
        if stage.num_reports == 1 or done == stage.total or self._clock() - self._last_print >= self._interval:
            self._flush()

    def note(self, text: str) -> None:
        """Print the message on one line."""
        self._print(one_line(text))

    def close(self) -> None:
        """Print the last report if it was thinned out."""
        self._flush()

    def _flush(self) -> None:
        if self._has_unprinted and self._stage is not None:
            self._has_unprinted = False
            self._print(self._stage.summary())

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
    """A live display that redraws itself: stage, bar, fields, elapsed and left, and the last message under it."""

    def __init__(self, *, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        self._console = console if console is not None else Console()
        self._clock = clock
        self._stage: StageClock | None = None
        self._message = ""
        self._is_broken = False
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)
        self._live.start()

    def stage(self, name: str, total: int | None) -> None:
        """Leave one line for the finished stage and begin the next."""
        self._leave_summary()
        self._stage = StageClock(name=name, total=total, clock=self._clock)
        self._message = ""

    def advance(self, done: int, **fields: Field) -> None:
        """Update the numbers; the display redraws on its own clock."""
        if self._stage is None:
            self.stage("run", None)
        assert self._stage is not None
        self._stage.advance(done, dict(fields))

    def note(self, text: str) -> None:
        """Keep the message above the display and show it as the last one."""
        self._message = one_line(text)
        self._print(self._message)

    def close(self) -> None:
        """Stop redrawing and leave the line of the last stage."""
        self._leave_summary()
        self._stage = None
        self._guarded(self._live.stop)

    def _leave_summary(self) -> None:
        if self._stage is not None:
            self._print(self._stage.summary())

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
        if stage is None:
            return Group(Text("starting"))
        grid = Table.grid(padding=(0, 2))
        count = f"{stage.done}/{stage.total}" if stage.total is not None else str(stage.done)
        left = "estimating" if stage.left is None else _duration(stage.left)
        bar = ProgressBar(total=stage.total, completed=stage.done, width=30, pulse=stage.total is None)
        times = Text(f"elapsed {_duration(stage.elapsed)}  left {left}")
        grid.add_row(Text(stage.name, style="bold"), bar, Text(count), times)
        shown = list(stage.fields.items())  # at once: the run's thread adds to them while this one draws
        fields = "  ".join(f"{name} {_shown(value)}" for name, value in shown)
        return Group(grid, Text(one_line(fields)), Text(self._message, style="dim", overflow="ellipsis", no_wrap=True))


def make_progress(mode: Literal["auto", "rich", "plain", "none"] = "auto") -> Progress:
    """The display for a mode; ``auto`` is ``rich`` on a terminal that can redraw and ``plain`` elsewhere.

    Raises :class:`~outrider.errors.ConfigError` for any other mode.
    """
    if mode == "none":
        return NullProgress()
    if mode == "plain":
        return PlainProgress()
    if mode in ("auto", "rich"):
        console = Console()
        can_redraw = console.is_terminal and not console.is_dumb_terminal
        return RichProgress(console=console) if mode == "rich" or can_redraw else PlainProgress()
    raise ConfigError(f"progress mode {mode!r} is not one of auto, rich, plain, none")


def one_line(text: str) -> str:
    """The text with every control character, line breaks and terminal escapes included, replaced by a space."""
    return "".join(char if char.isprintable() else " " for char in text)


def _shown(value: Field) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
