"""Curves of groups of runs on common costs: training reward in bins, held-out score on lines between
evaluations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.evals.compare.runs import STEPS, Run
from outrider.evals.statistics import UNBOUNDED, Band, Scores, bin_means, iqm_band

SCORE: Final = "held-out score"
REWARD: Final = "training reward"
_NUM_POINTS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """One quantity over one axis: ``x`` of shape (points,) is common to all groups; ``bands`` are by
    group.
    """

    quantity: str
    axis: str
    x: Scores
    bands: Mapping[str, Band]


def reward_curves(groups: Mapping[str, Sequence[Run]], axis: str, *, seed: int) -> Curves | None:
    """Training reward in bins of equal cost, up to the cost that every run reached; None where a run lacks
    the record.
    """
    runs = [run for members in groups.values() for run in members]
    end = min(float(run.costs[axis][-1]) if axis in run.costs and len(run.rewards) else 0.0 for run in runs)
    if end <= 0:
        return None
    edges = np.linspace(0.0, end, 1 + min(_NUM_POINTS, *(len(run.rewards) for run in runs)))
    if axis == STEPS:
        edges = np.unique(np.round(edges))  # a bin ends with a step
    values = {
        label: np.stack([bin_means(run.costs[axis], run.rewards, edges) for run in members])
        for label, members in groups.items()
    }
    return _curves(REWARD, axis, edges[1:], values, within=UNBOUNDED, seed=seed)


def score_curves(groups: Mapping[str, Sequence[Run]], axis: str, *, seed: int) -> Curves | None:
    """Held-out score, on straight lines between the evaluations of a run, within the costs that every run's
    evaluations cover; None where they cover no common range.
    """
    lines = {label: [_score_line(run, axis) for run in members] for label, members in groups.items()}
    every = [x for members in lines.values() for x, _ in members]
    if not all(len(x) for x in every):
        return None
    start, end = max(x[0] for x in every), min(x[-1] for x in every)
    if end <= start:
        return None
    grid = np.unique(np.concatenate(every))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > _NUM_POINTS:
        grid = grid[np.linspace(0, len(grid) - 1, _NUM_POINTS).round().astype(int)]
    values = {
        label: np.stack([np.interp(grid, x, y) for x, y in members]) for label, members in lines.items()
    }
    return _curves(SCORE, axis, grid, values, within=(0.0, 1.0), seed=seed)


def _curves(
    quantity: str,
    axis: str,
    x: Scores,
    values: Mapping[str, Scores],
    *,
    within: tuple[float, float],
    seed: int,
) -> Curves:
    bands = {label: iqm_band(label, curves, within=within, seed=seed) for label, curves in values.items()}
    return Curves(quantity=quantity, axis=axis, x=x, bands=bands)


def _score_line(run: Run, axis: str) -> tuple[Scores, Scores]:
    """(cost, score) of a run's evaluations with strictly ascending costs: of several at one cost, the
    last.
    """
    scores_by_cost = {
        run.cost_at_step(axis, evaluation.step): evaluation.score for evaluation in run.evaluations
    }
    known = sorted(cost for cost in scores_by_cost if math.isfinite(cost))
    return np.asarray(known, dtype=np.float64), np.asarray(
        [scores_by_cost[cost] for cost in known], dtype=np.float64
    )
