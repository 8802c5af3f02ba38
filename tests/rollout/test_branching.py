"""Forks of rollouts: complete groups, shared nodes, copied or replayed environments, and decisions that
do not depend on timing or faults.
"""

import copy
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.algorithms.entropy_branching import BranchHook
from outrider.algorithms.exploration import ArpoSettings
from outrider.config import validate
from outrider.engines.base import Generation, Request
from outrider.environments.base import EpisodeResult, StepResult
from outrider.errors import EngineFault, EnvironmentFault, ToolFault
from outrider.rollout.branching import Expansion
from outrider.rollout.hooks import Demonstration, EpisodeState, Hook, Splice
from outrider.rollout.scheduler import RolloutReport
from outrider.rollout.settings import Limits
from outrider.seeding import stream
from outrider.trace import Node, Trace
from outrider.training.step_metrics import rollout_metrics
from outrider.types import Message, Origin, Outcome, Task
from tests.rollout.fakes import (
    END,
    TOKENIZER,
    CopyableFake,
    Factory,
    Fake,
    Forking,
    RawEngine,
    contents,
    random_ids_engine,
    say,
    scheduler,
    tasks,
    three_observations,
)


def play(
    hook: Hook,
    *,
    make: Any = CopyableFake,
    size: int = 8,
    modes: Sequence[str] = (),
    num_tasks: int = 1,
    hooks: Sequence[Hook] = (),
    engine: Any = None,
    **options: Any,
) -> tuple[RolloutReport, Factory]:
    """Run groups; ``make`` is a class of environments, or a function of task and number."""
    factory = Factory(
        (lambda task, number: make(on_step=three_observations)) if isinstance(make, type) else make
    )
    runs = scheduler(engine or random_ids_engine(), factory, hooks=(*hooks, hook), **options)
    return runs.run(tasks(num_tasks), modes=modes or ("m",) * size, training_step=3), factory


def paths_by_rollout(trace: Trace) -> dict[int, list[Node]]:
    return {leaf.rollout: path for leaf, path in trace.rollouts()}


def num_forks(trace: Trace) -> list[int]:
    return [node.metadata["num_forks"] for node in trace.nodes if "num_forks" in node.metadata]


@pytest.mark.parametrize("kind", [CopyableFake, Fake])
def test_a_fork_shares_earlier_nodes_and_continues_from_the_same_state(kind: type[Fake]) -> None:
    """The environment of the fork, copied or replayed, has seen the actions of the parent."""
    hook = Forking(lambda state: state.rollout == 0 and state.turn == 2, first_wave=1, wave=1)
    report, factory = play(hook, make=kind, size=2)
    [trace] = report.traces
    paths = paths_by_rollout(trace)
    shared = [node for node in paths[0] if any(node is other for other in paths[1])]
    # the prompt, two turns and their observations
    assert [node.node_id for node in paths[0][:5]] == [node.node_id for node in shared]
    assert paths[0][5].trainable and paths[1][5].trainable and paths[0][5].token_ids != paths[1][5].token_ids
    assert paths[0][5].metadata["num_forks"] == 1 and "num_forks" not in paths[1][5].metadata
    if kind is Fake:
        parent, child = factory.made
        assert isinstance(parent, Fake) and isinstance(child, Fake) and child.seeds == parent.seeds
        assert child.texts[:3] == [*parent.texts[:2], paths[1][5].message.content]
    observations = [node.message.content for node in paths[1] if node.origin is Origin.ENVIRONMENT]
    assert observations[2] == f" o2:{paths[1][5].message.content}"


def test_a_group_is_completed_at_once_and_never_exceeded() -> None:
    never, _ = play(Forking(lambda state: 0))
    always, _ = play(Forking(lambda state: 4))
    for report in (never, always):
        assert sorted(report.traces[0].leaves) == list(range(8))
        assert len({id(path[-1]) for _, path in report.traces[0].rollouts()}) == 8
    assert never.num_batches == 8  # three rollouts, then the other five, of four turns
    nodes = always.traces[0].nodes
    [root] = [node for node in nodes if node.parent is None]
    # forks before the first turn are children of the prompt
    assert sum(node.trainable and node.parent == root.node_id for node in nodes) > 3
    num_wanted = sum(node.metadata.get("num_forks_wanted", 0) for node in nodes)
    assert num_wanted > sum(num_forks(always.traces[0])) == 5


def test_after_a_first_wave_of_one_the_hook_chooses_the_next_wave() -> None:
    hook = Forking(lambda state: 0, first_wave=1, wave=5)
    report, _ = play(hook)
    assert sorted(report.traces[0].leaves) == list(range(8))
    assert report.num_batches == 12  # one rollout, then four, then three
    assert [turn for _, rollout, turn in hook.calls if rollout == 0] == [0, 1, 2, 3]
    report, _ = play(Forking(lambda state: 0, first_wave=1, wave=None))
    assert sorted(report.traces[0].leaves) == list(range(8))
    assert report.num_batches == 8  # without a choice: all others


@pytest.mark.parametrize("changed", ["message", "reward", "done", "num_tool_calls", "invalid"])
def test_a_replay_with_another_result_is_a_fault_that_names_the_difference(changed: str) -> None:
    values = {
        "message": say(" else").message, "reward": 0.5, "done": True, "num_tool_calls": 2, "invalid": True,
    }  # fmt: skip

    def fork_leaf(changes: dict[str, Any]) -> Any:
        def make(task: Any, number: int) -> Fake:
            result = StepResult(message=say(" same").message, num_tool_calls=1)
            first = result if number == 0 else replace(result, **changes)
            return Fake(on_step=lambda n, text: first if n == 0 else END)

        hook = Forking(lambda state: state.rollout == 0 and state.turn == 1, first_wave=1, wave=1)
        report, _ = play(hook, make=make, size=2, max_retries=1)
        assert report.traces[0].leaves[0].outcome is Outcome.FINISHED
        return report.traces[0].leaves[1]

    assert fork_leaf({}).outcome is Outcome.FINISHED
    leaf = fork_leaf({changed: values[changed]})
    assert leaf.outcome is Outcome.ENVIRONMENT_FAULT
    assert "replay" in leaf.detail and f"answered differently ({changed})" in leaf.detail


def test_a_copy_that_fails_is_replaced_by_a_recorded_replay() -> None:
    class Uncopyable(CopyableFake):
        def copy(self) -> CopyableFake:
            raise EnvironmentFault("no copy today")

    report, factory = play(Forking(lambda state: state.turn == 2, first_wave=4), make=Uncopyable)
    assert all(leaf.outcome is Outcome.FINISHED for leaf in report.traces[0].leaves.values())
    assert len(factory.made) == 8
    forked = [node for node in report.traces[0].nodes if node.metadata.get("num_forks")]
    assert forked and all(node.metadata["is_replayed"] for node in forked)


def test_a_fork_does_not_decide_at_the_turn_where_it_starts() -> None:
    hook = Forking(lambda state: state.turn == 1, first_wave=1, wave=1)
    play(hook)
    assert ("task 0", 1, 1) not in hook.calls and ("task 0", 1, 2) in hook.calls


def test_a_retry_does_not_repeat_the_forks_of_its_first_attempt() -> None:
    failures: list[int] = []

    def make(task: Any, number: int) -> Fake:
        def step(n: int, text: str) -> StepResult:
            if number == 0 and n == 2 and not failures:
                failures.append(n)
                raise ToolFault("once")
            return three_observations(n, text)

        return Fake(on_step=step)

    hook = Forking(lambda state: state.rollout == 0 and state.turn == 1, first_wave=1, wave=None)
    report, _ = play(hook, make=make, size=4)
    assert report.num_retries == 1 and hook.calls.count(("task 0", 0, 1)) == 2
    assert num_forks(report.traces[0]) == [1]


@pytest.mark.parametrize(("scope", "bound"), [("lineage", 5), ("prompt", 9)])
@pytest.mark.parametrize("max_concurrent", [1, 2, 40])
def test_copies_are_few_and_closed(scope: Any, bound: int, max_concurrent: int) -> None:
    """At most one for every rollout that is left in the group; with streaks of the group, one per point."""
    copies: list[CopyableFake] = []
    most_open = 0

    class Counted(CopyableFake):
        def copy(self) -> CopyableFake:
            nonlocal most_open
            copies.append(super().copy())
            most_open = max(most_open, sum(one.num_closed == 0 for one in copies))
            return copies[-1]

    hook = Forking(lambda state: state.turn > 0, streak_scope=scope)
    report, _ = play(hook, make=Counted, max_concurrent=max_concurrent)
    assert sum(num_forks(report.traces[0])) == 5
    assert copies and all(one.num_closed == 1 for one in copies)
    assert most_open <= bound + min(5, max_concurrent)  # the second term: environments of running forks


def test_a_failed_copy_is_counted_and_its_fork_replays_the_actions() -> None:
    class Uncopyable(CopyableFake):
        def copy(self) -> CopyableFake:
            raise RuntimeError("cannot pickle the simulator")

    report, _ = play(Forking(lambda state: state.turn > 0), make=Uncopyable)
    assert sum(num_forks(report.traces[0])) == 5
    assert set(report.faults) == {"copy"} and report.faults["copy"] == len(report.fault_reasons) > 0
    assert set(report.fault_reasons) == {"copying an environment: RuntimeError: cannot pickle the simulator"}


def test_streaks_of_a_lineage_and_of_a_group() -> None:
    streaks: dict[str, list[tuple[int, int, int]]] = {}
    for scope in ("lineage", "prompt"):
        points: dict[tuple[int, int], int] = {}

        def rule(state: EpisodeState, points: dict[tuple[int, int], int] = points) -> int:
            points[state.turn, state.rollout] = state.branch_streak
            return int(state.branch_streak < 2)

        hook = Forking(rule, first_wave=2, streak_scope=scope)  # type: ignore[arg-type]
        play(hook, size=2, max_concurrent=1)
        streaks[scope] = [(*point, points[point]) for point in sorted(points)]
    assert [streak for turn, _, streak in streaks["lineage"] if turn] == [1, 1, 2, 2, 0, 0]
    assert [streak for *_, streak in streaks["prompt"]] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_the_kv_cache_of_a_parent_is_released_after_the_first_request_of_its_fork() -> None:
    """The parent ends in the turn before which the fork starts."""
    events: list[tuple[str, str]] = []

    class Recording(RawEngine):
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            events.extend(("request", str(request.cache_key)) for request in requests)
            return super().generate(requests)

        def release(self, cache_keys: Sequence[str]) -> None:
            events.extend(("release", key) for key in cache_keys)

    engine = Recording(TOKENIZER, lambda request: [random.Random(request.seed).randrange(10, 60)])
    hook = Forking(lambda state: state.rollout == 0 and state.turn == 3, first_wave=1, wave=None)
    play(hook, size=2, engine=engine)
    assert events.index(("release", "task 0/0")) > events.index(("request", "task 0/1"))
    assert ("release", "task 0/1") in events


class Retrieve(Hook):
    """Inserts a step into rollouts of mode ``hybrid`` before their second turn."""

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        is_shown = state.mode == "hybrid" and state.turn == 1
        return [Splice(origin=Origin.BUFFER, text="<r>")] if is_shown else []


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_fork_with_a_retrieved_step_in_its_prefix_has_the_mode_of_its_parent(turn: int) -> None:
    """A fork before the retrieval has the mode of its own number."""
    hook = Forking(lambda state: state.rollout == 0 and state.turn == turn, first_wave=1, wave=1)
    report, _ = play(hook, hooks=(Retrieve(),), modes=("hybrid", "on_policy", "on_policy"))
    [trace] = report.traces
    assert trace.modes == ("hybrid", "hybrid" if turn else "on_policy", "on_policy")
    for leaf, path in trace.rollouts():
        assert any(node.origin is Origin.BUFFER for node in path) == (trace.modes[leaf.rollout] == "hybrid")


# Trees of Tree-GRPO.

SHAPE = Expansion(num_trees=2, num_expansions=2, num_rounds=2, num_trained_leaves=5)


def grow(shape: Expansion = SHAPE, **options: Any) -> tuple[RolloutReport, Factory]:
    return play(shape, size=shape.num_trees * shape.tree_size, **options)


def num_shared_turns(trace: Trace, rollout: int, others: Any) -> int:
    """Number of turns of a rollout that it shares with one of the others."""
    paths = paths_by_rollout(trace)
    others_nodes = {id(node) for other in others if other != rollout for node in paths[other]}
    return sum(node.trainable and id(node) in others_nodes for node in paths[rollout])


def test_a_tree_is_a_chain_and_rounds_of_forks() -> None:
    report, factory = grow(num_tasks=4)
    num_second_generation = 0
    for trace in report.traces:
        assert sorted(trace.leaves) == list(range(10)) and not trace.pruned
        paths = paths_by_rollout(trace)
        assert len({id(path[-1]) for path in paths.values()}) == 10
        for rollout, path in paths.items():
            tree = rollout // 5
            assert num_shared_turns(trace, rollout, [one for one in paths if one // 5 != tree]) == 0
            assert sum(node.trainable for node in path) == 4  # forks run to the end
            if rollout % 5:
                assert num_shared_turns(trace, rollout, range(tree * 5, rollout)) < 4
        num_second_generation += sum(
            num_shared_turns(trace, rollout, (1, 2)) > num_shared_turns(trace, rollout, (0,))
            for rollout in (3, 4)
        )
    assert num_second_generation > 0  # the second round also forks rollouts of the first
    # every wave runs at once: four turns of the chains, and at most four of each round
    assert 4 < report.num_batches <= 12
    assert all(environment.num_closed for environment in factory.made)  # type: ignore[attr-defined]


def test_a_tree_without_rounds_is_a_chain() -> None:
    report, _ = grow(Expansion(num_trees=3, num_expansions=2, num_rounds=0, num_trained_leaves=1))
    assert sorted(report.traces[0].leaves) == [0, 1, 2] and report.num_batches == 4


def test_forks_start_at_uniformly_drawn_nodes_with_replacement() -> None:
    """An episode of four turns has four nodes: the prompt and the turns that another one follows."""
    shape = Expansion(num_trees=1, num_expansions=2, num_rounds=1, num_trained_leaves=3)
    report, _ = grow(shape, num_tasks=60, max_concurrent=4096)
    depths = [[num_shared_turns(trace, rollout, (0,)) for rollout in (1, 2)] for trace in report.traces]
    counts = Counter(itertools.chain(*depths))
    assert sorted(counts) == [0, 1, 2, 3]
    assert all(abs(count - 30) < 4 * (120 * 0.25 * 0.75) ** 0.5 for count in counts.values())
    num_equal = sum(first == second for first, second in depths)
    assert abs(num_equal - 15) < 4 * (60 * 0.25 * 0.75) ** 0.5


def test_pruning_draws_the_leaves_that_are_trained_on() -> None:
    shape = Expansion(num_trees=2, num_expansions=3, num_rounds=1, num_trained_leaves=2)
    traces = grow(shape, num_tasks=24)[0].traces
    for trace in traces:
        assert Counter(rollout // 4 for rollout in trace.pruned) == {0: 2, 1: 2}
        assert sorted(trace.leaves) == list(range(8))
    assert 3 < sum(0 in trace.pruned for trace in traces) < 21  # the chain is a leaf like the others


def test_a_retry_is_expanded_and_not_its_failed_attempt() -> None:
    """The failed attempt had more turns."""
    failures: list[int] = []

    def make(task: Any, number: int) -> Fake:
        def step(n: int, text: str) -> StepResult:
            if number == 0 and n == 3:
                failures.append(n)
                raise ToolFault("once")
            return say(f" o{n}:{text}") if number == 0 or n < 1 else END

        return CopyableFake(on_step=step)

    shape = Expansion(num_trees=1, num_expansions=6, num_rounds=2, num_trained_leaves=13)
    report, _ = grow(shape, make=make)
    [trace] = report.traces
    assert failures and report.num_retries == 1
    assert all(leaf.outcome is Outcome.FINISHED for leaf in trace.leaves.values())
    counted = {id(node) for path in paths_by_rollout(trace).values() for node in path}
    lost = {node.node_id for node in trace.nodes if id(node) not in counted}
    assert lost and not lost & {node.parent for node in trace.nodes if id(node) in counted}


def test_after_a_lost_chain_forks_start_at_the_prompt() -> None:
    def make(task: Any, number: int) -> Fake:
        def step(n: int, text: str) -> StepResult:
            if number == 0 and n == 2:
                raise EnvironmentFault("gone")
            return three_observations(n, text)

        return Fake(on_step=step)

    shape = Expansion(num_trees=1, num_expansions=4, num_rounds=1, num_trained_leaves=5)
    report, _ = grow(shape, make=make, max_retries=0)
    [trace] = report.traces
    assert trace.leaves[0].outcome is Outcome.ENVIRONMENT_FAULT
    assert all(num_shared_turns(trace, rollout, (1, 2, 3, 4)) == 0 for rollout in (1, 2, 3, 4))


# The trees do not depend on timing, on max_concurrent, or on faults that a retry repaired.

RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "bernoulli": {"entropy_weight": 5.0},
    "coin": {"entropy_weight": 0.0},
    "threshold": {"decision": "threshold", "entropy_weight": 5.0},
    "children": {"num_children": 2, "base_probability": 0.3},
    "streaks": {"branch_penalty": 0.4, "base_probability": 0.8},
    "aepo": {"preset": "aepo"},
    "aepo-released": {"preset": "aepo-released", "branch_penalty": 0.4, "base_probability": 0.3},
    "aepo-advised": {"preset": "aepo-advised", "branch_penalty": 0.4, "base_probability": 0.3},
    "tree": {},
}
SIZE: Final = 6


@dataclass
class World:
    """State of all episodes: how often each history was played, its faults, delays and open environments."""

    seed: int
    fault_rate: float
    delay: float
    num_plays: Counter[tuple[str, ...]] = field(default_factory=Counter)
    num_open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_open(self, number: int) -> None:
        with self.lock:
            self.num_open += number
            self.most_open = max(self.most_open, self.num_open)

    def fault(self, history: tuple[str, ...]) -> Exception | None:
        """The first plays of some histories fail, so that attempts of one rollout fail there."""
        with self.lock:
            self.num_plays[history] += 1
            number = self.num_plays[history]
        draw = random.Random(f"{self.seed} {history}")
        if draw.random() >= self.fault_rate or number > draw.randrange(1, 5):
            return None
        return (ToolFault if draw.random() < 0.5 else EnvironmentFault)(f"attempt {number}")


@dataclass
class Replayed:
    """An environment whose results depend on the actions since its start alone."""

    world: World
    task: Task
    actions: tuple[str, ...] = ()
    num_closed: int = 0

    def reset(self, seed: int) -> Sequence[Message]:
        self.world.add_open(1)
        return (Message(role="user", content=self.task.question),)

    def step(self, message: Message) -> StepResult:
        time.sleep(random.random() * self.world.delay)
        history = (self.task.key, *self.actions, message.content)
        if fault := self.world.fault(history):
            raise fault
        self.actions = history[1:]
        draw = random.Random(f"{self.world.seed} {history} answer")
        if draw.random() < 0.15:
            return END
        observation = Message(role="inline", content=f" {draw.randrange(100)}")
        return StepResult(message=observation, num_tool_calls=int(draw.random() < 0.8), reward=draw.random())

    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=float(len(self.actions)), success=False)

    def close(self) -> None:
        self.num_closed += 1
        self.world.add_open(-1)


class Copied(Replayed):
    def copy(self) -> "Copied":
        self.world.add_open(1)
        twin = copy.copy(self)
        twin.num_closed = 0
        return twin


class FaultyEngine(RawEngine):
    """Draws ids from the seed of the request, and fails in the batches of the given numbers."""

    def __init__(self, faulty: Sequence[int] = ()) -> None:
        super().__init__(TOKENIZER, self._draw)
        self.faulty = set(faulty)
        self.num_batches = self.num_tokens = 0

    @staticmethod
    def _draw(request: Request) -> Sequence[int]:
        draw = random.Random(request.seed)
        return [draw.randrange(10, 60) for _ in range(draw.randrange(3, 6))]

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.num_batches += 1
        if self.num_batches in self.faulty:
            raise EngineFault("no memory")
        generations = super().generate(requests)
        self.num_tokens += sum(len(one.token_ids) for one in generations)
        return generations


def play_world(
    rule: str,
    world: World,
    *,
    copies: bool,
    max_concurrent: int = 64,
    engine: RawEngine | None = None,
    first_wave: int = 3,
    max_retries: int = 2,
) -> RolloutReport:
    """Two groups of six; seeds and histories determine everything but the order of events."""
    hook: Any = Expansion(num_trees=2, num_expansions=2, num_rounds=1, num_trained_leaves=2)
    if rule != "tree":
        chosen = validate(ArpoSettings, {"group_size": SIZE, "first_wave": first_wave, **RULES[rule]})
        hook = BranchHook(chosen, group_size=SIZE, vocabulary_size=98)
    kind = Copied if copies else Replayed
    report, factory = play(
        hook, make=lambda task, number: kind(world=world, task=task), size=SIZE, num_tasks=2,
        engine=engine or FaultyEngine(), max_concurrent=max_concurrent, seed=world.seed,
        limits=Limits(step_timeout_s=20, max_turns=5), max_retries=max_retries,
    )  # fmt: skip
    assert all(sorted(trace.leaves) == list(range(SIZE)) for trace in report.traces)
    assert all(one.num_closed == 1 for one in factory.made)  # type: ignore[attr-defined]
    assert world.num_open == 0
    return report


def check_world(rule: str, seed: int, copies: bool, max_concurrent: int, first_wave: int) -> None:
    def run(num_concurrent: int, delay: float) -> RolloutReport:
        world = World(seed=seed, fault_rate=0.1, delay=delay)
        report = play_world(rule, world, copies=copies, max_concurrent=num_concurrent, first_wave=first_wave)
        # a rollout whose fork is undecided does not wait
        assert copies or world.most_open <= num_concurrent
        return report

    assert contents(run(max_concurrent, 0.002)) == contents(run(64, 0.0))


WORLDS: Final[Mapping[str, Any]] = {
    "rule": st.sampled_from(sorted(RULES)),
    "seed": st.integers(0, 2**32),
    "copies": st.booleans(),
    "max_concurrent": st.integers(1, 16),
    "first_wave": st.integers(1, SIZE),
}


@settings(max_examples=4)
@given(**WORLDS)
def test_trees_do_not_depend_on_concurrency_and_delays(**choices: Any) -> None:
    """With retries that succeed and with lost rollouts."""
    check_world(**choices)


@pytest.mark.slow
@settings(max_examples=400)
@given(**WORLDS)
def test_trees_do_not_depend_on_concurrency_and_delays_in_many_worlds(**choices: Any) -> None:
    check_world(**choices)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_repaired_faults_change_no_rollout(rule: str) -> None:
    """Faults of tools and of whole batches; environments copied in one run and replayed in the other."""

    def rollouts(report: RolloutReport) -> list[Any]:
        for trace in report.traces:
            counted = {node.node_id for _, path in trace.rollouts() for node in path}
            trace.nodes = [node for node in trace.nodes if node.node_id in counted]
            for node in trace.nodes:
                node.metadata.pop("is_replayed", None)
        return contents(report)

    plain = play_world(rule, World(seed=5, fault_rate=0.0, delay=0.0), copies=False)
    world = World(seed=5, fault_rate=0.2, delay=0.001)
    faulty = play_world(
        rule, world, copies=True, max_concurrent=3, engine=FaultyEngine((2, 5, 9, 14)), max_retries=40
    )
    assert faulty.num_retries > 5 and rollouts(faulty) == rollouts(plain)


@pytest.mark.parametrize("max_retries", [0, 1, 40])
@pytest.mark.parametrize("rule", ["bernoulli", "tree"])
def test_every_generated_token_is_counted_once(rule: str, max_retries: int) -> None:
    """As part of a rollout or as discarded: after retries, lost rollouts, and forks of failed attempts."""
    engine = FaultyEngine()
    world = World(seed=3, fault_rate=0.3, delay=0.0)
    report = play_world(rule, world, copies=True, engine=engine, max_retries=max_retries)
    values = rollout_metrics(report.traces)
    assert values["tokens/discarded"] > 0
    assert values.get("tokens/policy", 0.0) + values["tokens/discarded"] == engine.num_tokens


@dataclass
class Prefix(Hook):
    """Two executed steps of an expert in front of every rollout."""

    def before_turn(self, state: EpisodeState) -> Sequence[Demonstration]:
        return [] if state.turn else [Demonstration(text="a."), Demonstration(text="b.")]


@pytest.mark.parametrize("kind", ["prefix", "copied", "replayed"])
def test_executed_tool_calls_are_counted(kind: str) -> None:
    """A prefix is executed by every rollout, and a fork by replay executes the calls before it again."""
    executed = []

    def one_call(number: int, text: str) -> StepResult:
        executed.append(text)
        return replace(say(f" o{number}"), num_tool_calls=1, done=number >= 3)

    forking = Forking(lambda state: 3 * (state.rollout == 0 and state.turn == 2), first_wave=1, wave=1)
    environment = CopyableFake if kind == "copied" else Fake
    report, _ = play(
        Prefix() if kind == "prefix" else forking,
        size=4,
        make=lambda task, number: environment(on_step=one_call),
    )
    values = rollout_metrics(report.traces)
    assert values["rollout/num_tool_calls"] == len(executed) == (10 if kind == "copied" else 16)
    assert values["rollout/num_tool_calls_shared"] == (6 if kind == "copied" else 0)
    for leaf, _ in report.traces[0].rollouts():
        if leaf.rollout:  # as if a fault had ended it
            leaf.episode_return = None
    assert rollout_metrics(report.traces)["rollout/num_tool_calls"] == 4


def test_a_probe_that_sets_the_first_wave_to_one_leaves_room_for_forks() -> None:
    """The probe never forks: without another rollout from the prompt, the whole group would start there."""
    forking = Forking(lambda state: int(state.rollout > 0), first_wave=1, wave=1)
    report, _ = play(forking, size=8)
    [trace] = report.traces
    assert sum(node.trainable and node.parent == 0 for node in trace.nodes) < 8
    assert sum(node.metadata.get("num_forks", 0) for node in trace.nodes) > 0


def test_with_one_rollout_at_a_time_not_all_forks_start_from_the_first_ones() -> None:
    """First come, first served would grant all forks to two rollouts, with 6 and 4 of the 16 leaves."""

    def lineage_sizes(max_concurrent: int) -> list[int]:
        def twelve_calls(number: int, text: str) -> StepResult:
            message = Message(role="inline", content=f" o{number}") if number < 12 else None
            return StepResult(message=message, done=message is None, num_tool_calls=1)

        hook = BranchHook(validate(ArpoSettings, {"entropy_weight": 0.0}), group_size=16, vocabulary_size=98)
        report, _ = play(
            hook, make=lambda task, number: CopyableFake(on_step=twelve_calls), size=16,
            max_concurrent=max_concurrent, limits=Limits(max_turns=30),
        )  # fmt: skip
        first_turns = [
            next(node.node_id for node in path if node.trainable) for _, path in report.traces[0].rollouts()
        ]
        return sorted(Counter(first_turns).values(), reverse=True)

    sizes = lineage_sizes(1)
    assert sizes == lineage_sizes(6) == lineage_sizes(64)
    assert len(sizes) == 8 and sizes[0] <= 4


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32),
    first_wave=st.integers(1, 8),
    copies=st.booleans(),
    max_concurrent=st.sampled_from([1, 3, 40]),
    patience=st.none() | st.integers(1, 60),
)
def test_every_rollout_has_one_outcome(
    seed: int, first_wave: int, copies: bool, max_concurrent: int, patience: int | None
) -> None:
    """With faults, empty and truncated turns, random forks, and groups whose time limit of ``patience`` clock
    readings is exceeded.
    """

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

    kind = CopyableFake if copies else Fake
    runs = scheduler(
        RawEngine(TOKENIZER, ids),
        Factory(lambda task, number: kind(on_step=trouble)),
        hooks=(Forking(lambda state: int(state.stream("fork").integers(0, 3)), first_wave=first_wave),),
        max_concurrent=max_concurrent,
        limits=Limits(max_turns=5),
    )
    runs.group_timeout_s, runs.clock = patience, partial(next, itertools.count())
    report = runs.run(tasks(3), modes=("m",) * 8, training_step=0)
    for trace in report.traces:
        assert sorted(trace.leaves) == list(range(8))
        for leaf, path in trace.rollouts():
            assert (leaf.episode_return is None) == leaf.outcome.is_fault == (not path)
            assert path == [] or path[0].parent is None
