"""Retrieval, a branch and tips in one group against enumerated gradients: every group of a two-turn tree,
with its probability under the policy that acts.

Two rollouts begin at the prompt, with tips in a group that has them; one leaves each of them after the first
turn. The leaves that left are hybrid: a retrieved step stands before their second turn. So a group has four
leaves, two shared first turns, and second turns of two kinds. Tips are read at the first turn alone.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from outrider.algorithms.exploration import Combined, CombinedSettings
from outrider.algorithms.losses import TokenLossInputs
from outrider.config import validate
from outrider.memory.embedders import HashEmbedder
from outrider.trace import Node, Trace
from outrider.training.packing import pack
from outrider.training.update import MetricAccumulator, rollout_paths
from outrider.types import Origin
from tests.algorithms.builders import add_node, finish, new_trace

ACTIONS, FIRST_WAVE, LEAVES = 2, 2, 4
HYBRID = (False, False, True, True)
RETRIEVED = {"step_ids": [1], "similarity": 0.5, "agent": "expert", "source_task": "t", "num_calls_saved": 0}
NUM_RETRIEVED, NUM_TIP = 3, 5  # tokens
ROWS = 1 + 2 * ACTIONS  # first turn; second turns without and with a retrieved step


class Tree:
    """Policies and returns of one draw: ``student`` [ROWS, A] reads no tips, ``acting`` has another first
    row.
    """

    def __init__(self, seed: int) -> None:
        draw = np.random.Generator(np.random.PCG64(seed))
        self.logits = draw.normal(size=(ROWS, ACTIONS))
        self.student = np.exp(self.logits) / np.exp(self.logits).sum(axis=1, keepdims=True)
        self.acting = self.student.copy()
        self.acting[0] = draw.dirichlet(np.ones(ACTIONS) * 3)
        self.returns = draw.normal(size=(2, ACTIONS, ACTIONS))  # [is hybrid, first, second]

    def row(self, leaf: int, top: int) -> int:
        """The row of a leaf's second turn."""
        return 1 + ACTIONS * HYBRID[leaf] + top

    def groups(self, policy: np.ndarray) -> Iterator[tuple[float, tuple[int, ...], tuple[int, ...]]]:
        """Every group with its probability."""
        for tops in product(range(ACTIONS), repeat=FIRST_WAVE):
            for belows in product(range(ACTIONS), repeat=LEAVES):
                chance = np.prod(policy[0][list(tops)])
                for leaf, below in enumerate(belows):
                    chance *= policy[self.row(leaf, tops[leaf % FIRST_WAVE])][below]
                yield float(chance), tops, belows

    def exact(self) -> np.ndarray:
        """[ROWS, A]: the gradient of the mean return of a plain and a hybrid rollout, both without tips."""
        found = np.zeros((ROWS, ACTIONS))
        first = self.student[0]
        for is_hybrid in (0, 1):
            second = self.student[1 + ACTIONS * is_hybrid :][:ACTIONS]
            values = (second * self.returns[is_hybrid]).sum(axis=1)
            found[0] += first * (values - first @ values) / 2
            below = first[:, None] * second * (self.returns[is_hybrid] - values[:, None]) / 2
            found[1 + ACTIONS * is_hybrid :][:ACTIONS] = below
        return found


def entropy_of(probabilities: np.ndarray) -> float:
    return float(-(probabilities * np.log(probabilities)).sum())


def trace_of(tree: Tree, policy: np.ndarray, mode: str, tops: Any, belows: Any) -> Trace:
    trace = new_trace(modes=tuple(f"{mode}+{'hybrid' if one else 'on_policy'}" for one in HYBRID))

    def turn(parent: Node, row: int, action: int) -> Node:
        chance = policy[row]
        logprobs = (float(np.log(chance[action])),)
        entropies = [entropy_of(chance)]
        return add_node(
            trace, parent, Origin.POLICY, token_ids=(action,), logprobs=logprobs, entropies=entropies
        )

    node = add_node(trace, None, Origin.PROMPT, num_tokens=2)
    if mode != "plain":
        metadata: dict[str, Any] = {"tip_ids": [], "similarities": []}
        node = add_node(trace, node, Origin.MEMORY, num_tokens=NUM_TIP, metadata=metadata)
        node = add_node(trace, node, Origin.PROMPT)
    seen = [add_node(trace, turn(node, 0, top), Origin.ENVIRONMENT, num_tokens=2) for top in tops]
    for leaf, below in enumerate(belows):
        top, node = tops[leaf % FIRST_WAVE], seen[leaf % FIRST_WAVE]
        if HYBRID[leaf]:
            node = add_node(trace, node, Origin.BUFFER, num_tokens=NUM_RETRIEVED, metadata=RETRIEVED)
        node = turn(node, tree.row(leaf, top), below)
        finish(trace, node, float(tree.returns[int(HYBRID[leaf]), top, below]))
    return trace


def combined(*, a: float, m: float, **given: Any) -> Combined:
    sections = {
        "retrieval": {"num_hybrid": 2, "advantage_weight": a, "ratio_weight": m},
        "branch": {"first_wave": 2},
        "tips": {"memory": {"embedder": "hash"}, "intrinsic_coefficient": 0.0},
    }
    wide = {"type": "clip", "clip_low": 1.0, "clip_high": 1e6}
    table = {"group_size": LEAVES, "advantage": "leave_one_out", "loss": wide, "min_probability": 0.0}
    chosen = validate(CombinedSettings, {"type": "combined", **table, **sections, **given})
    return Combined(chosen, embedder=HashEmbedder())


def expected_estimate(tree: Tree, method: Combined, mode: str) -> np.ndarray:
    """Minus the mean gradient over all groups of 1/M times the library's token losses, by autograd through
    its credit, rendering, packing and loss.
    """
    policy = tree.student if mode == "plain" else tree.acting
    theta = torch.tensor(tree.logits, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for chance, tops, belows in tree.groups(policy):
        trace = trace_of(tree, policy, mode, tops, belows)
        method.assign_advantages(trace)
        [batch] = pack(rollout_paths([trace]), max_tokens=10**6)
        rows = [
            tree.row(leaf, tops[leaf % FIRST_WAVE]) if ordinal else 0
            for leaf, ordinal in zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        ]
        trained = tree.acting if mode == "tips_on" else tree.student
        taken = batch.targets_U[batch.token_T]
        # what the update computes: the policy in the rendering that it trains on
        shift = torch.tensor(np.log(trained) - np.log(tree.student))
        logprobs = (torch.log_softmax(theta, dim=1) + shift)[rows, taken]
        acting = torch.tensor(np.log(policy))[rows, taken] if mode == "tips_off" else None
        inputs = TokenLossInputs(
            logprobs_T=logprobs,
            old_logprobs=method.objective.old_logprobs(logprobs.detach(), acting),
            advantages_T=batch.advantages_T,
            ratio_scale_T=batch.ratio_scale_T,
            engine_logprobs_T=batch.engine_logprobs_T,
            is_off_policy_T=batch.is_off_policy_T,
            rollout_T=batch.rollout_index_T,
            turn_T=batch.turn_T,
            measures=MetricAccumulator(),
        )
        total = total + chance * method.objective.token_loss(inputs).losses.sum() / LEAVES
    (gradient,) = torch.autograd.grad(total, theta)
    return -gradient.numpy()


def enumerated(tree: Tree, *, a: float, m: float) -> np.ndarray:
    """The same expectation for a tips-off group, from the formulas alone: no line of the library."""
    found = np.zeros((ROWS, ACTIONS))
    policy, student = tree.acting, tree.student
    for chance, tops, belows in tree.groups(policy):
        returns = np.array(
            [tree.returns[int(HYBRID[i]), tops[i % FIRST_WAVE], b] for i, b in enumerate(belows)]
        )
        outcome = returns - (returns.sum() - returns) / (LEAVES - 1)
        rewards = np.zeros(LEAVES)
        for leaf in (2, 3):
            before = entropy_of(policy[0])
            after = entropy_of(policy[tree.row(leaf, tops[leaf % FIRST_WAVE])])
            rewards[leaf] = np.tanh(2.0 * (before - after) / before) * before
        spread = rewards.std(ddof=1)
        bonus = (rewards - rewards.mean()) / (spread + 1e-6) if np.ptp(rewards) > 0 else np.zeros(LEAVES)
        advantages = (1 + a * bonus) * outcome
        for leaf, below in enumerate(belows):
            top = tops[leaf % FIRST_WAVE]
            # of two policy tokens, two of the environment and the retrieved ones; tips do not count
            scale = 1 + m * (NUM_RETRIEVED / (4 + NUM_RETRIEVED) if HYBRID[leaf] else 0.0)
            for row, action in ((0, top), (tree.row(leaf, top), below)):
                ratio = student[row][action] / policy[row][action]
                score = np.eye(ACTIONS)[action] - student[row]
                found[row] += chance * scale * ratio * advantages[leaf] * score / LEAVES
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("a", "m"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.05), (0.7, 0.4)])
def test_the_expected_gradient_of_all_three_is_that_of_their_formulas(seed: int, a: float, m: float) -> None:
    tree = Tree(seed)
    found = expected_estimate(tree, combined(a=a, m=m), "tips_off")
    np.testing.assert_allclose(found, enumerated(tree, a=a, m=m), atol=1e-11)


@pytest.mark.parametrize("seed", range(3))
def test_without_tips_and_weights_it_is_the_policy_gradient_but_for_the_bias_of_a_branch(seed: int) -> None:
    """Two of four leaves share a first turn: that turn's gradient is (M - 2) / (M - 1) of the true one."""
    tree = Tree(seed)
    exact, found = tree.exact(), expected_estimate(tree, combined(a=0.0, m=0.0), "plain")
    np.testing.assert_allclose(found[0], exact[0] * (LEAVES - 2) / (LEAVES - 1), atol=1e-12)
    np.testing.assert_allclose(found[1:], exact[1:], atol=1e-12)
    assert np.abs(exact[0]).max() > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_without_tips_a_group_has_the_gradient_without_tips_in_the_states_that_tips_led_to(
    seed: int,
) -> None:
    """The ratio of a token mends its own choice; where tips led before it is not mended (EMPO²'s ratios are
    of tokens). So first turns are exact, and a later row is weighted by how often the acting policy came
    there.
    """
    tree = Tree(seed)
    exact, found = tree.exact(), expected_estimate(tree, combined(a=0.0, m=0.0), "tips_off")
    np.testing.assert_allclose(found[0], exact[0] * (LEAVES - 2) / (LEAVES - 1), atol=1e-12)
    visited = np.tile(tree.acting[0] / tree.student[0], 2)[:, None]
    np.testing.assert_allclose(found[1:], exact[1:] * visited, atol=1e-12)
    assert np.abs(visited - 1).max() > 0.01


def test_the_other_denominator_has_no_ratio() -> None:
    """``old_context = student``: the ratio is 1 where the update begins, so tips' choices are not mended."""
    tree = Tree(0)
    found = expected_estimate(tree, combined(a=0.2, m=0.05, old_context="student"), "tips_off")
    assert np.abs(found[0] - enumerated(tree, a=0.2, m=0.05)[0]).max() > 1e-3
