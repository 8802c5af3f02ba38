"""Batch, tree and mixed-group credit, whitening, DAPO's shaping and filters: upstream vectors, references,
rules for every group.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.advantages import (
    batch_scaled_advantages_per_rollout,
    difficulty_scores,
    groups_with_spread,
    leave_one_out_batch_normalized_advantages_per_rollout,
    mixed_group_advantages_per_rollout,
    overlong_penalty,
    reinforce_plus_plus_advantages_per_token,
    reinforce_plus_plus_baseline_advantages_per_token,
    replayable_groups,
    returns_to_go_per_token,
    token_rewards_per_token,
    tree_advantages_per_leaf,
    whitened_per_token,
)
from outrider.algorithms.gigpo import episode_advantages_per_turn

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "credit_family.json").read_text())
}


def test_verl_agent_vectors() -> None:
    """Rows are turns. Over turns (its default) or over the first row of each trajectory; its RLOO is the
    latter, times n / (n - 1).
    """
    inputs = CASES["adv.verl_agent.grpo.cross_steps_True"]["inputs"]
    scores, groups, rollouts = inputs["episode_reward_minus_penalty"], inputs["prompt_group"], inputs["traj"]
    for group in ("p0", "p1"):
        rows = [row for row, name in enumerate(groups) if name == group]
        own = [scores[row] for row in rows]
        first = list({rollouts[row]: scores[row] for row in reversed(rows)}.values())
        for name, population, normalization, factor in (
            ("grpo.cross_steps_True", own, "std", 1.0),
            ("grpo.cross_steps_False", first, "std", 1.0),
            ("rloo.cross_steps_False", first, "none", len(first) / (len(first) - 1)),
        ):
            found = factor * episode_advantages_per_turn(
                own, population=population, normalization=normalization
            )  # type: ignore[arg-type]
            expected = CASES[f"adv.verl_agent.{name}"]["expected"]["row_advantage"]
            np.testing.assert_allclose(found, [expected[row] for row in rows], atol=1e-9)


def test_tree_vectors_except_that_a_lone_leaf_gets_zero() -> None:
    for name, combination in (("tree_inner", "inner"), ("tree_2norm", "nested")):
        inputs, expected = (
            CASES[f"tree_grpo.{name}"]["inputs"],
            CASES[f"tree_grpo.{name}"]["expected"]["advantage"],
        )
        for prompt in ("q0", "q1"):
            rows = [row for row, own in enumerate(inputs["prompt"]) if own == prompt]
            credit = tree_advantages_per_leaf(
                returns=[inputs["leaf_rewards"][row] for row in rows],
                trees=[inputs["tree"][row] for row in rows],
                combination=combination,  # type: ignore[arg-type]
            )
            assert credit.has_signal and credit.reason is None
            for row, value in zip(rows, credit.values.tolist(), strict=True):
                lone = inputs["tree"].count(inputs["tree"][row]) == 1
                assert lone == (row == 9)
                assert value == (0.0 if lone else pytest.approx(expected[row], abs=1e-9))
        assert expected[9] != 0.0  # upstream: the raw reward, or the raw score over the prompt


@pytest.mark.parametrize("use_std", [False, True])
def test_luffy_vectors(use_std: bool) -> None:
    case = CASES[f"luffy.adv.use_std_{use_std}"]
    for key, statistics in (("mixed_group", "mixed"), ("on_policy_only_statistics", "on_policy")):
        for start in (0, 8):
            rows = slice(start, start + 8)
            credit = mixed_group_advantages_per_rollout(
                returns=case["inputs"]["rewards"][rows],
                is_demonstration=case["inputs"]["is_demonstration"][rows],
                statistics=statistics,  # type: ignore[arg-type]
                normalize_std=use_std,
            )
            np.testing.assert_allclose(credit.values, case["expected"][key][rows], atol=1e-9)
            assert credit.has_signal == (start == 0)


def test_a_good_demonstration_among_failures() -> None:
    """Mixed: 7/8 and -1/8. By the policy's rollouts alone it is the only one with credit; their std is 0."""
    arguments: dict[str, Any] = {"returns": [0.0] * 7 + [1.0], "is_demonstration": [False] * 7 + [True]}
    assert mixed_group_advantages_per_rollout(**arguments).values.tolist() == [-0.125] * 7 + [0.875]
    split = mixed_group_advantages_per_rollout(**arguments, statistics="on_policy", normalize_std=True)
    assert split.values.tolist() == [0.0] * 7 + [1.0] and split.has_signal
    rounding = mixed_group_advantages_per_rollout(
        returns=[0.3, 0.1 + 0.2, 0.3, 1.3], is_demonstration=[False] * 3 + [True], statistics="on_policy"
    )
    assert rounding.values[:3].tolist() == [0.0] * 3 and rounding.values[3] == pytest.approx(1.0)
    for returns, reason in (
        ([None, None, 1.0], "unscorable"),
        ([0.3, None, 0.3], "singleton"),
        ([0.3, 0.3, 0.3], "no_spread"),
    ):
        credit = mixed_group_advantages_per_rollout(
            returns=returns, is_demonstration=[False, False, True], statistics="on_policy"
        )
        assert (credit.has_signal, credit.reason, credit.values.tolist()) == (False, reason, [0.0] * 3)
        assert credit.assigned.tolist() == [value is not None for value in returns]
    with pytest.raises(ValueError, match="marks"):
        mixed_group_advantages_per_rollout(returns=[0.0, 1.0], is_demonstration=[True])


def test_overlong_vector_with_a_floor() -> None:
    """Equal to verl up to the longest length; beyond it upstream falls on, to -3 here."""
    case = CASES["dapo.overlong.verl"]
    shape = {"max_length": case["inputs"]["max_len"], "buffer": case["inputs"]["buffer"]}
    for length, penalty in zip(case["inputs"]["lengths"], case["expected"]["penalty"], strict=True):
        assert overlong_penalty(length=length, **shape) == pytest.approx(max(-1.0, penalty), abs=1e-12)
    assert overlong_penalty(length=90, **shape, factor=0.5) == -0.25
    for wrong in ({"buffer": 0}, {"buffer": 101}, {"factor": -1.0}):
        with pytest.raises(ValueError, match="overlong"):
            overlong_penalty(length=1, **(shape | wrong))  # type: ignore[arg-type]


def test_dynamic_sampling_vector_and_rounding() -> None:
    inputs = CASES["dapo.filter_groups.verl_agent"]["inputs"]
    groups = [position // inputs["group_size"] for position in range(len(inputs["rewards"]))]
    kept = groups_with_spread(inputs["rewards"], groups=groups)
    assert [row for rows in kept.values() for row in rows] == CASES["dapo.filter_groups.verl_agent"][
        "expected"
    ]["kept_indices"]
    assert np.std([0.1] * 3) > 0.0  # a test on the std would keep this group
    metric = [0.1, 0.1, 0.1, 1.0, None, 0.0, 0.5, None, None]
    names = ["a", "a", "a", "b", "b", "b", "lone", "fault", "fault"]
    assert groups_with_spread(metric, groups=names) == {"b": [3, 4, 5]}
    assert groups_with_spread([0.0, 0.4], groups=["a", "a"], tolerance=0.5) == {}
    with pytest.raises(ValueError, match="group names"):
        groups_with_spread([0.0, 1.0], groups=["a"])


def test_rollout_replay_vectors() -> None:
    case = CASES["rollout_replay.select_prob.tau0.1"]
    scores = difficulty_scores(
        case["inputs"]["predicted_mean_reward"], target=case["inputs"]["alpha"], temperature=0.1
    )
    np.testing.assert_allclose(np.exp(scores) / np.exp(scores).sum(), case["expected"]["prob"], rtol=1e-9)
    assert difficulty_scores([0.45, 0.5]) == pytest.approx([-50.0, 0.0])
    case = CASES["rollout_replay.select_buffer"]
    inputs, expected = case["inputs"], case["expected"]
    keys, means = inputs["group_ids_oldest_first"], [count / 8 for count in inputs["successes_of_8"]]
    assert [keys[row] for row in replayable_groups(keys, mean_rewards=means)] == expected[
        "eligible_after_dedup_and_filter"
    ]
    room = inputs["buffer_size"] - int(inputs["sigma"] * inputs["train_batch_size"])
    assert [keys[row] for row in replayable_groups(keys, mean_rewards=means, room=room)] == expected[
        "buffer_after"
    ]
    assert replayable_groups(keys, mean_rewards=means, room=0) == []
    assert len(replayable_groups(keys, mean_rewards=means, room=99)) == 4


RETURN = st.floats(-10.0, 10.0).map(lambda value: round(value, 3))
BATCH = st.lists(
    st.tuples(RETURN, st.integers(0, 2), st.integers(0, 2), st.integers(1, 4)), min_size=2, max_size=14
)


def split(batch: Any) -> tuple[list[float], list[int], list[int], np.ndarray]:
    """Returns, group names, tree names, whose each token is."""
    returns, groups, trees, lengths = (list(column) for column in zip(*batch, strict=True))
    return returns, groups, trees, np.repeat(np.arange(len(batch)), lengths)


def every_credit(
    returns: Any, groups: list[int], trees: list[int], owners: np.ndarray
) -> dict[str, np.ndarray]:
    """One array a method, per rollout or per token."""
    demonstration = [tree == 0 for tree in trees]
    return {
        "batch_scaled": batch_scaled_advantages_per_rollout(returns=returns, groups=groups, eps=0.0),
        "loo_normalized": leave_one_out_batch_normalized_advantages_per_rollout(
            returns=returns, groups=groups, eps=0.0),
        "r_plus_plus": reinforce_plus_plus_advantages_per_token(returns=returns, rollout_index=owners),
        "r_plus_plus_population": reinforce_plus_plus_advantages_per_token(
            returns=returns, rollout_index=owners, variance="population"
        ),
        "tree_sum": tree_advantages_per_leaf(returns=returns, trees=trees, eps=0.0).values,
        "tree_inner": tree_advantages_per_leaf(
            returns=returns, trees=trees, combination="inner", eps=0.0).values,
        "mixed": mixed_group_advantages_per_rollout(
            returns=returns, is_demonstration=demonstration, normalize_std=True, eps=0.0
        ).values,
        "on_policy": mixed_group_advantages_per_rollout(
            returns=returns, is_demonstration=[
                mark and position > 1 for position, mark in enumerate(demonstration)],
            statistics="on_policy", normalize_std=True, eps=0.0,
        ).values,
    }  # fmt: skip


@given(batch=BATCH, order=st.randoms(use_true_random=False))
def test_order_and_rollouts_without_a_return_change_no_bit(batch: Any, order: Any) -> None:
    returns, groups, trees, owners = split(batch)
    base = every_credit(returns, groups, trees, owners)
    rollouts = [name for name in base if "r_plus_plus" not in name and name != "on_policy"]
    permutation = list(range(len(batch)))
    order.shuffle(permutation)
    permuted = every_credit(*split([batch[index] for index in permutation]))
    with_fault = every_credit(
        [None, *returns], [groups[0], *groups], [trees[0], *trees], np.append([0, 0], owners + 1)
    )
    for name in rollouts:
        assert permuted[name].tolist() == base[name][permutation].tolist(), name
        assert with_fault[name][0] == 0.0 and with_fault[name][1:].tolist() == base[name].tolist(), name
    for name in ("r_plus_plus", "r_plus_plus_population"):
        assert not with_fault[name][:2].any() and with_fault[name][2:].tolist() == base[name].tolist(), name
    arguments: dict[str, Any] = {"groups": groups, "rollout_index": owners}
    centred = reinforce_plus_plus_baseline_advantages_per_token(returns=returns, **arguments)
    arguments = {"groups": [groups[0], *groups], "rollout_index": np.append([0, 0], owners + 1)}
    with_hole = reinforce_plus_plus_baseline_advantages_per_token(returns=[math.nan, *returns], **arguments)
    assert not with_hole[:2].any() and with_hole[2:].tolist() == centred.tolist()


@given(
    rewards=st.lists(st.tuples(st.integers(0, 2), RETURN), min_size=1, max_size=12),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_returns_to_go_loop_over_the_definition(rewards: Any, gamma: float) -> None:
    owners, values = [owner for owner, _ in rewards], np.array([value for _, value in rewards])
    found = returns_to_go_per_token(values, rollout_index=owners, gamma=gamma)
    for token, owner in enumerate(owners):
        later = [value for other, value in rewards[token:] if other == owner]
        assert found[token] == pytest.approx(
            math.fsum(gamma**k * value for k, value in enumerate(later)), abs=1e-9
        )


def test_no_signal_is_exactly_zero_and_impossible_input_raises() -> None:
    same: dict[str, Any] = {"returns": [0.1, 0.1, 0.1 + 1e-17], "rollout_index": [0, 0, 1, 2]}
    assert not reinforce_plus_plus_advantages_per_token(**same).any()
    assert not reinforce_plus_plus_baseline_advantages_per_token(**same, groups=["a", "a", "b"]).any()
    assert whitened_per_token(np.array([3.0])).tolist() == [0.0]
    assert whitened_per_token(np.array([math.nan, 1.0, 3.0]), variance="population").tolist() == [
        0.0,
        -1.0,
        1.0,
    ]
    assert not batch_scaled_advantages_per_rollout(returns=[0.5, 0.5], groups=[0, 0], eps=0.1).any()
    for returns, trees, combination, reason in (
        ([0.5], ["a"], "sum", "singleton"),
        ([None, None], ["a", "b"], "sum", "unscorable"),
        ([0.2, 0.2], ["a", "a"], "inner", "no_spread"),
        ([0.2, 0.8], ["a", "b"], "inner", "singleton"),
        ([0.2, 0.2, 0.8], ["a", "a", "b"], "nested", "no_spread"),
    ):
        credit = tree_advantages_per_leaf(
            returns=returns,
            trees=trees,
            combination=combination,  # type: ignore[arg-type]
        )
        assert (credit.has_signal, credit.reason, credit.values.any()) == (False, reason, False)
    for call in (
        lambda: token_rewards_per_token(returns=[1.0], rollout_index=[0], kl_weight=0.1),
        lambda: token_rewards_per_token(returns=[1.0], rollout_index=[0], kl_per_token=np.zeros(1)),
        lambda: returns_to_go_per_token(np.zeros(1), rollout_index=[0], gamma=1.5),
        lambda: batch_scaled_advantages_per_rollout(returns=[1.0, math.inf], groups=[0, 0]),
        lambda: batch_scaled_advantages_per_rollout(returns=[1.0, 0.0], groups=[0, 0], eps=-1.0),
        lambda: tree_advantages_per_leaf(returns=[1.0, 0.0], trees=["a"]),
    ):
        with pytest.raises(ValueError):
            call()
