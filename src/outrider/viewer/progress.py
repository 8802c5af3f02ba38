"""Live progress of a run: stages with a moving average of their pace, shown on a terminal, as lines of a log,
or as JSON.

:class:`WatchedProgress` adds a line when nothing was reported for a long time.
"""

import contextlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TextIO, TypeAlias

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outrider.errors import ConfigError
from outrider.files import json_value
from outrider.printing import Terminal, one_line
from outrider.rollout.hooks import RolloutStatus
from outrider.signals import STOPPING, clear_before_exit

Field: TypeAlias = float | int | str
Clock: TypeAlias = Callable[[], float]
ProgressMode: TypeAlias = Literal["auto", "rich", "plain", "json", "none"]

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
_TICK_S: Final = 5.0  # between calls of Progress.tick
_HEARTBEAT_S: Final = 60.0
_ALARM: Final = re.compile(r"[A-Z]{2,}[A-Z ]*[: ]|step \d+: .*(lost|missing)")
_FIELDS_ONLY: Final = frozenset({"stage", "step", "progress"})  # events whose text is made of their fields
_AFTER_STAGES: Final = frozenset({"summary", "end"})  # events of notes about the whole run
_LONGER: Final = "the same bits as far as it went"  # a finished run that was given more steps
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
        self.fields: dict[str, Field] = {}
        # Reported since the last unit ended or its phase began, or with its end.
        self.recent_fields: dict[str, Field] = {}
        self._num_before = done
        self._num_parallel = num_parallel
        self._clock = clock
        self._started = clock()
        self._marks: deque[tuple[float, int]] = deque([(self._started, done)])  # (time, units done)
        self._rewards: deque[float] = deque(maxlen=_REWARD_WINDOW)

    def advance(self, done: int, fields: dict[str, Field]) -> None:
        """Record a report. A field named ``phase`` is what is being done for the next unit."""
        if done != self._marks[-1][1]:  # a report within a unit does not change the pace
            if done < self._marks[-1][1]:
                self._marks.clear()
            now = self._clock()
            self._marks.append((now, done))
            # The later half of the time covers a burst and the wait before it, and follows a change of pace.
            while len(self._marks) > 2 and self._marks[1][0] <= (self._started + now) / 2:
                self._marks.popleft()
            self.recent_fields = {}
            self.fields.pop("phase", None)
        if "phase" in fields and fields["phase"] != self.fields.get("phase"):
            self.recent_fields = {}
        self.done = done
        self.fields.update(fields)
        reward = fields.get("reward")
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))
        self.recent_fields |= fields

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

    @property
    def reward_mean(self) -> tuple[float, int]:
        """The mean of the last rewards, and their number (at most 20)."""
        num = len(self._rewards)
        return (sum(self._rewards) / num if num else math.nan), num

    def describe(self, name: str, value: Field) -> str:
        """A field with its name; a reward is followed by the mean of the last ones."""
        if name == "phase":
            return str(value)
        text = f"{name} {compact(value):>{_VALUE}}"
        if name != "reward" or not self._rewards:
            return text
        mean, num = self.reward_mean
        width = len(str(min(_REWARD_WINDOW, self.total or _REWARD_WINDOW)))
        return f"{text} (mean {compact(mean)} of {num:>{width}})"

    @property
    def count(self) -> str:
        """``12/400``, or the number of units if the total is unknown."""
        return (
            f"{self.done:>{len(str(self.total))}}/{self.total}" if self.total is not None else str(self.done)
        )

    def unit_line(self, unit: str) -> str:
        """The end of a unit: ``step 12/400  reward 0.412 (mean 0.380 of 12)  left 1h20``.

        Numbers have a fixed width, so lines align; texts come last.
        """
        numbers = [
            self.describe(name, value)
            for name, value in self.recent_fields.items()
            if not isinstance(value, str)
        ]
        texts = [f"{name} {value}" for name, value in self.recent_fields.items() if isinstance(value, str)]
        left = [] if self.left_text is None else [f"left {self.left_text}"]
        return "  ".join([f"{unit} {self.count}", *numbers, *left, *texts])

    def heartbeat(self, unit: str) -> str:
        """What is being done: ``step 5/9: collecting rollouts 12/32, generated 5231``. ``unit`` is empty if
        units are no events.
        """
        fields = dict(self.recent_fields)
        if unit and self.done != self.total:
            where = f"{unit} {self.done + 1}" + ("" if self.total is None else f"/{self.total}")
        else:
            where = f"{self.name} {self.count.strip()}"
        phase = " ".join(str(fields.pop(name)) for name in ("phase", "rollouts") if name in fields)
        parts = [*([phase] if phase else []), *(f"{name} {compact(item)}" for name, item in fields.items())]
        return f"{where}: {', '.join(parts)}" if parts else where

    def summary(self) -> str:
        """``train  3/40  reward  0.41  elapsed 0:12  left 2:28``, at most 80 columns.

        Values have a fixed width, so lines with the same fields align. If there is no room, the last fields
        are left out first, then the elapsed time.
        """
        name = self.name if len(self.name) <= _NAME else self.name[: _NAME - 1] + "…"
        line, room = f"{name} {self.count}", _COLUMNS - _LEFT - 2
        for field, value in self.recent_fields.items():
            part = f"  {self.describe(field, value)}"
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


def is_alarm(text: str) -> bool:
    """Whether a note is an alarm: it names a problem that must not go unnoticed."""
    return _ALARM.match(text) is not None and _LONGER not in text


class Progress:
    """Display of a run's stages; this base class displays nothing. A display never changes a run, and its
    methods never raise.
    """

    def stage(
        self, name: str, total: int | None, *, done: int = 0, num_parallel: int = 1, unit: str = ""
    ) -> None:
        """Begin or continue a stage (set-up, buffer, cold start, evaluate, train) of ``total`` units, None if
        unknown.

        ``done`` units are already complete, and ``num_parallel`` run at a time. If the end of each unit is an
        event with a line of its own, ``unit`` is its name, for example ``step``.
        """

    def advance(self, done: int, **fields: Field) -> None:
        """``done`` units of the stage are complete. A field named ``reward`` is shown with a moving mean, one
        named ``phase`` is what is being done for the next unit.
        """

    def note(self, text: str, *, event: str = "note", **fields: Any) -> None:
        """Show one message. ``event`` and ``fields`` are the same for programs."""

    def tick(self) -> None:
        """Called every few seconds, by another thread."""

    def stopping(self) -> bool:
        """Display that a stop was requested. Returns False if the caller must print it.

        Called in a signal handler, so it takes no lock and writes nothing itself.
        """
        return False

    def close(self) -> None:
        """End the display; may be called twice."""


class _StageProgress(Progress):
    """Base class of the displays, with the clock of the current stage."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._clocks = StageClocks(clock)
        self._stage: StageClock | None = None
        self._unit = ""

    def stage(
        self, name: str, total: int | None, *, done: int = 0, num_parallel: int = 1, unit: str = ""
    ) -> None:
        self._finish_stage()
        self._stage = self._clocks.begin(name, total, done=done, num_parallel=num_parallel)
        self._unit = unit
        self._begin_stage(self._stage)

    def _finish_stage(self) -> None:
        """The current stage ends."""

    def _begin_stage(self, stage: StageClock) -> None:
        """Show that a stage began or continues."""

    def _advance(self, done: int, fields: dict[str, Field]) -> tuple[StageClock, bool]:
        """Update the stage. Returns it, and whether a unit has ended that is an event."""
        if self._stage is None:
            self.stage("run", None)
        assert self._stage is not None
        is_event = done != self._stage.done and bool(self._unit)
        self._stage.advance(done, fields)
        return self._stage, is_event

    def _warn(self, error: Exception) -> None:
        """Report a lost stream or terminal, which must not end the run."""
        _log.warning("progress display stopped, the run continues: %s", error)


class PlainProgress(_StageProgress):
    """A log with one line per event and the time in front. :class:`JsonProgress` writes the same events.

    Events are the stages, their units that have a name (training steps), and the notes. After
    ``heartbeat_s`` seconds without a line, one line reports what is being done, if anything was reported
    since then. If a stream breaks (a closed pipe), nothing more is written to it and the run continues.

    Alarms are also printed on ``error_stream``; by default on stderr if stdout is neither a terminal nor the
    same file.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        error_stream: TextIO | None = None,
        heartbeat_s: float = _HEARTBEAT_S,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
    ) -> None:
        super().__init__(clock)
        self._stream: TextIO | None = stream if stream is not None else sys.stdout
        self._error_stream = error_stream if error_stream is not None else _separate_stderr(self._stream)
        self._broken: set[TextIO] = set()
        self._heartbeat_s = heartbeat_s
        self._wall_clock = wall_clock
        self._lock = threading.RLock()  # the run's thread and that of the heartbeat
        self._last_print = clock()
        self._has_news = False
        self._last_heartbeat = ""
        self._begun: set[str] = set()  # stages
        self._day = ""

    def _begin_stage(self, stage: StageClock) -> None:
        with self._lock:
            self._has_news = False
            done, total = stage.done, stage.total
            if done and stage.name in self._begun:  # training after an evaluation
                return
            self._begun.add(stage.name)
            status = (
                "start" if total is None else f"{done} of {total} done" if done else f"start, {total} to do"
            )
            self._print(
                f"{stage.name}: {status}", "stage", {"stage": stage.name, "done": done, "total": total}
            )

    def advance(self, done: int, **fields: Field) -> None:
        with self._lock:
            stage, is_event = self._advance(done, dict(fields))
            self._has_news = not is_event
            if is_event:
                numbers: dict[str, Any] = {self._unit: done, "total": stage.total, **stage.recent_fields}
                if "reward" in stage.recent_fields:
                    numbers["reward_mean"], numbers["reward_mean_num"] = stage.reward_mean
                self._print(stage.unit_line(self._unit), self._unit, numbers | {"seconds_left": stage.left})
            else:
                self.tick()

    def note(self, text: str, *, event: str = "note", **fields: Any) -> None:
        with self._lock:
            self._print(text, "alarm" if event == "note" and is_alarm(text) else event, fields)

    def tick(self) -> None:
        """Print what is being done if no line was printed for a while and something is new."""
        with self._lock:
            stage = self._stage
            if stage is None or not self._has_news or self._clock() - self._last_print < self._heartbeat_s:
                return
            self._has_news = False
            line = stage.heartbeat(self._unit)
            if line == self._last_heartbeat:
                return
            self._last_heartbeat = line
            left = stage.left_text
            numbers = {"stage": stage.name, "done": stage.done, "total": stage.total, **stage.recent_fields}
            self._print(
                line if left is None else f"{line}, left {left}", "progress",
                numbers | {"seconds_left": stage.left},
            )  # fmt: skip

    def _print(self, text: str, event: str, fields: Mapping[str, Any]) -> None:
        """Write the line of an event."""
        self._last_print = self._clock()
        line = self._timed(one_line(text))
        self._write(self._stream, self._format(line, text, event, fields))
        if event == "alarm" and self._error_stream is not None:
            self._write(self._error_stream, line)

    def _format(self, line: str, text: str, event: str, fields: Mapping[str, Any]) -> str:
        """The line of an event in the log; ``line`` is its text with the time."""
        return line

    def _timed(self, line: str) -> str:
        """The line with the time, in the first line and after midnight also the date."""
        day, now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._wall_clock())).split(" ")
        is_new, self._day = day != self._day, day
        return f"{day} {now} {line}" if is_new else f"{now} {line}"

    def _write(self, stream: TextIO | None, line: str) -> None:
        if stream is None or stream in self._broken:
            return
        encoding = stream.encoding or "utf-8"
        try:
            print(line.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._broken.add(stream)
            self._warn(error)


class JsonProgress(PlainProgress):
    """One JSON object per event on stdout. Until :meth:`close`, everything else that this process or one that
    it starts writes to stdout goes to stderr.
    """

    def __init__(self, *, stream: TextIO | None = None, **options: Any) -> None:
        self._stdout, self._fd = sys.stdout, -1
        if stream is None:
            stream = self._stdout
            options.setdefault("error_stream", _separate_stderr(stream))
            if stream is sys.__stdout__ and stream is not None:
                stream.flush()
                self._fd = os.dup(1)
                stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
        super().__init__(stream=stream, **options)
        if self._fd >= 0:
            os.dup2(2, 1)
        sys.stdout = sys.stderr
        self._is_closed = False

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        sys.stdout = self._stdout
        if self._fd >= 0:
            self._stdout.flush()
            os.dup2(self._fd, 1)
            os.close(self._fd)
            with contextlib.suppress(OSError):
                assert self._stream is not None  # a duplicate of stdout
                self._stream.close()

    def _format(self, line: str, text: str, event: str, fields: Mapping[str, Any]) -> str:
        named = {
            name.replace(" ", "_").replace("/", "_per_"): json_value(value) for name, value in fields.items()
        }
        shown = {} if event in _FIELDS_ONLY else {"text": one_line(text)}
        record = {"time": round(self._wall_clock(), 3), "event": event, **shown, **named}
        return json.dumps(record, allow_nan=False, default=str)


def _separate_stderr(stdout: TextIO | None) -> TextIO | None:
    """Return stderr, or None if a line on both streams would appear twice in one terminal or file.

    Python sets a standard stream to None if its file descriptor is closed (``>&-``).
    """
    if stdout is None or sys.stderr is None:
        return sys.stderr
    is_own = stdout is sys.__stdout__
    if not is_own or stdout.isatty():
        return None
    with contextlib.suppress(OSError, ValueError):  # a closed stream
        if not os.path.sameopenfile(stdout.fileno(), sys.stderr.fileno()):
            return sys.stderr
    return None


class RichProgress(_StageProgress):
    """A live display that redraws itself: stage, bar, fields, elapsed and remaining time, and below them the
    last message.
    """

    def __init__(self, *, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console if console is not None else Terminal()
        self._message = ""
        self._is_stopping = False
        self._is_broken = False
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

    def note(self, text: str, *, event: str = "note", **fields: Any) -> None:
        """Show the message as the last one, and print it above the display unless it is a checkpoint. The
        line of a stage that is over comes before it.
        """
        self._message = one_line(text)
        if event != "checkpoint":
            if event in _AFTER_STAGES or (self._stage is not None and self._stage.done == self._stage.total):
                self._print_stage()
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
        self._print_stage()
        self._has_printed_summary = False

    def _print_stage(self) -> None:
        if self._stage is not None and not self._has_printed_summary:
            self._print(one_line(self._stage.summary()))
        self._has_printed_summary = True

    def _print(self, line: str) -> None:
        self._guarded(lambda: self._console.print(Text(line)))

    def _guarded(self, draw: Callable[[], object]) -> None:
        if self._is_broken:
            return
        try:
            draw()
        except (OSError, ValueError) as error:
            self._is_broken = True
            self._warn(error)

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
        fields = "  ".join(stage.describe(name, value) for name, value in entries)
        message = Text(self._message, style="dim", overflow="ellipsis", no_wrap=True)
        shown_fields = Text(one_line(fields), overflow="ellipsis", no_wrap=True)
        return Group(grid, shown_fields, message, *footer)


def make_progress(mode: ProgressMode = "auto") -> Progress:
    """The display for a mode; ``auto`` is ``rich`` on a terminal that can redraw and ``plain`` elsewhere.

    Raises :class:`~outrider.errors.ConfigError` for any other mode.
    """
    if mode == "none":
        return Progress()
    if mode == "plain":
        return PlainProgress()
    if mode == "json":
        return JsonProgress()
    if mode in ("auto", "rich"):
        console = Terminal()
        can_redraw = console.is_terminal and not console.is_dumb_terminal
        return RichProgress(console=console) if mode == "rich" or can_redraw else PlainProgress()
    raise ConfigError(f"progress mode {mode!r} is not one of auto, rich, plain, json, none")


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
    """A display, and a thread that calls its ``tick``, and prints a line if there was no report and no
    rollout progress for ``after_s`` seconds (0: never).

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
        threading.Thread(target=self._watch, daemon=True).start()

    def stage(self, name: str, total: int | None, *, done: int = 0, **options: Any) -> None:
        self._reported = self._clock()
        self._name, self._total, self._done = name, total, done
        self._display.stage(name, total, done=done, **options)

    def advance(self, done: int, **fields: Field) -> None:
        self._reported, self._done = self._clock(), done
        self._display.advance(done, **fields)

    def note(self, text: str, **details: Any) -> None:
        self._reported = self._clock()
        self._display.note(text, **details)

    def stopping(self) -> bool:
        return self._display.stopping()

    def close(self) -> None:
        """Close the display and end the thread."""
        self._is_closed.set()
        self._display.close()

    def _watch(self) -> None:
        while not self._is_closed.wait(min(self._after_s / _LOOKS or _TICK_S, _TICK_S)):
            self._display.tick()
            if self._after_s:
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
