"""Whether a difference between two groups of runs is more than chance: tests, their correction, and the
verdict. Pure functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.evals.statistics import DECIMALS, Estimate, Sample, Scores
from outrider.seeding import stream

ALPHA: Final = 0.05
MIN_SEEDS: Final = 3
_MAX_EXACT: Final = 14  # differences whose 2^n signs are all tried
_NUM_FLIPS, _FLIPS_PER_BATCH = 10_000, 1_000
_NUM_NODES: Final = 64  # of the integral of Student's tail


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """Two-sided ``p`` of no difference over ``num_tasks`` tasks; ``mean_difference`` is first minus
    second.
    """

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
    """Test over tasks of two score vectors of shape (tasks,), task by task: McNemar's where all scores are 0
    or 1.

    It takes the trained policies as given: what other seeds would have given, only the interval over runs
    tells. Raises ``ValueError`` when the shapes differ or there is no task.
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
    """Exact two-sided p of McNemar's test: tasks that only the first solved against tasks that only the
    second solved.
    """
    num = num_first + num_second
    tail = term = 1
    for k in range(min(num_first, num_second)):
        term = term * (num - k) // (k + 1)  # num over k + 1, from num over k
        tail += term
    return float(min(1.0, 2 * tail / 2**num))


def sign_flip_p(differences: Scores, *, seed: int) -> float:
    """Two-sided p of mean difference zero, when each task's difference is as likely with either sign (Fisher
    1935).

    Exact up to 14 tasks that differ; beyond, from 10,000 draws as (1 + hits) / (1 + draws), which never is 0
    (Phipson and Smyth 2010).
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
    rng = stream(seed, "compare", "sign flips")
    hits = 0
    for _ in range(_NUM_FLIPS // _FLIPS_PER_BATCH):
        signs = 2.0 * rng.integers(2, size=(_FLIPS_PER_BATCH, num)) - 1.0
        hits += int(np.sum(np.abs(signs @ values) >= bound))
    return (1 + hits) / (1 + _NUM_FLIPS)


def seeds_p(first: Sample, second: Sample) -> float:
    """Two-sided p of no difference between two trainings, over the mean scores of their runs: Welch's t test
    (1947).

    It alone asks whether other seeds would have shown the same; Colas et al. 2018 (arXiv 1806.08295) choose
    it for learning algorithms. Where the runs of neither side differ among themselves there is no spread to
    measure, and p is the share of the ways to hand out the runs that look as unequal: 2 / C(n + k, n). Raises
    ValueError for fewer than two runs a side.
    """
    sizes = [first.num_runs, second.num_runs]
    if min(sizes) < 2:
        raise ValueError(f"{first.name} and {second.name}: one run has no spread")
    means = [np.round(sample.scores.mean(axis=1), DECIMALS) for sample in (first, second)]
    difference = abs(float(means[0].mean() - means[1].mean()))
    squared = [float(mean.var(ddof=1)) / size for mean, size in zip(means, sizes, strict=True)]
    if math.sqrt(sum(squared)) <= 10**-DECIMALS:
        return 1.0 if difference <= 10**-DECIMALS else 2 / math.comb(sum(sizes), sizes[0])
    freedom = sum(squared) ** 2 / sum(part**2 / (size - 1) for part, size in zip(squared, sizes, strict=True))
    return student_p(difference / math.sqrt(sum(squared)), freedom)


def student_p(t: float, freedom: float) -> float:
    """Chance of a value beyond ``t`` on either side under Student's distribution with ``freedom`` degrees, at
    least 1.

    With t = sqrt(freedom) tan(angle) the density is a power of the cosine, so the tail is an integral over
    angles (Gauss-Legendre).
    """
    begin = math.atan2(abs(t), math.sqrt(freedom))
    half = (math.pi / 2 - begin) / 2
    nodes, weights = np.polynomial.legendre.leggauss(_NUM_NODES)
    tail = half * float(weights @ np.cos(begin + half * (1.0 + nodes)) ** (freedom - 1.0))
    whole = 0.5 * math.exp(math.lgamma(freedom / 2) + math.lgamma(0.5) - math.lgamma((freedom + 1) / 2))
    return min(1.0, tail / whole)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) step-down correction, in the given order: with it, the chance of any false finding stays
    below alpha.
    """
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
    p_seeds: float | None,
    obstacles: Sequence[str] = (),
) -> Verdict:
    """Names a winner only where nothing speaks against it; otherwise says everything that does.

    What is asked: at least three seeds a side, a corrected p below 0.05 over tasks and one over seeds
    (``p_seeds``; None where the paired test itself runs over seeds), an interval of the difference over seeds
    that excludes 0, and one sign of all. ``obstacles`` are reasons from outside the numbers.

    Each part alone would name too many. The test over tasks takes the policies as given, so seeds that differ
    are a difference to it; the interval is too narrow for three seeds and is not corrected for many groups;
    the test over seeds supposes that means are about normal. Of comparisons of four equal groups of three
    seeds that differ much, about one in three would have a winner without the test over seeds, and one in
    thirty has with it; one in eight where seeds either succeed or fail, which no test of three can tell from
    a difference (``tests/evals/test_significance.py``).
    """
    reasons = list(obstacles)
    for sample in (first, second):
        if sample.num_runs < MIN_SEEDS:
            seeds = "1 seed" if sample.num_runs == 1 else f"{sample.num_runs} seeds"
            reasons.append(f"{sample.name} has {seeds}, at least {MIN_SEEDS} are needed")
    if test is None or p_corrected is None:
        reasons.append("no paired test: the evaluations have no scores of single tasks")
    elif p_corrected >= ALPHA:
        reasons.append(f"over tasks, p = {p_corrected:.3g} is not below {ALPHA:g}")
    elif test.mean_difference * difference.value <= 0:
        reasons.append("the mean and the interquartile mean point to different sides")
    if p_seeds is not None and p_seeds >= ALPHA and min(first.num_runs, second.num_runs) >= MIN_SEEDS:
        reasons.append(f"over seeds, p = {p_seeds:.3g} is not below {ALPHA:g}")
    if difference.has_interval and difference.low <= 0 <= difference.high:
        reasons.append("the interval of the difference includes 0")
    if reasons:
        return Verdict(winner=None, reasons=tuple(reasons))
    return Verdict(winner=first.name if difference.value > 0 else second.name, reasons=())
