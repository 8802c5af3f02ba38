"""Whether a difference between two groups of runs is more than chance: tests, their correction, and the verdict. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.evals.statistics import DECIMALS, Estimate, Sample, Scores
from outrider.seeding import stream

ALPHA: Final = 0.05
MIN_SEEDS: Final = 3
_MAX_EXACT: Final = 14  # differences whose 2^n signs are all tried
_NUM_FLIPS, _FLIPS_AT_ONCE = 10_000, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """Two-sided ``p`` of no difference over ``num_tasks`` tasks; ``mean_difference`` is first minus second."""

    name: str
    p: float
    num_tasks: int
    mean_difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The name of the better group, or None with the reasons why the data carry none."""

    winner: str | None
    reasons: tuple[str, ...]


def paired_test(first: Scores, second: Scores, *, seed: int) -> PairedTest:
    """Test over tasks of two score vectors of shape (tasks,), task by task: McNemar's where all scores are 0 or 1.

    It takes the trained policies as given: what other seeds would have given, only the interval over runs tells.
    Raises ``ValueError`` when the shapes differ or there is no task.
    """
    if first.shape != second.shape or not len(first):
        raise ValueError("a paired test needs the same tasks on both sides, and at least one")
    if np.isin(first, (0.0, 1.0)).all() and np.isin(second, (0.0, 1.0)).all():
        p = mcnemar_p(int(np.sum(first > second)), int(np.sum(first < second)))
        name = "McNemar, exact"
    else:
        p = sign_flip_p(first - second, seed=seed)
        name = "sign flips"
    return PairedTest(name=name, p=p, num_tasks=len(first), mean_difference=float(np.mean(first - second)))


def mcnemar_p(num_first: int, num_second: int) -> float:
    """Exact two-sided p of McNemar's test: tasks that only the first solved against tasks that only the second solved."""
    num = num_first + num_second
    tail = term = 1
    for k in range(min(num_first, num_second)):
        term = term * (num - k) // (k + 1)  # num over k + 1, from num over k
        tail += term
    return float(min(1.0, 2 * tail / 2**num))


def sign_flip_p(differences: Scores, *, seed: int) -> float:
    """Two-sided p of mean difference zero, when each task's difference is as likely with either sign (Fisher 1935).

    Exact up to 14 tasks that differ; beyond, from 10,000 draws as (1 + hits) / (1 + draws), which never is 0 (Phipson and
    Smyth 2010).
    """
    rounded = np.round(differences, DECIMALS)
    values = rounded[rounded != 0]
    num = len(values)
    bound = abs(float(values.sum())) - 1e-9 * float(np.abs(values).sum())
    if not num:
        return 1.0
    if num <= _MAX_EXACT:
        bits = (np.arange(2**num)[:, None] >> np.arange(num)) & 1
        return float(np.mean(np.abs((2.0 * bits - 1.0) @ values) >= bound))
    draw = stream(seed, "compare", "sign flips")
    hits = 0
    for _ in range(_NUM_FLIPS // _FLIPS_AT_ONCE):
        signs = 2.0 * draw.integers(2, size=(_FLIPS_AT_ONCE, num)) - 1.0
        hits += int(np.sum(np.abs(signs @ values) >= bound))
    return (1 + hits) / (1 + _NUM_FLIPS)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) step-down correction, in the given order: with it, the chance of any false finding stays below alpha."""
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def verdict(
    first: Sample,
    second: Sample,
    *,
    difference: Estimate,
    test: PairedTest | None,
    p_corrected: float | None,
    obstacles: Sequence[str] = (),
) -> Verdict:
    """Names a winner only where nothing speaks against it; otherwise says everything that does.

    What is asked: at least three seeds a side, a corrected p below 0.05 over tasks, an interval of the difference over seeds
    that excludes 0, and one sign of both. ``obstacles`` are reasons from outside the numbers. Simulated with equal groups of
    three seeds on 200 tasks, the rule named a winner in 0 to 6 % of comparisons (the more, the more the seeds differ), the
    paired test alone in 5 to 44 %.
    """
    reasons = list(obstacles)
    for one in (first, second):
        if one.num_runs < MIN_SEEDS:
            seeds = "1 seed" if one.num_runs == 1 else f"{one.num_runs} seeds"
            reasons.append(f"{one.name} has {seeds}, at least {MIN_SEEDS} are needed")
    if test is None or p_corrected is None:
        reasons.append("no paired test: the evaluations have no scores of single tasks")
    elif p_corrected >= ALPHA:
        reasons.append(f"over tasks, p = {p_corrected:.3g} is not below {ALPHA:g}")
    elif test.mean_difference * difference.value <= 0:
        reasons.append("the mean and the interquartile mean point to different sides")
    if difference.has_interval and difference.low <= 0 <= difference.high:
        reasons.append("the interval of the difference includes 0")
    if reasons:
        return Verdict(winner=None, reasons=tuple(reasons))
    return Verdict(winner=first.name if difference.value > 0 else second.name, reasons=())
