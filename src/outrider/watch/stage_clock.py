"""Arithmetic of a run's stages: elapsed time, and how much is left by the pace that was measured, or
nothing."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from outrider.watch.span import Span, duration

Field: TypeAlias = float | int | str
Clock: TypeAlias = Callable[[], float]
TimeLeft: TypeAlias = Callable[[], Span | None]

_WINDOW: Final = 20  # rewards that the moving mean looks back on
_COLUMNS: Final = 80
_LEFT: Final = len("left 12:40-25:10")
_ELAPSED: Final = len("elapsed 59:59")
_VALUE: Final = 5  # characters
_UNITS: Final = ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"))
_NAME: Final = 31  # of a stage; longer ones end in an ellipsis


class StageClock:
    """One stage of ``total`` units (None: unknown), of which ``done`` were done before it began.

    ``num_parallel`` units are under way at a time and end in bursts: no pace is told from the first of them.
    ``time_left`` gives the seconds that are left in place of the stage's own pace: it knows what comes besides
    units.
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
        self._rewards: deque[float] = deque(maxlen=_WINDOW)

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
