"""How long the rest of a training run takes: what is still to do, of every kind, between the bounds that the
measurements of this kind give.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from outrider.json_lines import readable
from outrider.watch.span import Span, predict_total
from outrider.watch.stage_clock import Clock

Work: TypeAlias = Literal["step", "evaluation", "checkpoint"]
_WINDOW: Final = 10  # of a kind; they say what the next ones take
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
            kind: deque(maxlen=_WINDOW) for kind in ("step", "evaluation", "checkpoint")
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
    durations = (*durations, spent)[-_WINDOW:]
    rest, this = _predict(kind, durations, num - 1), _predict(kind, durations, 1)
    return Span(rest.low, rest.high + max(spent, this.high - spent))  # at worst it is half done
