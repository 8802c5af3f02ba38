"""Seconds between two bounds: what measured durations say of those to come, or that they say too little."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

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
