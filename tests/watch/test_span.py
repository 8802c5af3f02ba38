"""The time left does not lie: an estimate is no further off than the steps are from each other, or is not
shown."""

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.viewer.progress import Span, duration, predict_total

LATELY, FEWEST = 10, 3


def estimates(durations: list[float]) -> Iterator[tuple[Span, float]]:
    """After every step: what is told, and what it took."""
    for done in range(FEWEST, len(durations)):
        taken = durations[max(0, done - LATELY) : done]
        yield predict_total(taken, len(durations) - done), sum(durations[done:])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=10), st.integers(1, 1000))
def test_what_is_shown_is_narrow_and_more_than_nothing(taken: list[float], num: int) -> None:
    span = predict_total(taken, num)
    mean = num * sum(taken) / len(taken)
    assert 0.0 <= span.low <= mean * (1 + 1e-9) and span.high >= mean * (1 - 1e-9)
    if span.text is not None:
        assert span.high <= 2 * max(span.low, 1.0) and span.text != "0:00" and len(span.text) <= 11


@given(st.floats(0.1, 1e4), st.lists(st.floats(1.0, 3.0), min_size=4, max_size=60))
def test_the_error_is_at_most_the_factor_between_two_steps(scale: float, factors: list[float]) -> None:
    durations = [scale * one for one in factors]
    worst = max(factors) / min(factors) * (1 + 1e-9)
    for span, actual in estimates(durations):
        assert span.low <= actual * worst and span.high >= actual / worst


def noisy(deviation: float) -> Callable[[random.Random, int], float]:
    return lambda draw, _: 20 * draw.lognormvariate(0, deviation)


def growing(rate: float) -> Callable[[random.Random, int], float]:
    return lambda draw, step: 20 * (1 + rate * step) * draw.lognormvariate(0, 0.1)


@pytest.mark.parametrize(
    ("simulated", "shown_at_least", "near_at_least"),
    [
        (noisy(0.05), 0.9, 0.99),
        (noisy(0.2), 0.7, 0.98),
        (noisy(0.3), 0.4, 0.96),
        (growing(0.01), 0.8, 0.97),
        (growing(0.05), 0.5, 0.85),
    ],
    ids=["even", "noise 20 %", "noise 30 %", "growth 1 %", "growth 5 %"],
)
def test_of_simulated_runs_the_shown_bounds_hold_within_a_quarter(
    simulated: Callable[[random.Random, int], float], shown_at_least: float, near_at_least: float
) -> None:
    draw = random.Random(0)
    num = shown = near = 0
    for _ in range(40):
        for span, actual in estimates([simulated(draw, step) for step in range(30)]):
            num += 1
            if span.text is not None:
                shown += 1
                near += span.low / 1.25 <= actual <= 1.25 * span.high
    assert shown >= shown_at_least * num and near >= near_at_least * shown


def test_steps_that_vary_without_a_pattern_have_no_estimate() -> None:
    draw = random.Random(0)
    told = [span.text for span, _ in estimates([draw.choice((1.0, 60.0)) for _ in range(8)])]
    assert set(told) == {None}


def test_one_number_where_it_says_as_much() -> None:
    assert Span(100.0, 110.0).text == "1:45"
    assert Span(100.0, 180.0).text == "1:40-3:00"
    assert Span(100.0, 201.0).text is None
    assert [duration(one) for one in (0.4, 61.0, 3599.4, 3600.0, 6010.0)] == [
        "0:00",
        "1:01",
        "59:59",
        "1h00",
        "1h40",
    ]
