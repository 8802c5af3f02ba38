"""GiGPO's formulas: the released code's numbers, a numpy reference that loops over the definition, and rules
for every group.
"""

import math
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.algorithms.gigpo import (
    anchor_groups,
    discounted_returns_per_turn,
    episode_advantages_per_turn,
    step_advantages_per_turn,
)
from tests.algorithms.gigpo_groups import (
    LARGE,
    LARGE_EXPECTED,
    LARGE_GROUPS,
    LARGE_SCORES,
    LARGE_STEP_SCORES,
    LARGE_ZERO,
    SMALL,
    SMALL_EXPECTED,
    SMALL_RETURNS,
    Episode,
    credited,
    flat,
)


@pytest.mark.parametrize("normalization", ["none", "std"])
def test_small_vector(normalization: Any) -> None:
    expected = SMALL_EXPECTED[normalization]
    returns = flat([discounted_returns_per_turn(episode.rewards, gamma=0.95) for episode in SMALL])
    assert returns == pytest.approx(SMALL_RETURNS, abs=1e-12)
    scores = [episode.episode_return for episode in SMALL for _ in episode.states]
    episode_part = episode_advantages_per_turn(scores, population=scores, normalization=normalization)
    groups = anchor_groups([state for episode in SMALL for state in episode.states])
    step_part = step_advantages_per_turn(returns, groups=groups, normalization=normalization)
    assert episode_part.tolist() == pytest.approx(expected["episode"], abs=1e-6)
    assert step_part.tolist() == pytest.approx(expected["step"], abs=1e-6)
    values, _ = credited(SMALL, normalization=normalization, episode_statistics="turns")
    assert flat(values) == pytest.approx(expected["joint"], abs=1e-6)


@pytest.mark.parametrize("normalization", ["none", "std"])
def test_released_vector(normalization: Any) -> None:
    expected = LARGE_EXPECTED[normalization]
    groups = anchor_groups([state for episode in LARGE for state in episode.states])
    assert groups == LARGE_GROUPS
    step_part = step_advantages_per_turn(LARGE_STEP_SCORES, groups=groups, normalization=normalization)
    assert step_part.tolist() == pytest.approx(expected["step"], abs=1e-9)
    scores = flat(LARGE_SCORES)
    for name, population in (("over_turns", scores), ("over_first_turns", [own[0] for own in LARGE_SCORES])):
        episode_part = episode_advantages_per_turn(scores, population=population, normalization=normalization)
        assert episode_part.tolist() == pytest.approx(expected[name], abs=1e-9)
    chosen = {"normalization": normalization, "episode_statistics": "turns", "invalid_penalty": 0.1}
    values, _ = credited(LARGE, **chosen)
    assert flat(values) == pytest.approx(expected["joint"], abs=1e-9)
    zeros, credit = credited(LARGE_ZERO, **chosen)
    assert flat(zeros) == [0.0] * 5 and credit.advantages.reason == "no_spread"


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
    values, credit = credited(
        episodes, gamma=gamma, step_weight=omega, normalization=normalization, invalid_penalty=penalty,
        episode_statistics="turns" if over_turns else "rollouts",
    )  # fmt: skip
    expected = reference(
        episodes, gamma=gamma, omega=omega, std=normalization == "std", penalty=penalty, over_turns=over_turns
    )  # fmt: skip
    np.testing.assert_allclose(flat(values), flat(expected), rtol=1e-7, atol=1e-9)
    assert credit.advantages.has_signal is any(value != 0.0 for value in flat(values))
    assert (credit.advantages.reason is None) is credit.advantages.has_signal


@given(
    episodes=groups_of_episodes(states=("the red room", "the red rooms", "a blue hall", "a blue hill")),
    order=st.randoms(use_true_random=False), similarity=st.sampled_from(["exact", 0.8]),
    normalization=st.sampled_from(["none", "std"]), statistics=st.sampled_from(["rollouts", "turns"]),
)  # fmt: skip
def test_the_order_of_the_rollouts_changes_no_bit(
    episodes: list[Episode], order: Any, similarity: Any, normalization: str, statistics: str
) -> None:
    chosen = {
        "similarity": similarity,
        "normalization": normalization,
        "episode_statistics": statistics,
        "invalid_penalty": 0.1,
    }
    permutation = list(range(len(episodes)))
    order.shuffle(permutation)
    base, credit = credited(episodes, **chosen)
    moved, other = credited([episodes[index] for index in permutation], **chosen)
    assert moved == [base[index] for index in permutation]
    assert other.advantages.values.tolist() == [
        credit.advantages.values.tolist()[index] for index in permutation
    ]
    for name, values in credit.measurements.items():
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
    values, credit = credited(alone, gamma=1.0, step_weight=omega, normalization=normalization)
    for own, of_episode in zip(values, credit.advantages.values, strict=True):
        assert own[0] == pytest.approx((1.0 + omega) * of_episode, abs=1e-9)
        assert own[1:] == [of_episode] * (len(own) - 1)


def test_gamma_at_its_ends_and_what_raises() -> None:
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
