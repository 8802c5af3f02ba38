"""One way of writing scores (F10)."""

import math

import pytest

from outrider.printing import points, score


@pytest.mark.parametrize(
    ("values", "is_share", "told"),
    [
        ((0.35, 0.255, 0.459), True, "35.0 % [25.5, 45.9]"),
        ((0.0, 0.0, 0.0188), True, "0.0 % [0.0, 1.9]"),
        ((1.0,), True, "100.0 %"),
        ((0.5, math.nan, math.nan), True, "50.0 %"),
        ((math.nan, math.nan, math.nan), True, "not measured"),
        ((1.25, -0.5, 2.0), False, "1.25 [-0.5, 2]"),
        ((0.1934,), False, "0.1934"),
    ],
)
def test_f10_a_score_is_per_cent_with_its_interval_and_a_return_is_a_number(
    values: tuple[float, ...], is_share: bool, told: str
) -> None:
    assert score(*values, is_share=is_share) == told


def test_f10_differences_are_points_with_their_sign() -> None:
    assert points(0.287, 0.16, 0.401) == "+28.7 points [+16.0, +40.1]"
    assert points(-0.05) == "-5.0 points" and points(math.nan) == "not measured"
