"""Every field of a packed micro-batch by hand, and where one micro-batch ends."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outrider.trace import Leaf, Share, Trace
from outrider.training.packing import PackedBatch, RolloutPath, advantages_by_rollout, pack
from outrider.training.update import rollout_paths
from outrider.types import Message, Origin, Outcome, Task

TEXT = Message(role="user", content="")


def forked(*, prompt: tuple[int, ...] = (1, 2), last: tuple[int, ...] = (6, 7)) -> Trace:
    """A prompt, a turn that two rollouts share, an answer of the environment, and a turn of each rollout's
    own.
    """
    trace = Trace(task=Task(key="t", question=""))

    def node(
        parent: int | None, origin: Origin, tokens: Sequence[int], logprobs: Sequence[float] = ()
    ) -> int:
        scores: dict[str, Any] = {"logprobs": tuple(logprobs), "entropies": (0.0,) * len(logprobs)}
        return trace.append(
            parent=parent, origin=origin, token_ids=tuple(tokens), message=TEXT, **scores
        ).node_id

    shared = node(node(None, Origin.PROMPT, prompt), Origin.POLICY, (3, 4), (-0.1, -0.2))
    reason = node(shared, Origin.ENVIRONMENT, (8,))
    leaves = node(reason, Origin.POLICY, (5,), (-0.3,)), node(reason, Origin.POLICY, last, (-0.4, -0.5))
    trace.nodes[shared].shares = {0: Share((0.5, 0.25), 1.5), 1: Share((-0.5, -0.25), 1.1)}
    trace.nodes[leaves[0]].credit = (0.3,)
    trace.nodes[leaves[1]].credit, trace.nodes[leaves[1]].ratio_scale = (2.0, 3.0), 1.1
    for rollout, leaf in enumerate(leaves):
        trace.finish(Leaf(node_id=leaf, rollout=rollout, outcome=Outcome.FINISHED, episode_return=0.0))
    return trace


def rows(batch: PackedBatch) -> list[tuple[float, ...]]:
    columns = (
        batch.token_T, batch.rollout_index_T, batch.ordinal_T, batch.turn_T, batch.advantages_T,
        batch.ratio_scale_T, batch.engine_logprobs_T,
    )  # fmt: skip
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_forked_group_is_packed_as_by_hand() -> None:
    (batch,) = pack(rollout_paths([forked()]), max_tokens=8)
    assert batch.ids_N.tolist() == [1, 2, 3, 4, 8, 5, 6, 7] and batch.num_tokens == 8
    assert batch.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 5, 6]
    assert [(one.length, one.ancestors) for one in batch.plan.segments] == [(5, ()), (1, (0,)), (2, (0,))]
    assert batch.predictors_U.tolist() == [1, 2, 4, 4, 6] and batch.targets_U.tolist() == [3, 4, 5, 6, 7]
    assert rows(batch) == [
        # token, rollout, ordinal, turn, credit, scale, engine
        (0, 0, 0, 0, 0.5, 1.5, -0.1),
        (0, 1, 0, 1, -0.5, 1.1, -0.1),
        (1, 0, 1, 0, 0.25, 1.5, -0.2),
        (1, 1, 1, 1, -0.25, 1.1, -0.2),
        (2, 0, 2, 2, 0.3, 1.0, -0.3),
        (3, 1, 2, 3, 2.0, 1.1, -0.4),
        (4, 1, 3, 3, 3.0, 1.1, -0.5),
    ]
    assert not batch.is_off_policy_T.any()


def test_a_micro_batch_ends_before_it_would_hold_too_many_tokens() -> None:
    """Six tokens, and two more for the second rollout, or seven of its own."""
    paths = rollout_paths([forked()])
    for max_tokens, sizes in ((8, [8]), (7, [6, 7]), (1, [6, 7])):
        assert [batch.num_tokens for batch in pack(paths, max_tokens=max_tokens)] == sizes
    first, second = pack(paths, max_tokens=7)
    assert first.rollout_index_T.tolist() == [0, 0, 0] and second.rollout_index_T.tolist() == [1] * 4
    assert second.positions_N.tolist() == list(range(7)) and second.predictors_U.tolist() == [1, 2, 4, 5]
    assert list(pack([], max_tokens=7)) == []


def test_another_prompt_is_another_tree_and_an_equal_one_is_not() -> None:
    """Its positions begin anew, and nothing in the first tree predicts it."""
    other = rollout_paths([forked(), forked(prompt=(9,))])
    (batch,) = pack(other, max_tokens=100)
    assert batch.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 0, 1, 2, 3, 4, 4, 5]
    assert batch.predictors_U.tolist()[5:] == [8, 9, 11, 11, 13]
    assert [one.ancestors for one in batch.plan.segments[3:]] == [(), (3,), (3,)]
    equal = rollout_paths([forked(), forked(last=(6, 8))])
    (batch,) = pack(equal, max_tokens=10)
    # Whole branches are one computation or none: a turn of other tokens is computed for itself.
    assert batch.ids_N.tolist() == [1, 2, 3, 4, 8, 5, 6, 7, 6, 8]
    assert batch.rollout_index_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 2, 1, 1, 3, 3]


@pytest.mark.parametrize("is_replayed", [False, True])
def test_demonstrations_and_replayed_rollouts_are_off_policy(is_replayed: bool) -> None:
    trace = forked()
    trace.is_replayed = is_replayed
    trace.nodes[3].origin, trace.nodes[3].logprobs = Origin.DEMONSTRATION, ()
    (batch,) = pack(rollout_paths([trace]), max_tokens=100)
    assert batch.is_off_policy_T.tolist() == [is_replayed] * 4 + [True] + [is_replayed] * 2
    assert batch.engine_logprobs_T.tolist() == [-0.1, -0.1, -0.2, -0.2, 0.0, -0.4, -0.5]


def test_a_first_token_has_nothing_that_predicts_it() -> None:
    trace = Trace(task=Task(key="t", question=""))
    node = trace.append(
        parent=None, origin=Origin.POLICY, token_ids=(1, 2), message=TEXT, logprobs=(-1.0, -2.0),
        entropies=(0.0, 0.0), credit=(5.0, 6.0),
    )  # fmt: skip
    (batch,) = pack([RolloutPath(nodes=[node], rollout_index=3)], max_tokens=1)
    assert rows(batch) == [(0, 3, 0, 0, 6.0, 1.0, -2.0)] and batch.predictors_U.tolist() == [0]


def test_what_a_loss_multiplies_has_the_precision_of_the_scores() -> None:
    (batch,) = pack(rollout_paths([forked()]), max_tokens=100)
    like = batch.like(torch.zeros(7, dtype=torch.float32))
    assert {like.advantages_T.dtype, like.ratio_scale_T.dtype, like.engine_logprobs_T.dtype} == {
        torch.float32
    }
    assert like.is_off_policy_T.dtype is torch.bool and rows(like)[1:2] == [
        pytest.approx((0, 1, 0, 1, -0.5, 1.1, -0.1))
    ]


@pytest.mark.parametrize("num_rollouts", [1, 2, 3])
def test_advantages_of_a_shared_turn_need_an_owner(num_rollouts: int) -> None:
    trace = forked()
    node = trace.nodes[1]
    node.shares, node.credit = None, (0.5, 0.25)
    paths = [
        RolloutPath(nodes=trace.nodes[:2], rollout_index=number, rollout=number)
        for number in range(num_rollouts)
    ]
    if num_rollouts == 1:
        assert advantages_by_rollout(node, paths) == [(paths[0], (0.5, 0.25), 1.0)]
        return
    with pytest.raises(ValueError, match=f"shared by {num_rollouts} rollouts"):
        advantages_by_rollout(node, paths)
    node.owner = 1
    assert advantages_by_rollout(node, paths) == [(paths[1], (0.5, 0.25), 1.0)]
    assert advantages_by_rollout(trace.nodes[0], paths) == []  # nobody trains a prompt


def test_every_micro_batch_may_be_full() -> None:
    """Groups of seven tokens each."""
    paths = rollout_paths([forked(prompt=(number,)) for number in (9, 10, 11)])
    assert [batch.num_tokens for batch in pack(paths, max_tokens=7)] == [7, 7, 7]
