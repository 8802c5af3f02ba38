"""The trace tree against a plain list model of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.trace import Insertion, Leaf, Node, Trace, with_help, without_memory
from outrider.training.async_rollouts import group_to_dict, read_group
from outrider.types import Message, Origin, Outcome, Task

TEXT = Message(role="user", content="x")


def trace() -> Trace:
    return Trace(task=Task(key="t", question="q"))


def add(
    tree: Trace, parent: int | None, ids: tuple[int, ...], origin: Origin = Origin.ENVIRONMENT, **fields: Any
) -> Node:
    values = (
        {"logprobs": (-1.0,) * len(ids), "entropies": (0.5,) * len(ids)} if origin is Origin.POLICY else {}
    )
    return tree.append(parent=parent, origin=origin, token_ids=ids, message=TEXT, **(values | fields))


def leaf(
    rollout: int, node_id: int | None, outcome: Outcome = Outcome.FINISHED, episode_return: float | None = 1.0
) -> Leaf:
    return Leaf(node_id=node_id, rollout=rollout, outcome=outcome, episode_return=episode_return)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=30)
)
def test_token_ids_of_a_path(pieces: list[tuple[int, list[int]]]) -> None:
    tree = trace()
    whole: list[tuple[int, ...]] = []
    for choice, ids in pieces:
        parent = None if not whole else choice % (len(whole) + 1) - 1
        parent = None if parent == -1 else parent
        add(tree, parent, tuple(ids))
        whole.append(((whole[parent]) if parent is not None else ()) + tuple(ids))
    assert [tree.token_ids(i) for i in range(len(whole))] == whole
    assert [node.node_id for node in tree.nodes] == list(range(len(whole)))


@pytest.mark.parametrize("origin", list(Origin))
def test_policy_nodes_have_one_value_per_token(origin: Origin) -> None:
    right = (-0.1, -0.2) if origin is Origin.POLICY else ()
    node = trace().append(
        parent=None, origin=origin, token_ids=(1, 2), message=TEXT, logprobs=right, entropies=right
    )
    assert node.trainable is (origin is Origin.POLICY) and node.credit is None and node.ratio_scale == 1.0
    for logprobs, entropies in (((-0.1,), right), (right, (0.1,)), ((-0.1,) * 3, (0.1,) * 3)):
        with pytest.raises(ValueError, match="log-probs and entropies"):
            trace().append(
                parent=None,
                origin=origin,
                token_ids=(1, 2),
                message=TEXT,
                logprobs=logprobs,
                entropies=entropies,
            )


@pytest.mark.parametrize("parent", [-1, 0, 7])
def test_an_unknown_parent_is_refused(parent: int) -> None:
    tree = trace()
    with pytest.raises(ValueError, match="not in the trace"):
        add(tree, parent, (1,))
    assert tree.nodes == []


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_faults_have_no_return(outcome: Outcome) -> None:
    wrong, right = (1.0, None) if outcome.is_fault else (None, 1.0)
    tree = trace()
    with pytest.raises(ValueError, match="only faults have no return"):
        tree.finish(leaf(0, None, outcome, wrong))
    assert tree.leaves == {}
    tree.finish(leaf(0, None, outcome, right))
    with pytest.raises(ValueError, match="already ended"):
        tree.finish(leaf(0, None, outcome, right))
    assert len(tree.leaves) == 1


def test_outcomes_that_are_faults() -> None:
    faults = {"tool_fault", "environment_fault", "engine_fault", "cancelled"}
    assert {outcome.value for outcome in Outcome if outcome.is_fault} == faults


def test_rollouts_are_ordered_and_faults_have_no_path() -> None:
    tree = trace()
    root = add(tree, None, (1,), Origin.PROMPT)
    late, early = add(tree, root.node_id, (2,)), add(tree, root.node_id, (3,))
    tree.finish(leaf(2, late.node_id))
    tree.finish(leaf(0, early.node_id))
    tree.finish(leaf(1, None, Outcome.TOOL_FAULT, None))
    found = [(one.rollout, [node.token_ids for node in path]) for one, path in tree.rollouts()]
    assert found == [(0, [(1,), (3,)]), (1, []), (2, [(1,), (2,)])]


def test_mean_entropy() -> None:
    node = add(trace(), None, (1, 2, 3), Origin.POLICY, entropies=(1.0, 2.0, 6.0))
    assert node.mean_entropy == 3.0


@given(order=st.permutations([0, 0, 0, 1, 1, 1, 2, 2, 2]))
def test_node_numbers_do_not_depend_on_arrival(order: list[int]) -> None:
    """Three rollouts of three nodes arrive interleaved; the middle one is lost to a fault."""
    tree = trace()
    root = add(tree, None, (9,), Origin.PROMPT)
    tips = [root, root, root]
    count = [0, 0, 0]
    for rollout in order:
        tips[rollout] = add(
            tree, tips[rollout].node_id, (10 * rollout + count[rollout],), metadata={"rollout": rollout}
        )
        count[rollout] += 1
    tree.finish(leaf(2, tips[2].node_id))
    tree.finish(leaf(0, tips[0].node_id))
    tree.finish(leaf(1, None, Outcome.ENVIRONMENT_FAULT, None))
    before = {one.rollout: [node.token_ids for node in path] for one, path in tree.rollouts()}
    tree.number_by_rollout()
    assert [(n.node_id, n.parent, n.token_ids[0]) for n in tree.nodes] == [
        (0, None, 9),
        (1, 0, 0), (2, 1, 1), (3, 2, 2),
        (4, 0, 20), (5, 4, 21), (6, 5, 22),
        (7, 0, 10), (8, 7, 11), (9, 8, 12),
    ]  # fmt: skip
    assert {one.rollout: [node.token_ids for node in path] for one, path in tree.rollouts()} == before


def test_help_is_inserted_in_the_returned_path_only() -> None:
    tree = trace()
    add(tree, None, (1, 2, 3, 4), Origin.PROMPT)
    add(tree, 0, (5, 6), Origin.POLICY)
    add(tree, 1, (7,), restarts=True)
    add(tree, 2, (8,), Origin.POLICY)
    path = tree.path(3)
    help_ = [
        Insertion(node_id=0, offset=3, token_ids=(90, 91), text="a", source="tips"),
        Insertion(node_id=0, offset=3, token_ids=(92,), text="b", source="file"),
        Insertion(node_id=2, offset=0, token_ids=(93,), text="c", source="file"),
    ]
    helped = with_help(path, help_)
    assert [(node.origin, node.token_ids, node.restarts) for node in helped] == [
        (Origin.PROMPT, (1, 2, 3), False),
        (Origin.MEMORY, (90, 91), False),
        (Origin.MEMORY, (92,), False),
        (Origin.PROMPT, (4,), False),
        (Origin.POLICY, (5, 6), False),
        (Origin.MEMORY, (93,), True),
        (Origin.ENVIRONMENT, (7,), False),
        (Origin.POLICY, (8,), False),
    ]
    assert helped[4] is path[1] and with_help(path, ()) == path and len(tree.nodes) == 4
    bare = [token for node in without_memory(helped) for token in node.token_ids]
    assert bare == [token for node in path for token in node.token_ids]
    for node_id, offset in ((1, 1), (0, 5), (9, 0)):
        with pytest.raises(ValueError, match=r"cannot stand|not on the path"):
            with_help(path, [Insertion(node_id=node_id, offset=offset, token_ids=(9,), text="", source="x")])


def test_help_is_written_and_read_and_follows_its_node() -> None:
    tree = trace()
    add(tree, None, (1, 2), Origin.PROMPT)
    for rollout in (1, 0):  # the second rollout ended first
        add(tree, 0, (3 + rollout,), Origin.POLICY)
        add(tree, len(tree.nodes) - 1, (7,))
        tree.finish(leaf(rollout, len(tree.nodes) - 1))
    assert "help" not in group_to_dict(tree) and read_group(group_to_dict(tree)).help == {}
    tree.help[1] = (Insertion(node_id=2, offset=1, token_ids=(9,), text="a", source="sibling"),)
    tree.number_by_rollout()
    assert tree.help[1][0].node_id == 4
    again = read_group(json.loads(json.dumps(group_to_dict(tree))))
    assert again.help == tree.help and again.nodes == tree.nodes
