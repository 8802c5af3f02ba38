"""Groups in flight over real Ray: engines take new weights between two turns, what breaks is begun again, and
a run that is killed goes on with the groups that had ended. One Ray and four actors at a time.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outrider.distributed.rollouts import HeartbeatMonitor, RemoteGroupPlayer
from outrider.distributed.worker import Heartbeat, Job, JobResult, RolloutSlots
from outrider.errors import ProcessLost
from outrider.rollout.hooks import RolloutStatus, StatelessHook
from outrider.rollout.scheduler import RolloutReport
from outrider.trace import Trace
from outrider.training.async_rollouts import (
    AsyncRolloutQueue,
    GroupResult,
    PendingStep,
    read_snapshot,
    write_snapshot,
)
from outrider.training.data import TaskOrder
from outrider.types import Outcome, Task
from tests.distributed.command_runs import CommandRuns
from tests.distributed.stand_ins import ActorMethod, HashableFault, HashableResult, InstantRay
from tests.distributed.test_remote_faults import Crew, crew_of
from tests.training.whole_runs import command, write_data

if TYPE_CHECKING:
    from outrider.distributed.ray_session import Session

STEPS = 5
ALOFT = {"batching": "stream", "in_flight": True, "max_staleness": 2}
cluster = pytest.mark.cluster


@pytest.fixture(scope="module")
def crew(session: "Session", folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew_of(session, folder, tmp_path_factory.mktemp("async"), num_engines=1, **ALOFT) as made:
        yield made


def flown(crew: Crew, *, num_steps: int, between: Callable[[int], None] = lambda step: None) -> list[Trace]:
    """Steps that are collected as fast as they come, with new weights behind each; ``between`` is called
    in front of the groups that a step begins.
    """
    engine, base = crew.remote.engine, crew.remote.engine.weight_version
    flight = AsyncRolloutQueue(
        crew.parts, crew.remote.group_player(crew.parts), step=0, cursor=0, snapshot=None
    )
    traces: list[Trace] = []
    until = time.monotonic() + 120
    for step in range(num_steps):
        between(step)
        flight.begin(min(step + 2, num_steps - 1))
        played = flight.collect(step, on_tick=lambda status: None)
        assert time.monotonic() < until
        for trace in played.sampled.traces:
            assert sorted(trace.leaves) == [0, 1]
            ages = {base + step - (n.weight_version or 0) for n in trace.nodes if n.trainable}
            assert ages <= {0, 1, 2}
        traces += played.sampled.traces
        engine.load(engine.weight_version + 1)
    order = TaskOrder(tasks=crew.parts.train_tasks, tasks_per_step=4, seed=crew.parts.settings.seed)
    assert [trace.task for trace in traces] == order.draw(4 * num_steps, cursor=0)[0]
    return traces


@pytest.mark.long
@cluster
@pytest.mark.timeout(300)
def test_running_groups_continue_with_new_weights(crew: Crew) -> None:
    flown(crew, num_steps=3)
    assert crew.remote.metrics()["rollout/num_groups_replayed"] == 0.0


@cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("engine", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("worker", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("worker", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_groups_of_a_lost_process_start_again(crew: Crew, kind: str, how: signal.Signals) -> None:
    pids = crew.remote.engine_pids if kind == "engine" else crew.remote.worker_pids

    def kill(step: int) -> None:
        if step == 1:
            os.kill(pids[-1], how)

    flown(crew, num_steps=4, between=kill)
    counts = crew.remote.repairs.pop_counts()
    assert counts[f"cluster/{kind}_deaths"] == 1.0 and counts["rollout/num_groups_replayed"] >= 1.0
    assert len(crew.remote.notes()) == 1


@pytest.mark.long
@cluster
@pytest.mark.timeout(300)
def test_a_resume_keeps_finished_groups_and_restarts_the_others(crew: Crew, tmp_path: Path) -> None:
    first = AsyncRolloutQueue(
        crew.parts, crew.remote.group_player(crew.parts), step=0, cursor=0, snapshot=None
    )
    first.begin(1)
    first.collect(0, on_tick=lambda status: None)
    write_snapshot(tmp_path, first.snapshot())
    kept = read_snapshot(tmp_path)
    first.collect(1, on_tick=lambda status: None)  # else both would play the same groups
    assert kept is not None and [one.step for one in kept.steps] == [1]
    ended = {number: group.report.traces[0].nodes for number, group in kept.steps[0].results.items()}
    crew.remote.repairs.pop_counts()
    again = AsyncRolloutQueue(
        crew.parts, crew.remote.group_player(crew.parts), step=1, cursor=4, snapshot=kept
    )
    traces = again.collect(1, on_tick=lambda status: None).sampled.traces
    order = TaskOrder(tasks=crew.parts.train_tasks, tasks_per_step=4, seed=crew.parts.settings.seed)
    assert [trace.task for trace in traces] == order.draw(4, cursor=4)[0]
    assert {number: traces[number].nodes for number in ended} == ended
    assert again.num_restarted_groups == 4 - len(ended)
    assert crew.remote.repairs.pop_counts()["rollout/num_groups_replayed"] == again.num_restarted_groups


@cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_resumes_with_its_finished_groups(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="several processes need the extra 'cluster'")
    write_data(tmp_path)
    run, runs = tmp_path / "run", CommandRuns()
    given = [*command(tmp_path, run, "empo2"), f"train.num_steps={STEPS}", "evaluation.num_tasks=2",
             "train.keep_checkpoints=9", "cluster.weights=store", "cluster.num_rollout_workers=2",
             *(f"cluster.{key}={str(one).lower()}" for key, one in ALOFT.items())]  # fmt: skip
    process = runs.start_until(run / "checkpoints" / "step-000002" / "state.json", *given)
    runs.kill(process)
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    head, *groups = [json.loads(line) for line in (newest / "queue.jsonl").read_text().splitlines()]
    num_open = sum(len(step["tasks"]) for step in head["steps"])
    output = runs.run("train", "--resume", run, "--progress", "plain")
    if num_anew := num_open - len(groups):
        assert "that had not ended at the checkpoint will start again" in output
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {one["step"]: one for one in records if one["kind"] == "train"}
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert all(one["staleness/max"] <= 2.0 and one["gap/logprob_max"] < 1e-3 for one in steps.values())
    assert max(one["staleness/max"] for one in steps.values()) >= 1.0
    first = steps[int(newest.name.removeprefix("step-")) + 1]
    assert first["rollout/num_groups_replayed"] == num_anew
    assert not (run / "checkpoints" / f"step-{STEPS:06d}" / "queue.jsonl").exists()


class Worker:
    """Each call is the next of ``ends``, or else comes to its end."""

    def __init__(self) -> None:
        self.ends: list[Exception] = []
        self.jobs: list[Job] = []
        self.has_left, self.num_beats = False, 0
        self.play, self.beat, self.leave = (
            ActorMethod(self._play),
            ActorMethod(self._beat),
            ActorMethod(self._leave),
        )

    def _play(self, job: Job, snapshots: Any) -> Any:
        self.jobs.append(job)
        assert snapshots == ["known"]
        if self.ends:
            return self.ends.pop(0)
        report = RolloutReport(
            traces=[Trace(task=job.tasks[0], modes=job.modes[0])], num_batches=1, num_retries=0
        )
        return HashableResult(report=report, gathered=["seen"], seconds=2.0)

    def _beat(self) -> Heartbeat:
        self.num_beats += 1
        return Heartbeat(num_finished=0, changed=0.0, location=None)

    def _leave(self) -> None:
        self.has_left = True


class Together:
    def __init__(self, num: int) -> None:
        self.workers, self.repairs = [Worker() for _ in range(num)], self
        self.num_replaced: Counter[str] = Counter()
        self.replacements: list[tuple[list[str], int]] = []

    def replace(self, gone: Mapping[str, ProcessLost], *, num_groups: int) -> None:
        self.replacements.append((sorted(gone), num_groups))
        self.num_replaced.update(gone.keys())


class Known(StatelessHook):
    def snapshot(self) -> Any:
        return "known"


def flight_of(crew: Together) -> RemoteGroupPlayer:
    return RemoteGroupPlayer(
        InstantRay(), crew, hooks=[Known()], version=lambda: 7,  # type: ignore[arg-type]
        new_monitor=partial(HeartbeatMonitor, InstantRay(), limit_s=60.0, rollout_status=RolloutStatus()),
    )  # fmt: skip


def step_of(number: int) -> PendingStep:
    tasks = [Task(key=f"{number}.{group}", question="") for group in range(4)]
    return PendingStep(step=number, tasks=tasks, modes=[("plain", "other")] * 4, cursor=0)


def all_of(flight: RemoteGroupPlayer, num: int) -> dict[tuple[int, int], GroupResult]:
    found: dict[tuple[int, int], GroupResult] = {}
    for _ in range(40):
        new = flight.poll(waits=True)
        assert not found.keys() & new.keys()
        found |= new
    assert len(found) == num
    return found


def test_a_group_is_one_call_of_its_worker() -> None:
    crew = Together(3)
    flight = flight_of(crew)
    flight.begin(step_of(5), range(4), is_again=False)
    assert [[job.tasks[0].key for job in one.jobs] for one in crew.workers] == [
        ["5.0", "5.3"],
        ["5.1"],
        ["5.2"],
    ]
    jobs = [job for one in crew.workers for job in one.jobs]
    assert {(job.version, job.training_step, job.max_concurrent, tuple(job.modes[0])) for job in jobs} == {
        (7, 5, 2, ("plain", "other"))
    }
    assert [job.engine for job in jobs] == [0, 3, 1, 2]
    found = all_of(flight, 4)
    assert {name: one.report.traces[0].task.key for name, one in found.items()} == {
        (5, group): f"5.{group}" for group in range(4)
    }
    assert found[5, 0].gathered == ["seen"] and found[5, 0].seconds == 2.0
    assert crew.replacements == []


def test_an_engine_that_broke_several_groups_is_replaced_once() -> None:
    """The others have died of the same: those of after the replacement are another death."""
    crew = Together(2)
    for worker in crew.workers:
        worker.ends = [HashableFault("engine 1 died", "engine 1"), HashableFault("engine 1 died", "engine 1")]
    flight = flight_of(crew)
    flight.begin(step_of(0), range(4), is_again=False)
    all_of(flight, 4)
    assert [gone for gone, _ in crew.replacements if gone] == [["engine 1"]]
    assert sum(num for _, num in crew.replacements) == 4
    crew.workers[0].ends = [HashableFault("engine 1 died", "engine 1")]
    flight.begin(step_of(1), range(4), is_again=True)
    all_of(flight, 4)
    assert crew.num_replaced == {"engine 1": 2} and sum(num for _, num in crew.replacements) == 4 + 4 + 1


def test_a_worker_replaced_during_an_evaluation_gets_heartbeats() -> None:
    """Else nobody notices that it is silent, and its groups are waited for without a limit."""
    crew = Together(2)
    flight = flight_of(crew)
    flight.begin(step_of(0), range(4), is_again=False)
    all_of(flight, 4)
    crew.workers[1] = Worker()
    crew.num_replaced["rollout worker 1"] += 1
    flight.poll(waits=False)
    assert crew.workers[1].num_beats == 1


def test_cancelled_groups_are_not_awaited() -> None:
    crew = Together(2)
    flight = flight_of(crew)
    flight.begin(step_of(0), range(4), is_again=False)
    flight.cancel()
    assert all(worker.has_left for worker in crew.workers) and flight.poll(waits=False) == {}


def test_groups_reserve_slots_in_order_and_a_large_one_runs_alone() -> None:
    room = RolloutSlots(4)
    with room.reserve(9):
        assert not room._free.acquire(blocking=False)
    with room.reserve(3), room.reserve(1):
        assert not room._free.acquire(blocking=False)
    assert sum(room._free.acquire(blocking=False) for _ in range(6)) == 4


def test_a_group_runs_at_most_as_many_rollouts_as_there_are_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else programs, or sessions of a server, would be more than there may be."""
    pytest.importorskip("ray", reason="several processes need the extra 'cluster'")
    from outrider.distributed.worker import RolloutWorker

    worker, jobs = RolloutWorker(0, ["engine"]), list[Job]()
    worker._slots, worker._free_algorithms = RolloutSlots(2), [object()]  # type: ignore[list-item]
    worker._engine_options = {"client": "worker 0", "tokenizer": None, "context_length": 8, "timeout_s": 1.0}
    report = RolloutReport(traces=[], num_batches=0, num_retries=0)

    def play(job: Job, *given: Any) -> JobResult:
        jobs.append(job)
        return JobResult(report=report, gathered=[])

    monkeypatch.setattr(worker, "_play", play)
    for num in (1, 2, 5):
        job = Job(
            tasks=[Task(key="a", question="")], modes=[("plain",) * num], training_step=0, continued=False,
            is_training=True, version=0, snapshots=(), calls=(0, 0, 1), num_spent=0, max_concurrent=num,
        )  # fmt: skip
        worker.play(job, ["known"])
    assert [job.max_concurrent for job in jobs] == [1, 2, 2]


class Refunding(Together):
    num_refunded = 0

    def refund(self, num_repairs: int) -> None:
        self.num_refunded += num_repairs


class Poisoned(Worker):
    """Dies whenever it plays one task, and names it."""

    def __init__(self, number: int, key: str) -> None:
        super().__init__()
        self.number, self.key = number, key

    def _play(self, job: Job, snapshots: Any) -> Any:
        if job.tasks[0].key == self.key:
            name = f"rollout worker {self.number}"
            self.ends = [
                HashableFault(f"{name} did not answer, last seen at {self.key}/0: a step; go on", name, True)
            ]
        return super()._play(job, snapshots)


def test_a_group_that_breaks_its_worker_alone_is_masked_and_others_run() -> None:
    crew = Refunding(2)
    crew.workers = [Poisoned(number, "0.1") for number in range(2)]
    flight = flight_of(crew)
    flight.begin(step_of(0), range(4), is_again=False)
    found = all_of(flight, 4)
    assert (
        found[0, 1].gathered is None and [found[0, group].gathered for group in (0, 2, 3)] == [["seen"]] * 3
    )
    [trace] = found[0, 1].report.traces
    assert [leaf.outcome for leaf, _ in trace.rollouts()] == [Outcome.ENVIRONMENT_FAULT] * 2
    [reason] = found[0, 1].report.fault_reasons
    assert "in 0.1: " in reason and "last seen at 0.1/0: a step" in reason
    assert [job.tasks[0].key for job in crew.workers[1].jobs].count("0.1") == 3  # beside others, twice; alone
    assert crew.num_refunded == 1
