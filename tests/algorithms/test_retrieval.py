"""RAPO's formulas on cases worked by hand, and that every switch is neutral when off."""

import math
from typing import Any

import pytest

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.retrieval import (
    RetrievalAdvantageSettings,
    combined_advantages_per_rollout,
    retrieval_reward_per_rollout,
    step_entropy_per_step,
)

BEFORE, AFTER = [2.0, 0.5], [1.0, 1.0]  # changes 1/2 and -1; gains tanh(1) and tanh(-2)
TANH1, TANH2 = 0.7615941559557649, 0.9640275800758169


def test_step_entropy_is_the_mean_over_generated_tokens() -> None:
    assert step_entropy_per_step([1.0, 2.0, 0.0]) == 1.0
    assert step_entropy_per_step([-1e-8]) == 0.0
    for wrong in ([], [-0.1], [math.nan], [math.inf]):
        with pytest.raises(ValueError):
            step_entropy_per_step(wrong)


def test_two_retrievals_by_hand() -> None:
    reward = retrieval_reward_per_rollout(entropies_before=BEFORE, entropies_after=AFTER)
    assert reward.gains == pytest.approx((TANH1, -TANH2), abs=1e-15)
    assert reward.rewards == pytest.approx((2.0 * TANH1, -0.5 * TANH2), abs=1e-15)
    assert reward.value == pytest.approx(0.5205872609368105, abs=1e-12)  # (1.5231883 - 0.4820138) / 2
    assert (reward.num_without_after, reward.num_floored) == (0, 0)


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ({"sign": "increase"}, -0.5205872609368105),
        ({"timing": "inverse_entropy"}, (TANH1 / 2.0 - TANH2 / 0.5) / 2.0),
        ({"timing": "none"}, (TANH1 - TANH2) / 2.0),
        ({"quality": False}, (2.0 + 0.5) / 2.0),
        ({"quality": False, "timing": "inverse_entropy"}, (0.5 + 2.0) / 2.0),
    ],
)
def test_ablations_by_hand(switch: dict[str, Any], expected: float) -> None:
    reward = retrieval_reward_per_rollout(entropies_before=BEFORE, entropies_after=AFTER, **switch)
    assert reward.value == pytest.approx(expected, abs=1e-12)


def test_without_retrieval_and_cut_before_the_next_step() -> None:
    assert retrieval_reward_per_rollout(entropies_before=[], entropies_after=[]).value == 0.0
    cut = retrieval_reward_per_rollout(entropies_before=[*BEFORE, 9.0], entropies_after=[*AFTER, None])
    assert cut.value == pytest.approx(0.5205872609368105, abs=1e-12) and cut.num_without_after == 1
    only_cut = retrieval_reward_per_rollout(entropies_before=[9.0], entropies_after=[math.nan])
    assert (only_cut.value, only_cut.gains, only_cut.num_without_after) == (0.0, (), 1)


def test_zero_entropy_before_is_defined_and_counted() -> None:
    for after, gain in ((0.0, 0.0), (1.0, -1.0)):
        reward = retrieval_reward_per_rollout(entropies_before=[0.0], entropies_after=[after])
        assert (reward.value, reward.gains, reward.num_floored) == (0.0, (gain,), 1)
    floored = retrieval_reward_per_rollout(entropies_before=[1e-5], entropies_after=[2e-5])
    assert floored.gains == pytest.approx((math.tanh(-0.02),))
    flipped = retrieval_reward_per_rollout(
        entropies_before=[0.0], entropies_after=[1.0], timing="inverse_entropy"
    )
    assert flipped.value == pytest.approx(-1000.0)


def test_combinations_without_meaning_raise() -> None:
    switches: list[dict[str, Any]] = [
        {"quality": False, "timing": "none"},
        {"quality": False, "sign": "increase"},
    ]
    for switch in switches:
        with pytest.raises(ValueError):
            RetrievalAdvantageSettings(**switch)
    with pytest.raises(ValueError):
        retrieval_reward_per_rollout(entropies_before=[1.0], entropies_after=[])


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [([0.0] * 4, "no_spread"), ([0.3] * 4, "no_spread"), ([0.3], "singleton"), ([None], "unscorable")],
)
def test_retrieval_without_spread_leaves_the_outcome_alone(rewards: list[float | None], reason: str) -> None:
    """No rollout retrieved, all retrieved equally well, one rollout, one faulted rollout."""
    outcome = group_normalized_advantages_per_rollout(returns=rewards)
    assert outcome.reason == reason
    combined, factors = combined_advantages_per_rollout(outcome=outcome, rewards=rewards)
    assert factors.tolist() == [1.0] * len(rewards) and combined.reason == reason


def test_factor_can_turn_the_sign_only_in_large_groups() -> None:
    for size, turns in ((26, False), (27, True)):
        rewards = [-1.0, *[0.0] * (size - 1)]
        outcome = group_normalized_advantages_per_rollout(returns=rewards)
        _, factors = combined_advantages_per_rollout(outcome=outcome, rewards=rewards, weight=0.2)
        assert bool((factors < 0.0).any()) is turns


def test_an_entropy_may_be_below_zero_by_rounding_alone() -> None:
    assert step_entropy_per_step([-1e-5, 1.0]) == 0.5
    for wrong in (-1.1e-5, math.inf, math.nan):
        with pytest.raises(ValueError, match="not an entropy"):
            step_entropy_per_step([wrong])
