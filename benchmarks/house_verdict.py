"""Rules of :mod:`benchmarks.house_retention`, written before any arm was trained: whether the pilot goes on,
which weight and which control it selects, and what counts as a win.

All intervals are Student's 95 % intervals of paired differences over seeds. Panels have 192 episodes, so five
seeds show a difference of 8 points and do not show one of 4.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from benchmarks.student import student_interval
from outrider.evaluation.statistics import Estimate

CEILING: Final = 0.25
"""Panel A after stage 0 from which the weights can hold the facts."""
SEARCH: Final = 1 / 3
"""What a perfect search without knowledge of the house finds."""
PILOT_GAIN: Final = 0.05
MIN_RETENTION: Final = 0.5
MAX_LOSS_ON_NEW: Final = 0.05
PREDICTION: Final = "likelihood, divergence > EMPO², student denominator > EMPO², GRPO, SDAR"
"""Order of the arms on panel A that the table of pulls predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """Success on the trained tasks without and with tips, and on new houses."""

    trained: float
    helped: float
    new: float


Scores = Mapping[str, Mapping[int, Panels]]
"""By arm and seed; the arm ``cold`` is the cold start."""


def gain(scores: Scores, arm: str, other: str) -> Estimate:
    """The difference of two arms on the trained tasks, paired by seed."""
    first, second = scores[arm], scores[other]
    return student_interval([first[seed].trained - second[seed].trained for seed in first if seed in second])


def retention(scores: Scores, arm: str) -> float:
    """The part of the gain of the tips that remains without them; NaN if tips gain nothing."""
    seeds = [seed for seed in scores[arm] if seed in scores["cold"]]
    cold = [scores["cold"][seed] for seed in seeds]
    available = fmean(one.helped - one.trained for one in cold)
    kept = fmean(scores[arm][seed].trained for seed in seeds) - fmean(one.trained for one in cold)
    return kept / available if available > 0 else math.nan


def specific_rise(scores: Scores, arm: str) -> tuple[Estimate, Estimate]:
    """The rise on the trained tasks less that on new houses, and the change on new houses."""
    pairs = [(scores[arm][seed], scores["cold"][seed]) for seed in scores[arm] if seed in scores["cold"]]
    rises = [(after.trained - before.trained, after.new - before.new) for after, before in pairs]
    specific = student_interval([one - other for one, other in rises])
    return specific, student_interval([new for _, new in rises])


def verdict(scores: Scores, arm: str) -> str:
    """Return ``strong win``, ``win``, or ``no`` with every condition that failed."""
    failed = []
    if not (kept := retention(scores, arm)) >= MIN_RETENTION:
        failed.append(f"it keeps {kept:.2f} of the gain of tips, less than {MIN_RETENTION}")
    for name, other in (("GRPO", "grpo"), ("the control", "control")):
        if other not in scores or other == arm:
            continue
        if not (difference := gain(scores, arm, other)).low > 0:
            failed.append(f"the interval over {name} [{_points(difference)}] is not above 0")
    specific, new = specific_rise(scores, arm)
    if not specific.value > 0:
        failed.append("new houses rise as much as the trained ones")
    if new.value < -MAX_LOSS_ON_NEW:
        failed.append(f"new houses fall by {-100 * new.value:.1f} points")
    if failed:
        return f"no: {'; '.join(failed)}"
    trained = student_interval([panels.trained for panels in scores[arm].values()])
    return "strong win" if trained.low > SEARCH else "win"


def passes_pilot(scores: Scores, arms: Sequence[str]) -> list[str]:
    """The arms that are above GRPO by ``PILOT_GAIN`` in every seed."""
    return [
        arm
        for arm in arms
        if arm in scores
        and all(
            panels.trained - scores["grpo"][seed].trained >= PILOT_GAIN
            for seed, panels in scores[arm].items()
        )
    ]


def best_arm(scores: Scores, arms: Sequence[str]) -> str:
    """The arm with the highest mean on the trained tasks; of equals the first."""
    return max(arms, key=lambda arm: fmean(panels.trained for panels in scores[arm].values()))


def table(scores: Scores, titles: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: means over seeds in percent, retention, and the gain over GRPO with its interval."""
    header = ["arm", "seeds", "A %", "A+ %", "B %", "retention", "A over GRPO, points", "verdict"]
    rows = []
    for arm, by_seed in scores.items():
        means = (
            fmean(getattr(panels, name) for panels in by_seed.values())
            for name in ("trained", "helped", "new")
        )
        row = [titles.get(arm, arm), str(len(by_seed)), *(f"{100 * mean:.1f}" for mean in means)]
        is_compared = arm not in ("cold", "grpo") and "grpo" in scores and "cold" in scores
        rows.append(
            [
                *row,
                f"{retention(scores, arm):.2f}" if is_compared else "-",
                _gain_cell(gain(scores, arm, "grpo")) if is_compared else "-",
                verdict(scores, arm) if is_compared and len(by_seed) > 1 else "-",
            ]
        )
    return header, rows


def _gain_cell(difference: Estimate) -> str:
    interval = f" [{_points(difference)}]" if difference.has_interval else ""
    return f"{100 * difference.value:+.1f}{interval}"


def _points(difference: Estimate) -> str:
    return f"{100 * difference.low:+.1f}, {100 * difference.high:+.1f}"
