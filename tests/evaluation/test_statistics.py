"""Statistics of comparisons: textbook values, independent references, symmetries, and coverage counted over
simulations.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.evaluation.statistics import (
    COVERAGE,
    Estimate,
    Sample,
    Scores,
    bin_means,
    gain_of_best,
    improvement_estimate,
    improvement_probability,
    interquartile_mean,
    iqm_band,
    iqm_difference,
    iqm_estimate,
)
from outrider.seeding import stream

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@contextmanager
def num_draws(num: int) -> Iterator[None]:
    """Fewer or more draws of a bootstrap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.evaluation.statistics.NUM_DRAWS", num)
        yield


def sample(name: str, *rows: list[float]) -> Sample:
    return Sample(name=name, scores=np.asarray(rows, dtype=np.float64))


def by_run(name: str, *means: float) -> Sample:
    return sample(name, *([mean] for mean in means))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([5, 8, 4, 38, 8, 6, 9, 7, 7, 3, 1, 6], 6.5),  # the middle six of twelve; the mean is 8.5
        ([1, 3, 5, 7, 9, 11, 13, 15, 17], 9.0),
        ([0, 1, 2, 100], 1.5),
        ([0, 0, 0, 0, 0, 0, 1, 1], 0.0),
        # a quarter of the weight is three quarters of a value
        ([0, 3, 100], (0.25 * 0 + 3 + 0.25 * 100) / 1.5),
        ([1, 2, 3, 4, 10], (0.75 * 2 + 3 + 0.75 * 4) / 2.5),
        ([2, 4], 3.0),
        ([7], 7.0),
    ],
)
def test_interquartile_means_of_small_lists(numbers: list[float], expected: float) -> None:
    assert float(interquartile_mean(np.asarray(numbers, dtype=np.float64))) == pytest.approx(
        expected, rel=1e-12
    )


@given(values)
def test_interquartile_mean_is_the_trimmed_mean_of_the_list_four_times_over(numbers: list[float]) -> None:
    """Four copies of each value have a length that 4 divides, and the same quantile function."""
    repeated = np.sort(np.repeat(np.asarray(numbers), 4))
    reference = math.fsum(repeated[len(numbers) : -len(numbers)]) / (2 * len(numbers))
    assert float(interquartile_mean(np.asarray(numbers))) == pytest.approx(reference, rel=1e-9, abs=1e-6)


@given(values, st.randoms(use_true_random=False))
def test_interquartile_mean_lies_between_the_quartiles_and_ignores_the_order(
    numbers: list[float], random: object
) -> None:
    found = float(interquartile_mean(np.asarray(numbers)))
    low, high = np.quantile(numbers, [0.25, 0.75], method="inverted_cdf")
    assert low - 1e-6 <= found <= high + 1e-6
    shuffled = list(numbers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert float(interquartile_mean(np.asarray(shuffled))) == found


def test_interquartile_mean_of_nothing_is_refused_and_nan_stays_nan() -> None:
    with pytest.raises(ValueError, match="no values"):
        interquartile_mean(np.empty((3, 0)))
    found = interquartile_mean(np.asarray([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, math.nan]]))
    assert found[0] == 2.5
    assert math.isnan(found[1])


@given(values, values)
def test_probability_of_improvement_counts_pairs_and_is_antisymmetric(
    first: list[float], second: list[float]
) -> None:
    a, b = np.asarray(first), np.asarray(second)
    pairs = [(x > y) + 0.5 * (x == y) for x, y in itertools.product(np.round(first, 3), np.round(second, 3))]
    found = float(improvement_probability(np.round(a, 3), np.round(b, 3)))
    assert found == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert float(improvement_probability(b, a)) == pytest.approx(
        1.0 - float(improvement_probability(a, b)), abs=1e-12
    )
    assert float(improvement_probability(a, a)) == 0.5


@given(values, values, st.data())
def test_a_better_run_lowers_neither_the_mean_nor_the_chance(
    first: list[float], second: list[float], data: st.DataObject
) -> None:
    better = list(first)
    better[data.draw(st.integers(0, len(first) - 1))] += data.draw(st.floats(0.0, 1e6))
    a, b, raised = (np.asarray(numbers) for numbers in (first, second, better))
    assert float(interquartile_mean(raised)) >= float(interquartile_mean(a)) - 1e-6
    assert float(improvement_probability(raised, b)) >= float(improvement_probability(a, b)) - 1e-12


@given(st.integers(0, 1000), st.integers(2, 5), st.integers(1, 6))
def test_the_order_of_tasks_changes_no_value_and_that_of_runs_no_estimate(
    seed: int, num_runs: int, num_tasks: int
) -> None:
    """Values exactly; an interval only by its draws, which go by place."""
    draw = np.random.default_rng(seed)
    scores = draw.integers(0, 5, (num_runs, num_tasks)) / 4
    other = Sample(name="b", scores=draw.integers(0, 5, (3, num_tasks)) / 4)
    mixed = scores[draw.permutation(num_runs)][:, draw.permutation(num_tasks)]
    with num_draws(50):
        found = [
            (iqm_estimate(one, seed=0).value, improvement_estimate(one, other, seed=0).value)
            for one in (Sample(name="a", scores=scores), Sample(name="a", scores=mixed))
        ]
    assert found[0] == pytest.approx(found[1], abs=1e-12)


def test_estimates_of_improvement() -> None:
    low, high = by_run("low", 0.1, 0.2, 0.3), by_run("high", 0.4, 0.5, 0.6)
    assert improvement_estimate(high, low, seed=0) == Estimate(value=1.0, low=1.0, high=1.0)
    # a tie but for rounding
    assert float(improvement_probability(np.asarray([0.1 + 0.2]), np.asarray([0.3]))) == 0.5
    mixed = improvement_estimate(by_run("a", 0.1, 0.5, 0.9), by_run("b", 0.2, 0.4, 0.6), seed=0)
    assert mixed.value == pytest.approx(5 / 9)
    assert mixed.low < mixed.value < mixed.high


@given(st.integers(0, 1000), st.integers(2, 6), st.integers(2, 6), st.integers(1, 8))
def test_differences_and_their_intervals_are_antisymmetric(
    seed: int, num_a: int, num_b: int, num_tasks: int
) -> None:
    draw = np.random.default_rng(seed)
    a = Sample(name="a", scores=draw.random((num_a, num_tasks)))
    b = Sample(name="b", scores=draw.random((num_b, num_tasks)))
    with num_draws(200):
        one, other = iqm_difference(a, b, seed=3), iqm_difference(b, a, seed=3)
        assert one == iqm_difference(a, b, seed=3)
        chance, inverse = (improvement_estimate(*pair, seed=3) for pair in ((a, b), (b, a)))
    assert (one.value, one.low, one.high) == pytest.approx((-other.value, -other.high, -other.low), abs=1e-12)
    assert (chance.low, chance.high) == pytest.approx((1 - inverse.high, 1 - inverse.low), abs=1e-12)


def test_both_sides_see_the_same_drawn_tasks() -> None:
    easy = stream(0, "tasks").random(30)
    a, b = sample("a", list(easy + 0.1), list(easy + 0.1)), sample("b", list(easy), list(easy))
    difference = iqm_difference(a, b, seed=0)
    assert (difference.low, difference.high) == pytest.approx((0.1, 0.1))
    alone = iqm_estimate(b, seed=0)
    assert alone.high - alone.low > 0.1
    assert iqm_estimate(b, seed=0, within=(0.0, alone.value)).high == alone.value


def test_one_run_has_a_value_and_no_interval() -> None:
    alone, three = by_run("alone", 0.5), by_run("three", 0.2, 0.3, 0.4)
    for estimate, value in (
        (iqm_estimate(alone, seed=0), 0.5),
        (iqm_difference(alone, three, seed=0), 0.2),
        (improvement_estimate(three, alone, seed=0), 0.0),
    ):
        assert estimate.value == pytest.approx(value)
        assert not estimate.has_interval
    band = iqm_band("alone", np.asarray([[0.1, 0.2]]), seed=0)
    assert band.value.tolist() == [0.1, 0.2]
    assert np.isnan(band.low).all()
    assert iqm_estimate(three, seed=0).has_interval


def test_different_tasks_are_refused() -> None:
    a, b = sample("a", [1.0, 0.0]), sample("b", [1.0, 0.0, 1.0])
    for function in (iqm_difference, improvement_estimate):
        with pytest.raises(ValueError, match="same tasks"):
            function(a, b, seed=0)


def test_a_band_is_the_estimate_at_each_point_and_nan_stays_at_its_point() -> None:
    draw = np.random.default_rng(0)
    curves = draw.random((5, 3))
    band = iqm_band("a", curves, seed=1)
    for point in range(3):
        alone = iqm_estimate(by_run("a", *curves[:, point]), seed=1)
        assert (band.value[point], band.low[point], band.high[point]) == pytest.approx(
            (alone.value, alone.low, alone.high)
        )
    curves[2, 1] = math.nan
    assert np.isnan(iqm_band("a", curves, seed=1).value).tolist() == [False, True, False]


def bootstrap_reference(scores: Scores, *, num_draws: int, rng: np.random.Generator) -> tuple[float, float]:
    """The interval written as loops: tasks drawn, runs spread, runs drawn, interquartile mean by
    repetition.
    """
    num_runs, num_tasks = scores.shape
    found = []
    for _ in range(num_draws):
        means = scores[:, rng.integers(num_tasks, size=num_tasks)].mean(axis=1)
        spread = means.mean() + (means - means.mean()) * (num_runs / (num_runs - 1)) ** 0.5
        repeated = np.sort(np.repeat(spread[rng.integers(num_runs, size=num_runs)], 4))
        found.append(repeated[num_runs:-num_runs].mean())
    return float(np.percentile(found, 2.5)), float(np.percentile(found, 97.5))


def test_the_interval_agrees_with_a_bootstrap_written_as_loops() -> None:
    rng = np.random.default_rng(5)
    scores = (rng.random((6, 40)) < rng.random((6, 1))).astype(np.float64)
    with num_draws(20_000):
        estimate = iqm_estimate(Sample(name="a", scores=scores), seed=0)
    low, high = bootstrap_reference(scores, num_draws=6_000, rng=rng)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.02)
    assert high - low > 0.2  # so that 0.02 is little


@pytest.mark.parametrize(
    "noise",
    [lambda rng, shape: rng.normal(size=shape), lambda rng, shape: rng.uniform(-1, 1, size=shape)],
    ids=["normal", "flat"],
)
@pytest.mark.parametrize(
    ("num_runs", "least"),
    [(2, 0.55), (3, 0.77), (4, 0.87), (5, 0.90), (10, 0.92), pytest.param(30, 0.92, marks=pytest.mark.slow)],
)
def test_coverage_of_the_interval(
    noise: Callable[[np.random.Generator, tuple[int, int]], Scores], num_runs: int, least: float
) -> None:
    """The true interquartile mean of a symmetric distribution is its centre. Every column is one simulated
    experiment.
    """
    curves = noise(np.random.default_rng(num_runs), (num_runs, 600))
    with num_draws(600):
        band = iqm_band("simulated", curves, seed=0)
    covered = float(np.mean((band.low <= 0) & (band.high >= 0)))
    assert least <= covered <= 0.98
    assert 100 * covered == pytest.approx(COVERAGE.get(num_runs, 95), abs=5)


@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(-3, 3)), min_size=1, max_size=12), st.integers(1, 6))
def test_bin_means_are_integrals_of_the_steps(steps: list[tuple[float, float]], num_bins: int) -> None:
    widths, heights = (np.asarray(part) for part in zip(*steps, strict=True))
    x = np.cumsum(widths)
    edges = np.linspace(0.0, x[-1], num_bins + 1)
    begins = np.concatenate([[0.0], x[:-1]])
    for index, found in enumerate(bin_means(x, heights, edges)):
        shared = np.clip(np.minimum(x, edges[index + 1]) - np.maximum(begins, edges[index]), 0, None)
        assert found == pytest.approx(float(shared @ heights / shared.sum()), abs=1e-6)


def test_unknown_and_free_steps_in_bins() -> None:
    x, heights = np.asarray([1.0, 2.0, 2.0, 4.0]), np.asarray([0.2, math.nan, 9.0, 0.6])
    found = bin_means(x, heights, np.asarray([0.0, 1.0, 2.0, 3.0, 4.0]))
    # the third step cost nothing and weighs nothing
    assert found[[0, 2, 3]].tolist() == pytest.approx([0.2, 0.6, 0.6])
    assert math.isnan(found[1])
    assert bin_means(x, heights, np.asarray([0.0, 2.0]))[0] == pytest.approx(0.2)


@pytest.mark.parametrize(("num_episodes", "num_evaluations"), [(1, 1), (1, 4), (3, 2), (4, 3)])
def test_the_gain_of_the_best_is_that_of_all_outcomes(num_episodes: int, num_evaluations: int) -> None:
    share = Fraction(2, 5)
    expected = Fraction(0)
    for outcome in itertools.product((0, 1), repeat=num_episodes * num_evaluations):
        solved = [sum(outcome[first::num_evaluations]) for first in range(num_evaluations)]
        weight = share ** sum(outcome) * (1 - share) ** (len(outcome) - sum(outcome))
        expected += weight * Fraction(max(solved), num_episodes)
    gain = gain_of_best(float(share), num_episodes=num_episodes, num_evaluations=num_evaluations)
    assert gain == pytest.approx(float(expected - share), abs=1e-12)


def test_the_gain_of_the_best_of_many_episodes_is_that_of_normal_scores() -> None:
    normal, xs = NormalDist(), np.linspace(-10.0, 10.0, 801).tolist()
    density = [x * 31 * normal.pdf(x) * normal.cdf(x) ** 30 for x in xs]
    expected = math.fsum(density) * 20 / 800 * math.sqrt(0.8 * 0.2 / 50_000)
    gain = gain_of_best(0.8, num_episodes=50_000, num_evaluations=31)
    assert gain == pytest.approx(expected, rel=0.005)
    # 31 validations of 128 episodes, as published recipes have them
    assert gain_of_best(0.8, num_episodes=128, num_evaluations=31) == pytest.approx(0.0696, abs=1e-4)


def test_the_best_of_equal_scores_gains_nothing() -> None:
    assert [gain_of_best(score, num_episodes=9, num_evaluations=5) for score in (0.0, 1.0)] == [0.0, 0.0]
    assert gain_of_best(0.5, num_episodes=9, num_evaluations=1) == 0.0
