"""Who computes what: every rollout once, groups whole where that is fair, the same on every rank."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outrider.distributed.fsdp import Shape, assign_to_ranks
from outrider.training.packing import RolloutPath
from outrider.training.update import rollout_paths
from tests.distributed.groups import groups

SHAPE = Shape(num_parameters=1000, num_layers=2, attention_width=8)


def numbers(placed: Sequence[Sequence[RolloutPath]]) -> list[list[int]]:
    return [[path.rollout_index for path in each] for each in placed]


@given(num=st.integers(1, 7), rollouts=st.integers(1, 5), ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_rollout_is_on_exactly_one_rank(num: int, rollouts: int, ranks: int, seed: int) -> None:
    paths = rollout_paths(groups(num, rollouts=rollouts, seed=seed))
    placed = assign_to_ranks(paths, num_ranks=ranks, cost=SHAPE.cost)
    assert sorted(index for each in numbers(placed) for index in each) == list(range(len(paths)))
    assert all(each == sorted(each) for each in numbers(placed))
    assert numbers(placed) == numbers(assign_to_ranks(paths, num_ranks=ranks, cost=SHAPE.cost))


def test_the_longest_rollouts_are_assigned_first_to_the_lightest_rank() -> None:
    def cost(paths: Sequence[RolloutPath]) -> float:
        return sum(float(path.rollout) for path in paths)

    sizes = [5, 3, 3, 2, 2, 1]
    paths = [
        RolloutPath(nodes=(), rollout_index=index, rollout=size, group=index)
        for index, size in enumerate(sizes)
    ]
    # 5 | 3 -> 3 joins the 3, 2 the 5, 2 the 6's lighter other (7 and 6), 1 the tie's lower rank
    assert numbers(assign_to_ranks(paths, num_ranks=2, cost=cost)) == [[0, 3, 5], [1, 2, 4]]


def test_groups_stay_whole_unless_the_heaviest_rank_is_ten_percent_above_the_mean() -> None:
    even = rollout_paths(groups(8, seed=3))
    loads = [SHAPE.cost([path for path in even if path.group == group]) for group in range(8)]
    placed = assign_to_ranks(even, num_ranks=2, cost=SHAPE.cost)
    of_group = [{path.group for path in each} for each in placed]
    assert not of_group[0] & of_group[1] and max(loads) > 1.5 * min(loads)
    [lone, *_] = [rollout_paths(groups(1, rollouts=6, seed=seed)) for seed in range(1)]
    cut = assign_to_ranks(lone, num_ranks=2, cost=SHAPE.cost)
    assert all(cut) and max(map(SHAPE.cost, cut)) < SHAPE.cost(lone)


def test_a_shared_beginning_costs_once_and_a_late_token_more_than_an_early_one() -> None:
    paths = rollout_paths(groups(2, seed=0))
    first = [path for path in paths if path.group == 1]
    assert SHAPE.cost(first) < sum(SHAPE.cost([path]) for path in first)
    num_tokens = sum(len(node.token_ids) for node in first[0].nodes)
    contexts = num_tokens * (num_tokens + 1) // 2
    assert SHAPE.cost(first[:1]) == 6 * 1000 * num_tokens + 12 * 2 * 8 * contexts


def test_rollouts_without_a_gradient_are_not_placed_at_all() -> None:
    """Counting them left one rank idle: the update hands over those that train."""
    from outrider.algorithms.grpo import GrpoSettings
    from outrider.training.update import _trained_paths

    paths = rollout_paths(groups(4, seed=0))
    trained = _trained_paths(paths, GrpoSettings())
    assert {path.group for path in paths} - {path.group for path in trained} == {2}
