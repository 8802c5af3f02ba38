"""Statistics of comparing runs: pure functions over float64 arrays, random draws from named streams only.

Interquartile mean, bootstrap over runs and probability of improvement follow Agarwal et al. 2021 (arXiv
2108.13264), with these departures. There, every task has a policy of its own, so runs are drawn anew for each
task; here one policy answers all tasks of a panel, and that would average the spread between seeds away. So a
run is drawn whole, tasks are drawn once for all groups, and the interquartile mean is over runs: over single
tasks of score 0 or 1 it would saturate. And runs are moved away from their mean by sqrt(n / (n - 1)) before
they are drawn, because a bootstrap of n values is too narrow by just that factor (Hesterberg 2015,
"narrowness bias"), which matters at three seeds.

Even so a bootstrap of few values is too narrow, since it has seen no more than they are: ``COVERAGE``. The
interval of the probability of improvement is of the plain bootstrap; where all runs of one side are higher it
is that one value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.seeding import stream

Scores: TypeAlias = npt.NDArray[np.float64]

NUM_DRAWS: Final = 4000
COVERAGE: Final = {2: 60, 3: 80, 4: 90}
"""Percent of 95 % intervals over so many seeds that hold the true interquartile mean, for normal and for flat
noise.
"""
UNBOUNDED: Final = (-math.inf, math.inf)
_TAILS: Final = (2.5, 97.5)  # percent: a 95 % interval
DECIMALS: Final = 12  # sums of the same scores in another order must count as ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The scores of one group: shape (runs, tasks), or (runs, 1) where only the mean over tasks is known.

    ``name`` keys the group's random stream, so its draws do not depend on the order of groups.
    """

    name: str
    scores: Scores

    @property
    def num_runs(self) -> int:
        """Runs, one per seed."""
        return int(self.scores.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval; ``low`` and ``high`` are NaN where fewer than two runs can give
    none.
    """

    value: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        """Whether there were runs enough for an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The interquartile mean over runs at each point of a curve, with pointwise 95 % intervals; each of shape
    (points,).
    """

    value: Scores
    low: Scores
    high: Scores


def interquartile_mean(values: Scores) -> Scores:
    """Mean of the middle half along the last axis: the mean of the empirical quantile function from 1/4 to
    3/4.

    Each end gives up exactly a quarter of the weight, parts of a value too, so three values are trimmed as
    well. Where 4 divides their number this is the 25 % trimmed mean of Agarwal et al. 2021. NaN in, NaN out.
    Raises ``ValueError`` without values.
    """
    num = values.shape[-1]
    if not num:
        raise ValueError("the interquartile mean of no values is not defined")
    weights = 2.0 * np.diff(np.clip(np.arange(num + 1) / num, 0.25, 0.75))
    return np.asarray(np.sort(values, axis=-1) @ weights, dtype=np.float64)


def improvement_probability(first: Scores, second: Scores) -> Scores:
    """Chance that a run of ``first`` (..., n) scores higher than one of ``second`` (..., k); a tie counts one
    half.

    Agarwal et al. 2021: the Mann-Whitney statistic over n k.
    """
    signs = np.sign(np.round(first[..., :, None] - second[..., None, :], DECIMALS))
    return np.asarray(0.5 + 0.5 * signs.mean(axis=(-2, -1)), dtype=np.float64)


def iqm_estimate(
    sample: Sample, *, seed: int, within: tuple[float, float] = UNBOUNDED, num_draws: int = NUM_DRAWS
) -> Estimate:
    """Interquartile mean over runs of their mean scores, with its interval over runs and tasks.

    ``within`` is what the value can be at all: spread apart, runs may step beyond, and the interval is cut
    there.
    """
    value = float(interquartile_mean(sample.scores.mean(axis=1)))
    if sample.num_runs < 2:
        return Estimate(value=value, low=math.nan, high=math.nan)
    return _estimate(
        value,
        interquartile_mean(_bootstrap_means(sample, seed=seed, num_draws=num_draws, widen=True)),
        within,
    )


def iqm_difference(
    first: Sample,
    second: Sample,
    *,
    seed: int,
    within: tuple[float, float] = UNBOUNDED,
    num_draws: int = NUM_DRAWS,
) -> Estimate:
    """Interquartile mean of ``first`` minus that of ``second``; both see the same drawn tasks, which are
    those of one panel.

    Raises ``ValueError`` when the two do not have equally many tasks.
    """
    _check_tasks(first, second)
    value = float(
        interquartile_mean(first.scores.mean(axis=1)) - interquartile_mean(second.scores.mean(axis=1))
    )
    if min(first.num_runs, second.num_runs) < 2:
        return Estimate(value=value, low=math.nan, high=math.nan)
    means = [
        interquartile_mean(_bootstrap_means(sample, seed=seed, num_draws=num_draws, widen=True))
        for sample in (first, second)
    ]
    return _estimate(value, means[0] - means[1], within)


def improvement_estimate(first: Sample, second: Sample, *, seed: int, num_draws: int = NUM_DRAWS) -> Estimate:
    """:func:`improvement_probability` of the runs' mean scores, with its interval over runs and tasks.

    Raises ``ValueError`` when the two do not have equally many tasks.
    """
    _check_tasks(first, second)
    value = float(improvement_probability(first.scores.mean(axis=1), second.scores.mean(axis=1)))
    if min(first.num_runs, second.num_runs) < 2:
        return Estimate(value=value, low=math.nan, high=math.nan)
    draws = [
        _bootstrap_means(sample, seed=seed, num_draws=num_draws, widen=False) for sample in (first, second)
    ]
    return _estimate(value, improvement_probability(draws[0], draws[1]), (0.0, 1.0))


def iqm_band(
    name: str,
    curves: Scores,
    *,
    seed: int,
    within: tuple[float, float] = UNBOUNDED,
    num_draws: int = NUM_DRAWS,
) -> Band:
    """Interquartile mean over runs of ``curves``, shape (runs, points), at each point; the tasks are taken as
    given.

    A drawn run is drawn with its whole curve. NaN at a point makes that point NaN; fewer than two runs have
    no interval.
    """
    num_runs, num_points = curves.shape
    value = interquartile_mean(curves.T)
    if num_runs < 2:
        missing = np.full(num_points, math.nan)
        return Band(value=value, low=missing, high=missing)
    rows = _bootstrap_rows(name, num_runs, seed=seed, num_draws=num_draws)
    low, high = np.clip(
        np.percentile(interquartile_mean(_widened(curves.T)[:, rows]), _TAILS, axis=1), *within
    )
    return Band(value=value, low=low, high=high)


def bin_means(x: Scores, values: Scores, edges: Scores) -> Scores:
    """Mean of ``values`` per unit of cost between neighbouring ``edges``, shape (edges - 1,); NaN where
    nothing is known.

    ``x`` (n,) are ascending totals; ``values[i]`` holds from ``x[i - 1]`` (0 at first) to ``x[i]``. So a run
    has a value in every bin within its range, however many steps it took, and none is made up beyond it.
    Edges must lie within 0 and x[-1].
    """
    known = np.isfinite(values)
    widths = np.where(known, np.diff(x, prepend=0.0), 0.0)
    totals = [
        np.concatenate([[0.0], np.cumsum(part)]) for part in (widths * np.where(known, values, 0.0), widths)
    ]
    mass, width = (np.diff(np.interp(edges, np.concatenate([[0.0], x]), total)) for total in totals)
    return np.asarray(
        np.divide(mass, width, out=np.full(len(mass), math.nan), where=width > 0), dtype=np.float64
    )


def _check_tasks(first: Sample, second: Sample) -> None:
    if first.scores.shape[1] != second.scores.shape[1]:
        raise ValueError(f"{first.name} and {second.name} were not scored on the same tasks")


def _bootstrap_means(sample: Sample, *, seed: int, num_draws: int, widen: bool) -> Scores:
    """Mean scores of drawn runs on drawn tasks, shape (draws, runs); every sample of one seed sees the same
    tasks.
    """
    num_tasks = sample.scores.shape[1]
    counts = stream(seed, "compare", "tasks").multinomial(
        num_tasks, np.full(num_tasks, 1 / num_tasks), size=num_draws
    )
    means = np.asarray(counts @ sample.scores.T / num_tasks, dtype=np.float64)
    rows = _bootstrap_rows(sample.name, sample.num_runs, seed=seed, num_draws=num_draws)
    return np.take_along_axis(_widened(means) if widen else means, rows, axis=1)


def _bootstrap_rows(name: str, num_runs: int, *, seed: int, num_draws: int) -> npt.NDArray[np.int64]:
    return stream(seed, "compare", "runs", name).integers(num_runs, size=(num_draws, num_runs))


def _widened(scores: Scores) -> Scores:
    """Runs (last axis, at least two) moved away from their mean, so that drawing them has the variance of the
    mean.
    """
    num = scores.shape[-1]
    centre = scores.mean(axis=-1, keepdims=True)
    return np.asarray(centre + math.sqrt(num / (num - 1)) * (scores - centre), dtype=np.float64)


def _estimate(value: float, draws: Scores, within: tuple[float, float]) -> Estimate:
    low, high = np.clip(np.percentile(draws, _TAILS), *within)
    return Estimate(value=value, low=float(low), high=float(high))


# Whether a difference between two groups of runs is more than chance: tests, their correction, and the
# verdict. Pure functions.


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
