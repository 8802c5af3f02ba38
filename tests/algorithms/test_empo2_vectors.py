"""EMPO²'s reference numbers for memory, credit and reported results, through what the library makes of them.

That of ``retrospex_rescore`` is tested in ``test_retrospex.py``.
"""

from typing import Any

import numpy as np
import pytest

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.gigpo import discounted_returns_per_turn, episode_advantages_per_turn
from outrider.algorithms.tips import MemorySettings, TipHook
from outrider.config import validate
from outrider.memory.embedders import HashEmbedder
from tests.algorithms.gigpo_groups import Episode, credited, flat
from tests.algorithms.tip_groups import algorithm, played, vector


def test_advantages_are_those_of_rollouts() -> None:
    given, expected = vector("grpo_rollout_level")
    found = group_normalized_advantages_per_rollout(returns=given["returns"])
    np.testing.assert_allclose(found.values, expected["advantage"], atol=1e-4)
    same = group_normalized_advantages_per_rollout(returns=[given["returns"][0]] * 4)
    assert same.values.tolist() == expected["identical_returns"]
    centered = group_normalized_advantages_per_rollout(returns=given["returns"], normalize_std=False)
    np.testing.assert_allclose(centered.values, expected["no_std"], atol=1e-4)
    # released: the raw return, about -100
    alone = group_normalized_advantages_per_rollout(returns=given["returns"][:1])
    assert alone.values.tolist() == [0.0] and not alone.has_signal


def test_statistics_over_rows_lean_to_long_episodes() -> None:
    """The released code's earlier form, which GiGPO's ``episode_statistics = "turns"`` has as well."""
    given, expected = vector("grpo_row_level_bias")
    rows = [
        value for value, turns in zip(given["returns"], given["turns"], strict=True) for _ in range(turns)
    ]
    found = episode_advantages_per_turn(given["returns"], population=rows, normalization="std")
    np.testing.assert_allclose(found, expected["advantage_per_rollout"], atol=1e-4)
    ours = group_normalized_advantages_per_rollout(returns=given["returns"])
    np.testing.assert_allclose(ours.values, expected["rollout_level_for_comparison"], atol=1e-4)


def test_a_lost_last_row_does_not_change_a_return() -> None:
    given, expected = vector("grpo_lost_tail")
    rewards = [list(map(float, own)) for own in given["step_rewards"].values()]
    assert [sum(own) for own in rewards] == expected["true_returns"]
    kept = [rewards[0][:-1], *rewards[1:]]
    used = group_normalized_advantages_per_rollout(returns=[sum(own) for own in kept])
    assert [sum(own) for own in kept] == expected["returns_used"]
    np.testing.assert_allclose(used.values, expected["advantage_used"], atol=1e-4)
    trace = played(
        [sum(own) for own in rewards], [["x"] * len(own) for own in kept]
    )  # the tree lacks that turn, the record does not
    for (_, path), own in zip(trace.rollouts(), kept, strict=True):
        for node, reward in zip([node for node in path if node.trainable], own, strict=True):
            node.reward = reward
    credit = algorithm(intrinsic_coefficient=0.0).assign_advantages(trace)
    np.testing.assert_allclose(credit.advantages.values, expected["true_advantage"], atol=1e-4)
    for (_, path), value in zip(trace.rollouts(), expected["true_advantage"], strict=True):
        assert [node.credit for node in path if node.trainable] == [(pytest.approx(value, abs=1e-4),)] * (
            len(path) // 2
        )


@pytest.mark.parametrize(
    ("name", "normalization", "statistics"),
    [
        ("mean_norm", "none", "turns"),
        ("mean_std_norm", "std", "turns"),
        ("mean_norm_trajectory_stats", "none", "rollouts"),
    ],
)
def test_gigpo_s_credit_over_turns_and_over_trajectories(
    name: str, normalization: Any, statistics: str
) -> None:
    given, everything = vector("gigpo")
    expected = everything[name]
    episodes = [
        Episode(states=tuple(one["s"]), rewards=tuple(map(float, one["r"]))) for one in given["trajectories"]
    ]
    returns = flat([discounted_returns_per_turn(one.rewards, gamma=given["gamma"]) for one in episodes])
    np.testing.assert_allclose(returns, expected["discounted_return"], atol=1e-4)
    chosen = {"gamma": given["gamma"], "normalization": normalization, "episode_statistics": statistics}
    whole, _ = credited(episodes, step_weight=given["omega"], **chosen)
    episode_part, _ = credited(episodes, step_weight=0.0, **chosen)
    np.testing.assert_allclose(flat(whole), expected["A"], atol=1e-4)
    np.testing.assert_allclose(flat(episode_part), expected["A_E"], atol=1e-4)
    np.testing.assert_allclose(np.subtract(flat(whole), flat(episode_part)), expected["A_S"], atol=1e-4)


def test_an_episode_writes_one_record_for_every_different_action() -> None:
    """With the whole chat as the key; where the state is the key, the same action elsewhere is another
    record.
    """
    given, expected = vector("memory_write_amplification")
    told = ["hall", "kitchen", "kitchen", "yard"]
    for state_key, same_room, num_records in (
        ("chat", False, 3),
        ("observation", True, 3),
        ("observation", False, 4),
    ):
        hook = TipHook(
            validate(MemorySettings, {"state_key": state_key}),
            embedder=HashEmbedder(),
            count_tokens=len,
            seed=0,
        )
        rooms = told if same_room else ["hall", "kitchen", "cellar", "yard"]
        hook.after_group(
            played([given["episode_return"]], [rooms], reflections=[given["tip"]], actions=given["actions"])
        )
        tips = hook.memory.tips("t")
        assert len(tips) == num_records
        # not rounded: returns may lie in [0, 1]
        assert {tip.score for tip in tips} == {given["episode_return"]}
        assert {round(tip.score, 1) for tip in tips} == {expected["stored_score"]}
    assert expected["unique_entries"] == 3


@pytest.mark.parametrize(("num_actions", "name"), [(31, "31_unique_actions"), (2, "2_actions")])
def test_how_soon_a_buffer_is_full(num_actions: int, name: str) -> None:
    given, expected = vector("memory_write_amplification")
    hook = TipHook(
        MemorySettings(capacity=given["capacity"]), embedder=HashEmbedder(), count_tokens=len, seed=0
    )
    num_episodes = given["group"]
    told = [[f"room {turn}" for turn in range(num_actions)]] * num_episodes
    hook.after_group(
        played([0.0] * num_episodes, told, reflections=[f"tip {number}" for number in range(num_episodes)])
    )
    episodes_an_iteration = given["batch_tasks"] * given["group"] / given["variations"]
    assert episodes_an_iteration == expected["episodes_per_variation_per_iteration"]
    records_an_iteration = hook.memory.num_added("t") / num_episodes * episodes_an_iteration
    assert hook.memory.capacity / records_an_iteration == pytest.approx(
        expected[f"iterations_to_fill_if_{name}"], abs=1e-4
    )
