"""How long the rest of a training run takes: what is still to do, of every kind, at the pace that was
measured for this kind.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from outrider.json_lines import readable
from outrider.watch.stage_clock import Clock

Work: TypeAlias = Literal["step", "evaluation", "checkpoint"]
_LATELY: Final = 10  # of a kind; their mean is the pace
_RECORDED: Final[Mapping[str, Work]] = {"time/evaluation": "evaluation", "time/checkpoint": "checkpoint"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """How much of each kind is still to do, with what is under way."""

    step: int = 0
    evaluation: int = 0
    checkpoint: int = 0

    def of(self, kind: Work) -> int:
        """The count of a kind."""
        return {"step": self.step, "evaluation": self.evaluation, "checkpoint": self.checkpoint}[kind]


class RunPace:
    """Time it with :meth:`timed`, say what is :attr:`ahead`, and ask for :attr:`left`. May be asked from a
    display's thread.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.ahead = Ahead()
        self._clock = clock
        self._taken: dict[Work, deque[float]] = {
            kind: deque(maxlen=_LATELY) for kind in ("step", "evaluation", "checkpoint")
        }
        self._under_way: tuple[Work, float] | None = None

    @contextmanager
    def timed(self, kind: Work) -> Iterator[None]:
        """A unit of this kind is under way; one that is given up has no duration."""
        began = self._clock()
        self._under_way = kind, began
        try:
            yield
            self._taken[kind].append(self._clock() - began)
        finally:
            self._under_way = None

    def recall(self, metrics: Path) -> None:
        """Recalls the seconds of the run's last evaluation and checkpoint before this process, from its
        records.

        Not its steps: the first of this process gives their pace, and the machine may be another one. A line
        that cannot be read says nothing here.
        """
        found: dict[Work, float] = {}
        for _, record in readable(metrics) if metrics.is_file() else ():
            if record is None:
                continue
            with suppress(ValueError, TypeError):
                found |= {
                    kind: float(record[name])
                    for name, kind in _RECORDED.items()
                    if record.get(name) is not None
                }
        for kind, seconds in found.items():
            if not self._taken[kind]:
                self._taken[kind].append(seconds)

    def last(self, kind: Work) -> float:
        """Seconds of the last unit. Raises IndexError before the first."""
        return self._taken[kind][-1]

    def seconds(self, kind: Work) -> float | None:
        """The measured mean of the last units, None before the first."""
        taken = tuple(self._taken[kind])
        return sum(taken) / len(taken) if taken else None

    @property
    def left(self) -> float | None:
        """Seconds to the end of the run; 0 where nothing is to do, None while a step or an evaluation that is
        to come was never measured. A checkpoint that was not is left out: it is small beside these.

        It runs down while a unit is under way. Once that takes longer than its kind did, it counts as pace,
        so the estimate grows and is never down to nothing.
        """
        ahead, under_way = self.ahead, self._under_way
        total = 0.0
        for kind in self._taken:
            num, pace = ahead.of(kind), self.seconds(kind)
            if num and pace is not None:
                total += num * pace
            elif num and kind != "checkpoint":
                return None
        if under_way is None or not ahead.of(under_way[0]):
            return total
        return self._behind(total, *under_way)

    def _behind(self, total: float, kind: Work, began: float) -> float | None:
        """``total`` without what the unit under way has done of its share."""
        num, pace, spent = self.ahead.of(kind), self.seconds(kind), self._clock() - began
        if pace is None or spent <= pace:
            return total if pace is None else total - spent
        taken = tuple(self._taken[kind])
        slower = (sum(taken) + spent) / (len(taken) + 1)
        rest = total - num * pace + (num - 1) * slower
        return rest if rest > 0 else None
