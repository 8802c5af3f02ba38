"""Soft and hard attribution against the exact policy gradient, by enumeration of every group on a two-turn
tree.

Two rollouts begin at the prompt, and one leaves each of them after the first turn: four leaves, two shared
first turns. With leave-one-out advantages a group of independent rollouts is unbiased; here a leaf's sibling
sits in its own baseline.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from outrider.algorithms.base import Attribution, outcome_advantages, write_advantages
from outrider.trace import Trace
from outrider.training.packing import RolloutPath, advantages_by_rollout
from outrider.types import Origin
from tests.algorithms.builders import add_node, finish, new_trace

ACTIONS, FIRST_WAVE, LEAVES = 3, 2, 4


def policy_and_returns(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.Generator(np.random.PCG64(seed))
    first, second = draw.dirichlet(np.ones(ACTIONS)), draw.dirichlet(np.ones(ACTIONS), size=ACTIONS)
    return first, second, draw.normal(size=(ACTIONS, ACTIONS))


def exact_gradient(first: np.ndarray, second: np.ndarray, returns: np.ndarray) -> np.ndarray:
    """[1 + ACTIONS, ACTIONS]: of the expected return in the logits of the first turn and of each second
    turn.
    """
    values = (second * returns).sum(axis=1)
    top = first * (values - first @ values)
    below = first[:, None] * second * (returns - values[:, None])
    return np.vstack([top, below])


def groups(first: np.ndarray, second: np.ndarray) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """Every group with its probability: the shared first actions, and the four second ones."""
    for tops in product(range(ACTIONS), repeat=FIRST_WAVE):
        for belows in product(range(ACTIONS), repeat=LEAVES):
            chance = np.prod(first[list(tops)]) * np.prod(
                [second[tops[leaf % FIRST_WAVE], b] for leaf, b in enumerate(belows)]
            )
            yield float(chance), tops, belows


def trace_of(tops: tuple[int, ...], belows: tuple[int, ...], returns: np.ndarray) -> Trace:
    trace = new_trace()
    root = add_node(trace, None, Origin.PROMPT)
    shared = [add_node(trace, root, Origin.POLICY, token_ids=(action,)) for action in tops]
    for leaf, action in enumerate(belows):
        top = leaf % FIRST_WAVE
        node = add_node(trace, shared[top], Origin.POLICY, token_ids=(action,))
        finish(trace, node, float(returns[tops[top], action]))
    return trace


def expected_estimate(
    first: np.ndarray, second: np.ndarray, returns: np.ndarray, attribution: Attribution
) -> np.ndarray:
    """The mean over all groups of 1/M times the credited score functions, as the update counts them."""
    total = np.zeros((1 + ACTIONS, ACTIONS))
    for chance, tops, belows in groups(first, second):
        trace = trace_of(tops, belows, returns)
        write_advantages(trace, outcome_advantages(trace, "leave_one_out"), attribution=attribution)
        for leaf, path in trace.rollouts():
            own = RolloutPath(nodes=path, rollout_index=leaf.rollout, rollout=leaf.rollout)
            turns = [node for node in path if node.trainable]
            rows = (0, 1 + turns[0].token_ids[0])
            for node, row, probabilities in zip(
                turns, rows, (first, second[turns[0].token_ids[0]]), strict=True
            ):
                for _, credit, _ in advantages_by_rollout(node, [own]):
                    score = np.eye(ACTIONS)[node.token_ids[0]] - probabilities
                    total[row] += chance * credit[0] * score / LEAVES
    return total


@pytest.mark.parametrize("seed", range(3))
def test_the_bias_of_soft_and_hard_attribution_is_the_documented_one(seed: int) -> None:
    """d = 2 leaves share a first turn: soft scales its gradient by (M - d) / (M - 1), hard by that over d;
    later turns are exact.
    """
    first, second, returns = policy_and_returns(seed)
    exact = exact_gradient(first, second, returns)
    scale = (LEAVES - 2) / (LEAVES - 1)
    for attribution, factor in (("soft", scale), ("hard", scale / 2)):
        found = expected_estimate(first, second, returns, attribution)  # type: ignore[arg-type]
        np.testing.assert_allclose(found[1:], exact[1:], atol=1e-12)
        np.testing.assert_allclose(found[0], factor * exact[0], atol=1e-12)
    assert np.abs(exact[0]).max() > 1e-3
