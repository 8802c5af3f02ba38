"""Credit of groups on the borders of its rules, and credit of nodes that several rollouts share, by hand."""

from dataclasses import replace

import pytest

from outrider.algorithms.base import (
    ObjectiveSettings,
    group_advantages,
    outcome_advantages,
    total_returns,
    write_advantages,
)
from outrider.algorithms.grpo import GroupSettings
from outrider.algorithms.loss_settings import CispoLoss
from outrider.trace import Leaf, Share, Trace
from outrider.types import Message, Origin, Outcome, Task
from tests.algorithms.grouped import Played, trace_of


def test_each_kind_of_advantage_by_hand() -> None:
    """Returns of 1, 3, a fault, and 6 of which 1 is the algorithm's own: the mean is 10 / 3."""
    trace = trace_of([Played(value=1.0), Played(value=3.0), Played(value=None), Played(value=5.0)])
    trace.leaves[3].intrinsic = 1.0
    assert total_returns(trace) == [1.0, 3.0, None, 6.0]
    centred = [1 - 10 / 3, 3 - 10 / 3, 0.0, 6 - 10 / 3]
    std = (sum(value**2 for value in centred) / 2) ** 0.5
    assert outcome_advantages(trace, "group_centered").values.tolist() == pytest.approx(centred)
    assert outcome_advantages(trace, "leave_one_out").values.tolist() == pytest.approx(
        [1 - 4.5, 3 - 3.5, 0.0, 6 - 2.0]
    )
    normalized = [value / (std + 1e-6) for value in centred]
    assert outcome_advantages(trace, "group_normalized").values.tolist() == pytest.approx(normalized)
    population = [value / (std * (2 / 3) ** 0.5 + 1e-6) for value in centred]
    found = group_advantages(total_returns(trace), "group_normalized", std_ddof=0)
    assert found.values.tolist() == pytest.approx(population) and found.assigned.tolist() == [
        True,
        True,
        False,
        True,
    ]


def forked(num_leaves: int = 2) -> Trace:
    """A turn of two tokens that all rollouts share, and a turn of one token for each."""
    trace, text = Trace(task=Task(key="t", question="")), Message(role="user", content="")
    root = trace.append(parent=None, origin=Origin.PROMPT, token_ids=(1,), message=text)

    def turn(parent: int, *tokens: int) -> int:
        values = (0.0,) * len(tokens)
        node = trace.append(
            parent=parent,
            origin=Origin.POLICY,
            token_ids=tokens,
            message=text,
            logprobs=values,
            entropies=values,
        )
        return node.node_id

    shared = turn(root.node_id, 2, 3)
    for rollout in range(num_leaves):
        leaf = turn(shared, 4 + rollout)
        trace.finish(
            Leaf(node_id=leaf, rollout=rollout, outcome=Outcome.FINISHED, episode_return=float(rollout))
        )
    return trace


def test_a_shared_node_keeps_every_rollout_s_credit_and_scale_or_their_mean() -> None:
    """Advantages of -0.5 and 0.5."""
    soft = forked()
    write_advantages(soft, outcome_advantages(soft, "group_centered"), [1.5, 1.25], attribution="soft")
    assert soft.nodes[1].shares == {0: Share((-0.5, -0.5), 1.5), 1: Share((0.5, 0.5), 1.25)}
    assert [(node.credit, node.ratio_scale) for node in soft.nodes[2:]] == [((-0.5,), 1.5), ((0.5,), 1.25)]
    assert [soft.leaves[rollout].advantage for rollout in (0, 1)] == [-0.5, 0.5]
    hard = forked(3)
    hard.leaves[2].episode_return = 5.0  # advantages of -2, -1 and 3
    write_advantages(hard, outcome_advantages(hard, "group_centered"), [1.5] * 3, attribution="hard")
    assert (hard.nodes[1].credit, hard.nodes[1].ratio_scale, hard.nodes[1].owner) == ((0.0, 0.0), 1.5, 0)
    assert [(node.credit, node.ratio_scale, node.owner) for node in hard.nodes[2:]] == [
        ((-2.0,), 1.5, None), ((-1.0,), 1.5, None), ((3.0,), 1.5, None),
    ]  # fmt: skip


def test_credit_that_cannot_be_written_is_refused() -> None:
    shared = forked()
    advantages = outcome_advantages(shared, "group_centered")
    with pytest.raises(ValueError, match="already has credit"):
        write_advantages(shared, advantages)  # several rollouts, and no attribution
    with pytest.raises(ValueError, match="differently"):
        write_advantages(forked(), advantages, [1.0, 1.5], attribution="hard")
    twice = trace_of([Played(value=0.0), Played(value=1.0)])
    write_advantages(twice, advantages)
    assert [node.credit for node in twice.nodes[1:]] == [(-0.5,), (0.5,)]
    assert [node.ratio_scale for node in twice.nodes[1:]] == [1.0, 1.0]
    with pytest.raises(ValueError, match="already has credit"):
        write_advantages(twice, advantages)
    again = forked()
    write_advantages(again, advantages, attribution="soft")
    with pytest.raises(ValueError, match="already has credit"):
        write_advantages(again, advantages, attribution="soft")


def test_what_a_fault_left_in_the_tree_gets_no_credit() -> None:
    trace = trace_of([Played(value=0.0), Played(value=1.0), Played(value=0.0)])
    trace.leaves[1] = replace(trace.leaves[1], episode_return=None, outcome=Outcome.TOOL_FAULT)
    trace.leaves[2].episode_return = 3.0
    write_advantages(trace, outcome_advantages(trace, "group_centered"))
    assert [node.credit for node in trace.nodes[1:]] == [(-1.5,), None, (1.5,)]
    assert [trace.leaves[rollout].advantage for rollout in range(3)] == [-1.5, None, 1.5]


def test_a_reference_is_kept_for_a_kl_alone() -> None:
    assert not ObjectiveSettings().needs_reference and ObjectiveSettings(kl_weight=0.1).needs_reference
    assert not GroupSettings().needs_reference and GroupSettings(kl_weight=0.1).needs_reference
    assert GroupSettings(reward_kl_weight=0.1).needs_reference


@pytest.mark.parametrize("floor", [0.1, 0.9, 1.5])
def test_a_floor_of_the_ratio_belongs_to_cispo(floor: float) -> None:
    with pytest.raises(ValueError, match="ratio_floor"):
        ObjectiveSettings.model_validate({"loss": {"type": "clip", "ratio_floor": floor}})
    with pytest.raises(ValueError, match="not below"):
        CispoLoss(ratio_cap=floor, ratio_floor=floor)
    assert CispoLoss(ratio_cap=2.0, ratio_floor=floor).ratio_floor == floor
