"""Advantages of groups, batches and trees: upstream vectors, numpy references, and rules for every group."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.algorithms.advantages import (
    batch_scaled_advantages_per_rollout,
    difficulty_scores,
    group_normalized_advantages_per_rollout,
    groups_with_spread,
    leave_one_out_advantages_per_rollout,
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
from outrider.algorithms.base import (
    Algorithm,
    group_advantages,
    outcome_advantages,
    total_returns,
    write_advantages,
)
from outrider.algorithms.gigpo import episode_advantages_per_turn
from outrider.algorithms.grpo import (
    GroupSettings,
    Grpo,
    GrpoSettings,
    ReinforcePlusPlus,
    ReinforcePlusPlusSettings,
)
from outrider.config import validate
from outrider.errors import ConfigError
from outrider.trace import Share, Trace
from outrider.training import trainer
from outrider.types import Origin
from tests.algorithms.builders import (
    Rollout,
    add_node,
    build_trace,
    build_traces,
    finish,
    new_trace,
    token_advantages,
)
from tests.vectors import load_vectors

CASES = load_vectors("advantages", "group_advantages")
BOTH = (group_normalized_advantages_per_rollout, leave_one_out_advantages_per_rollout)


def grpo(**options: Any) -> Grpo:
    return Grpo(validate(GrpoSettings, options))


def plus(**options: Any) -> ReinforcePlusPlus:
    return ReinforcePlusPlus(validate(ReinforcePlusPlusSettings, options))


def batch(groups: Any) -> list[Trace]:
    """Return the traces of groups of (return, mask)."""
    return [
        build_trace([Rollout(value=value, mask=mask) for value, mask in rollouts], key=str(number))
        for number, rollouts in enumerate(groups)
    ]


# Upstream vectors


def options_of(name: str) -> dict[str, Any]:
    centred = "dr_grpo" in name or "scale_none" in name
    advantage = "leave_one_out" if "rloo" in name else "group_centered" if centred else "group_normalized"
    std = {"advantage_std": "batch"} if "scale_batch" in name or "normalize_True" in name else {}
    return {"advantage": advantage, **std}


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if "sequence_advantage" in case["expected"]]
)
def test_upstream_vectors_except_that_singletons_get_zero(name: str) -> None:
    """verl and ARPO return the raw reward of a lone rollout: a gradient without a baseline."""
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]["sequence_advantage"]
    rewards = inputs["rewards"]
    groups = inputs.get("group") or [row // inputs["num_generations"] for row in range(len(rewards))]
    order = [row for group in dict.fromkeys(groups) for row, own in enumerate(groups) if own == group]
    traces = build_traces(rewards, groups)
    results = grpo(**options_of(name)).assign_step_advantages(traces)
    found = token_advantages(traces)
    assert np.concatenate([one.advantages.values for one in results]).tolist() == found.tolist()
    for row, value in zip(order, found.tolist(), strict=True):
        if groups.count(groups[row]) == 1:
            upstream = 0.0 if "vectorized" in name else rewards[row]
            assert value == 0.0 and expected[row] == pytest.approx(upstream, rel=2e-6)
        else:
            assert value == pytest.approx(expected[row], abs=1e-6 if "arpo" in name else 1e-9)


def test_rollout_level_vector() -> None:
    returns, expected = (CASES["grpo_rollout_level"][key] for key in ("inputs", "expected"))
    normalized, centred = (
        group_normalized_advantages_per_rollout(returns=returns["returns"], normalize_std=std).values
        for std in (True, False)
    )
    np.testing.assert_allclose(normalized, expected["advantage"], atol=1e-6)
    np.testing.assert_allclose(centred, expected["no_std"], atol=1e-12)


@pytest.mark.parametrize("name", ["adv.reinforce_pp.gamma0.95.verl", "adv.reinforce_pp.kl_in_reward.verl"])
def test_reinforce_plus_plus_vectors(name: str) -> None:
    """All rollouts are in one group, because REINFORCE++ does not use groups."""
    inputs = CASES[name]["inputs"]
    mask = np.array(inputs["response_mask"]) > 0
    kl = np.array(inputs.get("kl_k1", np.zeros(mask.shape)))
    trace = build_trace(
        [
            Rollout(value=value, mask=row.astype(int).tolist(), kl=own[row].tolist())
            for value, row, own in zip(inputs["rewards"], mask, kl, strict=True)
        ]
    )
    weight = inputs.get("kl_coef", 0.0)
    [result] = plus(gamma=inputs["gamma"], reward_kl_weight=weight).assign_step_advantages([trace])
    expected = np.array(CASES[name]["expected"]["token_advantage"])[mask]
    np.testing.assert_allclose(token_advantages([trace]), expected, atol=1e-8)
    sums = [own[row].sum() for row, own in zip(mask, kl, strict=True)]
    assert result.measurements["reward/kl_mean"] == pytest.approx(sums if weight else [], abs=1e-12)
    # the KL counts on its tokens and not in the return
    assert all(leaf.intrinsic == 0.0 for leaf, _ in trace.rollouts())


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline"])
def test_openrlhf_vectors(name: str) -> None:
    inputs = CASES[f"adv.openrlhf.{name}"]["inputs"]
    rewards, size, masks = inputs["rewards"], inputs["n_samples_per_prompt"], inputs["action_mask"]
    traces = build_traces(rewards, [row // size for row in range(len(rewards))], masks)
    plus(variance="population", group_baseline=name != "reinforce").assign_step_advantages(traces)
    expected = np.array(CASES[f"adv.openrlhf.{name}"]["expected"]["token_advantage"])[np.array(masks) > 0]
    np.testing.assert_allclose(token_advantages(traces), expected, atol=1e-6)


def test_verl_agent_vectors() -> None:
    """Rows are turns. Statistics are over turns (its default) or over the first row of each trajectory; its
    RLOO is the latter, times n / (n - 1).
    """
    inputs = CASES["adv.verl_agent.grpo.cross_steps_True"]["inputs"]
    scores, groups, rollouts = inputs["episode_reward_minus_penalty"], inputs["prompt_group"], inputs["traj"]
    for group in ("p0", "p1"):
        rows = [row for row, name in enumerate(groups) if name == group]
        own = [scores[row] for row in rows]
        first = list({rollouts[row]: scores[row] for row in reversed(rows)}.values())
        cases: list[tuple[str, list[float], Any, float]] = [
            ("grpo.cross_steps_True", own, "std", 1.0),
            ("grpo.cross_steps_False", first, "std", 1.0),
            ("rloo.cross_steps_False", first, "none", len(first) / (len(first) - 1)),
        ]
        for name, population, normalization, factor in cases:
            found = episode_advantages_per_turn(own, population=population, normalization=normalization)
            expected = CASES[f"adv.verl_agent.{name}"]["expected"]["row_advantage"]
            np.testing.assert_allclose(factor * found, [expected[row] for row in rows], atol=1e-9)


@pytest.mark.parametrize(("name", "combination"), [("tree_inner", "inner"), ("tree_2norm", "nested")])
def test_tree_vectors_except_that_a_lone_leaf_gets_zero(name: str, combination: Any) -> None:
    inputs, expected = (CASES[f"tree_grpo.{name}"][key] for key in ("inputs", "expected"))
    for prompt in ("q0", "q1"):
        rows = [row for row, own in enumerate(inputs["prompt"]) if own == prompt]
        found = tree_advantages_per_leaf(
            returns=[inputs["leaf_rewards"][row] for row in rows],
            trees=[inputs["tree"][row] for row in rows],
            combination=combination,
        )
        assert found.has_signal and found.reason is None
        for row, value in zip(rows, found.values.tolist(), strict=True):
            lone = inputs["tree"].count(inputs["tree"][row]) == 1
            assert lone == (row == 9)
            assert value == (0.0 if lone else pytest.approx(expected["advantage"][row], abs=1e-9))
    assert expected["advantage"][9] != 0.0  # upstream: the raw reward, or the raw score over the prompt


@pytest.mark.parametrize("use_std", [False, True])
def test_luffy_vectors(use_std: bool) -> None:
    case = CASES[f"luffy.adv.use_std_{use_std}"]
    kinds: list[tuple[str, Any]] = [("mixed_group", "mixed"), ("on_policy_only_statistics", "on_policy")]
    for key, statistics in kinds:
        for rows in (slice(0, 8), slice(8, 16)):
            found = mixed_group_advantages_per_rollout(
                returns=case["inputs"]["rewards"][rows],
                is_demonstration=case["inputs"]["is_demonstration"][rows],
                statistics=statistics,
                normalize_std=use_std,
            )
            np.testing.assert_allclose(found.values, case["expected"][key][rows], atol=1e-9)
            assert found.has_signal == (rows.start == 0)


def test_overlong_vector_with_a_floor() -> None:
    """DAPO's Eq. 13: verl's own values up to the maximum length, the paper's floor beyond. The penalty is
    part of the advantages and not of the recorded return.
    """
    case = CASES["dapo.overlong.verl"]
    lengths, limits = case["inputs"]["lengths"], (case["inputs"]["max_len"], case["inputs"]["buffer"])
    penalties = [max(-1.0, value) for value in case["expected"]["penalty"]]
    overlong = {"max_tokens": limits[0], "buffer": limits[1]}
    settings = validate(GrpoSettings, {"overlong": overlong})
    trace = build_trace([Rollout(value=1.0, mask=[0] * 3 + [1] * length) for length in lengths])
    [result] = Grpo(settings, max_response_tokens=10_000).assign_step_advantages([trace])
    assert [leaf.intrinsic for leaf, _ in trace.rollouts()] == pytest.approx(penalties, abs=1e-12)
    assert result.measurements["reward/overlong_mean"] == pytest.approx(penalties, abs=1e-12)
    assert all(leaf.episode_return == 1.0 for leaf, _ in trace.rollouts())
    z = (np.array(penalties) - np.mean(penalties)) / (np.std(penalties, ddof=1) + 1e-6)
    np.testing.assert_allclose(result.advantages.values, z, atol=1e-9)
    for counted, penalty in (("policy", 0.0), ("all", -0.5)):
        half = build_trace([Rollout(value=0.0, mask=[0] * 45 + [1] * 45), Rollout(value=0.0, mask=[1])])
        grpo(overlong=overlong | {"counted": counted}).assign_advantages(half)
        assert half.leaves[0].intrinsic == penalty
    # by default the buffer is a fifth of the run's limit
    derived = Grpo(validate(GrpoSettings, {"overlong": {"factor": 0.5}}), max_response_tokens=50)
    trace = build_trace([Rollout(value=0.0, mask=[1] * 45), Rollout(value=0.0, mask=[1] * 40)])
    derived.assign_advantages(trace)
    assert [leaf.intrinsic for leaf, _ in trace.rollouts()] == [-0.25, 0.0]
    for wrong in ({"buffer": 0}, {"buffer": 101}, {"factor": -1.0}):
        with pytest.raises(ValueError, match="overlong"):
            overlong_penalty(**({"length": 1, "max_length": 100, "buffer": 20} | wrong))  # type: ignore[arg-type]


def test_dynamic_sampling_vector_and_rounding() -> None:
    inputs, expected = (CASES["dapo.filter_groups.verl_agent"][key] for key in ("inputs", "expected"))
    groups = [position // inputs["group_size"] for position in range(len(inputs["rewards"]))]
    kept = groups_with_spread(inputs["rewards"], groups=groups)
    assert [row for rows in kept.values() for row in rows] == expected["kept_indices"]
    assert np.std([0.1] * 3) > 0.0  # a test on the std would keep this group
    metric = [0.1, 0.1, 0.1, 1.0, None, 0.0, 0.5, None, None]
    names = ["a", "a", "a", "b", "b", "b", "lone", "fault", "fault"]
    assert groups_with_spread(metric, groups=names) == {"b": [3, 4, 5]}
    assert groups_with_spread([0.0, 0.4], groups=["a", "a"], tolerance=0.5) == {}
    with pytest.raises(ValueError, match="group names"):
        groups_with_spread([0.0, 1.0], groups=["a"])


def test_rollout_replay_vectors() -> None:
    """tests/algorithms/test_rollout_replay.py has the selection through the algorithm."""
    inputs, expected = (CASES["rollout_replay.select_prob.tau0.1"][key] for key in ("inputs", "expected"))
    scores = difficulty_scores(inputs["predicted_mean_reward"], target=inputs["alpha"], temperature=0.1)
    np.testing.assert_allclose(np.exp(scores) / np.exp(scores).sum(), expected["prob"], rtol=1e-9)
    assert difficulty_scores([0.45, 0.5]) == pytest.approx([-50.0, 0.0])
    inputs = CASES["rollout_replay.select_buffer"]["inputs"]
    keys, means = inputs["group_ids_oldest_first"], [count / 8 for count in inputs["successes_of_8"]]
    assert replayable_groups(keys, mean_rewards=means, room=0) == []
    assert len(replayable_groups(keys, mean_rewards=means, room=99)) == 4


# References and rules for every group

VALUE = st.floats(-10.0, 10.0).map(lambda value: round(value, 2))
MASK = st.lists(st.integers(0, 1), min_size=1, max_size=6)
GROUPS = st.lists(
    st.lists(st.tuples(st.one_of(st.none(), VALUE), MASK), min_size=2, max_size=4), min_size=1, max_size=4
)  # None: a fault


@given(groups=GROUPS)
def test_numpy_references(groups: Any) -> None:
    returns = [[value for value, _ in rollouts if value is not None] for rollouts in groups]
    scored = [(value, sum(mask)) for rollouts in groups for value, mask in rollouts if value is not None]
    every, lengths = np.array([value for value, _ in scored]), np.array([n for _, n in scored], dtype=int)
    assume(
        lengths.sum() > 1 and all(len(own) < 2 or np.ptp(own) == 0 or np.ptp(own) > 0.1 for own in returns)
    )

    def per_rollout(compute: Any) -> np.ndarray:
        """Return 0 for groups without spread, and else the values of the group."""
        parts = [compute(np.array(own)) if np.ptp(own) else np.zeros(len(own)) for own in returns if own]
        return np.concatenate(parts)

    def check(expected: np.ndarray, atol: float = 1e-9, **options: Any) -> None:
        grpo(**options).assign_step_advantages(traces := batch(groups))
        np.testing.assert_allclose(token_advantages(traces), np.repeat(expected, lengths), atol=atol)

    def batch_std(values: np.ndarray) -> float:
        return float(values.std(ddof=1)) if values.size > 1 else 0.0

    centred = per_rollout(lambda own: own - own.mean())
    left_out = per_rollout(lambda own: own - (own.sum() - own) / (len(own) - 1))
    check(per_rollout(lambda own: (own - own.mean()) / (own.std(ddof=1) + 1e-6)))
    check(per_rollout(lambda own: (own - own.mean()) / (own.std() + 1e-6)), advantage_std="population")
    check(left_out, advantage="leave_one_out")
    check(centred / (batch_std(every) + 1e-4), advantage_std="batch")
    check(left_out / (batch_std(left_out) + 1e-4), advantage="leave_one_out", advantage_std="batch")
    for baseline, values in ((False, every), (True, centred)):
        tokens = np.repeat(values, lengths)
        for variance, ddof in (("sample", 1), ("population", 0)):
            plus(variance=variance, group_baseline=baseline).assign_step_advantages(traces := batch(groups))
            if np.ptp(tokens) == 0.0:
                assert not token_advantages(traces).any()
            elif np.ptp(tokens) > 0.1:
                white = (tokens - tokens.mean()) / math.sqrt(tokens.var(ddof=ddof) + (1e-8 if ddof else 0.0))
                np.testing.assert_allclose(token_advantages(traces), white, atol=1e-9)


@given(
    returns=st.lists(st.floats(-100.0, 100.0).map(lambda value: round(value, 3)), min_size=2, max_size=16),
    position=st.integers(0, 16),
)
def test_an_unscorable_rollout_changes_no_bit_of_the_others(returns: list[float], position: int) -> None:
    position = min(position, len(returns))
    for compute in BOTH:
        base = compute(returns=returns)
        for hole in (None, math.nan):
            with_fault = compute(returns=[*returns[:position], hole, *returns[position:]])
            assert with_fault.values[position] == 0.0 and not with_fault.assigned[position]
            assert np.delete(with_fault.values, position).tolist() == base.values.tolist()
            assert np.delete(with_fault.assigned, position).all()
            assert (with_fault.has_signal, with_fault.reason) == (base.has_signal, base.reason)


@pytest.mark.parametrize(
    ("returns", "reason"),
    [
        ([0.7], "singleton"),
        ([None, 0.7, math.nan], "singleton"),
        ([None, None], "unscorable"),
        ([0.1, 0.1, 0.1], "no_spread"),
        ([0.3, 0.1 + 0.2, 0.3], "no_spread"),  # equal but for rounding: std is 3e-17, not 0
        ([0.1 + 0.2 - 0.3, 0.0, 0.0], "no_spread"),  # rounding of a sum that should be 0
        ([1e9, 1e9 + 0.5], "no_spread"),  # the tolerance scales with the returns
        ([0.0, 1e-6], None),
    ],
)
def test_no_signal_has_a_reason_and_exactly_zero_advantages(
    returns: list[float | None], reason: str | None
) -> None:
    for compute in BOTH:
        group = compute(returns=returns)
        assert (group.reason, group.has_signal) == (reason, reason is None)
        assert reason is None or not group.values.any()


BATCH = st.lists(
    st.tuples(VALUE, st.integers(0, 2), st.integers(0, 2), st.integers(1, 4)), min_size=2, max_size=14
)


def every_advantage(batch: Any) -> dict[str, np.ndarray]:
    """Return one array per method, per rollout or (``tokens``) per token, of rows of return, group, tree and
    number of tokens.
    """
    returns, groups, trees, lengths = (list(column) for column in zip(*batch, strict=True))
    owners = np.repeat(np.arange(len(batch)), lengths)
    by_token: dict[str, Any] = {"returns": returns, "rollout_index": owners}
    by_tree: dict[str, Any] = {"returns": returns, "trees": trees}
    mixed: dict[str, Any] = {"returns": returns, "is_demonstration": [tree == 0 for tree in trees]}
    return {
        "batch": batch_scaled_advantages_per_rollout(returns=returns, groups=groups),
        "leave_one_out": leave_one_out_batch_normalized_advantages_per_rollout(
            returns=returns, groups=groups
        ),
        "tree": tree_advantages_per_leaf(**by_tree).values,
        "tree, inner": tree_advantages_per_leaf(**by_tree, combination="inner").values,
        "mixed": mixed_group_advantages_per_rollout(**mixed, normalize_std=True).values,
        "on_policy": mixed_group_advantages_per_rollout(**mixed, statistics="on_policy").values,
        "tokens": reinforce_plus_plus_advantages_per_token(**by_token),
        "tokens, population": reinforce_plus_plus_advantages_per_token(**by_token, variance="population"),
        "tokens, baseline": reinforce_plus_plus_baseline_advantages_per_token(**by_token, groups=groups),
    }


@given(rows=BATCH, order=st.randoms(use_true_random=False))
def test_order_and_rollouts_without_a_return_change_no_bit(rows: Any, order: Any) -> None:
    base = every_advantage(rows)
    permutation = list(range(len(rows)))
    order.shuffle(permutation)
    permuted = every_advantage([rows[index] for index in permutation])
    with_fault = every_advantage([(None, *rows[0][1:3], 2), *rows])
    for name, values in base.items():
        num_lost = 2 if "tokens" in name else 1
        assert not with_fault[name][:num_lost].any(), name
        assert with_fault[name][num_lost:].tolist() == values.tolist(), name
        if "tokens" not in name:
            assert permuted[name].tolist() == values[permutation].tolist(), name


@given(
    rewards=st.lists(st.tuples(st.integers(0, 2), VALUE), min_size=1, max_size=12),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_returns_to_go_loop_over_the_definition(rewards: Any, gamma: float) -> None:
    owners, values = [owner for owner, _ in rewards], np.array([value for _, value in rewards])
    found = returns_to_go_per_token(values, rollout_index=owners, gamma=gamma)
    for token, owner in enumerate(owners):
        later = [value for other, value in rewards[token:] if other == owner]
        expected = math.fsum(gamma**k * value for k, value in enumerate(later))
        assert found[token] == pytest.approx(expected, abs=1e-9)


# Single rules


def test_each_kind_of_advantage_by_hand() -> None:
    """Returns of 1, 3, a fault, and 6 of which 1 is intrinsic: the mean is 10 / 3."""
    trace = build_trace([Rollout(value=value) for value in (1.0, 3.0, None, 5.0)])
    trace.leaves[3].intrinsic = 1.0
    assert total_returns(trace) == [1.0, 3.0, None, 6.0]
    centred = np.array([1 - 10 / 3, 3 - 10 / 3, 0.0, 6 - 10 / 3])
    std = (sum(centred**2) / 2) ** 0.5
    for kind, expected in (
        ("group_centered", centred),
        ("leave_one_out", np.array([1 - 4.5, 3 - 3.5, 0.0, 6 - 2.0])),
        ("group_normalized", centred / (std + 1e-6)),
    ):
        assert outcome_advantages(trace, kind).values.tolist() == pytest.approx(expected)  # type: ignore[arg-type]
    found = group_advantages(total_returns(trace), "group_normalized", std_ddof=0)
    assert found.values.tolist() == pytest.approx(centred / (std * (2 / 3) ** 0.5 + 1e-6))
    assert found.assigned.tolist() == [True, True, False, True]


def test_a_good_demonstration_among_failures() -> None:
    """Mixed: 7/8 and -1/8. Relative to the policy's rollouts alone, whose std is 0, only the demonstration
    has an advantage.
    """
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
        found = mixed_group_advantages_per_rollout(
            returns=returns, is_demonstration=[False, False, True], statistics="on_policy"
        )
        assert (found.has_signal, found.reason, found.values.tolist()) == (False, reason, [0.0] * 3)
        assert found.assigned.tolist() == [value is not None for value in returns]


def test_algorithms_with_statistics_of_the_batch_get_the_whole_batch() -> None:
    """The advantages of the first group depend on the returns of the second; those of GRPO do not."""
    algorithms: list[tuple[Algorithm, bool]] = [
        (grpo(advantage_std="batch"), True),
        (plus(), True),
        (plus(group_baseline=True), True),
        (grpo(), False),
    ]
    for algorithm, depends in algorithms:
        found = []
        for far in (1.0, 50.0):
            traces = batch([[(0.0, [1]), (1.0, [1])], [(0.0, [1]), (far, [1])]])
            algorithm.assign_step_advantages(traces)
            found.append(traces[0].leaves[1].advantage)
        assert (found[0] != found[1]) is depends


def test_a_group_of_one_never_gets_its_raw_return() -> None:
    """Only REINFORCE++ samples groups of one: their advantages are relative to the batch."""
    for wrong in ({}, {"preset": "rloo-paper"}, {"preset": "dapo-paper"}):
        with pytest.raises(ConfigError, match="group_size"):
            validate(GrpoSettings, wrong | {"group_size": 1})
    with pytest.raises(ConfigError, match="no baseline"):
        validate(ReinforcePlusPlusSettings, {"group_size": 1, "group_baseline": True})
    algorithm = plus(group_size=1)
    assert algorithm.modes == ("on_policy",)
    first, second = algorithm.assign_step_advantages(batch([[(2.0, [1])], [(4.0, [1, 0, 1])]]))
    assert first.advantages.has_signal
    assert first.advantages.values[0] == pytest.approx(-4 / 3 / math.sqrt(4 / 3), rel=1e-6)
    assert second.advantages.values[0] == pytest.approx(2 / 3 / math.sqrt(4 / 3), rel=1e-6)
    survivors = batch([[(2.0, [1]), (None, [1])], [(0.0, [1]), (1.0, [1])]])  # faults leave a group of one
    plus(group_baseline=True).assign_step_advantages(survivors)
    # 0 before whitening, and the others' mean is 0
    assert survivors[0].leaves[0].advantage == pytest.approx(0.0, abs=1e-12)


def test_the_kl_of_the_reward_is_summed_over_a_rollout() -> None:
    """TRL's RLOO: the sum of k1 over the tokens is subtracted from the return before leave-one-out."""
    trace = build_trace(
        [
            Rollout(value=1.0, mask=[1, 0, 1], kl=[0.5, 0.25]),
            Rollout(value=0.0, mask=[1], kl=[-2.0]),
            Rollout(value=0.5, mask=[0], kl=[]),
        ]
    )
    [result] = grpo(preset="rloo-paper").assign_step_advantages([trace])
    shaped = np.array([1.0 - 0.05 * 0.75, 0.1, 0.5])
    np.testing.assert_allclose(result.advantages.values, (shaped - shaped.mean()) * 1.5, atol=1e-12)
    assert result.measurements["reward/kl_mean"] == [0.75, -2.0, 0.0]
    for algorithm in (grpo(reward_kl_weight=0.1), plus(reward_kl_weight=0.1)):
        with pytest.raises(ValueError, match="no KL"):
            algorithm.assign_step_advantages([build_trace([Rollout(value=1.0), Rollout(value=0.0)])])


@pytest.mark.parametrize(
    ("weight", "has_reference", "is_measured"), [(0.1, True, True), (0.1, False, False), (0.0, True, False)]
)
def test_the_kl_that_the_reward_counts_is_measured_before_the_advantages(
    weight: float, has_reference: bool, is_measured: bool
) -> None:
    calls: list[Any] = []
    traces: list[Any] = ["one", "two"]
    parts: Any = SimpleNamespace(
        settings=SimpleNamespace(algorithm=GroupSettings(reward_kl_weight=weight)),
        learner=SimpleNamespace(has_reference=has_reference, score=lambda given: calls.append(("KL", given))),
        algorithm=SimpleNamespace(assign_step_advantages=lambda given: calls.append(given) or ["a", "b"]),
    )
    assert trainer.assign_step_advantages(parts, traces) == ["a", "b"]
    assert calls == [*([("KL", traces)] if is_measured else []), traces]


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (GrpoSettings, {"advantage": "group_centered", "advantage_std": "batch"}, "divides by no std"),
    (GrpoSettings, {"advantage": "leave_one_out", "advantage_std": "population"}, "no meaning"),
    (GrpoSettings, {"overlong": {"max_tokens": 10, "buffer": 11}}, "exceeds"),
    (ReinforcePlusPlusSettings, {"advantage": "leave_one_out"}, "remove advantage"),
    (ReinforcePlusPlusSettings, {"group_baseline": True, "gamma": 0.9}, "one value"),
    (ReinforcePlusPlusSettings, {"group_baseline": True, "reward_kl_weight": 0.1}, "one value"),
    (ReinforcePlusPlusSettings, {"gamma": 1.1}, "gamma"),
]


@pytest.mark.parametrize(("kind", "wrong", "message"), WRONG, ids=str)
def test_settings_without_meaning_are_errors(kind: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(kind, wrong)


def test_no_signal_of_batches_and_trees_is_exactly_zero_and_invalid_input_raises() -> None:
    same: dict[str, Any] = {"returns": [0.1, 0.1, 0.1 + 1e-17], "rollout_index": [0, 0, 1, 2]}
    assert not reinforce_plus_plus_advantages_per_token(**same).any()
    assert not reinforce_plus_plus_baseline_advantages_per_token(**same, groups=["a", "a", "b"]).any()
    assert whitened_per_token(np.array([3.0])).tolist() == [0.0]
    two = whitened_per_token(np.array([math.nan, 1.0, 3.0]), variance="population")
    assert two.tolist() == [0.0, -1.0, 1.0]
    assert not batch_scaled_advantages_per_rollout(returns=[0.5, 0.5], groups=[0, 0], eps=0.1).any()
    trees: list[tuple[list[float | None], list[str], Any, str]] = [
        ([0.5], ["a"], "sum", "singleton"),
        ([None, None], ["a", "b"], "sum", "unscorable"),
        ([0.2, 0.2], ["a", "a"], "inner", "no_spread"),
        ([0.2, 0.8], ["a", "b"], "inner", "singleton"),
        ([0.2, 0.2, 0.8], ["a", "a", "b"], "nested", "no_spread"),
    ]
    for returns, names, combination, reason in trees:
        found = tree_advantages_per_leaf(returns=returns, trees=names, combination=combination)
        assert (found.has_signal, found.reason, found.values.any()) == (False, reason, False)
    one: dict[str, Any] = {"returns": [1.0], "rollout_index": [0]}
    calls: list[tuple[str, Any]] = [
        ("at least one", lambda: group_normalized_advantages_per_rollout(returns=[])),
        ("infinite", lambda: leave_one_out_advantages_per_rollout(returns=[1.0, math.inf])),
        ("eps", lambda: group_normalized_advantages_per_rollout(returns=[1.0, 0.0], eps=-1.0)),
        ("belong together", lambda: token_rewards_per_token(**one, kl_weight=0.1)),
        ("belong together", lambda: token_rewards_per_token(**one, kl_per_token=np.zeros(1))),
        ("gamma", lambda: returns_to_go_per_token(np.zeros(1), rollout_index=[0], gamma=1.5)),
        ("infinite", lambda: batch_scaled_advantages_per_rollout(returns=[1.0, math.inf], groups=[0, 0])),
        ("eps", lambda: batch_scaled_advantages_per_rollout(returns=[1.0, 0.0], groups=[0, 0], eps=-1.0)),
        ("group names", lambda: tree_advantages_per_leaf(returns=[1.0, 0.0], trees=["a"])),
        (
            "marks",
            lambda: mixed_group_advantages_per_rollout(returns=[0.0, 1.0], is_demonstration=[True]),
        ),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()


# Writing advantages to a trace


def forked(num_leaves: int = 2) -> Trace:
    """Return a trace with a turn of two tokens that all rollouts share, and a turn of one token for each."""
    trace = new_trace()
    shared = add_node(trace, add_node(trace, None, Origin.PROMPT), Origin.POLICY, num_tokens=2)
    for rollout in range(num_leaves):
        finish(trace, add_node(trace, shared, Origin.POLICY), float(rollout))
    return trace


def test_a_shared_node_gets_the_advantage_and_scale_of_each_rollout_or_their_mean() -> None:
    """Advantages of -0.5 and 0.5."""
    soft = forked()
    write_advantages(soft, outcome_advantages(soft, "group_centered"), [1.5, 1.25], attribution="soft")
    assert soft.nodes[1].shares == {0: Share((-0.5, -0.5), 1.5), 1: Share((0.5, 0.5), 1.25)}
    assert [(node.credit, node.ratio_scale) for node in soft.nodes[2:]] == [((-0.5,), 1.5), ((0.5,), 1.25)]
    assert [soft.leaves[rollout].advantage for rollout in (0, 1)] == [-0.5, 0.5]
    hard = forked(3)
    hard.leaves[2].episode_return = 5.0  # advantages of -2, -1 and 3
    write_advantages(hard, outcome_advantages(hard, "group_centered"), [1.5] * 3, attribution="hard")
    assert [(node.credit, node.ratio_scale, node.owner) for node in hard.nodes[1:]] == [
        ((0.0, 0.0), 1.5, 0), ((-2.0,), 1.5, None), ((-1.0,), 1.5, None), ((3.0,), 1.5, None),
    ]  # fmt: skip


def test_advantages_are_written_once_and_shared_nodes_need_an_attribution() -> None:
    advantages = outcome_advantages(forked(), "group_centered")
    with pytest.raises(ValueError, match="already has"):
        write_advantages(forked(), advantages)
    with pytest.raises(ValueError, match="differently"):
        write_advantages(forked(), advantages, [1.0, 1.5], attribution="hard")
    for trace, attribution in ((batch([[(0.0, [1]), (1.0, [1])]])[0], None), (forked(), "soft")):
        write_advantages(trace, advantages, attribution=attribution)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="already has"):
            write_advantages(trace, advantages, attribution=attribution)  # type: ignore[arg-type]
    for algorithm in (grpo(), plus()):
        algorithm.assign_step_advantages(traces := batch([[(0.0, [1]), (1.0, [1])]]))
        with pytest.raises(ValueError, match="already has"):
            algorithm.assign_step_advantages(traces)
    shared = forked()
    with pytest.raises(ValueError, match="already has"):
        plus().assign_advantages(shared)
    assert all(node.credit is None for node in shared.nodes)


def test_nodes_of_a_rollout_that_a_fault_ended_get_no_advantage() -> None:
    trace = build_trace([Rollout(value=0.0), Rollout(value=1.0), Rollout(value=3.0)])
    trace.leaves[1].episode_return = None
    write_advantages(trace, outcome_advantages(trace, "group_centered"))
    assert [(node.credit, node.ratio_scale) for node in trace.nodes[1:]] == [
        ((-1.5,), 1.0), (None, 1.0), ((1.5,), 1.0),
    ]  # fmt: skip
    assert [trace.leaves[rollout].advantage for rollout in range(3)] == [-1.5, None, 1.5]
