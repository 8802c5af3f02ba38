"""The tree of a group is the same with any number of places, however fast tools answer and whatever is tried
again.
"""

import copy
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from outrider.rollout.scheduler import RolloutReport
from outrider.rollout.settings import Limits
from outrider.training.step_metrics import rollout_metrics
from outrider.types import Message, Task
from tests.rollout.fakes import TOKENIZER, Factory, RawEngine, scheduler, tasks
from tests.rollout.test_branch import Copying
from tests.rollout.test_scheduler import chatty, facts

RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "bernoulli": {"entropy_weight": 5.0},
    "coin": {"entropy_weight": 0.0},
    "threshold": {"decision": "threshold", "entropy_weight": 5.0},
    "children": {"num_children": 2, "base_probability": 0.3},
    "streaks": {"branch_penalty": 0.4, "base_probability": 0.8},
    "aepo": {"preset": "aepo"},
    "aepo-released": {"preset": "aepo-released", "branch_penalty": 0.4, "base_probability": 0.3},
    "tree": {},
}
SIZE: Final = 6


@dataclass
class World:
    """What all episodes share: how often every history was played, when it faults, its delays, how many are
    open.
    """

    seed: int
    fault_rate: float
    delay: float
    num_seen: Counter[tuple[str, ...]] = field(default_factory=Counter)
    num_open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def opened(self, by: int) -> None:
        with self.lock:
            self.num_open += by
            self.most_open = max(self.most_open, self.num_open)

    def fault(self, history: tuple[str, ...]) -> Exception | None:
        """The first plays of some histories break, so that it is one rollout's own tries that break there."""
        with self.lock:
            self.num_seen[history] += 1
            number = self.num_seen[history]
        draw = random.Random(f"{self.seed} {history}")
        if draw.random() >= self.fault_rate or number > draw.randrange(1, 5):
            return None
        return (ToolFault if draw.random() < 0.5 else EnvironmentFault)(f"try {number}")


@dataclass
class Replayed:
    """Its answers depend on what was said since its start and on nothing else."""

    world: World
    task: Task
    said: tuple[str, ...] = ()
    num_closed: int = 0

    def reset(self, seed: int) -> Sequence[Message]:
        self.world.opened(1)
        return (Message(role="user", content=self.task.question),)

    def step(self, message: Message) -> StepResult:
        time.sleep(random.random() * self.world.delay)
        history = (self.task.key, *self.said, message.content)
        if fault := self.world.fault(history):
            raise fault
        self.said = history[1:]
        draw = random.Random(f"{self.world.seed} {history} answer")
        if draw.random() < 0.15:
            return StepResult(message=None, done=True)
        answer = Message(role="inline", content=f" {draw.randrange(100)}")
        return StepResult(message=answer, num_tool_calls=int(draw.random() < 0.8), reward=draw.random())

    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=float(len(self.said)), success=False)

    def close(self) -> None:
        self.num_closed += 1
        self.world.opened(-1)


class Copied(Replayed):
    def copy(self) -> "Copied":
        self.world.opened(1)
        twin = copy.copy(self)
        twin.num_closed = 0
        return twin


class Faulty(RawEngine):
    """Ids by the request's own seed; whole batches fail, by their numbers."""

    def __init__(self, broken: Sequence[int] = ()) -> None:
        super().__init__(TOKENIZER, _ids)
        self.broken = set(broken)
        self.num_batches = 0

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.num_batches += 1
        if self.num_batches in self.broken:
            raise EngineFault("no memory")
        return super().generate(requests)


def _ids(request: Request) -> Sequence[int]:
    draw = random.Random(request.seed)
    return [draw.randrange(10, 60) for _ in range(draw.randrange(3, 6))]


def play(
    rule: str,
    world: World,
    *,
    copies: bool,
    max_concurrent: int = 64,
    engine: RawEngine | None = None,
    first_wave: int = 3,
    **options: Any,
) -> RolloutReport:
    """Two groups of six; seeds and histories decide everything but the order of events."""
    hook: Any = Expansion(num_trees=2, num_expansions=2, num_rounds=1, num_trained_leaves=2)
    if rule != "tree":
        chosen = validate(ArpoSettings, {"group_size": SIZE, "first_wave": first_wave, **RULES[rule]})
        hook = BranchHook(chosen, group_size=SIZE, vocabulary_size=98)
    kind = Copied if copies else Replayed
    factory = Factory(lambda task, number: kind(world=world, task=task))
    runs = scheduler(
        engine or Faulty(), factory, hooks=(hook,), max_concurrent=max_concurrent, seed=world.seed,
        limits=Limits(step_timeout_s=20, max_turns=5), **options,
    )  # fmt: skip
    report = runs.run(tasks(2), modes=("m",) * SIZE, training_step=0)
    # one outcome for every owed rollout
    assert all(sorted(trace.leaves) == list(range(SIZE)) for trace in report.traces)
    assert all(one.num_closed == 1 for one in factory.made)  # type: ignore[attr-defined]
    assert world.num_open == 0
    return report


def on_paths(report: RolloutReport) -> list[Any]:
    """What is in the rollouts, without what failed tries left behind."""
    found = []
    for trace in report.traces:
        counted = {node.node_id for _, path in trace.rollouts() for node in path}
        trace.nodes = [node for node in trace.nodes if node.node_id in counted]
        for node in trace.nodes:
            node.metadata.pop("is_replayed", None)
        found += facts(RolloutReport(traces=[trace], num_batches=0, num_retries=0))
    return found


def check(rule: str, seed: int, copies: bool, max_concurrent: int, first_wave: int) -> None:
    def run(places: int, delay: float) -> RolloutReport:
        world = World(seed=seed, fault_rate=0.1, delay=delay)
        report = play(rule, world, copies=copies, max_concurrent=places, first_wave=first_wave)
        if not copies:  # a rollout that waits for a decision would hold a place
            assert world.most_open <= places
        return report

    assert facts(run(max_concurrent, 0.002)) == facts(run(64, 0.0))


CHOICES: Final[Mapping[str, Any]] = {
    "rule": st.sampled_from(sorted(RULES)),
    "seed": st.integers(0, 2**32),
    "copies": st.booleans(),
    "max_concurrent": st.integers(1, 16),
    "first_wave": st.integers(1, SIZE),
}


@settings(max_examples=4)
@given(**CHOICES)
def test_the_tree_is_the_same_for_any_places_and_delays_and_under_faults(**choices: Any) -> None:
    """Node by node, with retries that help and rollouts that are lost for good."""
    check(**choices)


@pytest.mark.slow
@settings(max_examples=400)
@given(**CHOICES)
def test_the_tree_is_the_same_in_many_more_worlds(**choices: Any) -> None:
    check(**choices)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_faults_that_a_retry_made_good_change_no_rollout_and_no_sharing(rule: str) -> None:
    """Whole batches fail, others with other places, and tools besides; copied or replayed, rollouts are the
    same.
    """
    quiet = play(rule, World(seed=5, fault_rate=0.0, delay=0.0), copies=False)
    world = World(seed=5, fault_rate=0.2, delay=0.001)
    troubled = play(rule, world, copies=True, max_concurrent=3, engine=Faulty((2, 5, 9, 14)), max_retries=40)
    assert troubled.num_retries > 5 and on_paths(troubled) == on_paths(quiet)


@pytest.mark.parametrize("max_retries", [0, 1, 40])
@pytest.mark.parametrize("rule", ["bernoulli", "tree"])
def test_every_token_that_the_policy_wrote_is_counted_once(rule: str, max_retries: int) -> None:
    """In the rollouts or as discarded: retries that helped, rollouts that were lost, and forks of tries that
    broke.
    """
    written: list[int] = []

    class Counting(RawEngine):
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            answers = super().generate(requests)
            written.extend(len(answer.token_ids) for answer in answers)
            return answers

    world = World(seed=3, fault_rate=0.3, delay=0.0)
    report = play(rule, world, copies=True, engine=Counting(TOKENIZER, _ids), max_retries=max_retries)
    values = rollout_metrics(report.traces)
    assert values["tokens/discarded"] > 0
    assert values.get("tokens/policy", 0.0) + values["tokens/discarded"] == sum(written)


def shares_of_lineages(max_concurrent: int) -> list[int]:
    """Leaves of every first turn, the largest first: 16 leaves, 8 from the prompt, twelve calls each, forks
    by a coin.
    """

    def called(number: int, text: str) -> StepResult:
        message = Message(role="inline", content=f" o{number}") if number < 12 else None
        return StepResult(message=message, done=message is None, num_tool_calls=1)

    hook = BranchHook(validate(ArpoSettings, {"entropy_weight": 0.0}), group_size=16, vocabulary_size=98)
    factory = Factory(lambda task, number: Copying(on_step=called))
    runs = scheduler(
        chatty(), factory, hooks=(hook,), max_concurrent=max_concurrent, limits=Limits(max_turns=30)
    )
    [trace] = runs.run(tasks(1), modes=("m",) * 16, training_step=0).traces
    leaves = Counter(next(node.node_id for node in path if node.trainable) for _, path in trace.rollouts())
    return sorted(leaves.values(), reverse=True)


def test_with_one_place_forks_do_not_all_leave_the_first_rollout() -> None:
    """As ScienceWorld plays by default; first come, first served gave two rollouts all forks: 6 and 4 of 16
    leaves.
    """
    shares = shares_of_lineages(1)
    assert shares == shares_of_lineages(6) == shares_of_lineages(64)
    assert len(shares) == 8 and shares[0] <= 4
