"""Trees that grow in rounds: where rollouts leave, what they share, and that nothing depends on who is fast
or breaks.
"""

import random
from collections import Counter
from typing import Any

import pytest

from outrider.environments.base import StepResult
from outrider.errors import EnvironmentFault, ToolFault
from outrider.rollout.branching import Expansion
from outrider.rollout.settings import Limits
from outrider.trace import Node, Trace
from outrider.types import Outcome
from tests.rollout.fakes import Factory, Fake, say, scheduler, tasks
from tests.rollout.test_branch import END, Copying, answers
from tests.rollout.test_scheduler import chatty, facts

SHAPE = Expansion(num_trees=2, num_expansions=2, num_rounds=2, num_trained_leaves=5)


def grow(shape: Expansion = SHAPE, *, make: Any = None, num_tasks: int = 1, **options: Any) -> Any:
    factory = Factory(make or (lambda task, number: Copying(on_step=answers)))
    runs = scheduler(chatty(), factory, hooks=(shape,), limits=Limits(step_timeout_s=60), **options)
    modes = ("m",) * (shape.num_trees * shape.tree_size)
    return runs.run(tasks(num_tasks), modes=modes, training_step=3), factory


def paths(trace: Trace) -> dict[int, list[Node]]:
    return {leaf.rollout: path for leaf, path in trace.rollouts()}


def shared_turns(trace: Trace, rollout: int, others: Any) -> int:
    """Turns of a rollout's path that stand on the path of one of the others."""
    found = paths(trace)
    seen = {id(node) for other in others if other != rollout for node in found[other]}
    return sum(node.trainable and id(node) in seen for node in found[rollout])


def test_a_tree_is_a_chain_and_rounds_that_leave_it_and_one_another() -> None:
    report, factory = grow(num_tasks=4)
    later = 0
    for trace in report.traces:
        assert sorted(trace.leaves) == list(range(10)) and not trace.pruned
        found = paths(trace)
        assert len({id(path[-1]) for path in found.values()}) == 10  # no leaf twice
        for rollout, path in found.items():
            tree = rollout // 5
            assert shared_turns(trace, rollout, [one for one in found if one // 5 != tree]) == 0
            assert sum(node.trainable for node in path) == 4  # expansions run to the end
            if rollout % 5:
                assert shared_turns(trace, rollout, range(tree * 5, rollout)) < 4
        later += sum(shared_turns(trace, r, (1, 2)) > shared_turns(trace, r, (0,)) for r in (3, 4))
    assert later > 0  # the second round leaves rollouts of the first
    # every wave plays at once: 4 turns of the chains, then at most 4 for each round
    assert 4 < report.num_batches <= 12
    assert all(environment.num_closed for environment in factory.made)


@pytest.mark.parametrize("kind", [Copying, Fake])
def test_the_same_seed_gives_the_same_trees_copied_or_replayed_however_fast_environments_answer(
    kind: Any,
) -> None:
    def slow(task: Any, number: int) -> Fake:
        return kind(on_step=answers, delay=random.random() * 0.02)  # type: ignore[no-any-return]

    def plain(report: Any) -> Any:
        for trace in report.traces:
            for node in trace.nodes:
                node.metadata.pop("is_replayed", None)
        return facts(report)

    quick, slowly, narrow = (
        grow(num_tasks=3),
        grow(num_tasks=3, make=slow),
        grow(num_tasks=3, max_concurrent=2),
    )
    assert plain(quick[0]) == plain(slowly[0]) == plain(narrow[0])
    if kind is Fake:  # replayed: the environment has seen the prefix and then the rollout's own turns
        [trace] = grow(make=slow)[0].traces
        for path in paths(trace).values():
            said = [node.message.content for node in path if node.trainable]
            answered = [node.message.content for node in path if node.origin.value == "environment"]
            assert answered == [f" o{number}:{text}" for number, text in enumerate(said[:-1])]


def test_nodes_are_drawn_uniformly_and_with_replacement() -> None:
    """Four turns: the root and the three turns that another one follows."""
    shape = Expansion(num_trees=1, num_expansions=2, num_rounds=1, num_trained_leaves=3)
    report, _ = grow(shape, num_tasks=80, max_concurrent=4096)
    depths = [[shared_turns(trace, rollout, (0,)) for rollout in (1, 2)] for trace in report.traces]
    counts = Counter(depth for both in depths for depth in both)
    assert sorted(counts) == [0, 1, 2, 3] and all(
        abs(count - 40) < 4 * (160 * 0.25 * 0.75) ** 0.5 for count in counts.values()
    )
    twice = sum(first == second for first, second in depths)
    assert abs(twice - 20) < 4 * (80 * 0.25 * 0.75) ** 0.5


def test_pruning_draws_the_leaves_that_stay() -> None:
    shape = Expansion(num_trees=2, num_expansions=3, num_rounds=1, num_trained_leaves=2)
    traces = grow(shape, num_tasks=60)[0].traces
    for trace in traces:
        assert Counter(rollout // 4 for rollout in trace.pruned) == {0: 2, 1: 2}
        assert sorted(trace.leaves) == list(range(8))
    chains = sum(0 in trace.pruned for trace in traces)
    assert 10 < chains < 50  # the chain is a leaf like the others


def test_a_tree_without_rounds_is_a_chain() -> None:
    report, _ = grow(Expansion(num_trees=3, num_expansions=2, num_rounds=0, num_trained_leaves=1))
    assert sorted(report.traces[0].leaves) == [0, 1, 2] and report.num_batches == 4


def test_a_retry_is_expanded_and_its_first_try_is_not() -> None:
    """The first try got further than the second ever does."""
    broken: list[int] = []

    def make(task: Any, number: int) -> Fake:
        def step(n: int, text: str) -> StepResult:
            if number == 0 and n == 3:
                broken.append(n)
                raise ToolFault("once")
            return say(f" o{n}:{text}") if number == 0 or n < 1 else END

        return Copying(on_step=step)

    shape = Expansion(num_trees=1, num_expansions=6, num_rounds=2, num_trained_leaves=13)
    report, _ = grow(shape, make=make)
    [trace] = report.traces
    owned = {id(node) for path in paths(trace).values() for node in path}
    assert broken and report.num_retries == 1
    assert all(leaf.outcome is Outcome.FINISHED for leaf in trace.leaves.values())
    lost = [node for node in trace.nodes if id(node) not in owned]
    assert (
        lost
        and {node.parent for node in trace.nodes if id(node) in owned} & {node.node_id for node in lost}
        == set()
    )


def test_a_chain_that_is_lost_leaves_the_root() -> None:
    def make(task: Any, number: int) -> Fake:
        def step(n: int, text: str) -> StepResult:
            if number == 0 and n == 2:
                raise EnvironmentFault("gone")
            return answers(n, text)

        return Fake(on_step=step)

    shape = Expansion(num_trees=1, num_expansions=4, num_rounds=1, num_trained_leaves=5)
    report, _ = grow(shape, make=make, max_retries=0)
    [trace] = report.traces
    assert trace.leaves[0].outcome is Outcome.ENVIRONMENT_FAULT
    assert all(shared_turns(trace, rollout, (1, 2, 3, 4)) == 0 for rollout in (1, 2, 3, 4))
