"""The gain between two evaluations of one policy on the same tasks and draws, with an interval of the paired
difference.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from outrider.printing import points
from outrider.seeding import stream

_NUM_DRAWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedGain:
    """Mean difference of the scores, later minus earlier, with its interval; ``num_tasks`` were scored by
    both.
    """

    earlier: str
    difference: float
    ci_low: float
    ci_high: float
    num_tasks: int

    def __str__(self) -> str:
        """One line, in percentage points."""
        gained = points(self.difference, self.ci_low, self.ci_high)
        return f"{gained} over {self.earlier!r}, the same {self.num_tasks} tasks and draws"


def paired_gain(
    earlier: Mapping[str, Any], later: Mapping[str, Any], *, level: float = 0.95
) -> PairedGain | None:
    """Gain between two lines of ``evaluations.jsonl``; None where they have no task, panel or temperature in
    common.
    """
    if any(earlier[key] != later[key] for key in ("split", "panel_hash", "temperature")):
        return None
    before, after = earlier["task_scores"], later["task_scores"]
    differences = [after[key] - before[key] for key in after if key in before]
    if not differences:
        return None
    low, high = difference_interval(differences, level=level)
    return PairedGain(
        earlier=earlier["label"],
        difference=fmean(differences),
        ci_low=low,
        ci_high=high,
        num_tasks=len(differences),
    )


def gain_over_start(evaluations: Sequence[Mapping[str, Any]]) -> PairedGain | None:
    """Gain of the last evaluation over the policy that reinforcement learning began with (the last one of
    step 0).
    """
    starts = [evaluation for evaluation in evaluations if evaluation["step"] == 0]
    if not starts or evaluations[-1]["step"] == 0:
        return None
    return paired_gain(starts[-1], evaluations[-1])


def difference_interval(differences: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of paired differences.

    Where each is -1, 0 or 1 (one sample per task): the Wald interval with half a task added to each of the
    four cells (Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
    proportions"), which keeps its level with few changed tasks and has a width where all agree. Else a seeded
    percentile bootstrap over tasks.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not np.isin(values, (-1.0, 0.0, 1.0)).all():
        draws = stream(0, "paired bootstrap").choice(values, size=(_NUM_DRAWS, len(values))).mean(axis=1)
        tail = 50 * (1 - level)
        return float(np.percentile(draws, tail)), float(np.percentile(draws, 100 - tail))
    gained, lost, num = float((values > 0).sum()) + 0.5, float((values < 0).sum()) + 0.5, len(values) + 2.0
    centre = (gained - lost) / num
    z = NormalDist().inv_cdf(0.5 + level / 2)
    margin = z * math.sqrt(gained + lost - (gained - lost) ** 2 / num) / num
    return max(-1.0, centre - margin), min(1.0, centre + margin)
