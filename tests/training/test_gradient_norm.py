"""The global gradient norm against exact arithmetic, and what clipping makes of it."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.training.policy import Policy, clip, sum_of_squares
from outrider.training.settings import OptimizerSettings
from tests.tiny import tiny_model

VALUES = st.lists(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=30), min_size=1, max_size=5
)


@given(VALUES)
def test_the_sum_of_squares_is_that_of_fractions(values: list[list[float]]) -> None:
    exact = float(sum(Fraction(value) ** 2 for each in values for value in each))
    found = sum_of_squares([torch.tensor(each) for each in values])
    assert math.isclose(found, exact, rel_tol=1e-13, abs_tol=1e-290)


def test_many_small_entries_are_not_lost_beside_a_large_one() -> None:
    """In float32 the norm of these 10^7 entries, of which each is too small to count beside the first, would
    be 1 for some orders of the sum.
    """
    gradient = torch.full((10_000_001,), 1e-4)
    gradient[0] = 1.0
    assert sum_of_squares([gradient]) == pytest.approx(1.1, rel=1e-7)


@given(VALUES, st.floats(0.01, 100.0))
def test_clipping_bounds_the_norm_and_keeps_the_direction(values: list[list[float]], bound: float) -> None:
    before = [torch.tensor(each, dtype=torch.float64) for each in values]
    norm = math.sqrt(sum_of_squares(before))
    after = [one.clone() for one in before]
    clip(after, norm=norm, max_norm=bound)
    scale = min(1.0, bound / (norm + 1e-6))
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other * scale, rtol=1e-12, atol=0.0)
    assert math.sqrt(sum_of_squares(after)) <= bound * (1 + 1e-9) or norm <= bound


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_gradient_makes_no_step_and_leaves_the_weights(broken: float) -> None:
    policy = Policy(tiny_model(), OptimizerSettings())
    before = {name: master.clone() for name, master in policy.masters.items()}
    for master in policy.masters.values():
        master.grad = torch.ones_like(master)
    next(iter(policy.masters.values())).grad.view(-1)[3] = broken  # type: ignore[union-attr]
    assert not math.isfinite(policy.step())
    assert all(torch.equal(master, before[name]) for name, master in policy.masters.items())
    assert all(master.grad is None for master in policy.masters.values())
