"""RAPO's formulas on cases worked by hand, and that every switch is neutral when off."""

import math
from typing import Any

import numpy as np
import pytest

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.retrieval import (
    combined_advantages_per_rollout,
    retrieval_advantages_per_rollout,
    retrieval_factors_per_rollout,
    retrieval_reward_per_rollout,
    retrieved_token_share,
    step_entropy_change,
    step_entropy_per_step,
)

BEFORE, AFTER = [2.0, 0.5], [1.0, 1.0]  # changes 1/2 and -1; gains tanh(1) and tanh(-2)
TANH1, TANH2 = 0.7615941559557649, 0.9640275800758169


def test_step_entropy_is_the_mean_over_generated_tokens() -> None:
    assert step_entropy_per_step(token_entropies=[1.0, 2.0, 0.0]) == 1.0
    assert step_entropy_per_step(token_entropies=[-1e-8]) == 0.0
    for wrong in ([], [-0.1], [math.nan], [math.inf]):
        with pytest.raises(ValueError):
            step_entropy_per_step(token_entropies=wrong)


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
        ({"sharpness": 1.0}, (2.0 * math.tanh(0.5) - 0.5 * TANH1) / 2.0),
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
    assert step_entropy_change(entropy_before=1e-5, entropy_after=2e-5) == pytest.approx(-0.01)
    flipped = retrieval_reward_per_rollout(
        entropies_before=[0.0], entropies_after=[1.0], timing="inverse_entropy"
    )
    assert flipped.value == pytest.approx(-1000.0)


def test_combinations_without_meaning_raise() -> None:
    switches: list[dict[str, Any]] = [
        {"quality": False, "timing": "none"},
        {"quality": False, "sign": "increase"},
        {"entropy_floor": 0.0},
    ]
    for switch in switches:
        with pytest.raises(ValueError):
            retrieval_reward_per_rollout(entropies_before=BEFORE, entropies_after=AFTER, **switch)
    with pytest.raises(ValueError):
        retrieval_reward_per_rollout(entropies_before=[1.0], entropies_after=[])


def test_group_of_hybrid_and_on_policy_rollouts_by_hand() -> None:
    """Zeros of on-policy rollouts are in the statistics: Z = (0, 0, 1, 1) has sample std 1/sqrt(3)."""
    retrieval = retrieval_advantages_per_rollout(rewards=[0.0, 0.0, 1.0, 1.0], eps=0.0)
    np.testing.assert_allclose(retrieval.values, np.array([-1, -1, 1, 1]) * math.sqrt(3) / 2, rtol=1e-15)
    outcome = group_normalized_advantages_per_rollout(returns=[0.0, 1.0, 1.0, 0.0], eps=0.0)
    factors = retrieval_factors_per_rollout(retrieval=retrieval, weight=0.2)
    np.testing.assert_allclose(
        factors, [1 - math.sqrt(0.03), 1 - math.sqrt(0.03), 1 + math.sqrt(0.03), 1 + math.sqrt(0.03)]
    )
    combined = combined_advantages_per_rollout(outcome=outcome, factors=factors)
    half = math.sqrt(3) / 2
    np.testing.assert_allclose(
        combined.values, [-half + 0.15, half - 0.15, half + 0.15, -half - 0.15], rtol=1e-12
    )


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [([0.0] * 4, "no_spread"), ([0.3] * 4, "no_spread"), ([0.3], "singleton"), ([None], "unscorable")],
)
def test_retrieval_without_spread_leaves_the_outcome_alone(rewards: list[float | None], reason: str) -> None:
    """No rollout retrieved, all retrieved equally well, one rollout, one faulted rollout."""
    retrieval = retrieval_advantages_per_rollout(rewards=rewards)
    assert retrieval.reason == reason
    assert retrieval_factors_per_rollout(retrieval=retrieval).tolist() == [1.0] * len(rewards)


def test_factor_can_turn_the_sign_only_in_large_groups() -> None:
    for size, turns in ((26, False), (27, True)):
        retrieval = retrieval_advantages_per_rollout(rewards=[-1.0, *[0.0] * (size - 1)], eps=0.0)
        assert bool((retrieval_factors_per_rollout(retrieval=retrieval, weight=0.2) < 0.0).any()) is turns


def test_retrieved_token_share() -> None:
    assert retrieved_token_share(num_retrieved_tokens=30, num_response_tokens=120) == 0.25
    assert retrieved_token_share(num_retrieved_tokens=0, num_response_tokens=0) == 0.0
    for retrieved, response in ((5, 4), (-1, 4)):
        with pytest.raises(ValueError):
            retrieved_token_share(num_retrieved_tokens=retrieved, num_response_tokens=response)


def test_lengths_must_agree() -> None:
    outcome = group_normalized_advantages_per_rollout(returns=[0.0, 1.0])
    with pytest.raises(ValueError, match="3 retrieval factors for 2"):
        combined_advantages_per_rollout(outcome=outcome, factors=np.ones(3))


def test_an_entropy_may_be_below_zero_by_rounding_alone() -> None:
    assert step_entropy_per_step(token_entropies=[-1e-5, 1.0]) == 0.5
    for wrong in (-1.1e-5, math.inf, math.nan):
        with pytest.raises(ValueError, match="not an entropy"):
            step_entropy_per_step(token_entropies=[wrong])
