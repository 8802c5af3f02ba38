"""Statistics of comparing runs: pure functions over float64 arrays, random draws from named streams only.

Interquartile mean, bootstrap over runs and probability of improvement follow Agarwal et al. 2021 (arXiv
2108.13264), with these differences:

- In the paper, every task has its own policy, so runs are resampled independently for each task. Here one
  policy answers all tasks, and resampling per task would average out the variance between seeds. Therefore a
  run is drawn with all its tasks, and tasks are drawn once for all groups.
- The interquartile mean is over runs. Over single tasks with scores 0 or 1 it would saturate.
- Deviations of runs from their mean are scaled by sqrt(n / (n - 1)) before resampling, because a bootstrap of
  n values is too narrow by that factor (Hesterberg 2015, "narrowness bias"), which matters at three seeds.

A bootstrap of few values is nevertheless too narrow; ``COVERAGE`` has the actual coverage. The interval of
the probability of improvement is that of the plain bootstrap. If all runs of one side are higher, it consists
of one value.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.printing import plural
from outrider.seeding import stream

Scores: TypeAlias = npt.NDArray[np.float64]

NUM_DRAWS: Final = 4000
COVERAGE: Final = {2: 60, 3: 80, 4: 90}
"""Actual coverage, in percent, of 95 % intervals of the interquartile mean by number of seeds, for normal and
uniform noise.
"""
UNBOUNDED: Final = (-math.inf, math.inf)
_TAILS: Final = (2.5, 97.5)  # percent: a 95 % interval
DECIMALS: Final = 12  # rounding, so that sums of the same scores in another order are ties


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The scores of one group: shape (runs, tasks), or (runs, 1) if only the mean over tasks is known.

    ``name`` is the key of the group's random stream, so its draws do not depend on the order of groups.
    """

    name: str
    scores: Scores

    @property
    def num_runs(self) -> int:
        """Runs, one per seed."""
        return int(self.scores.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval; ``low`` and ``high`` are NaN for fewer than two runs."""

    value: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        """Whether there were enough runs for an interval."""
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

    Exactly a quarter of the weight is removed at each end, including fractions of a value, so that three
    values are trimmed, too. If the number of values is divisible by 4, this is the 25 % trimmed mean of
    Agarwal et al. 2021. NaN values give NaN. Raises ``ValueError`` without values.
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


def iqm_estimate(sample: Sample, *, seed: int, within: tuple[float, float] = UNBOUNDED) -> Estimate:
    """Interquartile mean over runs of their mean scores, with its interval over runs and tasks.

    ``within`` is the range of possible values. Scaled deviations may exceed it, so the interval is clipped.
    """
    return _estimate(interquartile_mean, sample, seed=seed, within=within)


def iqm_difference(
    first: Sample, second: Sample, *, seed: int, within: tuple[float, float] = UNBOUNDED
) -> Estimate:
    """Interquartile mean of ``first`` minus that of ``second``. Both have the same tasks, and every draw
    resamples them identically for both.

    Raises ``ValueError`` if the numbers of tasks differ.
    """

    def difference(first: Scores, second: Scores) -> Scores:
        return interquartile_mean(first) - interquartile_mean(second)

    return _estimate(difference, first, second, seed=seed, within=within)


def improvement_estimate(first: Sample, second: Sample, *, seed: int) -> Estimate:
    """:func:`improvement_probability` of the runs' mean scores, with its interval over runs and tasks.

    Raises ``ValueError`` if the numbers of tasks differ.
    """
    return _estimate(improvement_probability, first, second, seed=seed, within=(0.0, 1.0), widen=False)


def iqm_band(name: str, curves: Scores, *, seed: int, within: tuple[float, float] = UNBOUNDED) -> Band:
    """Interquartile mean over runs of ``curves``, shape (runs, points), at each point, for fixed tasks.

    Runs are resampled with their whole curves. A NaN at a point makes the result NaN there; fewer than two
    runs have no interval.
    """
    num_runs, num_points = curves.shape
    value = interquartile_mean(curves.T)
    if num_runs < 2:
        missing = np.full(num_points, math.nan)
        return Band(value=value, low=missing, high=missing)
    rows = _bootstrap_rows(name, num_runs, seed=seed)
    low, high = np.clip(
        np.percentile(interquartile_mean(_widened(curves.T)[:, rows]), _TAILS, axis=1), *within
    )
    return Band(value=value, low=low, high=high)


def gain_of_best(score: float, *, num_episodes: int, num_evaluations: int) -> float:
    """How much the best of several evaluations of a policy exceeds its true score by chance, on average.

    The expected maximum of ``num_evaluations`` independent binomial shares of ``num_episodes`` episodes minus
    ``score``, the success probability of each episode. It is an upper bound if tasks differ in difficulty,
    because scores then vary less, or if the policy improved between evaluations.
    """
    if num_evaluations < 2 or not 0.0 < score < 1.0:
        return 0.0
    counts = np.arange(num_episodes + 1)
    log_choose = [math.lgamma(num_episodes + 1) - math.lgamma(k + 1) - math.lgamma(num_episodes - k + 1)
                  for k in counts.tolist()]  # fmt: skip
    log_p = np.asarray(log_choose) + counts * math.log(score) + (num_episodes - counts) * math.log1p(-score)
    below = np.cumsum(np.exp(log_p))[:-1].clip(0.0, 1.0)  # P(X <= k) for k < num_episodes
    return float(np.sum(1.0 - below**num_evaluations)) / num_episodes - score


def bin_means(x: Scores, values: Scores, edges: Scores) -> Scores:
    """Mean of ``values`` per unit of cost between adjacent ``edges``, shape (edges - 1,); NaN in bins without
    known values.

    ``x`` (n,) are ascending totals; ``values[i]`` applies from ``x[i - 1]`` (initially 0) to ``x[i]``. A run
    therefore has a value in every bin within its range, regardless of its number of steps, and no value is
    extrapolated. Edges must be between 0 and x[-1].
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


def _bootstrap_means(sample: Sample, *, seed: int, widen: bool) -> Scores:
    """Mean scores of resampled runs on resampled tasks, shape (draws, runs). For one ``seed``, all samples
    use the same resampled tasks.
    """
    num_tasks = sample.scores.shape[1]
    counts = stream(seed, "compare", "tasks").multinomial(
        num_tasks, np.full(num_tasks, 1 / num_tasks), size=NUM_DRAWS
    )
    means = np.asarray(counts @ sample.scores.T / num_tasks, dtype=np.float64)
    rows = _bootstrap_rows(sample.name, sample.num_runs, seed=seed)
    return np.take_along_axis(_widened(means) if widen else means, rows, axis=1)


def _bootstrap_rows(name: str, num_runs: int, *, seed: int) -> npt.NDArray[np.int64]:
    return stream(seed, "compare", "runs", name).integers(num_runs, size=(NUM_DRAWS, num_runs))


def _widened(scores: Scores) -> Scores:
    """Scale the deviations of runs (last axis, at least two) from their mean, so that resampling has the
    variance of the mean.
    """
    num = scores.shape[-1]
    centre = scores.mean(axis=-1, keepdims=True)
    return np.asarray(centre + math.sqrt(num / (num - 1)) * (scores - centre), dtype=np.float64)


def _estimate(
    statistic: Callable[..., Scores],
    *samples: Sample,
    seed: int,
    within: tuple[float, float],
    widen: bool = True,
) -> Estimate:
    """``statistic`` of the runs' mean scores of one or two samples, with its interval over runs and tasks."""
    if len({sample.scores.shape[1] for sample in samples}) > 1:
        raise ValueError(f"{samples[0].name} and {samples[1].name} were not scored on the same tasks")
    value = float(statistic(*(sample.scores.mean(axis=1) for sample in samples)))
    if min(sample.num_runs for sample in samples) < 2:
        return Estimate(value=value, low=math.nan, high=math.nan)
    draws = [_bootstrap_means(sample, seed=seed, widen=widen) for sample in samples]
    low, high = np.clip(np.percentile(statistic(*draws), _TAILS), *within)
    return Estimate(value=value, low=float(low), high=float(high))


# Significance of a difference between two groups of runs: tests, correction for multiple comparisons, and the
# verdict. Pure functions.


ALPHA: Final = 0.05
MIN_SEEDS: Final = 3
_MAX_EXACT: Final = 14  # number of differences up to which all 2^n signs are enumerated
_NUM_FLIPS, _FLIPS_PER_BATCH = 10_000, 1_000
_NUM_NODES: Final = 64  # Gauss-Legendre nodes for the tail of Student's distribution


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
    """The name of the better group, or None with the reasons why the data support no conclusion. The first
    of them, ``missing``, are data that a test would need.
    """

    winner: str | None
    reasons: tuple[str, ...]
    missing: tuple[str, ...] = ()


def paired_test(first: Scores, second: Scores, *, seed: int) -> PairedTest:
    """Test over tasks of two score vectors of shape (tasks,), task by task: McNemar's where all scores are 0
    or 1.

    The test is conditional on the trained policies; only the interval over runs accounts for other seeds.
    Raises ``ValueError`` if the shapes differ or there is no task.
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
    """Exact two-sided p of McNemar's test.

    Args:
        num_first: Number of tasks that only the first group solved.
        num_second: Number of tasks that only the second group solved.
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

    Exact for up to 14 differing tasks. For more, estimated from 10,000 draws as (1 + hits) / (1 + draws),
    which is never 0 (Phipson and Smyth 2010).
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

    This is the only test of whether the difference would persist with other seeds; Colas et al. 2018 (arXiv
    1806.08295) recommend it for learning algorithms. If the variance is zero on both sides, p is that of a
    permutation test instead: 2 / C(n + k, n), twice the share of assignments of runs to sides that are as
    unequal in the same direction. Raises ValueError for fewer than two runs per side.
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
    """Two-sided tail probability of ``t`` under Student's distribution with ``freedom`` degrees of freedom
    (1 to 10,000: the quadrature is not exact beyond).

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
    """Holm's (1979) step-down correction, which keeps the family-wise error rate below alpha. Returns
    corrected p-values in the order of ``p_values``.
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
    """Name a winner only if all criteria are met; otherwise return every reason against it.

    The criteria: at least three seeds per side; a corrected p below 0.05 over tasks and one over seeds
    (``p_seeds``; None if the paired test itself is over seeds); an interval of the difference over seeds that
    excludes 0; and the same sign in all of them. ``obstacles`` are reasons unrelated to the scores.

    No criterion suffices alone. The test over tasks is conditional on the policies, so it also detects
    differences that are due to seeds. The interval is too narrow for three seeds and is not corrected for
    multiple groups. The test over seeds assumes approximately normal means. If four equal groups of three
    seeds with a large variance are compared, about one comparison in three would have a winner without the
    test over seeds, and one in thirty with it. If seeds either succeed or fail, it is one in eight, because
    no test of three seeds can distinguish this from a difference (``tests/evaluation/test_significance.py``).
    """
    missing, reasons = list(obstacles), list[str]()
    for sample in (first, second):
        if sample.num_runs < MIN_SEEDS:
            seeds = plural(sample.num_runs, "seed")
            missing.append(f"{sample.name} has {seeds}, at least {MIN_SEEDS} are needed")
    if test is None or p_corrected is None:
        missing.append("no paired test: the evaluations have no scores of single tasks")
    elif p_corrected >= ALPHA:
        reasons.append(f"over tasks, p = {p_corrected:.3g} is not below {ALPHA:g}")
    elif test.mean_difference * difference.value <= 0:
        reasons.append("the mean and the interquartile mean point to different sides")
    if p_seeds is not None and p_seeds >= ALPHA and min(first.num_runs, second.num_runs) >= MIN_SEEDS:
        reasons.append(f"over seeds, p = {p_seeds:.3g} is not below {ALPHA:g}")
    if difference.has_interval and difference.low <= 0 <= difference.high:
        reasons.append("the interval of the difference includes 0")
    if missing or reasons:
        return Verdict(winner=None, reasons=(*missing, *reasons), missing=tuple(missing))
    return Verdict(winner=first.name if difference.value > 0 else second.name, reasons=())
