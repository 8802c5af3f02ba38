"""Scheduling of rollouts: one outcome each, retries and counts of faults, and no dependence on latencies."""

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.base import Generation, Request
from outrider.engines.scripted import ScriptedEngine
from outrider.environments.base import StepResult
from outrider.errors import EngineFault, EnvironmentFault, ToolFault
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.rollout.settings import Limits
from outrider.seeding import stream
from outrider.training.step_metrics import rollout_metrics
from outrider.types import Message, Origin, Outcome, Task
from tests.rollout.fakes import (
    END,
    TOKENIZER,
    Factory,
    Fake,
    RawEngine,
    contents,
    random_ids_engine,
    say,
    scheduler,
    scripted,
    tasks,
)


def one_turn(**options: Any) -> Factory:
    """Environments that end at the first turn."""
    return Factory(lambda task, number: Fake(on_step=lambda n, t: END, **options))


def one_turn_scheduler(factory: Factory | None = None, **options: Any) -> Scheduler:
    return scheduler(scripted(lambda request, context: "a."), factory or one_turn(), **options)


def outcomes(report: RolloutReport) -> list[Counter[Outcome]]:
    return [Counter(leaf.outcome for leaf in trace.leaves.values()) for trace in report.traces]


def test_groups_are_complete_and_in_the_order_of_the_tasks() -> None:
    factory = one_turn()
    order = tasks(5)[::-1]
    report = one_turn_scheduler(factory, max_concurrent=3).run(order, modes=("m",) * 4, training_step=7)
    assert [trace.task for trace in report.traces] == order
    assert all(sorted(trace.leaves) == [0, 1, 2, 3] for trace in report.traces)
    assert [environment.num_closed for environment in factory.made] == [1] * 20  # type: ignore[attr-defined]
    assert report.num_retries == 0 and report.faults == Counter()
    # a group shares one prompt node and one reset seed
    assert all(sum(node.parent is None for node in trace.nodes) == 1 for trace in report.traces)
    seeds = Counter(environment.seeds[0] for environment in factory.made)  # type: ignore[attr-defined]
    assert sorted(seeds.values()) == [4] * 5


@pytest.mark.parametrize("max_concurrent", [1, 5, 64])
def test_a_group_shares_its_task_and_its_seed(max_concurrent: int) -> None:
    """Every rollout of a group, whatever plays beside it: also a retried one, and one of another mode."""
    played: list[tuple[str, Fake]] = []
    broken = {"task 1"}

    def make(task: Task, number: int) -> Fake:
        def act(step: int, text: str) -> StepResult:
            if task.key in broken:
                broken.remove(task.key)
                raise EnvironmentFault("the simulator died")
            return StepResult(message=None, done=True)

        played.append((task.key, environment := Fake(on_step=act)))
        return environment

    scheduled = one_turn_scheduler(Factory(make), max_concurrent=max_concurrent)
    report = scheduled.run(tasks(4), modes=("plain", "plain", "tips", "tips"), training_step=3)
    assert report.num_retries == 1
    seeds: dict[str, set[int]] = {}
    for key, environment in played:
        seeds.setdefault(key, set()).update(environment.seeds)
    assert [trace.task.key for trace in report.traces] == [task.key for task in tasks(4)]
    assert all(sorted(trace.leaves) == [0, 1, 2, 3] for trace in report.traces)
    assert seeds.keys() == {trace.task.key for trace in report.traces}
    assert all(len(group) == 1 for group in seeds.values())
    assert len(set.union(*seeds.values())) == 4


def test_different_prompts_have_their_own_nodes() -> None:
    factory = Factory(lambda task, number: Fake(on_step=lambda n, t: END, question=f"q{number}"))
    report = one_turn_scheduler(factory, max_concurrent=1).run(tasks(1), modes=("m",) * 3, training_step=0)
    assert sum(node.origin is Origin.PROMPT for node in report.traces[0].nodes) == 3


def test_invalid_batches() -> None:
    runs = one_turn_scheduler()
    with pytest.raises(ValueError, match="share a key"):
        runs.run([*tasks(1), *tasks(1)], modes=("m",), training_step=0)
    with pytest.raises(ValueError, match="differ in size"):
        runs.run(tasks(2), modes=lambda group: ("m",) * (1 + group), training_step=0)
    assert runs.run([], modes=("m",), training_step=0).traces == []


def test_groups_may_have_different_modes() -> None:
    report = one_turn_scheduler().run(tasks(3), modes=lambda group: (f"m{group}",) * 2, training_step=0)
    assert [trace.modes for trace in report.traces] == [("m0", "m0"), ("m1", "m1"), ("m2", "m2")]


@pytest.mark.parametrize("max_concurrent", [1, 4, 64])
def test_traces_do_not_depend_on_latencies(max_concurrent: int) -> None:
    def run(latency_seed: int) -> RolloutReport:
        def make(task: Any, number: int) -> Fake:
            delay = random.Random(f"{latency_seed} {number}").random() * 0.004
            return Fake(
                on_step=lambda n, text: END if n == 3 or len(text) == 3 else say(f" {len(text)}"), delay=delay
            )

        return scheduler(random_ids_engine(), Factory(make), max_concurrent=max_concurrent).run(
            tasks(3), modes=("m",) * 4, training_step=1
        )

    first = contents(run(0))
    assert contents(run(1)) == first
    assert sum(len(nodes) for _, nodes, _ in first) > 30


def test_samples_depend_on_run_seed_step_and_rollout() -> None:
    def sampled(seed: int, step: int) -> list[tuple[int, ...]]:
        report = scheduler(random_ids_engine(), one_turn(), seed=seed).run(
            tasks(2), modes=("m",) * 2, training_step=step
        )
        return [node.token_ids for trace in report.traces for node in trace.nodes if node.trainable]

    first, other_seed, other_step = sampled(0, 0), sampled(1, 0), sampled(0, 1)
    assert first == sampled(0, 0) and first != other_seed != other_step != first
    assert len(set(first)) == 4


# Faults.


@pytest.mark.parametrize("method", ["factory", "reset", "step", "result"])
@pytest.mark.parametrize("num_broken", [1, 3])
def test_a_fault_is_retried_in_a_new_environment_and_then_masked(method: str, num_broken: int) -> None:
    class Broken(Fake):
        def reset(self, seed: int) -> Sequence[Message]:
            if method == "reset":
                raise EnvironmentFault("reset")
            return super().reset(seed)

        def step(self, message: Message) -> StepResult:
            if method == "step":
                raise ToolFault("step")
            return super().step(message)

        def result(self) -> Any:
            if method == "result":
                raise RuntimeError("result")
            return super().result()

    calls: list[int] = []

    def make(task: Any, number: int) -> Fake:
        calls.append(1)
        if len(calls) > num_broken:
            return Fake(on_step=lambda n, t: END)
        if method == "factory":
            raise OSError("no process")
        return Broken(on_step=lambda n, t: END)

    factory = Factory(make)
    report = one_turn_scheduler(factory, max_retries=2).run(tasks(1), modes=("m",), training_step=0)
    leaf = report.traces[0].leaves[0]
    outcome = Outcome.TOOL_FAULT if method == "step" else Outcome.ENVIRONMENT_FAULT
    assert report.faults[outcome.value] == num_broken and report.num_retries == min(num_broken, 2)
    assert len(calls) == min(num_broken + 1, 3)
    # also the faults that a retry repaired
    assert len(report.fault_reasons) == num_broken
    assert all(line.startswith(f"{outcome.value} in task 0, rollout 0: ") for line in report.fault_reasons)
    if num_broken == 3:
        assert leaf.outcome is outcome and leaf.episode_return is None and leaf.node_id is None
    else:
        assert leaf.outcome is Outcome.FINISHED and leaf.episode_return == 0.5
        path = report.traces[0].path(leaf.node_id or 0)
        assert sum(node.trainable for node in path) == 1  # nothing of the failed attempt
    assert all(environment.num_closed == 1 for environment in factory.made)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), ToolFault("x"), SystemExit(1)], ids=lambda e: type(e).__name__
)
def test_a_failure_to_close_is_counted_and_changes_no_outcome(error: BaseException) -> None:
    class Sticky(Fake):
        def close(self) -> None:
            raise error

    factory = Factory(lambda task, number: Sticky(on_step=lambda n, t: END))
    report = one_turn_scheduler(factory).run(tasks(1), modes=("m",) * 3, training_step=0)
    assert outcomes(report) == [{Outcome.FINISHED: 3}]
    assert report.faults == Counter({"close": 3})
    assert len(report.fault_reasons) == 3
    assert all(line.startswith("closing an environment: ") for line in report.fault_reasons)


def test_an_engine_fault_affects_the_whole_batch_and_is_retried() -> None:
    class Flaky(ScriptedEngine):
        num_calls = 0

        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            Flaky.num_calls += 1
            if Flaky.num_calls == 1:
                raise EngineFault("first batch")
            return super().generate(requests)

    engine = Flaky(tokenizer=TOKENIZER, script=lambda r, c: "a.")
    report = scheduler(engine, one_turn()).run(tasks(2), modes=("m",) * 2, training_step=0)
    assert outcomes(report) == [{Outcome.FINISHED: 2}] * 2
    assert report.faults == Counter({"engine_fault": 4, "retries": 4})
    assert list(report.fault_reasons) == [
        f"engine_fault in task {task}, rollout {rollout}: first batch"
        for task in range(2)
        for rollout in range(2)
    ]


def test_a_bug_in_the_engine_raises_and_closes_all_environments() -> None:
    def script(request: Request, context: str) -> str:
        raise ZeroDivisionError

    factory = one_turn()
    with pytest.raises(ZeroDivisionError):
        scheduler(scripted(script), factory).run(tasks(3), modes=("m",) * 2, training_step=0)
    assert all(environment.num_closed == 1 for environment in factory.made)  # type: ignore[attr-defined]


@given(
    workers=st.integers(1, 9),
    groups=st.integers(1, 4),
    size=st.integers(1, 5),
    turns=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_a_batch_has_a_request_of_every_running_rollout(
    workers: int, groups: int, size: int, turns: int, seed: int
) -> None:
    """Episodes have different lengths."""
    sizes: list[int] = []

    class Watching(ScriptedEngine):
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            sizes.append(len(requests))
            assert [r.request_id for r in requests] == sorted(r.request_id for r in requests)
            return super().generate(requests)

    def make(task: Any, number: int) -> Fake:
        last = int(stream(seed, task.key).integers(turns))
        return Fake(on_step=lambda n, t: END if n >= last else say(" o"))

    engine = Watching(tokenizer=TOKENIZER, script=lambda r, c: "a.")
    report = scheduler(engine, Factory(make), max_concurrent=workers).run(
        tasks(groups), modes=("m",) * size, training_step=0
    )
    assert report.num_batches == len(sizes) and max(sizes) <= workers
    assert sum(sizes) == sum(node.trainable for trace in report.traces for node in trace.nodes)
    assert len(sizes) >= -(-sum(sizes) // workers)


def test_counts_of_random_faults_add_up() -> None:
    """Faults of every kind in every call, invalid turns, truncation and endless episodes."""
    raised: Counter[str] = Counter()
    lock = threading.Lock()
    numbers = itertools.count()

    def broken(kind: str, error: Exception) -> Exception:
        with lock:
            raised[kind] += 1
        return error

    class Wild(Fake):
        def reset(self, seed: int) -> Sequence[Message]:
            if self.delay:
                self.delay = 0.0
                raise broken("environment_fault", EnvironmentFault("reset"))
            return super().reset(seed)

    def make(task: Any, number: int) -> Fake:
        dice = random.Random(next(numbers))
        if dice.random() < 0.03:
            raise broken("environment_fault", OSError("factory"))

        def step(n: int, text: str) -> StepResult:
            roll = dice.random()
            if roll < 0.06:
                raise broken("tool_fault", ToolFault("tool"))
            if roll < 0.12:
                raise broken("environment_fault", ValueError("bug"))
            if roll < 0.2:
                return StepResult(message=Message(role="inline", content="?"), invalid=True, done=roll < 0.15)
            if roll < 0.5:
                return StepResult(message=None, done=True, truncated=roll < 0.25)
            return say(" o" * dice.randrange(1, 40))

        return Wild(on_step=step, delay=float(dice.random() < 0.03))

    class Weak(RawEngine):
        num_batches = 0

        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            self.num_batches += 1
            if self.num_batches % 13 == 0:
                raised["engine_fault"] += len(requests)
                raise EngineFault("batch")
            return super().generate(requests)

    def ids(request: Request) -> Sequence[int]:
        draw = random.Random(request.seed)
        return [draw.choice([1, 10, 20, 30]) for _ in range(draw.randrange(1, 30))]

    engine, factory = Weak(TOKENIZER, ids), Factory(make)
    limits = Limits(
        max_turns=6, max_turn_tokens=12, max_response_tokens=90, max_observation_tokens=40, step_timeout_s=30
    )
    report = scheduler(engine, factory, limits=limits, max_concurrent=50, max_retries=1).run(
        tasks(40), modes=("m",) * 8, training_step=0
    )
    leaves = [leaf for trace in report.traces for leaf in trace.leaves.values()]
    assert all(sorted(trace.leaves) == list(range(8)) for trace in report.traces) and len(leaves) == 320
    counts = Counter(leaf.outcome for leaf in leaves)
    policy_ended = {Outcome.FINISHED, Outcome.INVALID, Outcome.TRUNCATED_TURNS, Outcome.TRUNCATED_TOKENS}
    assert set(counts) >= policy_ended | {Outcome.TOOL_FAULT, Outcome.ENVIRONMENT_FAULT}
    for kind in ("tool_fault", "environment_fault", "engine_fault"):
        assert report.faults[kind] == raised[kind] > 0
    num_lost = sum(number for outcome, number in counts.items() if outcome.is_fault)
    assert sum(raised.values()) == report.num_retries + num_lost
    assert all((leaf.episode_return is None) == leaf.outcome.is_fault for leaf in leaves)
    assert all(environment.num_closed == 1 for environment in factory.made)  # type: ignore[attr-defined]
    for trace in report.traces:
        for leaf, path in trace.rollouts():
            assert leaf.outcome.is_fault == (path == [])
            assert all(node.metadata.get("rollout", leaf.rollout) == leaf.rollout for node in path)


# Time limits.


def test_hanging_calls_are_faults_and_block_no_other_rollout() -> None:
    """More calls hang than a thread pool has threads, until after the end of the run."""
    release = threading.Event()

    def make(task: Any, number: int) -> Fake:
        def step(n: int, text: str) -> StepResult:
            if task.key == "task 0":
                release.wait(60)
            return END

        return Fake(on_step=step)

    start = time.perf_counter()
    runs = one_turn_scheduler(
        Factory(make), limits=Limits(step_timeout_s=1), max_retries=0, max_concurrent=80
    )
    try:
        report = runs.run(tasks(2), modes=("m",) * 40, training_step=0)
    finally:
        seconds = time.perf_counter() - start
        release.set()
    assert outcomes(report) == [{Outcome.ENVIRONMENT_FAULT: 40}, {Outcome.FINISHED: 40}]
    assert "no answer within 1 s" in report.traces[0].leaves[0].detail
    assert seconds < 20  # one after the other: 40 s


def test_many_slow_calls_run_at_the_same_time() -> None:
    """80 calls of 0.1 s with a limit of 2 s: no call waits for another one until it times out."""
    runs = one_turn_scheduler(
        one_turn(delay=0.1), limits=Limits(step_timeout_s=2), max_concurrent=80, max_retries=0
    )
    report = runs.run(tasks(1), modes=("m",) * 80, training_step=0)
    assert outcomes(report) == [{Outcome.FINISHED: 80}]


class SlowGroup:
    """Every step of the first environment takes ten seconds of a simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.factory = Factory(self._make)

    def _make(self, task: Task, number: int) -> Fake:
        is_slow = task.key == "task 0" and number == 0
        return Fake(on_step=self._step if is_slow else lambda n, text: END)

    def _step(self, number: int, text: str) -> StepResult:
        self.now += 10.0
        return say(" on")

    def run(self, limit: float | None, *, num_tasks: int = 1, max_concurrent: int = 9) -> RolloutReport:
        runs = one_turn_scheduler(self.factory, max_concurrent=max_concurrent)
        runs.group_timeout_s, runs.clock = limit, lambda: self.now
        return runs.run(tasks(num_tasks), modes=("m",) * 3, training_step=0)


@pytest.mark.parametrize(("limit", "num_steps"), [(25.0, 3), (30.0, 4)])
def test_a_group_over_its_time_limit_is_cancelled_before_the_next_turn(limit: float, num_steps: int) -> None:
    slow = SlowGroup()
    report = slow.run(limit)
    assert outcomes(report) == [{Outcome.FINISHED: 2, Outcome.CANCELLED: 1}]
    [lost] = [leaf for leaf in report.traces[0].leaves.values() if leaf.outcome is Outcome.CANCELLED]
    assert lost.episode_return is None and lost.node_id is None and "group_timeout_s" in lost.detail
    assert [made.num_steps for made in slow.factory.made] == [num_steps, 1, 1]  # type: ignore[attr-defined]
    assert all(made.num_closed == 1 for made in slow.factory.made)  # type: ignore[attr-defined]
    metrics = rollout_metrics(report.traces)
    assert (metrics["rollout/num_cancelled"], metrics["rollout/num_finished"]) == (1.0, 2.0)


def test_the_time_of_a_group_starts_with_its_first_rollout() -> None:
    """Rollouts that have not started create no environment; the next group has its whole time."""
    slow = SlowGroup()
    report = slow.run(25.0, num_tasks=2, max_concurrent=1)
    assert outcomes(report) == [{Outcome.CANCELLED: 3}, {Outcome.FINISHED: 3}]
    assert len(slow.factory.made) == 1 + 3


def test_without_a_time_limit_no_rollout_is_cancelled() -> None:
    assert outcomes(SlowGroup().run(None)) == [{Outcome.FINISHED: 2, Outcome.TRUNCATED_TURNS: 1}]
