"""Live progress of a run: stages with a moving average of their pace, shown on a terminal or as plain lines.

:class:`WatchedProgress` adds a line when nothing was reported for a long time.
"""

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal, TextIO, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outrider.errors import ConfigError
from outrider.printing import Terminal, one_line
from outrider.rollout.hooks import RolloutStatus
from outrider.signals import STOPPING, clear_before_exit

Field: TypeAlias = float | int | str
Clock: TypeAlias = Callable[[], float]

SET_UP: Final = "set-up"
"""The stage before anything is written."""

_REWARD_WINDOW: Final = 20  # rewards of the moving mean
_COLUMNS: Final = 80
_LEFT: Final = len("left 100h00")
_ELAPSED: Final = len("elapsed 59:59")
_VALUE: Final = 5  # characters
_UNITS: Final = ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"))
_NAME: Final = 31  # characters of a stage's name; longer ones end in an ellipsis
_BAR_LEAST: Final = 5
_BAR_MOST: Final = 30  # columns
_GAPS: Final = 8  # between four cells, and after the last
_METER_WINDOW: Final = 50  # decoding steps of the moving average of tokens per second
_LOOKS: Final = 8  # checks of the watchdog within its time limit
_log = logging.getLogger(__name__)


class StageClock:
    """One stage of ``total`` units (None: unknown), of which ``done`` were done before it began.

    The time left is a moving average over the later half of the stage's time. ``num_parallel`` units run at a
    time and end in bursts, so there is no estimate before the first burst is complete.
    """

    def __init__(
        self,
        *,
        name: str,
        total: int | None,
        done: int = 0,
        num_parallel: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self.total = total
        self.done = done
        self.num_reports = 0
        self.fields: dict[str, Field] = {}
        self._recent_fields: dict[str, Field] = {}  # reported since the last unit ended, or with its end
        self._num_before = done
        self._num_parallel = num_parallel
        self._clock = clock
        self._started = clock()
        self._marks: deque[tuple[float, int]] = deque([(self._started, done)])  # (time, units done)
        self._rewards: deque[float] = deque(maxlen=_REWARD_WINDOW)

    def advance(self, done: int, fields: dict[str, Field]) -> None:
        """Record a report; a mean over the last rewards replaces the field ``reward``."""
        if done != self._marks[-1][1]:  # a report within a unit does not change the pace
            if done < self._marks[-1][1]:
                self._marks.clear()
            now = self._clock()
            self._marks.append((now, done))
            # The later half of the time covers a burst and the wait before it, and follows a change of pace.
            while len(self._marks) > 2 and self._marks[1][0] <= (self._started + now) / 2:
                self._marks.popleft()
            self._recent_fields = {}
        self.done = done
        self.num_reports += 1
        self.fields.update(fields)
        reward = fields.get("reward")
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))
            self.fields["reward"] = sum(self._rewards) / len(self._rewards)
        self._recent_fields |= {name: self.fields[name] for name in fields}

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return self._clock() - self._started

    @property
    def left(self) -> float | None:
        """Estimated seconds to the end of the stage, None if there is no basis for an estimate.

        The estimate decreases between reports. If the next unit takes longer than the average one, the time
        since the last report counts as a unit, so that the estimate grows and never reaches 0 early.
        """
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        if self.total is None or last <= first:
            return None
        num_completed, num_left = last - self._num_before, self.total - last
        if num_left <= 0:
            return 0.0
        if num_completed < min(self._num_parallel, (num_completed + num_left) / 2):
            return None
        now = self._clock()
        pace, silence = (end - start) / (last - first), now - end
        if silence <= pace:
            return pace * num_left - silence
        return (now - start) / (last - first + 1) * (num_left - 1) if num_left > 1 else None

    @property
    def left_text(self) -> str | None:
        """The estimate as text; None if there is no estimate or nothing left to do."""
        left = self.left
        return None if left is None or (self.done == self.total and left <= 0) else duration(max(1.0, left))

    def summary(self) -> str:
        """``train  3/40  reward  0.41  elapsed 0:12  left 2:28``, at most 80 columns.

        Values have a fixed width, so lines with the same fields align. If there is no room, the last fields
        are left out first, then the elapsed time.
        """
        count = (
            f"{self.done:>{len(str(self.total))}}/{self.total}" if self.total is not None else str(self.done)
        )
        name = self.name if len(self.name) <= _NAME else self.name[: _NAME - 1] + "…"
        line, room = f"{name} {count}", _COLUMNS - _LEFT - 2
        for field, value in self._recent_fields.items():
            part = f"  {field} {compact(value):>{_VALUE}}"
            if len(line) + len(part) <= room:
                line += part
        if len(line) + _ELAPSED + 2 <= room:
            line += f"  {f'elapsed {duration(self.elapsed)}':<{_ELAPSED}}"
        left = self.left_text
        return (line if left is None else f"{line}  left {left}").rstrip()


class StageClocks:
    """The clocks of a run's stages. A stage that continues where it stopped, as training does after an
    evaluation, keeps its clock: its pace includes the evaluations and checkpoints between its units.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, StageClock] = {}

    def begin(self, name: str, total: int | None, *, done: int, num_parallel: int) -> StageClock:
        """The clock of a stage that begins or continues."""
        known = self._known.get(name)
        if known is None or not done or (known.total, known.done) != (total, done):
            known = StageClock(
                name=name, total=total, done=done, num_parallel=num_parallel, clock=self._clock
            )
            self._known[name] = known
        return known


def duration(seconds: float) -> str:
    """``2:28``, from an hour on ``1h02``, from a hundred on ``100h``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}" if minutes < 6000 else f"{round(minutes / 60)}h"


def format_field(value: Field) -> str:
    """A field's value with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def compact(value: Field) -> str:
    """Format a field's value; a number below 10^13 has at most five characters: ``0.412``, ``12345``,
    ``123k``."""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    for scale, unit in _UNITS:
        for digits in (0,) if isinstance(value, int) and not unit else (3, 2, 1, 0):
            text = f"{value / scale:.{digits}f}{unit}"
            if len(text) <= _VALUE:
                return text
    return f"{value:.0e}"


class Progress:
    """Display of a run's stages; this base class displays nothing. A display never changes a run, and its
    methods never raise.
    """

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        num_parallel: int = 1,
        line_per_unit: bool = False,
    ) -> None:
        """Begin or continue a stage (set-up, buffer, cold start, evaluate, train) of ``total`` units, None if
        unknown.

        ``done`` units are already complete, and ``num_parallel`` run at a time. ``line_per_unit`` prints a
        line for each unit without rate limit.
        """

    def advance(self, done: int, **fields: Field) -> None:
        """``done`` units of the stage are complete; a field named ``reward`` is shown as a moving mean."""

    def note(self, text: str) -> None:
        """Show one message."""

    def stopping(self) -> bool:
        """Display that a stop was requested. Returns False if the caller must print it.

        Called in a signal handler, so it takes no lock and writes nothing itself.
        """
        return False

    def close(self) -> None:
        """End the display; may be called twice."""


class _StageProgress(Progress):
    """Base class of both displays, with the clock of the current stage."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._clocks = StageClocks(clock)
        self._stage: StageClock | None = None
        self._line_per_unit = False
        self._is_broken = False

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        num_parallel: int = 1,
        line_per_unit: bool = False,
    ) -> None:
        self._finish_stage()
        self._stage = self._clocks.begin(name, total, done=done, num_parallel=num_parallel)
        self._line_per_unit = line_per_unit
        self._begin_stage(self._stage)

    def _finish_stage(self) -> None:
        """Print the last report of the current stage if that is necessary."""

    def _begin_stage(self, stage: StageClock) -> None:
        """Show that a stage began or continues."""

    def _advance(self, done: int, fields: dict[str, Field]) -> tuple[StageClock, bool]:
        """Update the stage. Returns it, and whether the report must be printed as a line."""
        if self._stage is None:
            self.stage("run", None)
        assert self._stage is not None
        needs_line = done != self._stage.done and self._line_per_unit
        self._stage.advance(done, fields)
        return self._stage, needs_line

    def _warn_once(self, error: Exception) -> None:
        """Disable the display with a warning, because a lost stream or terminal must not end the run."""
        self._is_broken = True
        _log.warning("progress display stopped, the run continues: %s", error)


class PlainProgress(_StageProgress):
    """One line per event, for logs, with at most one progress report per ``interval`` seconds.

    The first and the last report of a stage, every stage and every note are always printed. While work is
    reported, the log is therefore never silent for longer than ``interval`` plus one report. If the stream
    breaks (a closed pipe), the display ends and the run continues.
    """

    def __init__(
        self, *, stream: TextIO | None = None, interval: float = 5.0, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._stream = stream if stream is not None else sys.stdout
        self._interval = interval
        self._last_print = clock()
        self._has_unprinted = False

    def _begin_stage(self, stage: StageClock) -> None:
        done, total = stage.done, stage.total
        status = "start" if total is None else f"{done} of {total} done" if done else f"start, {total} to do"
        self._print(f"{stage.name}: {status}")

    def advance(self, done: int, **fields: Field) -> None:
        """Print the state of the stage, unless the last line was printed within the interval."""
        stage, needs_line = self._advance(done, dict(fields))
        self._has_unprinted = True
        if (
            stage.num_reports == 1
            or needs_line
            or done == stage.total
            or self._clock() - self._last_print >= self._interval
        ):
            self._finish_stage()

    def note(self, text: str) -> None:
        self._print(one_line(text))

    def close(self) -> None:
        self._finish_stage()

    def _finish_stage(self) -> None:
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
            self._warn_once(error)


class RichProgress(_StageProgress):
    """A live display that redraws itself: stage, bar, fields, elapsed and remaining time, and below them the
    last message.
    """

    def __init__(self, *, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console if console is not None else Terminal()
        self._message = ""
        self._is_stopping = False
        self._has_printed_summary = False  # the last report of the stage was printed
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True
        )
        self._live.start()
        self._unregister_cleanup = clear_before_exit(self._live.stop)

    def _begin_stage(self, stage: StageClock) -> None:
        self._message = ""

    def advance(self, done: int, **fields: Field) -> None:
        """Update the numbers; the display redraws at its own refresh rate."""
        stage, self._has_printed_summary = self._advance(done, dict(fields))
        if self._has_printed_summary:
            self._print(one_line(stage.summary()))

    def note(self, text: str) -> None:
        """Print the message above the display and show it as the last message."""
        self._message = one_line(text)
        self._print(self._message)

    def stopping(self) -> bool:
        """Add the line from the next redraw on."""
        self._is_stopping = self._live.is_started and not self._is_broken
        return self._is_stopping

    def close(self) -> None:
        """Stop redrawing and print the line of the last stage."""
        self._finish_stage()
        self._stage = None
        self._guarded(self._live.stop)
        self._unregister_cleanup()

    def _finish_stage(self) -> None:
        if self._stage is not None and not self._has_printed_summary:
            self._print(one_line(self._stage.summary()))
        self._has_printed_summary = False

    def _print(self, line: str) -> None:
        self._guarded(lambda: self._console.print(Text(line)))

    def _guarded(self, draw: Callable[[], object]) -> None:
        if self._is_broken:
            return
        try:
            draw()
        except (OSError, ValueError) as error:
            self._warn_once(error)

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
        entries = list(stage.fields.items())  # a copy: the run's thread may add fields meanwhile
        fields = "  ".join(f"{name} {format_field(value)}" for name, value in entries)
        message = Text(self._message, style="dim", overflow="ellipsis", no_wrap=True)
        shown_fields = Text(one_line(fields), overflow="ellipsis", no_wrap=True)
        return Group(grid, shown_fields, message, *footer)


def make_progress(mode: Literal["auto", "rich", "plain", "none"] = "auto") -> Progress:
    """The display for a mode; ``auto`` is ``rich`` on a terminal that can redraw and ``plain`` elsewhere.

    Raises :class:`~outrider.errors.ConfigError` for any other mode.
    """
    if mode == "none":
        return Progress()
    if mode == "plain":
        return PlainProgress()
    if mode in ("auto", "rich"):
        console = Terminal()
        can_redraw = console.is_terminal and not console.is_dumb_terminal
        return RichProgress(console=console) if mode == "rich" or can_redraw else PlainProgress()
    raise ConfigError(f"progress mode {mode!r} is not one of auto, rich, plain, none")


class TokenMeter:
    """Displays the number of generated tokens and the recent tokens per second. Call it with the number of
    tokens of every decoding step.

    ``num_done`` returns the number of complete units of the stage. While it is None (during set-up, when
    decoding is not progress of a stage), tokens are counted but not displayed.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.num_done: Callable[[], int] | None = None
        self.num_tokens = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_METER_WINDOW)

    def __call__(self, num_tokens: int) -> None:
        """Count the tokens of one decoding step."""
        self.num_tokens += num_tokens
        if self.num_done is None:
            return
        self._recent.append((time.monotonic(), self.num_tokens))
        (began, before), (now, total) = self._recent[0], self._recent[-1]
        speed = {"tokens/s": round((total - before) / (now - began))} if now > began else {}
        self._progress.advance(self.num_done(), generated=self.num_tokens, **speed)


class WatchedProgress(Progress):
    """A display, and a thread that prints a line if there was no report and no rollout progress for
    ``after_s`` seconds (0: never).

    The line contains the stage, the number of rollouts in each pending call with their waiting time, and the
    current function of the main thread. It is repeated every ``after_s`` seconds. The thread only reads, so
    it changes no result.
    """

    def __init__(
        self,
        display: Progress,
        *,
        rollout_status: RolloutStatus,
        after_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._display = display
        self._rollout_status = rollout_status
        self._after_s = after_s
        self._clock = clock
        self._name, self._done = "the beginning", 0
        self._total: int | None = None
        self._reported = self._last_note = clock()
        self._is_closed = threading.Event()
        if after_s:
            threading.Thread(target=self._watch, daemon=True).start()

    def stage(self, name: str, total: int | None, *, done: int = 0, **options: Any) -> None:
        self._reported = self._clock()
        self._name, self._total, self._done = name, total, done
        self._display.stage(name, total, done=done, **options)

    def advance(self, done: int, **fields: Field) -> None:
        self._reported, self._done = self._clock(), done
        self._display.advance(done, **fields)

    def note(self, text: str) -> None:
        self._reported = self._clock()
        self._display.note(text)

    def stopping(self) -> bool:
        return self._display.stopping()

    def close(self) -> None:
        """Close the display and end the thread."""
        self._is_closed.set()
        self._display.close()

    def _watch(self) -> None:
        while not self._is_closed.wait(self._after_s / _LOOKS):
            self.look()

    def look(self) -> None:
        """Print where the run waits, if the silence lasts long enough."""
        now = self._clock()
        last = max(self._reported, self._rollout_status.changed)
        if now - max(last, self._last_note) >= self._after_s:
            self._last_note = now
            self._display.note(
                f"NO PROGRESS for {now - last:.0f} s {self._describe_location()}; {_program()}"
            )

    def _describe_location(self) -> str:
        stage = self._name if self._total is None else f"{self._name} {self._done}/{self._total}"
        locations = [
            f"{group.num_rollouts} in {group.location} (longest: {group.longest}, {group.seconds:.0f} s)"
            for group in self._rollout_status.snapshot()
        ]
        return f"in {stage}; rollouts: {', '.join(locations) or 'none is open'}"


def _program() -> str:
    """The innermost Outrider function on the stack of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("outrider."):
        frame = frame.f_back
    if frame is None:
        return "the main thread is outside of Outrider"
    return (
        f"the main thread is in {frame.f_globals['__name__']}.{frame.f_code.co_name}, line {frame.f_lineno}"
    )
