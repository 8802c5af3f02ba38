"""Many rollouts at a time: one outcome each, faults retried and counted, nothing depends on who is fast."""

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
from outrider.rollout.scheduler import RolloutReport
from outrider.rollout.settings import Limits
from outrider.seeding import stream
from outrider.types import Message, Origin, Outcome
from tests.rollout.fakes import TOKENIZER, Factory, Fake, RawEngine, say, scheduler, scripted, tasks

END = StepResult(message=None, done=True)


def facts(report: RolloutReport) -> list[Any]:
    """Everything that a trace holds, for exact comparison."""
    return [
        (
            trace.task.key,
            [
                (
                    n.node_id,
                    n.parent,
                    n.origin,
                    n.token_ids,
                    n.logprobs,
                    n.entropies,
                    n.reward,
                    n.message,
                    n.metadata,
                )
                for n in trace.nodes
            ],
            [trace.leaves[i] for i in sorted(trace.leaves)],
        )
        for trace in report.traces
    ]


def chatty(run_seed: int = 0) -> RawEngine:
    """Ids and lengths that depend on the request's own seed."""

    def ids(request: Request) -> Sequence[int]:
        draw = random.Random(request.seed)
        return [draw.randrange(10, 60) for _ in range(draw.randrange(1, 8))]

    return RawEngine(TOKENIZER, ids)


def test_every_group_is_whole_and_in_the_order_asked() -> None:
    factory = Factory(lambda task, number: Fake(on_step=lambda n, t: END))
    wanted = tasks(5)[::-1]
    report = scheduler(scripted(lambda r, c: "a."), factory, max_concurrent=3).run(
        wanted, modes=("m",) * 4, training_step=0
    )
    assert [trace.task for trace in report.traces] == wanted
    assert all(sorted(trace.leaves) == [0, 1, 2, 3] for trace in report.traces)
    assert len(factory.made) == 20 and all(
        environment.num_closed == 1  # type: ignore[attr-defined]
        for environment in factory.made
    )
    assert report.num_retries == 0 and report.faults == Counter()


def test_a_group_shares_one_prompt_node_and_one_reset_seed() -> None:
    factory = Factory(lambda task, number: Fake(on_step=lambda n, t: END))
    report = scheduler(chatty(), factory).run(tasks(2), modes=("m",) * 4, training_step=7)
    for trace in report.traces:
        assert sum(node.parent is None for node in trace.nodes) == 1
    seeds = Counter(environment.seeds[0] for environment in factory.made)  # type: ignore[attr-defined]
    assert sorted(seeds.values()) == [4, 4]


def test_prompts_that_differ_are_not_merged() -> None:
    factory = Factory(lambda task, number: Fake(on_step=lambda n, t: END, question=f"q{number}"))
    trace = (
        scheduler(chatty(), factory, max_concurrent=1)
        .run(tasks(1), modes=("m",) * 3, training_step=0)
        .traces[0]
    )
    assert sum(node.origin is Origin.PROMPT for node in trace.nodes) == 3


@pytest.mark.parametrize("max_concurrent", [1, 4, 64])
def test_same_seed_same_traces_whatever_the_latencies(max_concurrent: int) -> None:
    def run(latency_seed: int) -> RolloutReport:
        def make(task: Any, number: int) -> Fake:
            delay = random.Random(f"{latency_seed} {number}").random() * 0.004
            return Fake(
                on_step=lambda n, text: END if n == 3 or len(text) == 3 else say(f" {len(text)}"), delay=delay
            )

        return scheduler(chatty(), Factory(make), max_concurrent=max_concurrent).run(
            tasks(3), modes=("m",) * 4, training_step=1
        )

    first = facts(run(0))
    assert facts(run(1)) == first and facts(run(2)) == first
    assert sum(len(nodes) for _, nodes, _ in first) > 30


def test_another_run_seed_or_step_gives_other_rollouts() -> None:
    def sampled(seed: int, step: int) -> list[tuple[int, ...]]:
        factory = Factory(lambda task, number: Fake(on_step=lambda n, t: END))
        report = scheduler(chatty(), factory, seed=seed).run(tasks(2), modes=("m",) * 2, training_step=step)
        return [node.token_ids for trace in report.traces for node in trace.nodes if node.trainable]

    drawn = [sampled(0, 0), sampled(1, 0), sampled(0, 1)]
    assert drawn[0] == sampled(0, 0) and drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert len(set(drawn[0])) == 4  # rollouts of a group differ


@pytest.mark.parametrize("place", ["factory", "reset", "step", "result"])
@pytest.mark.parametrize("num_broken", [1, 2, 3])
def test_a_fault_is_retried_with_a_fresh_environment_and_then_masked(place: str, num_broken: int) -> None:
    class Broken(Fake):
        def reset(self, seed: int) -> Sequence[Message]:
            if place == "reset":
                raise EnvironmentFault("reset")
            return super().reset(seed)

        def step(self, message: Message) -> StepResult:
            if place == "step":
                raise ToolFault("step")
            return super().step(message)

        def result(self) -> Any:
            if place == "result":
                raise RuntimeError("result")
            return super().result()

    calls: list[int] = []

    def make(task: Any, number: int) -> Fake:
        calls.append(1)
        if len(calls) > num_broken:
            return Fake(on_step=lambda n, t: END)
        if place == "factory":
            raise OSError("no process")
        return Broken(on_step=lambda n, t: END)

    factory = Factory(make)
    report = scheduler(scripted(lambda r, c: "a."), factory, max_retries=2).run(
        tasks(1), modes=("m",), training_step=0
    )
    leaf = report.traces[0].leaves[0]
    outcome = Outcome.TOOL_FAULT if place == "step" else Outcome.ENVIRONMENT_FAULT
    assert report.faults[outcome.value] == num_broken and report.num_retries == min(num_broken, 2)
    assert len(calls) == min(num_broken + 1, 3)
    assert len(report.fault_reasons) == num_broken  # also those that a retry made good
    assert all(one.startswith(f"{outcome.value} in task 0, rollout 0: ") for one in report.fault_reasons)
    if num_broken == 3:
        assert leaf.outcome is outcome and leaf.episode_return is None and leaf.node_id is None
    else:
        assert leaf.outcome is Outcome.FINISHED and leaf.episode_return == 0.5
        path = report.traces[0].path(leaf.node_id or 0)
        assert sum(node.trainable for node in path) == 1  # nothing of the broken try is in the rollout
    assert all(environment.num_closed == 1 for environment in factory.made)  # type: ignore[attr-defined]


def test_a_call_that_hangs_is_a_fault_after_the_time_limit_and_blocks_neither_the_others_nor_the_end() -> (
    None
):
    """More hanging calls than any thread pool has places; they are never let go before the run is over."""
    release = threading.Event()

    def make(task: Any, number: int) -> Fake:
        def step(n: int, text: str) -> StepResult:
            if task.key == "task 0":
                release.wait(60)
            return END

        return Fake(on_step=step)

    began = time.perf_counter()
    runs = scheduler(
        scripted(lambda r, c: "a."),
        Factory(make),
        limits=Limits(step_timeout_s=2),
        max_retries=0,
        max_concurrent=80,
    )
    try:
        report = runs.run(tasks(2), modes=("m",) * 40, training_step=0)
    finally:
        took = time.perf_counter() - began
        release.set()
    assert {leaf.outcome for leaf in report.traces[0].leaves.values()} == {Outcome.ENVIRONMENT_FAULT}
    assert "no answer within 2 s" in report.traces[0].leaves[0].detail
    assert {leaf.outcome for leaf in report.traces[1].leaves.values()} == {Outcome.FINISHED}
    # one after the other: 80 s; the limit is no tighter, or a busy machine makes the others late
    assert took < 40


def test_slow_is_not_hanging_however_many_run_at_a_time() -> None:
    """80 calls of 0.2 s with a limit of 2 s: none may wait for another's place until it looks late."""
    factory = Factory(lambda task, number: Fake(on_step=lambda n, t: END, delay=0.2))
    runs = scheduler(
        scripted(lambda r, c: "a."),
        factory,
        limits=Limits(step_timeout_s=2),
        max_concurrent=80,
        max_retries=0,
    )
    report = runs.run(tasks(1), modes=("m",) * 80, training_step=0)
    assert {leaf.outcome for leaf in report.traces[0].leaves.values()} == {Outcome.FINISHED}


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), ToolFault("x"), SystemExit(1)], ids=lambda e: type(e).__name__
)
def test_an_environment_that_breaks_while_it_closes_changes_no_outcome_and_is_counted(
    error: BaseException,
) -> None:
    class Sticky(Fake):
        def close(self) -> None:
            raise error

    report = scheduler(
        scripted(lambda r, c: "a."), Factory(lambda task, number: Sticky(on_step=lambda n, t: END))
    ).run(tasks(1), modes=("m",) * 3, training_step=0)
    assert {leaf.outcome for leaf in report.traces[0].leaves.values()} == {Outcome.FINISHED}
    assert report.faults == Counter({"close": 3})
    assert len(report.fault_reasons) == 3 and all(
        one.startswith("closing an environment: ") for one in report.fault_reasons
    )


def test_an_engine_fault_hits_the_whole_batch_and_is_retried() -> None:
    class Flaky(ScriptedEngine):
        num_calls = 0

        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            Flaky.num_calls += 1
            if Flaky.num_calls == 1:
                raise EngineFault("first batch")
            return super().generate(requests)

    engine = Flaky(tokenizer=TOKENIZER, script=lambda r, c: "a.")
    report = scheduler(engine, Factory(lambda task, number: Fake(on_step=lambda n, t: END))).run(
        tasks(2), modes=("m",) * 2, training_step=0
    )
    assert all(leaf.outcome is Outcome.FINISHED for trace in report.traces for leaf in trace.leaves.values())
    assert report.faults == Counter({"engine_fault": 4, "retries": 4})
    assert list(report.fault_reasons) == [
        f"engine_fault in task {task}, rollout {rollout}: first batch"
        for task in range(2)
        for rollout in range(2)
    ]


def test_a_bug_in_the_engine_ends_the_run_loudly_and_does_not_hang() -> None:
    def script(request: Request, context: str) -> str:
        raise ZeroDivisionError

    factory = Factory(lambda task, number: Fake(on_step=lambda n, t: END))
    with pytest.raises(ZeroDivisionError):
        scheduler(scripted(script), factory).run(tasks(3), modes=("m",) * 2, training_step=0)
    assert all(environment.num_closed == 1 for environment in factory.made)  # type: ignore[attr-defined]


def test_two_tasks_with_one_key_are_refused() -> None:
    runs = scheduler(
        scripted(lambda r, c: "a."), Factory(lambda task, number: Fake(on_step=lambda n, t: END))
    )
    with pytest.raises(ValueError, match="share a key"):
        runs.run([*tasks(1), *tasks(1)], modes=("m",), training_step=0)
    assert runs.run([], modes=("m",), training_step=0).traces == []


@given(
    workers=st.integers(1, 9),
    groups=st.integers(1, 4),
    size=st.integers(1, 5),
    turns=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_batches_are_rounds_and_no_worker_is_forgotten(
    workers: int, groups: int, size: int, turns: int, seed: int
) -> None:
    """Episodes of different lengths: as many batches as the longest worker has turns, never more than
    ``workers`` requests.
    """
    seen: list[int] = []

    class Watching(ScriptedEngine):
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            seen.append(len(requests))
            assert [r.request_id for r in requests] == sorted(r.request_id for r in requests)
            return super().generate(requests)

    def make(task: Any, number: int) -> Fake:
        last = int(stream(seed, task.key).integers(turns))
        return Fake(on_step=lambda n, t: END if n >= last else say(" o"))

    engine = Watching(tokenizer=TOKENIZER, script=lambda r, c: "a.")
    report = scheduler(engine, Factory(make), max_concurrent=workers).run(
        tasks(groups), modes=("m",) * size, training_step=0
    )
    assert report.num_batches == len(seen) and max(seen) <= workers
    assert sum(seen) == sum(node.trainable for trace in report.traces for node in trace.nodes)
    assert len(seen) >= -(-sum(seen) // workers)


def test_a_thousand_rollouts_with_random_faults_add_up() -> None:
    """Faults of every kind at every place, garbage, cuts, endless talk: the groups are whole and every fault
    is counted.
    """
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
            if self.num_batches % 29 == 0:
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
        tasks(125), modes=("m",) * 8, training_step=0
    )
    leaves = [leaf for trace in report.traces for leaf in trace.leaves.values()]
    assert all(sorted(trace.leaves) == list(range(8)) for trace in report.traces) and len(leaves) == 1000
    outcomes = Counter(leaf.outcome for leaf in leaves)
    policy_ended = {Outcome.FINISHED, Outcome.INVALID, Outcome.TRUNCATED_TURNS, Outcome.TRUNCATED_TOKENS}
    assert set(outcomes) >= policy_ended | {Outcome.TOOL_FAULT, Outcome.ENVIRONMENT_FAULT}
    for kind in ("tool_fault", "environment_fault", "engine_fault"):
        assert report.faults[kind] == raised[kind] > 0
    final = sum(number for outcome, number in outcomes.items() if outcome.is_fault)
    assert sum(raised.values()) == report.num_retries + final
    assert all((leaf.episode_return is None) == leaf.outcome.is_fault for leaf in leaves)
    assert all(environment.num_closed == 1 for environment in factory.made)  # type: ignore[attr-defined]
    for trace in report.traces:
        for leaf, path in trace.rollouts():
            assert leaf.outcome.is_fault == (path == [])
            assert all(node.metadata.get("rollout", leaf.rollout) == leaf.rollout for node in path)
