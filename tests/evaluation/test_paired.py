"""The paired gain between two evaluations: what it compares, and how often its interval holds the truth."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.rollout.evaluate import difference_interval, gain_over_start, paired_gain


def _line(label: str, step: int, scores: dict[str, float], **other: Any) -> dict[str, Any]:
    return {
        "label": label,
        "step": step,
        "split": "test",
        "panel_hash": "p",
        "temperature": 1.0,
        "task_scores": scores,
    } | other


def test_gain_is_over_the_tasks_that_both_scored() -> None:
    before = _line("after cold start", 0, {"a": 0.0, "b": 1.0, "lost later": 1.0})
    after = _line("after RAPO", 5, {"a": 1.0, "b": 1.0, "lost before": 0.0})
    gain = paired_gain(before, after)
    assert gain is not None and (gain.num_tasks, gain.difference, gain.earlier) == (
        2,
        0.5,
        "after cold start",
    )


@pytest.mark.parametrize(
    "other", [{"panel_hash": "q"}, {"temperature": 0.0}, {"split": "valid"}, {"task_scores": {"z": 1.0}}]
)
def test_different_measurements_are_not_compared(other: dict[str, Any]) -> None:
    assert paired_gain(_line("a", 0, {"a": 0.0}), _line("b", 1, {"a": 1.0}) | other) is None


def test_the_start_is_the_last_evaluation_before_the_first_step() -> None:
    lines = [
        _line("before", 0, {"a": 0.0}),
        _line("cold", 0, {"a": 1.0}),
        _line("step 2", 2, {"a": 0.0}),
        _line("end", 4, {"a": 1.0}),
    ]
    gain = gain_over_start(lines)
    assert gain is not None and (gain.earlier, gain.difference) == ("cold", 0.0)
    assert gain_over_start(lines[:2]) is None  # nothing was trained
    assert gain_over_start(lines[2:]) is None  # no evaluation of the start


def test_interval_by_hand() -> None:
    # 100 tasks, 20 gained and 5 lost: cells 20.5 and 5.5 of 102 (Agresti and Min 2005).
    differences = [1.0] * 20 + [-1.0] * 5 + [0.0] * 75
    centre = 15 / 102
    spread = 1.959963984540054 * np.sqrt(26 - 15**2 / 102) / 102
    assert difference_interval(differences) == pytest.approx((centre - spread, centre + spread), abs=1e-12)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=60))
def test_interval_is_ordered_bounded_and_mirrored(differences: list[float]) -> None:
    low, high = difference_interval(differences)
    assert -1.0 <= low < high <= 1.0
    mirrored = difference_interval([-one for one in differences])
    assert mirrored == pytest.approx((-high, -low))


@pytest.mark.parametrize(("gained", "lost"), [(0.05, 0.05), (0.2, 0.05), (0.02, 0.02), (0.35, 0.1)])
def test_coverage_of_the_paired_interval(gained: float, lost: float) -> None:
    draws = np.random.default_rng(0).choice(
        [1.0, -1.0, 0.0], p=[gained, lost, 1 - gained - lost], size=(2000, 100)
    )
    bounds = [difference_interval(list(row)) for row in draws]
    covered = np.mean([low <= gained - lost <= high for low, high in bounds])
    assert covered >= 0.935


def test_means_over_several_samples_have_a_bootstrap_interval() -> None:
    differences = [0.25] * 30 + [-0.25] * 10
    low, high = difference_interval(differences)
    assert 0.0 < low < 0.125 < high < 0.25
