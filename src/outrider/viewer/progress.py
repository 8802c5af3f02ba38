"""Seconds between two bounds: what measured durations say of those to come, or that they say too little."""

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, Protocol, TextIO, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outrider.errors import ConfigError
from outrider.files import readable
from outrider.printing import Terminal, one_line
from outrider.rollout.base import RolloutStatus
from outrider.signals import STOPPING, clear_before_exit

_WIDEST: Final = 2.0  # the upper bound over the lower one, of what a person is told
_POINT: Final = 1.2  # below it one number says as much
_PRIOR: Final = 0.1  # relative deviation, worth one measurement: two that agree by chance are no proof
_SURE: Final = 2.0  # standard errors of a trend
# 95th percentiles of Student's t by degrees of freedom, from 1: a central interval of 90 %.
_T: Final = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


@dataclass(frozen=True, slots=True)
class Span:
    """At least ``low`` and at most ``high`` seconds."""

    low: float
    high: float

    def __add__(self, other: "Span") -> "Span":
        return Span(self.low + other.low, self.high + other.high)

    @property
    def text(self) -> str | None:
        """``2:28``, ``2:10-3:40`` or None, where the bounds are too far apart to say anything."""
        low = max(self.low, 1.0)
        if self.high > _WIDEST * low:
            return None
        if self.high <= _POINT * low:
            return duration((low + max(self.high, low)) / 2)
        return f"{duration(self.low)}-{duration(self.high)}"


def predict_total(durations: Sequence[float], num: int) -> Span:
    """The sum of the next ``num`` durations by the ``durations`` ones, at least one.

    A prediction interval of 90 % for the sum of independent draws (Student's t, with one measurement's worth
    of prior deviation), widened to where the line through the durations leads: to the end where they surely
    grow or shrink, else as far ahead as it was seen.
    """
    n, mean = len(durations), fmean(durations)
    slope, is_sure = _trend(durations, mean)
    squares = (_PRIOR * mean) ** 2 + math.fsum((seconds - mean) ** 2 for seconds in durations)
    half = _T[min(n, len(_T)) - 1] * math.sqrt(squares / n) * math.sqrt(num + num * num / n)
    followed = num if is_sure else min(n, num)
    from_middle = (n + 1) / 2  # of the next unit
    distance = followed * from_middle + followed * (followed - 1) / 2
    distance += (num - followed) * (from_middle + followed - 1)
    drifted = num * mean + slope * distance
    return Span(max(0.0, min(num * mean - half, drifted)), max(num * mean + half, drifted))


def _trend(durations: Sequence[float], mean: float) -> tuple[float, bool]:
    """Slope by least squares, seconds a unit, and whether it is more than two of its standard errors."""
    n, middle = len(durations), (len(durations) - 1) / 2
    if n < 3:
        return (durations[-1] - durations[0], False)
    squares = math.fsum((index - middle) ** 2 for index in range(n))
    slope = (
        math.fsum((index - middle) * (seconds - mean) for index, seconds in enumerate(durations)) / squares
    )
    rest = math.fsum(
        (seconds - mean - slope * (index - middle)) ** 2 for index, seconds in enumerate(durations)
    )
    return slope, abs(slope) > _SURE * math.sqrt(rest / (n - 2) / squares)


def duration(seconds: float) -> str:
    """``2:28``, from an hour on ``1h02``, from a hundred on ``100h``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}" if minutes < 6000 else f"{round(minutes / 60)}h"


# Arithmetic of a run's stages: elapsed time, and how much is left by the pace that was measured, or
# nothing.


Field: TypeAlias = float | int | str
Clock: TypeAlias = Callable[[], float]
TimeLeft: TypeAlias = Callable[[], Span | None]

_REWARD_WINDOW: Final = 20  # rewards that the moving mean looks back on
_COLUMNS: Final = 80
_LEFT: Final = len("left 12:40-25:10")
_ELAPSED: Final = len("elapsed 59:59")
_VALUE: Final = 5  # characters
_UNITS: Final = ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"))
_NAME: Final = 31  # of a stage; longer ones end in an ellipsis


class StageClock:
    """One stage of ``total`` units (None: unknown), of which ``done`` were done before it began.

    ``num_parallel`` units are under way at a time and end in bursts: no pace is told from the first of them.
    ``time_left`` gives the seconds that are left in place of the stage's own pace: it knows what comes
    besides units.
    """

    def __init__(
        self,
        *,
        name: str,
        total: int | None,
        done: int = 0,
        num_parallel: int = 1,
        time_left: TimeLeft | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self.total = total
        self.done = done
        self.num_reports = 0
        self.fields: dict[str, Field] = {}
        self._recent_fields: dict[str, Field] = {}  # reported since a unit last ended, or with its end
        self.time_left = time_left
        self._num_before = done
        self._num_parallel = num_parallel
        self._clock = clock
        self._started = clock()
        self._marks: deque[tuple[float, int]] = deque([(self._started, done)])  # when so many units were done
        self._rewards: deque[float] = deque(maxlen=_REWARD_WINDOW)

    def advance(self, done: int, fields: dict[str, Field]) -> None:
        """Take a report; a mean over the last rewards replaces the field ``reward``."""
        if done != self._marks[-1][1]:  # reports within a unit say nothing about the pace of units
            self._mark(self._clock(), done)
            self._recent_fields = {}
        self.done = done
        self.num_reports += 1
        self.fields.update(fields)
        reward = fields.get("reward")
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))
            self.fields["reward"] = sum(self._rewards) / len(self._rewards)
        self._recent_fields |= {name: self.fields[name] for name in fields}

    def _mark(self, now: float, done: int) -> None:
        """Keep what covers the later half of the time: long enough for a burst and the wait before it, and it
        follows a change."""
        if done < self._marks[-1][1]:
            self._marks.clear()
        self._marks.append((now, done))
        while len(self._marks) > 2 and self._marks[1][0] <= (self._started + now) / 2:
            self._marks.popleft()

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return self._clock() - self._started

    @property
    def left(self) -> float | None:
        """Estimated seconds to the end of the stage: the units that are to do, at the measured pace. None
        where there is no basis.

        It runs down between reports. Once the next unit is later than the pace had it, the silence counts as
        pace, and the estimate grows: it is never down to nothing while something is to do.
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
        """The estimate for a person; None where nothing is to do or too little is known."""
        if self.time_left is not None:
            span = self.time_left()
            return None if span is None or span.high <= 0 else span.text
        left = self.left
        return None if left is None or (self.done == self.total and left <= 0) else duration(max(1.0, left))

    def summary(self) -> str:
        """``train  3/40  reward  0.41  elapsed 0:12  left 2:28``, at most 80 columns.

        Columns stand where they stood for the same fields: values have a width, and the ends theirs. What has
        no room is left out: fields from the last one on, then the time that has passed.
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
    """The stages of a run. One that is taken up again where it was, as training after an evaluation, goes on
    with its clock.

    So its pace has in it what came between, and the time left counts the coming evaluations at the measured
    cost of the past.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, StageClock] = {}

    def begin(
        self, name: str, total: int | None, *, done: int, num_parallel: int, time_left: TimeLeft | None = None
    ) -> StageClock:
        """The clock of a stage that begins or goes on."""
        known = self._known.get(name)
        if known is None or not done or (known.total, known.done) != (total, done):
            known = StageClock(
                name=name, total=total, done=done, num_parallel=num_parallel, clock=self._clock
            )
            self._known[name] = known
        known.time_left = time_left
        return known


def format_field(value: Field) -> str:
    """A field's value with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def compact(value: Field) -> str:
    """A field's value, where it is a number below 10^13 in at most five characters: ``0.412``, ``12345``,
    ``123k``."""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    for scale, unit in _UNITS:
        for digits in (0,) if isinstance(value, int) and not unit else (3, 2, 1, 0):
            text = f"{value / scale:.{digits}f}{unit}"
            if len(text) <= _VALUE:
                return text
    return f"{value:.0e}"


# How long the rest of a training run takes: what is still to do, of every kind, between the bounds that the
# measurements of this kind give.


Work: TypeAlias = Literal["step", "evaluation", "checkpoint"]
_PACE_WINDOW: Final = 10  # of a kind; they say what the next ones take
_MIN_STEPS: Final = 3  # fewer say nothing of how steps grow
_SINGLE_SAMPLE_FACTOR: Final = (
    1.5  # an evaluation or checkpoint that was measured once varies by this factor: the same work
)
_RECORDED: Final[Mapping[str, Work]] = {"time/evaluation": "evaluation", "time/checkpoint": "checkpoint"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """How much of each kind is still to do, with what is under way."""

    step: int = 0
    evaluation: int = 0
    checkpoint: int = 0

    def count(self, kind: Work) -> int:
        """The count of a kind."""
        return {"step": self.step, "evaluation": self.evaluation, "checkpoint": self.checkpoint}[kind]


class RunPace:
    """Time it with :meth:`timed`, say what is :attr:`ahead`, and ask for :attr:`left`. May be asked from a
    display's thread.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.remaining = RemainingWork()
        self._clock = clock
        self._durations: dict[Work, deque[float]] = {
            kind: deque(maxlen=_PACE_WINDOW) for kind in ("step", "evaluation", "checkpoint")
        }
        self._current: tuple[Work, float] | None = None

    @contextmanager
    def timed(self, kind: Work) -> Iterator[None]:
        """A unit of this kind is under way; one that is given up has no duration."""
        began = self._clock()
        self._current = kind, began
        try:
            yield
            self._durations[kind].append(self._clock() - began)
        finally:
            self._current = None

    def recall(self, metrics: Path) -> None:
        """Recalls the seconds of the run's last evaluation and checkpoint before this process, from its
        records.

        Not its steps: the first of this process gives their pace, and the machine may be another one. A line
        that cannot be read says nothing here.
        """
        recorded: dict[Work, float] = {}
        for _, record in readable(metrics) if metrics.is_file() else ():
            if record is None:
                continue
            with suppress(ValueError, TypeError):
                recorded |= {
                    kind: float(record[name])
                    for name, kind in _RECORDED.items()
                    if record.get(name) is not None
                }
        for kind, seconds in recorded.items():
            if not self._durations[kind]:
                self._durations[kind].append(seconds)

    def last(self, kind: Work) -> float:
        """Seconds of the last unit. Raises IndexError before the first."""
        return self._durations[kind][-1]

    def seconds(self, kind: Work) -> float | None:
        """The measured mean of the last units, None before the first."""
        durations = tuple(self._durations[kind])
        return sum(durations) / len(durations) if durations else None

    @property
    def left(self) -> Span | None:
        """Seconds to the end of the run; 0 where nothing is to do, None while a step or an evaluation that is
        to come was never measured. A checkpoint that was not is left out: it is small beside these.

        It runs down while a unit is under way. Once that takes longer than its kind did, it counts as
        measured, so that the bounds grow.
        """
        remaining, current = self.remaining, self._current
        total = Span(0.0, 0.0)
        for kind, durations in self._durations.items():
            num, samples = remaining.count(kind), tuple(durations)
            if not num:
                continue
            if not samples:
                if kind == "checkpoint":
                    continue
                return None
            if current is not None and current[0] == kind:
                total += _predict_started(kind, samples, num, self._clock() - current[1])
            else:
                total += _predict(kind, samples, num)
        return total


def _predict(kind: Work, durations: tuple[float, ...], num: int) -> Span:
    if not num:
        return Span(0.0, 0.0)
    if kind != "step" and len(durations) == 1:
        return Span(num * durations[0] / _SINGLE_SAMPLE_FACTOR, num * durations[0] * _SINGLE_SAMPLE_FACTOR)
    return (
        Span(0.0, math.inf)
        if kind == "step" and len(durations) < _MIN_STEPS
        else predict_total(durations, num)
    )


def _predict_started(kind: Work, durations: tuple[float, ...], num: int, spent: float) -> Span:
    """``num`` units, the first of which began ``spent`` seconds ago."""
    if spent <= sum(durations) / len(durations):
        whole = _predict(kind, durations, num)
        return Span(max(0.0, whole.low - spent), whole.high - spent)
    durations = (*durations, spent)[-_PACE_WINDOW:]
    rest, this = _predict(kind, durations, num - 1), _predict(kind, durations, 1)
    return Span(rest.low, rest.high + max(spent, this.high - spent))  # at worst it is half done


# Live progress of a run: a display on a terminal, one plain line per event in a log, or nothing.


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


# From an engine's decoding steps to the display: a batch of long rollouts shows that it is alive before the
# first one ends.


_METER_WINDOW: Final = 50  # decoding steps that the speed looks back on


class TokenMeter:
    """Call it with the number of tokens of every decoding step: it shows tokens so far, and how many per
    second lately.

    ``num_done`` tells how many units of the stage are complete. While it is None (the parts are still being
    made, and what they decode is nobody's progress), tokens are counted and not shown.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.num_done: Callable[[], int] | None = None
        self.num_tokens = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_METER_WINDOW)

    def __call__(self, num_tokens: int) -> None:
        """Count what one decoding step wrote."""
        self.num_tokens += num_tokens
        if self.num_done is None:
            return
        self._recent.append((time.monotonic(), self.num_tokens))
        (began, before), (now, total) = self._recent[0], self._recent[-1]
        speed = {"tokens/s": round((total - before) / (now - began))} if now > began else {}
        self._progress.advance(self.num_done(), generated=self.num_tokens, **speed)


# A run without progress says where it waits: one line to the display, and never an end of the run.


_LOOKS: Final = 8  # in the time after which a line comes


class WatchedProgress:
    """A display, and a thread that adds a line when nothing was reported and no rollout went on for
    ``after_s`` seconds (0: never).

    The line names the stage, in which calls how many rollouts are and since when, and where the program is.
    It comes again after as long a silence. The thread only reads, so it changes no result.
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

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        num_parallel: int = 1,
        time_left: TimeLeft | None = None,
    ) -> None:
        """Handed on."""
        self._reported = self._clock()
        self._name, self._total, self._done = name, total, done
        self._display.stage(name, total, done=done, num_parallel=num_parallel, time_left=time_left)

    def advance(self, done: int, **fields: Field) -> None:
        """Handed on."""
        self._reported, self._done = self._clock(), done
        self._display.advance(done, **fields)

    def note(self, text: str) -> None:
        """Handed on."""
        self._reported = self._clock()
        self._display.note(text)

    def stopping(self) -> bool:
        """Handed on."""
        return self._display.stopping()

    def close(self) -> None:
        """Ends the thread too."""
        self._is_closed.set()
        self._display.close()

    def _watch(self) -> None:
        while not self._is_closed.wait(self._after_s / _LOOKS):
            self.look()

    def look(self) -> None:
        """Say where the run waits, if it is time to."""
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
    """The innermost function of Outrider that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("outrider."):
        frame = frame.f_back
    if frame is None:
        return "the main thread is outside of Outrider"
    return (
        f"the main thread is in {frame.f_globals['__name__']}.{frame.f_code.co_name}, line {frame.f_lineno}"
    )
