"""The mean of a few values with Student's interval."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from outrider.evaluation.statistics import ALPHA, Estimate, student_p


def student_interval(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's 95 % interval; its bounds are NaN for fewer than two values."""
    if len(values) < 2:
        return Estimate(value=fmean(values), low=math.nan, high=math.nan)
    low, high = 0.0, 1e3  # the quantile, by bisection
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, len(values) - 1) > ALPHA else (low, middle)
    margin = high * stdev(values) / math.sqrt(len(values))
    return Estimate(value=fmean(values), low=fmean(values) - margin, high=fmean(values) + margin)
