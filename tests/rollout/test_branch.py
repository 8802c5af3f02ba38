"""Forks in the loop: whole groups, shared nodes, environments brought to the same point, nothing lost under
faults.
"""

import copy
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engines.base import Request
from outrider.environments.base import CopyableEnvironment, StepResult
from outrider.errors import EnvironmentFault, ToolFault
from outrider.rollout.hooks import EpisodeState, Hook, Splice
from outrider.rollout.settings import Limits
from outrider.seeding import stream
from outrider.trace import Trace
from outrider.types import Origin, Outcome
from tests.rollout.fakes import TOKENIZER, Factory, Fake, RawEngine, say, scheduler, scripted, tasks
from tests.rollout.test_scheduler import chatty, facts

END = StepResult(message=None, done=True)
MODES = ("m",) * 8


@dataclass
class Forking(Hook):
    """Forks where ``rule`` says so."""

    rule: Any
    first_wave: int = 3
    wave: int | None = 5
    streak_scope: Literal["lineage", "prompt"] = "lineage"
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def num_forks(self, state: EpisodeState) -> int:
        self.asked.append((state.task.key, state.rollout, state.turn))
        return int(self.rule(state))

    def budget(self, trace: Trace) -> int | None:
        return self.wave


class Copying(Fake):
    """The same with copies that remember what was done."""

    def copy(self) -> "Copying":
        return copy.deepcopy(self)


def answers(number: int, text: str) -> StepResult:
    return say(f" o{number}:{text}", "inline") if number < 3 else END


def play(
    hook: Forking,
    *,
    kind: type[Fake] = Copying,
    modes: Sequence[str] = MODES,
    num_tasks: int = 1,
    **options: Any,
) -> Any:
    factory = Factory(lambda task, number: kind(on_step=answers))
    engine = options.pop("engine", None) or chatty()
    runs = scheduler(engine, factory, hooks=(hook,), limits=Limits(step_timeout_s=60), **options)
    return runs.run(tasks(num_tasks), modes=modes, training_step=0), factory


def test_the_stand_ins_are_what_they_should_be() -> None:
    assert isinstance(Copying(on_step=answers), CopyableEnvironment)
    assert not isinstance(Fake(on_step=answers), CopyableEnvironment)


@pytest.mark.parametrize("kind", [Copying, Fake])
def test_a_fork_shares_the_nodes_in_front_of_the_turn_and_goes_on_from_the_same_state(
    kind: type[Fake],
) -> None:
    """Copied or replayed, the child's environment has seen the parent's actions and then its own."""
    hook = Forking(lambda state: state.rollout == 0 and state.turn == 2, first_wave=1, wave=1)
    report, factory = play(hook, kind=kind, modes=("m",) * 2)
    [trace] = report.traces
    paths = {leaf.rollout: path for leaf, path in trace.rollouts()}
    shared = [node for node in paths[0] if any(node is other for other in paths[1])]
    # prompt, two turns with answers
    assert [node.node_id for node in paths[0][:5]] == [node.node_id for node in shared]
    assert paths[0][5].trainable and paths[1][5].trainable and paths[0][5].token_ids != paths[1][5].token_ids
    assert paths[0][5].metadata["num_forks"] == 1 and "num_forks" not in paths[1][5].metadata
    child = factory.made[-1] if kind is Fake else None
    if child is not None:  # replayed: both prefixes equal, then its own turns
        assert child.texts[:2] == factory.made[0].texts[:2] and child.texts[2] == paths[1][5].message.content
        assert child.seeds == factory.made[0].seeds
    observations = [node.message.content for node in paths[1] if node.origin.value == "environment"]
    assert observations[2] == f" o2:{paths[1][5].message.content}"


def test_a_group_is_filled_up_at_once_and_never_overfull() -> None:
    never, _ = play(Forking(lambda state: 0))
    always, _ = play(Forking(lambda state: 4))
    for report in (never, always):
        assert sorted(report.traces[0].leaves) == list(range(8))
        assert len({id(path[-1]) for _, path in report.traces[0].rollouts()}) == 8  # no leaf twice
    assert never.num_batches == 8  # 3 at once, then the other 5 at once, four turns each
    roots = [node for node in always.traces[0].nodes if node.parent is None]
    firsts = [node for node in always.traces[0].nodes if node.trainable and node.parent == roots[0].node_id]
    assert len(roots) == 1 and len(firsts) > 3  # forks in front of the first turn hang under the prompt too
    wanted = sum(node.metadata.get("num_forks_wanted", 0) for node in always.traces[0].nodes)
    assert wanted > sum(node.metadata.get("num_forks", 0) for node in always.traces[0].nodes) == 5


def test_a_first_wave_of_one_asks_for_the_budget_when_it_has_ended() -> None:
    hook = Forking(lambda state: 0, first_wave=1, wave=5)
    report, _ = play(hook)
    assert sorted(report.traces[0].leaves) == list(range(8))
    assert report.num_batches == 12  # one, then four more, then the last three
    assert [turn for _, rollout, turn in hook.asked if rollout == 0] == [0, 1, 2, 3]


def test_the_same_seed_gives_the_same_tree_however_fast_environments_answer() -> None:
    def forks(state: EpisodeState) -> int:
        return int(state.stream("fork").integers(0, 3))

    def slow(task: Any, number: int) -> Fake:
        return Copying(on_step=answers, delay=random.random() * 0.02)

    quick, _ = play(Forking(forks), num_tasks=3)
    runs = scheduler(chatty(), Factory(slow), hooks=(Forking(forks),), limits=Limits(step_timeout_s=60))
    assert facts(runs.run(tasks(3), modes=MODES, training_step=0)) == facts(quick)


def test_few_places_play_the_same_rollouts_later() -> None:
    report, _ = play(Forking(lambda state: state.turn == 1), num_tasks=2, max_concurrent=2)
    assert all(sorted(trace.leaves) == list(range(8)) for trace in report.traces)


def test_a_replay_that_is_answered_differently_is_a_fault_and_not_a_rollout() -> None:
    factory = Factory(
        lambda task, number: Fake(on_step=lambda n, text: say(f" {number} {n}") if n < 2 else END)
    )
    hook = Forking(lambda state: state.rollout == 0 and state.turn == 1, first_wave=1, wave=1)
    runs = scheduler(chatty(), factory, hooks=(hook,), max_retries=1)
    report = runs.run(tasks(1), modes=("m",) * 2, training_step=0)
    assert report.traces[0].leaves[1].outcome is Outcome.ENVIRONMENT_FAULT
    assert (
        "replay" in report.traces[0].leaves[1].detail
        and report.traces[0].leaves[0].outcome is Outcome.FINISHED
    )


@pytest.mark.parametrize("field", ["message", "reward", "done", "num_tool_calls", "invalid"])
def test_a_replay_that_pays_ends_or_calls_otherwise_is_a_fault(field: str) -> None:
    """The same text is not the same state; the fault names what differs. Unchanged, the same fork is a
    rollout.
    """
    other = {
        "message": say(" else").message,
        "reward": 0.5,
        "done": True,
        "num_tool_calls": 2,
        "invalid": True,
    }

    def outcome(changed: dict[str, Any]) -> Any:
        def make(task: Any, number: int) -> Fake:
            answer = StepResult(message=say(" same").message, num_tool_calls=1)
            first = answer if number == 0 else replace(answer, **changed)
            return Fake(on_step=lambda n, text: first if n == 0 else END)

        hook = Forking(lambda state: state.rollout == 0 and state.turn == 1, first_wave=1, wave=1)
        runs = scheduler(chatty(), Factory(make), hooks=(hook,), max_retries=1)
        return runs.run(tasks(1), modes=("m",) * 2, training_step=0).traces[0].leaves[1]

    assert outcome({}).outcome is Outcome.FINISHED
    broken = outcome({field: other[field]})
    assert broken.outcome is Outcome.ENVIRONMENT_FAULT and f"answered differently ({field})" in broken.detail


def test_the_slowest_rollout_does_not_claim_first() -> None:
    """Every rollout waits for its batch's other answers: the one that completes the batch must not act before
    the others.
    """
    trees = []
    for slow in (0, 7):

        def make(task: Any, number: int, slow: int = slow) -> Fake:
            return Copying(on_step=answers, delay=0.15 if number == slow else 0.0)

        hook = Forking(lambda state: state.turn == 2 and state.rollout in (1, 5, 7, 0), first_wave=8)
        runs = scheduler(chatty(), Factory(make), hooks=(hook,), limits=Limits(step_timeout_s=60))
        trees.append(facts(runs.run(tasks(1), modes=("m",) * 10, training_step=0)))
    assert trees[0] == trees[1]


def test_a_child_does_not_decide_again_where_it_left() -> None:
    hook = Forking(lambda state: state.turn == 1, first_wave=1, wave=1)
    play(hook)
    assert [point for point in hook.asked if point[2] == 1 and point[1] == 1] == []
    assert ("task 0", 1, 2) in hook.asked


@pytest.mark.parametrize(("scope", "bound"), [("lineage", 5), ("prompt", 9)])
@pytest.mark.parametrize("max_concurrent", [1, 2, 40])
def test_few_copies_are_kept_for_decisions_that_are_still_to_fall(
    scope: Any, bound: int, max_concurrent: int
) -> None:
    """At most one for every place that the group has left, and all are closed; where streaks are the group's,
    one for every point.
    """
    opened: list[Copying] = []
    most = 0

    class Counted(Copying):
        def copy(self) -> Copying:
            nonlocal most
            twin = super().copy()
            opened.append(twin)
            most = max(most, sum(one.num_closed == 0 for one in opened))
            return twin

    hook = Forking(lambda state: state.turn > 0, streak_scope=scope)
    report, _ = play(hook, kind=Counted, max_concurrent=max_concurrent)
    assert sum(node.metadata.get("num_forks", 0) for node in report.traces[0].nodes) == 5
    assert opened and all(one.num_closed == 1 for one in opened)
    assert most <= bound + min(5, max_concurrent)  # and those that forks play


def test_a_streak_is_its_lineage_s_or_its_group_s_in_the_order_of_decisions() -> None:
    seen: dict[str, list[tuple[int, int, int]]] = {}
    for scope in ("lineage", "prompt"):
        points: dict[tuple[int, int], int] = {}

        def rule(state: EpisodeState, points: dict[tuple[int, int], int] = points) -> int:
            points[state.turn, state.rollout] = state.branch_streak
            return int(state.branch_streak < 2)

        play(  # type: ignore[arg-type]
            Forking(rule, first_wave=2, streak_scope=scope), modes=("m",) * 2, max_concurrent=1
        )
        seen[scope] = [(*point, points[point]) for point in sorted(points)]
    assert [streak for turn, _, streak in seen["lineage"] if turn] == [1, 1, 2, 2, 0, 0]
    assert [streak for *_, streak in seen["prompt"]] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_first_wave_of_one_without_a_budget_is_filled_up_at_once() -> None:
    report, _ = play(Forking(lambda state: 0, first_wave=1, wave=None))
    assert report.num_batches == 8 and sorted(report.traces[0].leaves) == list(range(8))


def test_a_copy_that_fails_is_replaced_by_replaying() -> None:
    class Uncopyable(Copying):
        def copy(self) -> Copying:
            raise EnvironmentFault("no copy today")

    report, factory = play(Forking(lambda state: state.turn == 2, first_wave=4), kind=Uncopyable)
    assert all(leaf.outcome is Outcome.FINISHED for leaf in report.traces[0].leaves.values())
    assert len(factory.made) == 8
    nodes = report.traces[0].nodes
    # not in silence
    assert all(node.metadata["is_replayed"] for node in nodes if node.metadata.get("num_forks"))


def test_a_retry_does_not_fork_where_its_first_try_did() -> None:
    broken: list[int] = []

    def make(task: Any, number: int) -> Fake:
        def step(n: int, text: str) -> StepResult:
            if number == 0 and n == 2 and not broken:
                broken.append(n)
                raise ToolFault("once")
            return answers(n, text)

        return Fake(on_step=step)

    hook = Forking(lambda state: state.rollout == 0 and state.turn == 1, first_wave=1, wave=None)
    runs = scheduler(chatty(), Factory(make), hooks=(hook,), limits=Limits(step_timeout_s=60))
    report = runs.run(tasks(1), modes=("m",) * 4, training_step=0)
    assert report.num_retries == 1 and hook.asked.count(("task 0", 0, 1)) == 2
    forks = [
        node.metadata.get("num_forks", 0)
        for node in report.traces[0].nodes
        if node.metadata.get("num_forks_wanted")
    ]
    assert forks == [1]  # and its own turn has the mark, because the rollouts share it


def test_what_a_fork_begins_with_is_kept_until_it_has_asked() -> None:
    """The parent ends in the turn at which it is left, so its keys and values must outlive it by one
    batch.
    """
    said: list[tuple[str, str]] = []

    class Recording(RawEngine):
        def generate(self, requests: Sequence[Request]) -> list[Any]:
            said.extend(("asks", str(request.cache_key)) for request in requests)
            return super().generate(requests)

        def release(self, cache_keys: Sequence[str]) -> None:
            said.extend(("released", key) for key in cache_keys)

    engine = Recording(TOKENIZER, lambda request: [random.Random(request.seed).randrange(10, 60)])
    play(
        Forking(lambda state: state.rollout == 0 and state.turn == 3, first_wave=1, wave=None),
        modes=("m",) * 2,
        engine=engine,
    )
    assert said.index(("released", "task 0/0")) > said.index(("asks", "task 0/1"))
    assert ("released", "task 0/1") in said


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32),
    first_wave=st.integers(1, 8),
    copies=st.booleans(),
    max_concurrent=st.sampled_from([1, 3, 40]),
    patience=st.none() | st.integers(1, 60),
)
def test_every_owed_rollout_ends_once_whatever_breaks(
    seed: int, first_wave: int, copies: bool, max_concurrent: int, patience: int | None
) -> None:
    """Faults of tools and environments, empty and cut turns, forks at random, groups that are given up: group
    sizes add up and nothing hangs.
    """
    troubled(
        6, seed=seed, first_wave=first_wave, copies=copies, max_concurrent=max_concurrent, patience=patience
    )


def troubled(
    num_tasks: int,
    *,
    seed: int,
    first_wave: int,
    copies: bool,
    max_concurrent: int,
    patience: int | None = None,
) -> None:
    """``patience``: after so many looks at the clock a group is given up."""

    def trouble(number: int, text: str) -> StepResult:
        draw = stream(seed, text, number).random()
        if draw < 0.06:
            raise ToolFault("broken")
        if draw < 0.12:
            raise EnvironmentFault("gone")
        return (
            END if draw < 0.3 else StepResult(message=say(" o").message, num_tool_calls=1, invalid=draw > 0.9)
        )

    def ids(request: Request) -> list[int]:
        draw = random.Random(request.seed ^ seed)
        return [draw.randrange(10, 60) for _ in range(draw.randrange(0, 6))] or [draw.randrange(10, 60)]

    kind = Copying if copies else Fake
    factory = Factory(lambda task, number: kind(on_step=trouble))
    hook = Forking(lambda state: int(state.stream("fork").integers(0, 3)), first_wave=first_wave)
    runs = scheduler(
        RawEngine(TOKENIZER, ids),
        factory,
        hooks=(hook,),
        max_concurrent=max_concurrent,
        limits=Limits(max_turns=5),
    )
    runs.group_timeout_s, runs.clock = patience, partial(next, itertools.count())
    report = runs.run(tasks(num_tasks), modes=MODES, training_step=0)
    outcomes = Counter(leaf.outcome for trace in report.traces for leaf in trace.leaves.values())
    assert outcomes.total() == 8 * num_tasks and all(
        sorted(trace.leaves) == list(range(8)) for trace in report.traces
    )
    for trace in report.traces:
        for leaf, path in trace.rollouts():
            assert (leaf.episode_return is None) == leaf.outcome.is_fault == (not path)
            assert path == [] or path[0].parent is None


def test_a_loop_without_a_brancher_is_untouched() -> None:
    engine = scripted(lambda request, context: "a.")
    report = scheduler(engine, Factory(lambda task, number: Fake(on_step=lambda n, t: END))).run(
        tasks(2), modes=MODES, training_step=0
    )
    assert report.num_batches == 1


class Retrieves(Hook):
    """Shows a step to rollouts of mode ``hybrid`` before their second turn."""

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        return (
            [Splice(origin=Origin.BUFFER, text="<r>")] if state.mode == "hybrid" and state.turn == 1 else []
        )


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_fork_of_a_rollout_that_retrieved_is_hybrid_whatever_its_number(turn: int) -> None:
    """It carries the retrieved step on, so it is no pure on-policy rollout. Before the retrieval its
    number decides.
    """
    forking = Forking(lambda state: state.rollout == 0 and state.turn == turn, first_wave=1, wave=1)
    factory = Factory(lambda task, number: Copying(on_step=answers))
    runs = scheduler(chatty(), factory, hooks=(Retrieves(), forking), limits=Limits(step_timeout_s=60))
    [trace] = runs.run(tasks(1), modes=("hybrid", "on_policy", "on_policy"), training_step=0).traces
    assert trace.modes == ("hybrid", "hybrid" if turn else "on_policy", "on_policy")
    for leaf, path in trace.rollouts():
        assert any(node.origin is Origin.BUFFER for node in path) == (trace.modes[leaf.rollout] == "hybrid")
