"""GiGPO: the released code's numbers, a numpy reference, rules for every group, and groups built by hand."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.base import GroupAdvantages
from outrider.algorithms.gigpo import (
    Gigpo,
    GigpoSettings,
    anchor_groups,
    discounted_returns_per_turn,
    episode_advantages_per_turn,
    reward_without_step,
    step_advantages_per_turn,
    step_returns,
)
from outrider.config import to_toml, validate
from outrider.errors import ConfigError
from outrider.trace import Node, Trace, policy_turns
from outrider.types import Origin
from tests.algorithms.builders import add_node, finish, new_trace
from tests.vectors import load_vector, load_vectors

CASES = load_vectors("gigpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """``states[t]`` is the observation that turn t acted on; ``extra`` is the part of the return that no step
    reward contains.
    """

    states: Sequence[str]
    rewards: Sequence[float]
    invalid: Sequence[bool] = ()
    extra: float = 0.0

    @property
    def episode_return(self) -> float:
        return math.fsum(self.rewards) + self.extra

    def is_invalid(self, turn: int) -> bool:
        return bool(self.invalid) and self.invalid[turn]


def build(episodes: Sequence[Episode]) -> tuple[Trace, list[list[Node]]]:
    """Return the group of these episodes, and the policy nodes of each, which have two tokens."""
    trace = new_trace()
    prompts: dict[str, Node] = {}
    turns: list[list[Node]] = []
    for rollout, episode in enumerate(episodes):
        turns.append([])
        node = None if episode.states else add_node(trace, None, Origin.PROMPT, "nothing")
        for turn, (state, reward) in enumerate(zip(episode.states, episode.rewards, strict=True)):
            if node is not None:
                node = add_node(trace, node, Origin.ENVIRONMENT, state)
            else:
                if state not in prompts:
                    prompts[state] = add_node(trace, None, Origin.PROMPT, state)
                node = prompts[state]
            metadata = {"invalid": episode.is_invalid(turn)}
            node = add_node(
                trace,
                node,
                Origin.POLICY,
                f"{rollout}/{turn}",
                num_tokens=2,
                reward=reward,
                metadata=metadata,
            )
            turns[-1].append(node)
        finish(trace, node, episode.episode_return)
    return trace, turns


def assign(episodes: Sequence[Episode], **options: Any) -> tuple[list[list[float]], GroupAdvantages]:
    """Return the advantage of every turn, and the result of the algorithm."""
    trace, turns = build(episodes)
    result = Gigpo(validate(GigpoSettings, options)).assign_advantages(trace)
    values = []
    for own in turns:
        values.append([node.credit[0] for node in own if node.credit is not None])
        assert all(node.credit == (value,) * 2 for node, value in zip(own, values[-1], strict=True))
    return values, result


def flat(values: Sequence[Sequence[float]]) -> list[float]:
    return [value for own in values for value in own]


def episodes_of(name: str) -> list[Episode]:
    return [Episode(**episode) for episode in CASES[name]["inputs"]["episodes"]]


SMALL = episodes_of("gigpo.worked_group")


@pytest.mark.parametrize("normalization", ["none", "std"])
def test_small_vector(normalization: Any) -> None:
    everything = CASES["gigpo.worked_group"]["expected"]
    expected = everything[normalization]
    returns = flat([discounted_returns_per_turn(episode.rewards, gamma=0.95) for episode in SMALL])
    assert returns == pytest.approx(everything["discounted_returns"], abs=1e-12)
    scores = [episode.episode_return for episode in SMALL for _ in episode.states]
    episode_part = episode_advantages_per_turn(scores, population=scores, normalization=normalization)
    groups = anchor_groups([state for episode in SMALL for state in episode.states])
    step_part = step_advantages_per_turn(returns, groups=groups, normalization=normalization)
    assert episode_part.tolist() == pytest.approx(expected["episode"], abs=1e-6)
    assert step_part.tolist() == pytest.approx(expected["step"], abs=1e-6)
    values, _ = assign(SMALL, normalization=normalization, statistics="samples")
    assert flat(values) == pytest.approx(expected["joint"], abs=1e-6)


@pytest.mark.parametrize("normalization", ["none", "std"])
def test_released_vector(normalization: Any) -> None:
    inputs, everything = load_vector("gigpo", "gigpo.adv.verl_agent")
    expected, large = everything[normalization], episodes_of("gigpo.adv.verl_agent")
    groups = anchor_groups([state for episode in large for state in episode.states])
    assert groups == everything["groups"]
    step_part = step_advantages_per_turn(inputs["step_scores"], groups=groups, normalization=normalization)
    assert step_part.tolist() == pytest.approx(expected["step"], abs=1e-9)
    scores, first = flat(inputs["scores"]), [own[0] for own in inputs["scores"]]
    for name, population in (("over_turns", scores), ("over_first_turns", first)):
        episode_part = episode_advantages_per_turn(scores, population=population, normalization=normalization)
        assert episode_part.tolist() == pytest.approx(expected[name], abs=1e-9)
    options = {"normalization": normalization, "statistics": "samples", "invalid_penalty": 0.1}
    assert flat(assign(large, **options)[0]) == pytest.approx(expected["joint"], abs=1e-9)
    zeros, result = assign(episodes_of("gigpo.adv.verl_agent.no_spread"), **options)
    assert flat(zeros) == [0.0] * 5 and result.advantages.reason == "no_spread"


@pytest.mark.parametrize(
    ("name", "normalization", "statistics"),
    [
        ("mean_norm", "none", "samples"),
        ("mean_std_norm", "std", "samples"),
        ("mean_norm_trajectory_stats", "none", "rollouts"),
    ],
)
def test_vector_of_empo2_over_turns_and_over_trajectories(
    name: str, normalization: Any, statistics: str
) -> None:
    inputs, everything = load_vector("empo2", "gigpo")
    expected = everything[name]
    episodes = [Episode(states=one["s"], rewards=[*map(float, one["r"])]) for one in inputs["trajectories"]]
    returns = flat([discounted_returns_per_turn(one.rewards, gamma=inputs["gamma"]) for one in episodes])
    np.testing.assert_allclose(returns, expected["discounted_return"], atol=1e-4)
    options = {"gamma": inputs["gamma"], "normalization": normalization, "statistics": statistics}
    whole, episode_part = (
        flat(assign(episodes, step_weight=weight, **options)[0]) for weight in (inputs["omega"], 0.0)
    )
    np.testing.assert_allclose(whole, expected["A"], atol=1e-4)
    np.testing.assert_allclose(episode_part, expected["A_E"], atol=1e-4)
    np.testing.assert_allclose(np.subtract(whole, episode_part), expected["A_S"], atol=1e-4)


def test_statistics_over_turns_favour_long_episodes() -> None:
    """The earlier form of EMPO²'s released code is ``statistics = "samples"``."""
    inputs, expected = load_vector("empo2", "grpo_row_level_bias")
    rows = np.repeat(inputs["returns"], inputs["turns"])
    found = episode_advantages_per_turn(inputs["returns"], population=rows, normalization="std")
    np.testing.assert_allclose(found, expected["advantage_per_rollout"], atol=1e-4)
    returns = inputs["returns"]
    ours = episode_advantages_per_turn(returns, population=returns, normalization="std")
    np.testing.assert_allclose(ours, expected["rollout_level_for_comparison"], atol=1e-4)


def reference(
    episodes: Sequence[Episode], *, gamma: float, omega: float, std: bool, penalty: float, over_turns: bool
) -> list[list[float]]:
    """The definition with plain loops and numpy's own mean and std."""

    def relative(value: float, population: list[float]) -> float:
        array = np.array(population)
        if len(array) < 2 or np.ptp(array) <= 1e-9 * max(1.0, np.abs(array).max()):
            return 0.0
        return float((value - array.mean()) / (array.std(ddof=1) + 1e-6 if std else 1.0))

    turns = []
    for rollout, episode in enumerate(episodes):
        rewards = [*episode.rewards[:-1], episode.rewards[-1] + episode.extra]
        for t, state in enumerate(episode.states):
            fine = penalty * episode.is_invalid(t)
            to_go = sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
            turns.append((rollout, state, episode.episode_return - fine, to_go - fine))
    scores = [[turn[2] for turn in turns if turn[0] == rollout] for rollout in range(len(episodes))]
    population = flat(scores) if over_turns else [float(np.mean(own)) for own in scores]
    values: list[list[float]] = [[] for _ in episodes]
    for rollout, state, score, to_go in turns:
        step = relative(to_go, [other[3] for other in turns if other[1] == state])
        values[rollout].append(relative(score, population) + omega * step)
    return values


REWARDS = st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.5])


@st.composite
def groups_of_episodes(draw: st.DrawFn, states: Sequence[str] = ("a", "b", "c")) -> list[Episode]:
    """A few rollouts over few states, so that anchors are shared and met again."""
    episodes = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 5))
        episodes.append(
            Episode(
                states=tuple(draw(st.lists(st.sampled_from(states), min_size=size, max_size=size))),
                rewards=tuple(draw(st.lists(REWARDS, min_size=size, max_size=size))),
                invalid=tuple(draw(st.lists(st.booleans(), min_size=size, max_size=size))),
                extra=draw(st.sampled_from([0.0, 0.0, 1.0, -3.0])),
            )
        )
    return episodes


@given(
    episodes=groups_of_episodes(), gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    omega=st.sampled_from([0.0, 0.7, 1.0]), normalization=st.sampled_from(["none", "std"]),
    penalty=st.sampled_from([0.0, 0.1]), over_turns=st.booleans(),
)  # fmt: skip
def test_numpy_reference(
    episodes: list[Episode], gamma: float, omega: float, normalization: str, penalty: float, over_turns: bool
) -> None:
    values, result = assign(
        episodes, gamma=gamma, step_weight=omega, normalization=normalization, invalid_penalty=penalty,
        statistics="samples" if over_turns else "rollouts",
    )  # fmt: skip
    expected = reference(
        episodes, gamma=gamma, omega=omega, std=normalization == "std", penalty=penalty, over_turns=over_turns
    )  # fmt: skip
    np.testing.assert_allclose(flat(values), flat(expected), rtol=1e-7, atol=1e-9)
    assert result.advantages.has_signal is any(value != 0.0 for value in flat(values))
    assert (result.advantages.reason is None) is result.advantages.has_signal


@given(
    episodes=groups_of_episodes(states=("the red room", "the red rooms", "a blue hall", "a blue hill")),
    order=st.randoms(use_true_random=False), similarity=st.sampled_from(["exact", 0.8]),
    normalization=st.sampled_from(["none", "std"]), statistics=st.sampled_from(["rollouts", "samples"]),
)  # fmt: skip
def test_the_order_of_the_rollouts_changes_no_bit(
    episodes: list[Episode], order: Any, similarity: Any, normalization: str, statistics: str
) -> None:
    options = {"similarity": similarity, "normalization": normalization, "statistics": statistics}
    permutation = list(range(len(episodes)))
    order.shuffle(permutation)
    base, result = assign(episodes, invalid_penalty=0.1, **options)
    moved, other = assign([episodes[index] for index in permutation], invalid_penalty=0.1, **options)
    assert moved == [base[index] for index in permutation]
    assert other.advantages.values.tolist() == result.advantages.values[permutation].tolist()
    for name, values in result.measurements.items():
        assert sorted(other.measurements[name]) == sorted(values)


@given(
    episodes=groups_of_episodes(),
    omega=st.sampled_from([0.5, 1.0]),
    normalization=st.sampled_from(["std", "none"]),
)
def test_distinct_anchors_leave_the_episode_part_and_a_common_start_counts_twice(
    episodes: list[Episode], omega: float, normalization: str
) -> None:
    """With gamma 1 the step return of a first turn is the return of its episode."""
    alone = [
        Episode(
            states=("start", *(f"{n}/{t}" for t in range(1, len(e.states)))), rewards=e.rewards, extra=e.extra
        )
        for n, e in enumerate(episodes)
    ]
    values, result = assign(alone, gamma=1.0, step_weight=omega, normalization=normalization)
    for own, of_episode in zip(values, result.advantages.values, strict=True):
        assert own[0] == pytest.approx((1.0 + omega) * of_episode, abs=1e-9)
        assert own[1:] == [of_episode] * (len(own) - 1)


@pytest.mark.parametrize("statistics", ["rollouts", "samples"])
def test_a_rollout_that_a_fault_ended_changes_no_bit_of_the_others(statistics: str) -> None:
    algorithm = Gigpo(validate(GigpoSettings, {"statistics": statistics}))
    base, turns = build(SMALL)
    trace, others = build(SMALL)
    lost = add_node(trace, 0, Origin.POLICY, "lost", reward=99.0)
    finish(trace, lost, None)
    plain, result = algorithm.assign_advantages(base), algorithm.assign_advantages(trace)
    assert [node.credit for own in others for node in own] == [node.credit for own in turns for node in own]
    assert lost.credit is None and trace.leaves[3].advantage is None
    assert result.advantages.values.tolist() == [*plain.advantages.values.tolist(), 0.0]
    assert result.advantages.assigned.tolist() == [True, True, True, False]
    assert result.measurements == plain.measurements
    empty = new_trace()
    finish(empty, None, None)
    assert algorithm.assign_advantages(empty).advantages.reason == "unscorable"


def test_gamma_at_its_ends_and_invalid_values() -> None:
    rewards = [1.0, 0.0, 2.0]
    assert discounted_returns_per_turn(rewards, gamma=0.0) == rewards
    assert discounted_returns_per_turn(rewards, gamma=1.0) == [3.0, 2.0, 2.0]
    assert discounted_returns_per_turn(rewards, gamma=0.5) == [1.5, 1.0, 2.0]
    assert discounted_returns_per_turn([], gamma=0.5) == []
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="gamma"):
            discounted_returns_per_turn(rewards, gamma=wrong)
    for reward in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            discounted_returns_per_turn([reward], gamma=1.0)
    with pytest.raises(ValueError, match="anchor groups"):
        step_advantages_per_turn([1.0], groups=[0, 0], normalization="none")


def test_the_std_is_that_of_the_sample_and_no_spread_is_exactly_zero() -> None:
    found = step_advantages_per_turn([1.0, 0.0, 7.0], groups=[0, 0, 1], normalization="std")
    assert found.tolist() == pytest.approx(
        [0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6), 0.0], rel=1e-12
    )
    for normalization in ("none", "std"):
        chosen: dict[str, Any] = {"normalization": normalization}
        assert not step_advantages_per_turn([0.3, 0.1 + 0.2], groups=[0, 0], **chosen).any()
        assert not episode_advantages_per_turn([5.0, 4.9], population=[5.0], **chosen).any()
        assert not episode_advantages_per_turn([5.0], population=[], **chosen).any()


def plain_leaders(texts: Sequence[str], threshold: float) -> dict[str, str]:
    leaders: list[str] = []
    found = {}
    for text in sorted(set(texts)):
        for leader in leaders:
            if SequenceMatcher(None, leader, text, autojunk=False).ratio() >= threshold:
                found[text] = leader
                break
        else:
            leaders.append(text)
            found[text] = text
    return found


@given(
    texts=st.lists(st.text("ab c", max_size=9), max_size=8), threshold=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
    order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_similar_texts_share_an_anchor_whatever_their_order(
    texts: list[str], threshold: float, order: Any
) -> None:
    groups = anchor_groups(texts, similarity=threshold)
    leaders = plain_leaders(texts, threshold)
    shuffled = list(texts)
    order.shuffle(shuffled)
    of_shuffled = dict(zip(shuffled, anchor_groups(shuffled, similarity=threshold), strict=True))
    for first, one in zip(texts, groups, strict=True):
        for second, other in zip(texts, groups, strict=True):
            assert (
                (one == other)
                is (leaders[first] == leaders[second])
                is (of_shuffled[first] == of_shuffled[second])
            )
    if threshold == 1.0:
        assert groups == anchor_groups(texts)


@pytest.mark.parametrize("texts", list(permutations(("aaaa", "aaab", "aabb"))))
def test_a_chain_of_similar_texts_is_cut_at_the_same_place_in_every_order(texts: tuple[str, ...]) -> None:
    """Neighbours resemble each other (0.75), the ends do not (0.5): the alphabetically first text leads."""
    groups = dict(zip(texts, anchor_groups(texts, similarity=0.7), strict=True))
    assert groups["aaaa"] == groups["aaab"] != groups["aabb"]


def test_long_texts_are_compared_whole() -> None:
    """difflib's autojunk, which the released code leaves on, ignores the characters that make up a long
    text.
    """
    one, other = "x" + "ab" * 150, "y" + "ab" * 150
    assert SequenceMatcher(None, one, other).ratio() < 0.5
    assert anchor_groups([one, other], similarity=0.95) == [0, 0]
    assert anchor_groups([one, other]) == [0, 1]
    for wrong in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="similarity"):
            anchor_groups([one], similarity=wrong)


# Groups built by hand


def test_the_anchor_is_the_newest_text_of_the_environment() -> None:
    trace = new_trace()
    node = add_node(trace, None, Origin.PROMPT, "question")
    script = [
        (Origin.MEMORY, "tip"), (Origin.POLICY, "one"), (Origin.ENVIRONMENT, "door"), (Origin.MEMORY, "tip"),
        (Origin.POLICY, "two"), (Origin.ENVIRONMENT, ""), (Origin.POLICY, "three"), (Origin.BUFFER, "shown"),
        (Origin.POLICY, "four"), (Origin.BUFFER, "done"), (Origin.POLICY, "five"),
    ]  # fmt: skip
    for origin, text in script:
        node = add_node(trace, node, origin, text)
        if text == "done":  # a retrieved step that was executed: its observation is of this environment
            node.metadata["num_tool_calls"] = 1
    found = [(turn.node.message.content, turn.observation) for turn in policy_turns(trace.path(node.node_id))]
    expected = ["question", "door", "door", "door", "done"]
    assert found == list(zip(["one", "two", "three", "four", "five"], expected, strict=True))


def test_a_retrieved_step_takes_one_step_of_time_and_its_reward_belongs_to_earlier_turns() -> None:
    trace = new_trace()
    node = add_node(trace, None, Origin.PROMPT)
    steps = [(Origin.POLICY, 0.0), (Origin.BUFFER, 0.5), (Origin.POLICY, 1.0), (Origin.BUFFER, 0.25)]
    for origin, reward in steps:
        node = add_node(trace, node, origin, reward=reward)
    path = trace.path(node.node_id)
    # 0.25 + 0.25 + 0.03125 and 1 + 0.125
    assert step_returns(path, episode_return=1.75, gamma=0.5) == [0.53125, 1.125]
    # 2 more on the last policy turn
    assert step_returns(path, episode_return=3.75, gamma=0.5) == [1.03125, 3.125]
    assert step_returns(path[:1], episode_return=1.0, gamma=0.5) == []


def test_the_return_that_no_step_reward_contains_is_added_to_the_last_turn_and_measured() -> None:
    paid_at_the_end = [
        Episode(states=("s", "x"), rewards=(0.0, 0.0), extra=1.0),
        Episode(states=("s", "y"), rewards=(0.5, 0.0), extra=-0.5),
    ]
    trace, turns = build(paid_at_the_end)
    (_, first), (_, second) = trace.rollouts()
    assert step_returns(first, episode_return=1.0, gamma=0.5) == [0.5, 1.0]
    assert step_returns(second, episode_return=0.0, gamma=0.5) == [0.25, -0.5]
    assert reward_without_step(second, episode_return=0.0) == -0.5
    result = Gigpo(validate(GigpoSettings, {"gamma": 0.5})).assign_advantages(trace)
    assert result.measurements["gigpo/reward_without_step_abs"] == [1.0, 0.5]
    assert turns[0][0].credit == pytest.approx((0.5 + 0.125,) * 2)
    assert turns[1][1].credit == pytest.approx((-0.5,) * 2)


def test_the_measurements_of_a_small_group() -> None:
    _, result = assign(SMALL)
    found = {name.removeprefix("gigpo/"): values for name, values in result.measurements.items()}
    assert found["anchor_group_size"] == [3.0, 3.0, 2.0, 1.0]
    assert found["share_alone"] == [0.0] * 6 + [1.0] + [0.0] * 2
    # statistics over one return per rollout
    expected = [10.0 / 3.0] * 3 + [20.0 / 3.0] * 4 + [10.0 / 3.0] * 2
    assert found["episode_advantage_abs"] == pytest.approx(expected)
    step = CASES["gigpo.worked_group"]["expected"]["none"]["step"]
    assert found["step_advantage_abs"] == pytest.approx([abs(value) for value in step], abs=1e-6)
    assert result.advantages.values.tolist() == pytest.approx([10.0 / 3.0, -20.0 / 3.0, 10.0 / 3.0])


def test_the_step_part_alone_is_a_signal() -> None:
    """Equal returns: the quicker rollout is preferred, and in a rollout that returns to a state, its last
    action there.
    """
    both = [Episode(states=("s",), rewards=(1.0,)), Episode(states=("s", "x"), rewards=(0.0, 1.0))]
    values, result = assign(both, gamma=0.9, step_weight=2.0)
    assert values == [pytest.approx([0.1]), pytest.approx([-0.1, 0.0])]
    assert result.advantages.values.tolist() == [0.0, 0.0]
    assert result.advantages.has_signal and result.advantages.reason is None
    values, result = assign([Episode(states=("s", "x", "x"), rewards=(0.0, 0.0, 1.0))])
    assert values == [pytest.approx([0.0, -0.025, 0.025])]
    assert result.advantages.has_signal and result.advantages.reason is None


def test_no_signal_has_a_reason_and_a_rollout_without_a_turn_counts_in_the_episode_part_only() -> None:
    same, silent = Episode(states=("s",), rewards=(1.0,)), Episode(states=(), rewards=(), extra=1.0)
    nothing = Episode(states=(), rewards=())
    for episodes, reason in (
        ([same, same], "no_spread"),
        ([same], "singleton"),
        ([silent, nothing], "no_spread"),
    ):
        values, result = assign(episodes)
        assert flat(values) == [0.0] * sum(len(episode.states) for episode in episodes)
        assert (result.advantages.has_signal, result.advantages.reason) == (False, reason)
    values, result = assign([Episode(states=(), rewards=(), extra=-1.0), same])
    assert values == [[], [1.0]] and result.advantages.values.tolist() == [-1.0, 1.0]


def test_shared_and_assigned_nodes_are_errors_before_anything_is_written() -> None:
    trace = new_trace()
    shared = add_node(trace, add_node(trace, None, Origin.PROMPT), Origin.POLICY)
    for rollout in range(2):
        finish(trace, add_node(trace, shared, Origin.POLICY, str(rollout)), float(rollout))
    algorithm = Gigpo(validate(GigpoSettings, {}))
    with pytest.raises(ValueError, match=f"node {shared.node_id} already has"):
        algorithm.assign_advantages(trace)
    assert all(node.credit is None for node in trace.nodes)
    group, _ = build(SMALL)
    algorithm.assign_advantages(group)
    with pytest.raises(ValueError, match="already has"):
        algorithm.assign_advantages(group)


def test_turn_numbers_as_anchors() -> None:
    """MT-GRPO for any number of turns: the step reward of a turn against that of the same turn number; a
    turn alone at its number has the episode part only.
    """
    rewards, returns = [[0.0, 1.0, 0.0], [0.5, 0.0], [0.0, 0.0, 1.0, 0.0]], [1.0, 0.0, 1.0]
    episodes = [
        Episode(states=["room"] * len(own), rewards=own, extra=value - sum(own))
        for own, value in zip(rewards, returns, strict=True)
    ]
    values, _ = assign(episodes, anchor="turn")
    expected = [
        [0.166666666667, 1.0, -0.166666666667],
        [-0.333333333333, -1.0],
        [0.166666666667, 0.0, 0.833333333333, 0.333333333333],
    ]
    for own, wanted in zip(values, expected, strict=True):
        assert own == pytest.approx(wanted, abs=1e-11)
    # Terminal rewards only: the returns are equal, and the length of an episode is no signal.
    terminal = [Episode(states=["a"] * length, rewards=[0.0] * (length - 1) + [1.0]) for length in (2, 3, 3)]
    values, result = assign(terminal, anchor="turn")
    assert not any(flat(values)) and not result.advantages.has_signal
    two_turns = [Episode(states=["a", "b"], rewards=[reward, 1.0 - reward]) for reward in (1.0, 0.0, 0.0)]
    values, _ = assign(two_turns, anchor="turn", normalization="std")
    # All returns are equal: only the step part remains, and it is the z-score of the first reward.
    assert [own[0] for own in values] == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)


@pytest.mark.parametrize("settings", [{"gamma": 0.5}, {"similarity": 0.9}])
def test_turn_numbers_need_no_discount_and_no_similarity(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="has no effect with anchor = turn"):
        validate(GigpoSettings, {"anchor": "turn", **settings})


def test_settings() -> None:
    chosen = validate(GigpoSettings, {})
    expected: dict[str, Any] = {
        "gamma": 0.95, "step_weight": 1.0, "normalization": "none", "similarity": "exact",
        "advantage": "group_centered", "statistics": "rollouts", "invalid_penalty": 0.0,
    }  # fmt: skip
    assert chosen.model_dump() == chosen.model_dump() | expected
    with_std = validate(GigpoSettings, {"normalization": "std", "similarity": 0.95})
    assert with_std.advantage == "group_normalized"
    for one in (chosen, with_std):
        # as a run directory saves it
        assert validate(GigpoSettings, tomllib.loads(to_toml(one.model_dump()))) == one
    with pytest.raises(ConfigError, match="contradicts normalization"):
        validate(GigpoSettings, {"advantage": "leave_one_out"})
    wrong_options: list[dict[str, Any]] = [
        {"similarity": 0.0}, {"similarity": "near"}, {"gamma": 1.1}, {"normalization": "mean"},
        {"step_weight": -1.0},
    ]  # fmt: skip
    for wrong in wrong_options:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            validate(GigpoSettings, wrong)
    assert Gigpo(validate(GigpoSettings, {"group_size": 3})).modes == ("on_policy",) * 3
