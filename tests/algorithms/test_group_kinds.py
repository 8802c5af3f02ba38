"""MaxRL, pass@k and best-minus-second advantages: recorded values, enumerated gradients, rules, settings."""

import math
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.advantages import (
    RolloutAdvantages,
    best_minus_second_advantages_per_rollout,
    group_normalized_advantages_per_rollout,
    mean_normalized_advantages_per_rollout,
    pass_at_k_advantages_per_rollout,
)
from outrider.algorithms.exploration import Empo2Settings
from outrider.algorithms.gigpo import GigpoSettings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.luffy import LuffySettings
from outrider.config import validate
from outrider.errors import ConfigError, InvalidResult
from outrider.training.settings import RunSettings
from tests.algorithms.builders import Rollout, build_trace
from tests.vectors import load_vectors

VECTORS = load_vectors("group_kinds")
MAXRL, PASS_AT_K = VECTORS["maxrl"]["cases"], VECTORS["pass_at_k"]["cases"]
NUM_ENUMERATED = 4


def of_name(cases: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(case for case in cases if case["name"] == name)


@pytest.mark.parametrize("name", [case["name"] for case in MAXRL if "returns" in case])
def test_maxrl_vectors(name: str) -> None:
    case = of_name(MAXRL, name)
    found = mean_normalized_advantages_per_rollout(returns=case["returns"])
    np.testing.assert_allclose(found.values, case["advantages"], atol=1e-11)


@pytest.mark.parametrize("name", [case["name"] for case in MAXRL if "expected_gradient" in case])
def test_maxrl_climbs_the_log_likelihood_truncated_below_the_group_size(name: str) -> None:
    """All outcomes of a group of Bernoulli rollouts, with their probability: the gradient for the logit of
    success is that of sum_{k < n} -(1 - p)^k / k.
    """
    case, words = of_name(MAXRL, name), name.split()
    p, n = float(words[2].rstrip(",")), int(words[3])
    gradient = 0.0
    for outcome in product((0.0, 1.0), repeat=n):
        probability = math.prod(p if success else 1.0 - p for success in outcome)
        advantages = mean_normalized_advantages_per_rollout(returns=outcome).values
        # d log-probability / d logit is 1 - p for a success and -p for a failure
        slopes = np.array(outcome) - p
        gradient += probability * float(advantages @ slopes) / n
    series = sum(p * (1.0 - p) * (1.0 - p) ** (k - 1) for k in range(1, n))
    assert gradient == pytest.approx(case["expected_gradient"], abs=1e-9)
    assert gradient == pytest.approx(series, abs=1e-12)


def test_every_enumerated_vector_is_checked() -> None:
    assert sum("expected_gradient" in case for case in MAXRL) == NUM_ENUMERATED


@pytest.mark.parametrize("name", [case["name"] for case in PASS_AT_K])
def test_pass_at_k_vectors(name: str) -> None:
    case = of_name(PASS_AT_K, name)
    if "k" in case:
        found = pass_at_k_advantages_per_rollout(success=case["success"], k=case["k"])
    else:
        found = best_minus_second_advantages_per_rollout(returns=case["returns"])
    np.testing.assert_allclose(found.values, case["advantages"], atol=1e-9)
    assert found.has_signal == any(case["advantages"])


@given(st.lists(st.booleans(), min_size=2, max_size=7), st.integers(1, 6))
def test_pass_at_k_is_the_mean_over_all_subsets(success: list[bool], k: int) -> None:
    """The advantage of a rollout is the mean of (reward - rho) / sigma over the subsets with it."""
    if k > len(success):
        return
    subsets = list(combinations(range(len(success)), k))
    rewards = [Fraction(any(success[i] for i in subset)) for subset in subsets]
    rho = sum(rewards) / len(subsets)
    sigma = math.sqrt(rho * (1 - rho))
    expected = []
    for rollout in range(len(success)):
        own = [reward for subset, reward in zip(subsets, rewards, strict=True) if rollout in subset]
        expected.append(0.0 if sigma == 0 else float(sum(own) / len(own) - rho) / (sigma + 1e-6))
    found = pass_at_k_advantages_per_rollout(success=success, k=k)
    np.testing.assert_allclose(found.values, expected, atol=1e-12)


@given(st.lists(st.booleans(), min_size=2, max_size=8))
def test_pass_at_1_is_the_z_score_with_the_population_std(success: list[bool]) -> None:
    found = pass_at_k_advantages_per_rollout(success=success, k=1)
    expected = group_normalized_advantages_per_rollout(returns=[float(one) for one in success], std_ddof=0)
    np.testing.assert_allclose(found.values, expected.values, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a_faulted_rollout_does_not_count(seed: int) -> None:
    rng = np.random.default_rng(seed)
    returns = [float(value) for value in rng.integers(0, 2, size=6)]
    place = int(rng.integers(0, 7))
    with_fault: list[float | None] = [*returns[:place], None, *returns[place:]]
    pairs: list[tuple[RolloutAdvantages, RolloutAdvantages]] = [
        (
            mean_normalized_advantages_per_rollout(returns=returns),
            mean_normalized_advantages_per_rollout(returns=with_fault),
        ),
        (
            best_minus_second_advantages_per_rollout(returns=returns),
            best_minus_second_advantages_per_rollout(returns=with_fault),
        ),
        (
            pass_at_k_advantages_per_rollout(success=[bool(one) for one in returns], k=2),
            pass_at_k_advantages_per_rollout(
                success=[None if one is None else bool(one) for one in with_fault], k=2
            ),
        ),
    ]
    for whole, faulted in pairs:
        assert faulted.values[place] == 0.0 and not faulted.assigned[place]
        assert np.delete(faulted.values, place).tolist() == whole.values.tolist()
        assert (whole.has_signal, whole.reason) == (faulted.has_signal, faulted.reason)


def grpo(**settings: Any) -> Grpo:
    return Grpo(validate(GrpoSettings, {"group_size": 4, **settings}))


GROUP = [Rollout(value=value, success=value == 1.0) for value in (1.0, 0.25, 0.0)] + [Rollout(value=None)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"advantage": "mean_normalized"}, [1.4, -0.4, -1.0]),
        ({"advantage": "best_minus_second"}, [0.75, 0.0, 0.0]),
        ({"advantage": "pass_at_k", "pass_k": 1}, [math.sqrt(2.0), -math.sqrt(0.5), -math.sqrt(0.5)]),
    ],
)
def test_the_kinds_in_grpo(settings: dict[str, Any], expected: list[float]) -> None:
    trace = build_trace(GROUP)
    (result,) = grpo(**settings).assign_step_advantages([trace])
    leaves = [leaf for leaf, _ in trace.rollouts()]
    assert [leaf.advantage for leaf in leaves[:3]] == pytest.approx(expected, abs=1e-5)
    assert leaves[3].advantage is None
    assert result.advantages.has_signal


def test_a_penalty_of_the_environment_is_refused_before_the_run() -> None:
    recipe = {
        "environment": {"type": "factbook"},
        "algorithm": {"type": "grpo", "advantage": "mean_normalized"},
    }
    assert validate(RunSettings, recipe).algorithm.advantage == "mean_normalized"
    recipe["environment"] |= {"reward": {"format_penalty": -0.5}}
    for kind in ("grpo", "rapo"):
        recipe["algorithm"]["type"] = kind
        with pytest.raises(ConfigError, match=r"set environment\.reward\.format_penalty = 0 \(now -0\.5\)"):
            validate(RunSettings, recipe)


def test_a_negative_return_stops_maxrl_in_one_line() -> None:
    trace = build_trace([Rollout(value=1.0), Rollout(value=-0.5)], key="door")
    with pytest.raises(InvalidResult, match=r"mean_normalized needs returns of at least 0.*'door' has -0\.5"):
        grpo(advantage="mean_normalized").assign_step_advantages([trace])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (GrpoSettings, {"advantage": "pass_at_k"}, "pass_k belongs to advantage = pass_at_k"),
        (GrpoSettings, {"pass_k": 2}, "pass_k belongs to advantage = pass_at_k"),
        (GrpoSettings, {"advantage": "pass_at_k", "pass_k": 8}, "needs a group_size above it, got 8"),
        (
            GrpoSettings,
            {"advantage": "pass_at_k", "pass_k": 2, "overlong": {}},
            "counts successes only: remove overlong",
        ),
        (
            GrpoSettings,
            {"advantage": "mean_normalized", "reward_kl_weight": 0.1},
            "at least 0: remove reward_kl_weight",
        ),
        (
            GrpoSettings,
            {"advantage": "mean_normalized", "advantage_std": "batch"},
            "divides by no std: remove advantage_std",
        ),
        (GigpoSettings, {"advantage": "mean_normalized"}, "contradicts normalization"),
        (
            LuffySettings,
            {"advantage": "best_minus_second"},
            "is not defined for a group with a demonstration",
        ),
        (
            Empo2Settings,
            {"advantage": "pass_at_k", "pass_k": 2},
            "counts successes only: set intrinsic_coefficient = 0",
        ),
    ],
)
def test_combinations_without_meaning_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(kind, settings)
