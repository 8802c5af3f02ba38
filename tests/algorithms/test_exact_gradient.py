"""Credit, ratio, loss and aggregation against policy gradients that are enumerated, not typed in.

The tree, its exact gradient and the enumeration over groups come from ``benchmarks/grpo_bias.py``; the first
test checks that gradient by finite differences of the expected return, so the rest stands on its own feet.
"""

import dataclasses
import importlib.util
import itertools
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch

from outrider.algorithms.advantages import leave_one_out_advantages_per_rollout
from outrider.algorithms.losses import Aggregation, clipped_surrogate_per_token, token_weights, weighted_loss


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "grpo_bias.py"
    spec = importlib.util.spec_from_file_location("grpo_bias", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_bias"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bias: Any = load_benchmark()
ROW = {estimator.name: estimator for estimator in bias.ESTIMATORS}


def test_exact_gradient_is_the_derivative_of_the_expected_return() -> None:
    tree = bias.make_tree(seed=3)
    assert tree.path_probabilities.sum() == pytest.approx(1.0, abs=1e-14)
    gradient = tree.policy_gradient()
    assert not gradient[list(bias.ENVIRONMENT_NODES)].any() and np.abs(gradient).max() > 0.01
    step = 1e-5
    for node, action in itertools.product(range(bias.NUM_NODES), range(bias.BRANCHING)):
        if node in bias.ENVIRONMENT_NODES:
            continue
        returns = []
        for sign in (1.0, -1.0):
            logits = tree.logits.copy()
            logits[node, action] += sign * step
            moved = dataclasses.replace(tree, logits=logits)
            returns.append((moved.path_probabilities * moved.returns).sum())
        assert (returns[0] - returns[1]) / (2 * step) == pytest.approx(gradient[node, action], abs=1e-9)


@pytest.mark.parametrize("share", [None, 0.25])
@pytest.mark.parametrize("group_size", [2, 3])
def test_leave_one_out_is_unbiased_and_centring_is_off_by_its_known_factor(
    group_size: int, share: float | None
) -> None:
    tree = bias.make_tree(seed=1, success_share=share)
    truth = tree.policy_gradient()
    left_out = bias.expected_gradient(tree, bias.leave_one_out(tree), group_size=group_size)
    np.testing.assert_allclose(left_out, truth, atol=1e-12)
    centred = bias.expected_gradient(tree, bias.normalized(tree, normalize_std=False), group_size=group_size)
    np.testing.assert_allclose(centred, truth * (group_size - 1) / group_size, atol=1e-12)


def test_dividing_by_the_std_bends_the_gradient() -> None:
    """The measured bias of GRPO, as the documentation quotes it (docs/algorithms/details/grpo.md)."""
    uniform = [bias.make_tree(seed=0)]
    binary = [bias.make_tree(seed=0, success_share=0.25)]
    cosine, relative, rescaled = bias.measure(uniform, ROW["GRPO, token sum"], group_size=3)
    assert (cosine, relative, rescaled) == pytest.approx((0.995270, 1.502018, 0.097152), abs=2e-6)
    # Two-valued returns of one task: the expectation is parallel, only its length is off.
    cosine, relative, _ = bias.measure(binary, ROW["GRPO, token sum"], group_size=3)
    assert (cosine, relative) == pytest.approx((1.0, 0.154699), abs=2e-6)
    cosine, _, _ = bias.measure(binary, ROW["GRPO, sequence mean"], group_size=3)
    assert cosine == pytest.approx(0.993409, abs=2e-6)
    cosine, _, rescaled = bias.measure(binary, ROW["RAPO a=0.2, token sum"], group_size=3)
    assert (cosine, rescaled) == pytest.approx((0.995554, 0.094195), abs=2e-6)


@pytest.mark.parametrize(("row", "cosine"), [("token mean", 0.990174), ("sequence mean", 0.927701)])
def test_means_over_lengths_bend_unbiased_credit(row: str, cosine: float) -> None:
    """As docs/algorithms/details/grpo.md quotes it: ``token_mean`` has a length bias too, which falls with
    the group's size.
    """
    ragged = [bias.make_tree(seed=0, environment_nodes=bias.RAGGED_NODES)]
    found = {size: bias.measure(ragged, ROW[f"leave-one-out, {row}"], group_size=size)[0] for size in (2, 3)}
    assert found[2] == pytest.approx(cosine, abs=2e-6)
    assert bias.measure(ragged, ROW["leave-one-out"], group_size=2)[0] == pytest.approx(1.0, abs=1e-12)
    assert (
        found[3] > found[2] + 0.005 if row == "token mean" else found[3] == pytest.approx(found[2], abs=1e-12)
    )


@pytest.mark.parametrize(("kind", "mean"), [("token_mean", "group"), ("sequence_mean_token_mean", "rollout")])
def test_the_means_of_the_benchmark_are_those_of_the_loss(kind: Aggregation, mean: str) -> None:
    """Every ordered pair of paths, with the weights that the loss gives to its tokens, against the
    enumeration.
    """
    tree = bias.make_tree(seed=0, environment_nodes=bias.RAGGED_NODES)
    lengths = tree.is_trainable.sum(axis=1).tolist()
    assert set(lengths) == {1, 2, 3}
    weights = {}  # of a token of each path, by the lengths of both
    for first, second in itertools.product((1, 2, 3), repeat=2):
        index = torch.tensor([0] * first + [1] * second)
        tokens = token_weights(kind=kind, rollout_index=index, num_rollouts=2, dtype=torch.float64)
        weights[first, second] = tokens.numpy()[[0, -1]]
    coefficients = np.zeros(tree.returns.size)  # of the score of each path
    for pair in itertools.product(range(tree.returns.size), repeat=2):
        paths = list(pair)
        values = leave_one_out_advantages_per_rollout(returns=tree.returns[paths]).values
        values = values * weights[lengths[paths[0]], lengths[paths[1]]]
        np.add.at(coefficients, paths, tree.path_probabilities[paths].prod() * values)
    expected = np.tensordot(coefficients, tree.scores, axes=1)
    found = bias.expected_gradient(tree, bias.leave_one_out(tree), group_size=2, mean=mean)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_group_multisets_agree_with_plain_enumeration() -> None:
    """Independent of the multiset counting: all ordered triples, vectorised, with the formula in plain
    numpy.
    """
    tree = bias.make_tree(seed=2)
    paths = np.array(list(itertools.product(range(tree.returns.size), repeat=3)))
    probabilities = tree.path_probabilities[paths].prod(axis=1)
    returns = tree.returns[paths]
    centred = returns - returns.mean(axis=1, keepdims=True)
    spread = np.ptp(returns, axis=1, keepdims=True) > 0.0
    advantages = np.where(spread, centred / (returns.std(axis=1, ddof=1, keepdims=True) + 1e-6), 0.0)
    weights = np.zeros(tree.returns.size)
    np.add.at(weights, paths, probabilities[:, None] * advantages / 3.0)
    expected = np.tensordot(weights, tree.scores, axes=1)
    np.testing.assert_allclose(
        bias.expected_gradient(tree, bias.normalized(tree), group_size=3), expected, atol=1e-12
    )


def sampled_gradients(
    tree: Any, *, num_groups: int, group_size: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Per-group gradients with leave-one-out credit and with raw returns but the mean taken from the whole
    group.
    """
    generator = np.random.default_rng(seed)
    paths = generator.choice(tree.returns.size, size=(num_groups, group_size), p=tree.path_probabilities)
    advantages = np.stack(
        [leave_one_out_advantages_per_rollout(returns=tree.returns[group]).values for group in paths]
    )
    scores = tree.scores.reshape(tree.returns.size, -1)
    shrunk = advantages * (group_size - 1) / group_size
    return tuple(
        np.einsum("gi,gik->gk", credit, scores[paths]) / group_size for credit in (advantages, shrunk)
    )


def test_sampled_leave_one_out_gradient_lies_within_its_standard_errors() -> None:
    """Bonferroni over the moving coordinates at a family level of 0.27 %, which is three standard errors for
    one.
    """
    tree = bias.make_tree(seed=4)
    unbiased, shrunk = sampled_gradients(tree, num_groups=20_000, group_size=4, seed=0)
    truth = tree.policy_gradient().reshape(-1)
    moving = unbiased.std(axis=0) > 0.0
    assert not truth[~moving].any() and moving.sum() == 3 * (bias.NUM_NODES - len(bias.ENVIRONMENT_NODES))
    limit = statistics.NormalDist().inv_cdf(1.0 - 0.0027 / (2.0 * moving.sum()))

    def worst(samples: np.ndarray) -> float:
        errors = samples.std(axis=0, ddof=1)[moving] / np.sqrt(len(samples))
        return float((np.abs(samples.mean(axis=0) - truth)[moving] / errors).max())

    assert worst(unbiased) < limit
    assert worst(shrunk) > 2.0 * limit  # the same criterion does notice a gradient that is a quarter short


@pytest.mark.parametrize("kind", ["sequence_mean_token_sum", "constant_length"])
def test_autograd_through_the_loss_is_the_exact_gradient(
    kind: Literal["sequence_mean_token_sum", "constant_length"],
) -> None:
    """Every pair of paths is one batch; its loss, weighted by the pair's probability, adds up to minus the
    gradient.
    """
    tree = bias.make_tree(seed=5)
    pairs = np.array(list(itertools.product(range(tree.returns.size), repeat=2)))
    probabilities = tree.path_probabilities[pairs].prod(axis=1)
    advantages = np.stack(
        [leave_one_out_advantages_per_rollout(returns=tree.returns[pair]).values for pair in pairs]
    )
    logits = torch.tensor(tree.logits, requires_grad=True)
    nodes, actions = (
        torch.tensor(field[pairs].reshape(-1)) for field in (tree.path_nodes, tree.path_actions)
    )
    logprobs = torch.log_softmax(logits, dim=1)[nodes, actions]
    mask = torch.tensor(tree.is_trainable[pairs].reshape(-1))
    weights = token_weights(
        kind=kind,
        rollout_index=torch.tensor([0] * bias.DEPTH + [1] * bias.DEPTH),
        num_rollouts=2,
        max_length=bias.DEPTH if kind == "constant_length" else None,
        dtype=torch.float64,
    ).repeat(len(pairs))
    surrogate = clipped_surrogate_per_token(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=torch.tensor(advantages.repeat(bias.DEPTH)),
    )
    weights = weights * torch.tensor(probabilities.repeat(2 * bias.DEPTH)) * mask
    (gradient,) = torch.autograd.grad(weighted_loss(losses=surrogate.losses, weights=weights), logits)
    scale = bias.DEPTH if kind == "constant_length" else 1
    np.testing.assert_allclose(-gradient.numpy() * scale, tree.policy_gradient(), atol=1e-12)
