"""RAPO's formulas, settings and measures on cases worked by hand."""

import math
from typing import Any, cast

import pytest

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.entropy_branching import BranchHook, BranchSettings
from outrider.algorithms.exploration import Rapo, RapoSettings
from outrider.algorithms.retrieval import (
    RetrievalAdvantageSettings,
    RetrievalHook,
    RetrievalSettings,
    combined_advantages_per_rollout,
    retrieval_reward,
    retrieval_reward_per_rollout,
    scheduled_probability,
    step_entropy_per_step,
)
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.trace import Trace
from outrider.types import Origin
from tests.algorithms.builders import add_node, finish, new_trace

BUFFER = cast(StepTraceBuffer, object())
BEFORE, AFTER = [2.0, 0.5], [1.0, 1.0]  # changes 1/2 and -1; gains tanh(1) and tanh(-2)
TANH1, TANH2 = 0.7615941559557649, 0.9640275800758169


def test_step_entropy_is_the_mean_over_generated_tokens() -> None:
    assert step_entropy_per_step([1.0, 2.0, 0.0]) == 1.0
    assert step_entropy_per_step([-1e-8]) == 0.0
    assert step_entropy_per_step([-1e-5, 1.0]) == 0.5  # below 0 by rounding
    for wrong in ([], [-1.1e-5], [math.nan], [math.inf]):
        with pytest.raises(ValueError, match="entropy"):
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
    """The formula, and the reward of a rollout with these settings."""
    reward = retrieval_reward_per_rollout(entropies_before=BEFORE, entropies_after=AFTER, **switch)
    assert reward.value == pytest.approx(expected, abs=1e-12)
    trace = new_trace()
    node = add_node(trace, None, Origin.PROMPT)
    for before, after in zip(BEFORE, AFTER, strict=True):
        node = add_node(trace, node, Origin.POLICY, entropies=[before])
        node = add_node(trace, add_node(trace, node, Origin.BUFFER), Origin.POLICY, entropies=[after])
    found = retrieval_reward(trace.path(node.node_id), RapoSettings(**switch))
    assert found.value == pytest.approx(expected, abs=1e-12)


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (RetrievalAdvantageSettings, {"quality": False, "timing": "none"}),
        (RetrievalAdvantageSettings, {"quality": False, "sign": "increase"}),
        (RetrievalSettings, {"mode": "execute", "level": "segment"}),
        (RetrievalSettings, {"mode": "execute", "level": "trajectory"}),
        (RapoSettings, {"group_size": 8, "branch": {"first_wave": 8}}),  # no room for forks
        (RapoSettings, {"branch": {"first_wave": 4, "attribution": "hard"}}),  # with a ratio_weight
    ],
)
def test_settings_without_meaning_are_errors(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        kind.model_validate(options)


def test_settings_next_to_those_errors_are_valid() -> None:
    full, hard = BranchSettings(first_wave=8), BranchSettings(first_wave=4, attribution="hard")
    RetrievalSettings(mode="execute")
    RetrievalSettings(level="segment")
    RapoSettings(group_size=9, branch=full)
    RapoSettings(group_size=8, branch=full.model_copy(update={"pre_monitor": True}))
    RapoSettings(ratio_weight=0.0, aggregation="token_mean", branch=hard)
    with pytest.raises(ValueError):
        retrieval_reward_per_rollout(entropies_before=[1.0], entropies_after=[])


def test_the_hooks_get_the_settings_of_the_run() -> None:
    settings = RapoSettings(group_size=8, num_hybrid=3, ratio_weight=0.0, branch=BranchSettings(first_wave=4))
    rapo = Rapo(settings, buffer=BUFFER, num_training_steps=7, vocabulary_size=50, every_action=True)
    retrieval, branch = rapo.hooks
    assert isinstance(retrieval, RetrievalHook) and isinstance(branch, BranchHook)
    assert retrieval.buffer is BUFFER
    assert (retrieval.settings, retrieval.num_training_steps) == (settings.retrieval, 7)
    assert (branch.settings, branch.group_size, branch.vocabulary_size, branch.every_action) == (
        settings.branch,
        8,
        50,
        True,
    )
    assert rapo.modes == ("on_policy",) * 5 + ("hybrid",) * 3 == rapo.modes_of(0, 0)
    assert rapo.objective is settings


def test_without_hybrid_rollouts_or_a_buffer_nothing_is_retrieved() -> None:
    assert Rapo(RapoSettings(num_hybrid=0), buffer=BUFFER, num_training_steps=1).hooks == ()
    assert Rapo(RapoSettings(num_hybrid=8), buffer=None, num_training_steps=1).hooks == ()
    (hook,) = Rapo(RapoSettings(num_hybrid=1), buffer=BUFFER, num_training_steps=1).hooks
    assert isinstance(hook, RetrievalHook)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", (0.75, 0.625, 0.5, 0.25)), ("cosine", (0.75, 0.6767766952966369, 0.5, 0.25))],
)
def test_a_schedule_moves_from_the_first_step_to_the_last(schedule: str, expected: tuple[float, ...]) -> None:
    """The second step of five is a quarter of the way: (1 - cos(pi / 4)) / 2 of it for the cosine."""
    settings = RetrievalSettings.model_validate(
        {"probability": 0.75, "final_probability": 0.25, "schedule": schedule}
    )
    assert tuple(scheduled_probability(settings, step, 5) for step in (0, 1, 2, 4)) == pytest.approx(expected)
    assert scheduled_probability(settings, 9, 5) == pytest.approx(0.25)  # a run that goes on
    own = settings.model_copy(update={"schedule_steps": 5})  # of a run that a budget ends
    assert tuple(scheduled_probability(own, step, 10**5) for step in (0, 1, 2, 4)) == pytest.approx(expected)
    assert scheduled_probability(own, 9, 10**5) == pytest.approx(0.25)
    assert scheduled_probability(settings, 0, 1) == 0.75 and scheduled_probability(
        settings, 1, 2
    ) == pytest.approx(0.25)
    assert scheduled_probability(RetrievalSettings(probability=0.3), 3, 5) == 0.3


def hybrid_group() -> Trace:
    """Three turns of entropy 2. One rollout retrieves, its next turn has entropy 1; one is cut after that."""
    trace = new_trace(modes=("on_policy", "hybrid", "hybrid"))
    root = add_node(trace, None, Origin.PROMPT, num_tokens=2)
    for rollout, (similarity, entropy) in enumerate(((None, None), (0.5, 1.0), (float("nan"), None))):
        node = add_node(trace, root, Origin.POLICY, num_tokens=2, entropies=(3.0, 1.0))
        if similarity is not None:
            metadata = {"similarity": similarity, "step_ids": [1]}
            node = add_node(trace, node, Origin.BUFFER, metadata=metadata)
        if entropy is not None:
            node = add_node(trace, node, Origin.POLICY, entropies=[entropy])
        finish(trace, node, float(rollout == 1))
    return trace


def test_advantages_scales_and_measures_of_a_group_by_hand() -> None:
    """Z = 2 tanh(1) for the scored retrieval, 0 for the others; 1/4 and 1/3 of the tokens were retrieved."""
    trace = hybrid_group()
    settings = RapoSettings(
        group_size=3, num_hybrid=2, advantage="group_centered", advantage_weight=0.3, ratio_weight=0.6
    )
    found = Rapo(settings, buffer=None, num_training_steps=1).assign_advantages(trace)
    z, gain = 2 * 0.7615941559557649, 0.7615941559557649
    std = z / 3**0.5  # of (0, z, 0) with two degrees of freedom
    low, high = 1 + 0.3 * (-z / 3) / (std + 1e-6), 1 + 0.3 * (2 * z / 3) / (std + 1e-6)
    assert found.advantages.values.tolist() == pytest.approx([-low / 3, high * 2 / 3, -low / 3])
    scales = [node.ratio_scale for node in trace.nodes if node.trainable]
    assert scales == pytest.approx([1.0, 1 + 0.6 / 4, 1 + 0.6 / 4, 1 + 0.6 / 3])
    expected: dict[str, list[float]] = {
        "retrieval/z_mean": [z],
        "retrieval/g_mean": [gain],
        "retrieval/entropy_before_mean": [2.0, 2.0],
        "retrieval/entropy_after_mean": [1.0],
        "retrieval/share_g_positive": [1.0],
        "retrieval/token_share": [1 / 4, 1 / 3],
        "retrieval/similarity_mean": [0.5],
        "retrieval/num_unscored": [0.0, 0.0, 1.0],
        "retrieval/num_floored": [0.0, 0.0, 0.0],
        "retrieval/share_factor_negative": [0.0, 0.0, 0.0],
    }
    assert found.measurements.keys() == expected.keys()
    for name, values in expected.items():
        assert found.measurements[name] == pytest.approx(values), name
