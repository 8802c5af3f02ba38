"""Tests between groups and their verdict: textbook values, exact references, and rates counted over
simulations.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.evaluation.statistics import (
    Estimate,
    PairedTest,
    Sample,
    holm,
    iqm_difference,
    mcnemar_p,
    paired_test,
    seeds_p,
    sign_flip_p,
    student_p,
    verdict,
)
from outrider.seeding import stream
from tests.evaluation.test_statistics import num_draws


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (0, 0, 1.0),
        (0, 5, 0.0625),
        (0, 6, 0.03125),
        (6, 0, 0.03125),
        (1, 9, 22 / 1024),
        (5, 5, 1.0),
        (4, 5, 1.0),
        (10, 20, 0.09873714670538902),
    ],
)
def test_exact_p_of_mcnemar(first: int, second: int, expected: float) -> None:
    assert mcnemar_p(first, second) == pytest.approx(expected, rel=1e-12)


@given(st.integers(0, 20), st.integers(0, 20))
def test_mcnemar_is_the_two_sided_sign_test(first: int, second: int) -> None:
    num, far = first + second, abs(first - second)
    row = [Fraction(1)]
    for _ in range(num):  # Pascal's triangle, halved at each row
        row = [sum(pair) / 2 for pair in zip([Fraction(0), *row], [*row, Fraction(0)], strict=True)]
    reference = sum((p for k, p in enumerate(row) if abs(2 * k - num) >= far), Fraction(0))
    assert mcnemar_p(first, second) == pytest.approx(float(reference), rel=1e-12)


def test_thousands_of_tasks_do_not_overflow() -> None:
    assert 0.0 <= mcnemar_p(0, 5_000) < 1e-300
    assert mcnemar_p(2_500, 2_500) == 1.0


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=14))
def test_sign_flips_of_wins_and_losses_are_mcnemars_test(differences: list[float]) -> None:
    expected = mcnemar_p(differences.count(1.0), differences.count(-1.0))
    assert sign_flip_p(np.asarray(differences), seed=0) == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=8))
def test_exact_sign_flips_try_every_sign(thirds: list[int]) -> None:
    """Scores that are means over three seeds; the reference flips zeros too and counts in whole numbers."""
    flipped = [
        abs(sum(s * d for s, d in zip(signs, thirds, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(thirds))
    ]
    expected = sum(one >= abs(sum(thirds)) for one in flipped) / len(flipped)
    assert sign_flip_p(np.asarray(thirds) / 3, seed=0) == pytest.approx(expected, rel=1e-12)


def test_drawn_sign_flips_are_near_the_exact_ones_and_never_zero() -> None:
    differences = np.asarray([1.0] * 24 + [-1.0] * 10)
    # 0.024, four standard errors
    assert sign_flip_p(differences, seed=0) == pytest.approx(mcnemar_p(24, 10), abs=0.005)
    assert (
        sign_flip_p(differences, seed=0)
        == sign_flip_p(-differences, seed=0)
        == sign_flip_p(differences, seed=0)
    )
    assert sign_flip_p(np.ones(100), seed=0) == 1 / 10_001


def test_the_paired_test_rejects_equal_policies_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    p_values = [
        paired_test(rng.integers(3, size=12) / 2, rng.integers(3, size=12) / 2, seed=0).p for _ in range(500)
    ]
    assert 0.01 <= np.mean(np.asarray(p_values) < 0.05) <= 0.07


def test_different_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="same tasks"):
        paired_test(np.asarray([1.0, 0.0]), np.asarray([1.0, 0.0, 1.0]), seed=0)
    with pytest.raises(ValueError, match="at least one"):
        paired_test(np.empty(0), np.empty(0), seed=0)


def test_the_paired_test_is_chosen_by_the_scores() -> None:
    first, second = np.asarray([1.0, 1, 1, 0, 1, 1, 1]), np.asarray([0.0, 0, 0, 0, 0, 0, 1])
    binary = paired_test(first, second, seed=0)
    assert binary == PairedTest(
        name="McNemar, exact", p=0.0625, num_tasks=7, mean_difference=pytest.approx(5 / 7)
    )
    means = paired_test(first, np.where(second == 0, 0.5, 1.0), seed=0)
    assert means.name == "sign flips"
    assert means.p == pytest.approx(14 / 64)  # six halves, one of them lost: none or one of a sign


@pytest.mark.parametrize(
    ("given_p", "expected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.2], [0.2]),
        ([], []),
        ([0.5, 0.6, 0.7], [1.0, 1.0, 1.0]),
    ],
)
def test_holm_on_known_lists(given_p: list[float], expected: list[float]) -> None:
    assert holm(given_p) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_the_raw_p_and_bonferroni_and_keeps_the_order(p_values: list[float]) -> None:
    corrected = holm(p_values)
    for p, q in zip(p_values, corrected, strict=True):
        assert p <= q <= min(1.0, len(p_values) * p)
    assert all(
        q1 <= q2
        for (p1, q1), (p2, q2) in itertools.product(zip(p_values, corrected, strict=True), repeat=2)
        if p1 < p2
    )


GOOD = PairedTest(name="sign flips", p=0.001, num_tasks=100, mean_difference=0.2)
CLEAR = Estimate(value=0.2, low=0.1, high=0.3)


def judged(
    *,
    seeds: tuple[int, int] = (3, 3),
    difference: Estimate = CLEAR,
    test: PairedTest | None = GOOD,
    p: float | None = 0.003,
    p_seeds: float | None = 0.004,
    obstacles: tuple[str, ...] = (),
) -> tuple[str | None, str]:
    first, second = (
        Sample(name=name, scores=np.zeros((num, 1))) for name, num in zip(("new", "old"), seeds, strict=True)
    )
    found = verdict(
        first, second, difference=difference, test=test, p_corrected=p, p_seeds=p_seeds, obstacles=obstacles
    )
    return found.winner, "; ".join(found.reasons)


def test_a_winner_needs_everything() -> None:
    assert judged() == ("new", "")
    down = Estimate(value=-0.2, low=-0.3, high=-0.1)
    lost = PairedTest(name="sign flips", p=0.001, num_tasks=100, mean_difference=-0.2)
    assert judged(difference=down, test=lost) == ("old", "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seeds": (1, 3)}, "new has 1 seed, at least 3"),
        ({"seeds": (3, 2)}, "old has 2 seeds, at least 3"),
        ({"p": 0.05}, "p = 0.05 is not below 0.05"),
        ({"test": None, "p": None}, "no paired test"),
        ({"p_seeds": 0.05}, "over seeds, p = 0.05 is not below 0.05"),
        ({"difference": Estimate(value=0.2, low=-0.01, high=0.3)}, "includes 0"),
        ({"difference": Estimate(value=-0.2, low=-0.3, high=-0.1)}, "different sides"),
        ({"obstacles": ("run x was stopped",)}, "run x was stopped"),
    ],
)
def test_each_missing_condition_refuses_the_winner_and_is_named(
    change: dict[str, object], reason: str
) -> None:
    winner, reasons = judged(**change)  # type: ignore[arg-type]
    assert winner is None
    assert reason in reasons


def simulated(name: str, centre: float, *, seed_spread: float, rng: np.random.Generator) -> Sample:
    """Five seeds on one panel of 80 tasks: each seed has a skill, each task a difficulty, each answer is one
    draw.
    """
    skill = centre + seed_spread * rng.normal(size=(5, 1))
    difficulty = 1.2 * stream(0, "difficulty").normal(size=(1, 80))
    return Sample(
        name=name, scores=(rng.random((5, 80)) < 1 / (1 + np.exp(difficulty - skill))).astype(np.float64)
    )


@pytest.mark.parametrize("seed_spread", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_equal_algorithms_seldom_have_a_winner_and_different_ones_do(seed_spread: float) -> None:
    def winners(gap: float) -> float:
        rng = np.random.default_rng(7)
        count = 0
        for _ in range(40):
            first, second = (
                simulated(n, c, seed_spread=seed_spread, rng=rng) for n, c in (("a", gap), ("b", 0.0))
            )
            test = paired_test(first.scores.mean(axis=0), second.scores.mean(axis=0), seed=0)
            with num_draws(300):
                difference = iqm_difference(first, second, seed=0)
            found = verdict(
                first,
                second,
                difference=difference,
                test=test,
                p_corrected=test.p,
                p_seeds=seeds_p(first, second),
            )
            count += found.winner is not None
        return count / 40

    assert winners(0.0) <= 0.1
    assert winners(2.0) >= 0.8


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [  # tables of Student's distribution
        (0.0, 3, 1.0), (1.0, 1, 0.5), (12.706205, 1, 0.05), (4.302653, 2, 0.05), (2.776445, 4, 0.05),
        (8.610302, 4, 0.001), (2.228139, 10, 0.05), (1.971896, 200, 0.05),
    ],
)  # fmt: skip
def test_tails_of_student(t: float, freedom: float, p: float) -> None:
    assert student_p(t, freedom) == student_p(-t, freedom) == pytest.approx(p, rel=1e-5)


@given(st.floats(0.01, 50), st.sampled_from([2.0, 4.0, 6.0]))
def test_tails_of_student_have_a_closed_form_for_even_degrees(t: float, freedom: float) -> None:
    """1 - sin(angle) times the sum of the even powers of the cosine (Abramowitz and Stegun 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    terms = {2.0: (1.0,), 4.0: (1.0, 1 / 2), 6.0: (1.0, 1 / 2, 3 / 8)}[freedom]
    expected = 1 - math.sin(angle) * sum(part * math.cos(angle) ** (2 * n) for n, part in enumerate(terms))
    assert student_p(t, freedom) == pytest.approx(expected, rel=1e-6, abs=1e-14)


def by_run(name: str, *means: float) -> Sample:
    return Sample(name=name, scores=np.asarray(means, dtype=np.float64)[:, None])


def test_the_test_over_seeds_on_worked_examples() -> None:
    first, second = by_run("a", 1, 2, 3, 4, 5), by_run("b", 2, 4, 6, 8, 10)
    t, freedom = 3 / math.sqrt(2.5), (0.5 + 2) ** 2 / (0.5**2 / 4 + 2**2 / 4)  # freedom 5.88
    assert seeds_p(first, second) == student_p(t, freedom)
    assert 0.1 < seeds_p(first, second) < 0.11  # R: t.test(1:5, 2 * (1:5)) has p = 0.1057
    assert seeds_p(by_run("a", 0.5, 0.5), by_run("b", 0.5, 0.5)) == 1.0
    # no spread: 2 of 20 orders
    assert seeds_p(by_run("a", 0.3, 0.1 + 0.2, 0.3), by_run("b", 1, 1, 1)) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="one run has no spread"):
        seeds_p(by_run("a", 0.5), by_run("b", 0.1, 0.2))


scores = st.lists(st.integers(0, 40), min_size=2, max_size=6)


@given(scores, scores, st.randoms(use_true_random=False))
def test_the_test_over_seeds_knows_neither_sides_nor_order_nor_units(
    one: list[int], other: list[int], random: object
) -> None:
    p = seeds_p(by_run("a", *one), by_run("b", *other))
    assert 0.0 < p <= 1.0
    assert seeds_p(by_run("b", *other), by_run("a", *one)) == pytest.approx(p, rel=1e-9)
    shuffled = list(one)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert seeds_p(by_run("a", *shuffled), by_run("b", *other)) == pytest.approx(p, rel=1e-9)
    moved = [[3 + number / 40 for number in side] for side in (one, other)]
    assert seeds_p(by_run("a", *moved[0]), by_run("b", *moved[1])) == pytest.approx(p, rel=1e-6)


@pytest.mark.parametrize(
    ("draw", "most"), [pytest.param("normal", 0.1, marks=pytest.mark.slow), ("two heaps", 0.2)]
)
def test_equal_groups_of_three_seeds_that_differ_much_seldom_have_a_winner(draw: str, most: float) -> None:
    """Four equal groups, six pairs, tasks beyond doubt: the share of comparisons in which anybody wins.

    Two heaps, seeds that succeed and seeds that fail, are the worst case: three of each happen, and no test
    of three can tell.
    """
    rng = np.random.default_rng(11)
    num_won = num_intervals = 0
    for _ in range(60):
        heaps = 0.9 * (rng.random((4, 3)) < 0.5) + 0.05 * rng.random((4, 3))
        spread = rng.normal(0.5, 0.1, (4, 3)) if draw == "normal" else heaps
        pairs = list(
            itertools.combinations(
                [by_run(name, *means) for name, means in zip("abcd", spread, strict=True)], 2
            )
        )
        found = []
        for (first, second), p in zip(pairs, holm([seeds_p(*pair) for pair in pairs]), strict=True):
            with num_draws(200):
                difference = iqm_difference(first, second, seed=0)
            test = PairedTest(name="sign flips", p=1e-4, num_tasks=200, mean_difference=difference.value)
            found.append([
                verdict(first, second, difference=difference, test=test, p_corrected=1e-4, p_seeds=one).winner
                for one in (p, None)
            ])  # fmt: skip
        num_won += any(with_seeds is not None for with_seeds, _ in found)
        num_intervals += any(without is not None for _, without in found)
    assert num_won / 60 <= most
    assert num_intervals / 60 >= 0.25  # what the interval alone lets through
