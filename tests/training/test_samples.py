"""Rollouts whose context began anew: several samples, one rollout in every statistic.

The gradient is enumerated: all groups of a two-turn tree with their probabilities, against the derivative of
the expected return.
"""

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
import torch

from outrider.algorithms.advantages import group_normalized_advantages_per_rollout
from outrider.algorithms.base import write_advantages
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.losses import TokenLossInputs
from outrider.config import validate
from outrider.engines.local.unpacked import segment_paths
from outrider.trace import Leaf, Node, Trace, split_contexts
from outrider.training.packing import advantages_by_rollout, pack
from outrider.training.update import MetricAccumulator, rollout_paths
from outrider.types import Message, Origin, Outcome, Task

TEXT = Message(role="assistant", content="")
ACTIONS, GROUP = 3, 2
RESTARTED = (False, True, True)  # by the first action


def other(trace: Trace, parent: Node | None, tokens: Sequence[int], *, restarts: bool = False) -> Node:
    origin = Origin.PROMPT if parent is None else Origin.ENVIRONMENT
    return trace.append(parent=None if parent is None else parent.node_id, origin=origin,
                        token_ids=tuple(tokens), message=TEXT, restarts=restarts)  # fmt: skip


def act(trace: Trace, parent: Node, tokens: Sequence[int]) -> Node:
    scores: Any = {"logprobs": (-0.5,) * len(tokens), "entropies": (0.1,) * len(tokens)}
    return trace.append(
        parent=parent.node_id, origin=Origin.POLICY, token_ids=tuple(tokens), message=TEXT, **scores
    )


def finish(trace: Trace, node: Node, rollout: int, value: float) -> None:
    trace.finish(Leaf(node_id=node.node_id, rollout=rollout, outcome=Outcome.FINISHED, episode_return=value))


def two_rollouts() -> Trace:
    """One goes on in its context, of the other the second turn stands in a context of its own."""
    trace = Trace(task=Task(key="t", question=""))
    root = other(trace, None, (1, 2))
    first = act(trace, other(trace, act(trace, root, (3, 4)), (8,)), (5,))
    again = act(trace, other(trace, act(trace, root, (6,)), (1, 9, 9), restarts=True), (7, 7))
    finish(trace, first, 0, 1.0)
    finish(trace, again, 1, 0.0)
    return trace


def test_a_context_that_began_anew_is_what_the_engine_sees_and_a_path_is_the_whole_rollout() -> None:
    trace = two_rollouts()
    leaf = trace.leaves[1]
    assert leaf.node_id is not None
    assert trace.token_ids(leaf.node_id) == (1, 9, 9, 7, 7)
    path = trace.path(leaf.node_id)
    assert [node.token_ids for node in path] == [(1, 2), (6,), (1, 9, 9), (7, 7)]
    assert [[n.token_ids for n in part] for part in split_contexts(path)] == [
        [(1, 2), (6,)],
        [(1, 9, 9), (7, 7)],
    ]
    alone = trace.path(trace.leaves[0].node_id or 0)
    assert split_contexts(alone) == [alone]


def test_a_rollout_is_packed_once_for_every_context() -> None:
    trace = two_rollouts()
    for number, node in enumerate(one for one in trace.nodes if one.trainable):
        node.credit = tuple(10.0 * number + i for i in range(len(node.token_ids)))
    [batch] = pack(rollout_paths([trace]), max_tokens=100)
    assert batch.ids_N.tolist() == [1, 2, 3, 4, 8, 5, 6, 1, 9, 9, 7, 7]
    assert batch.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 2, 0, 1, 2, 3, 4]
    assert [(one.length, one.ancestors) for one in batch.plan.segments] == [
        (2, ()), (4, (0,)), (1, (0,)), (5, ()),
    ]  # fmt: skip
    assert list(zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)) == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert batch.turn_T.tolist() == [0, 0, 1, 2, 3, 3]
    paths = rollout_paths([trace])
    # samples of a rollout stay together if they fit, and always if the loss needs all of them
    assert [one.num_tokens for one in pack(paths, max_tokens=8)] == [6, 8]
    assert [one.num_tokens for one in pack(paths, max_tokens=7)] == [7, 5]
    assert [one.num_tokens for one in pack(paths, max_tokens=1, whole_rollouts=True)] == [6, 8]


def grown(random: Random) -> Trace:
    """Rollouts that leave each other anywhere, with contexts that begin anew anywhere."""
    trace = Trace(task=Task(key="t", question=""))
    root, ends = other(trace, None, (1, 2)), list[Node]()
    for rollout in range(random.randint(2, 4)):
        node = root
        if ends and random.random() < 0.7:
            node = random.choice([n for n in trace.path(random.choice(ends).node_id) if not n.trainable])
        for turn in range(random.randint(1, 3)):
            if turn:
                anew = random.random() < 0.5
                seen = [20 + random.randint(0, 1) for _ in range(random.randint(1, 2))]
                node = other(trace, node, [*([1, 2] if anew else []), *seen], restarts=anew)
            node = act(trace, node, [10 + random.randint(0, 1) for _ in range(random.randint(1, 3))])
        ends.append(node)
        finish(trace, node, rollout, random.random())
    return trace


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("attribution", ["soft", "hard"])
def test_every_trained_token_is_computed_behind_the_context_that_it_was_sampled_in(
    seed: int, attribution: Literal["soft", "hard"]
) -> None:
    trace = grown(Random(seed))
    returns = [leaf.episode_return for leaf, _ in trace.rollouts()]
    write_advantages(trace, group_normalized_advantages_per_rollout(returns=returns), attribution=attribution)
    paths = rollout_paths([trace])
    expected: dict[tuple[int, int], tuple[tuple[int, ...], int, float]] = {}
    for path in paths:
        ordinal = 0
        for node in path.nodes:
            context = trace.token_ids(node.node_id)[: -len(node.token_ids)]
            for _, credit, _ in advantages_by_rollout(node, [path]):
                for i, token in enumerate(node.token_ids):
                    before = context + node.token_ids[:i]
                    expected[path.rollout_index, ordinal] = (before, token, credit[i])
                    ordinal += 1
    for max_tokens in (5, 20, 1000):
        found = {}
        for batch in pack(paths, max_tokens=max_tokens):
            ids = batch.ids_N.tolist()
            seen = {
                place: tuple(ids[one] for one in sequence[: number + 1])
                for sequence in segment_paths(batch.plan)
                for number, place in enumerate(sequence)
            }
            for entry, token in enumerate(batch.token_T.tolist()):
                key = (int(batch.rollout_index_T[entry]), int(batch.ordinal_T[entry]))
                assert key not in found
                before, target = seen[int(batch.predictors_U[token])], int(batch.targets_U[token])
                found[key] = (before, target, float(batch.advantages_T[entry]))
        assert found == expected


def test_what_the_policy_wrote_and_a_prompt_begin_no_context() -> None:
    trace = Trace(task=Task(key="t", question=""))
    with pytest.raises(ValueError, match="a new context"):
        other(trace, None, (1,), restarts=True)
    root = other(trace, None, (1,))
    with pytest.raises(ValueError, match="a new context"):
        trace.append(parent=root.node_id, origin=Origin.POLICY, token_ids=(1,), message=TEXT,
                     logprobs=(0.0,), entropies=(0.0,), restarts=True)  # fmt: skip


def group(paths: Sequence[tuple[int, int]], returns: np.ndarray, *, restarts: bool) -> Trace:
    trace = Trace(task=Task(key="t", question=""))
    root = other(trace, None, (50, 51))
    for rollout, (top, below) in enumerate(paths):
        first = act(trace, root, (top,))
        is_new = restarts and RESTARTED[top]
        seen = other(trace, first, (50, 60 + top) if is_new else (61,), restarts=is_new)
        finish(trace, act(trace, seen, (below,)), rollout, float(returns[top, below]))
    return trace


def estimate(logits: np.ndarray, returns: np.ndarray, *, restarts: bool, **given: Any) -> np.ndarray:
    """Minus the mean gradient of the library's losses over all groups, through credit and packing."""
    method = Grpo(validate(GrpoSettings, {
        "group_size": GROUP, "advantage": "leave_one_out", "loss": {"type": "clip", "clip_low": 1.0,
                                                                     "clip_high": 1e6}, **given,
    }))  # fmt: skip
    policy = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    theta = torch.tensor(logits, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    every = list(product(range(ACTIONS), repeat=2))
    for paths in product(every, repeat=GROUP):
        chance = np.prod([policy[0, top] * policy[1 + top, below] for top, below in paths])
        trace = group(paths, returns, restarts=restarts)
        method.assign_advantages(trace)
        [batch] = pack(rollout_paths([trace]), max_tokens=10**6)
        rows = [
            1 + paths[rollout][0] if ordinal else 0
            for rollout, ordinal in zip(batch.rollout_index_T.tolist(), batch.ordinal_T.tolist(), strict=True)
        ]
        logprobs = torch.log_softmax(theta, dim=1)[rows, batch.targets_U[batch.token_T]]
        losses = method.objective.token_loss(TokenLossInputs(
            logprobs_T=logprobs, old_logprobs=method.objective.old_logprobs(logprobs.detach(), None),
            advantages_T=batch.advantages_T, ratio_scale_T=batch.ratio_scale_T,
            engine_logprobs_T=batch.engine_logprobs_T, is_off_policy_T=batch.is_off_policy_T,
            rollout_T=batch.rollout_index_T, turn_T=batch.turn_T, measures=MetricAccumulator(),
        )).losses  # fmt: skip
        total = total + float(chance) * losses.sum() / GROUP
    (gradient,) = torch.autograd.grad(total, theta)
    return -np.asarray(gradient)


def exact(logits: np.ndarray, returns: np.ndarray) -> np.ndarray:
    theta = torch.tensor(logits, requires_grad=True)
    policy = torch.softmax(theta, dim=1)
    values = (policy[1:] * torch.tensor(returns)).sum(dim=1)
    (gradient,) = torch.autograd.grad((policy[0] * values).sum(), theta)
    return np.asarray(gradient)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_gradient_over_samples_is_that_of_the_expected_return(seed: int) -> None:
    draw = np.random.Generator(np.random.PCG64(seed))
    logits, returns = draw.normal(size=(1 + ACTIONS, ACTIONS)), draw.normal(size=(ACTIONS, ACTIONS))
    found = estimate(logits, returns, restarts=True)
    np.testing.assert_allclose(found, exact(logits, returns), atol=1e-12)
    np.testing.assert_allclose(found, estimate(logits, returns, restarts=False), atol=1e-12)


def test_a_rollout_of_several_samples_counts_once_in_its_group() -> None:
    """Advantages that divide by the spread of returns would move if a sample counted as a rollout."""
    draw = np.random.Generator(np.random.PCG64(2))
    logits, returns = draw.normal(size=(1 + ACTIONS, ACTIONS)), draw.normal(size=(ACTIONS, ACTIONS))
    one = estimate(logits, returns, restarts=True, advantage="group_normalized")
    other_ = estimate(logits, returns, restarts=False, advantage="group_normalized")
    np.testing.assert_allclose(one, other_, atol=1e-12)
