"""How a batch is shared over rollout workers and put together again. Without Ray: workers answer at once."""

import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import load_settings
from outrider.distributed.ray_session import Recipe
from outrider.distributed.rollouts import HeartbeatMonitor, WorkerRollouts
from outrider.distributed.worker import Heartbeat, Job
from outrider.environments.tool_qa.datasets import hash_tasks
from outrider.errors import ConfigError, ProcessLost
from outrider.rollout.hooks import Hook, RolloutStatus, StatelessHook
from outrider.rollout.scheduler import RolloutReport
from outrider.tools.base import CallBudget
from outrider.trace import Trace
from outrider.training.settings import RunSettings
from outrider.types import Outcome, Task
from tests.distributed.forked_ranks import CONTEXT
from tests.distributed.stand_ins import ActorMethod, HashableFault, HashableResult, InstantRay


class Worker:
    """Plays nothing: a trace with the task, and the job for whoever looks."""

    def __init__(self, number: int) -> None:
        self.jobs: list[Job] = []
        self.number = number
        self.breaks: list[Exception] = []  # one a try
        self.num_spent = 0
        self.run = ActorMethod(self._run)
        self.beat = ActorMethod(lambda: Heartbeat(num_finished=0, changed=0.0, location=None))

    def __hash__(self) -> int:
        return id(self)

    def _run(self, job: Job) -> Any:
        self.jobs.append(job)
        if self.breaks:
            return self.breaks.pop(0)
        traces = [Trace(task=task, modes=modes) for task, modes in zip(job.tasks, job.modes, strict=True)]
        report = RolloutReport(
            traces=traces, num_batches=self.number, num_retries=1, faults=Counter(retries=1),
            fault_reasons=(f"of {self.number}",),
        )  # fmt: skip
        gathered = [self.number for _ in job.snapshots]
        return HashableResult(report=report, gathered=gathered, num_spent=self.num_spent)


class Notes(StatelessHook):
    """Writes down what it is told, in order."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def snapshot(self) -> Any:
        return len(self.records)

    def absorb(self, gathered: Any) -> None:
        self.records.append(gathered)

    def after_group(self, trace: Trace) -> None:
        self.records.append(trace.task.key)


class Together:
    """Counts what is replaced, and puts nothing else in its place."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers, self.repairs = workers, self
        self.replaced: list[tuple[list[str], int]] = []

    def replace(self, gone: Mapping[str, ProcessLost], *, num_groups: int) -> None:
        self.replaced.append((sorted(gone), num_groups))


def rollouts_of(workers: list[Worker], hooks: list[Any], *, at_once: int = 8) -> WorkerRollouts:
    return WorkerRollouts(
        InstantRay(), Together(workers), hooks=hooks, is_training=True, version=lambda: 5,
        max_concurrent=at_once, on_finished=lambda done, owed: None,
        new_monitor=partial(HeartbeatMonitor, InstantRay(), limit_s=1.0, rollout_status=RolloutStatus()),
    )  # fmt: skip


@given(st.integers(1, 6), st.integers(1, 13), st.integers(0, 40), st.integers(1, 20))
def test_groups_are_assigned_in_turn_and_returned_in_order(
    size: int, num: int, cap: int, at_once: int
) -> None:
    workers, hook = [Worker(number) for number in range(size)], Notes()
    tasks = [Task(key=f"t{number}", question="") for number in range(num)]
    report = rollouts_of(workers, [hook], at_once=at_once).run(
        tasks, modes=lambda group: (f"m{group}", "plain"), training_step=3
    )
    assert [one.task for one in report.traces] == tasks
    assert [tuple(one.modes) for one in report.traces] == [(f"m{group}", "plain") for group in range(num)]
    used = min(size, num)
    for number, worker in enumerate(workers):
        assert [job.tasks for job in worker.jobs] == ([tasks[number::size]] if number < used else [])
    # what the copies gathered, worker by worker, and only then the groups, in their order
    assert hook.records == [*range(used), *(task.key for task in tasks)]
    jobs = [worker.jobs[0] for worker in workers[:used]]
    assert {(job.version, job.training_step, tuple(job.snapshots)) for job in jobs} == {(5, 3, (0,))}
    assert sum(job.max_concurrent for job in jobs) <= max(at_once, size)
    assert (report.num_batches, report.num_retries) == (used - 1, used)
    assert report.faults == Counter(retries=used)
    assert report.fault_reasons == tuple(f"of {number}" for number in range(used))
    # the parts of a cap on calls add up to it, and one worker has all of it
    shares = []
    for job in jobs:
        budget = CallBudget(cap)
        budget.set_share(0, 1, 7)  # of an earlier batch: it does not count
        budget.set_share(*job.calls)
        shares.append(budget.limit)
    assert sum(shares) == cap  # type: ignore[arg-type]
    for job, share in zip(jobs, shares, strict=True):
        assert abs(share - cap * len(job.tasks) / num) < 1  # type: ignore[operator]


@given(
    st.lists(st.lists(st.sampled_from(["rollout worker", "engine 0", "engine 1"]), max_size=3), max_size=4)
)
def test_only_the_groups_of_lost_processes_run_again(breaks: list[list[str]]) -> None:
    """Each worker breaks so often, with itself or with an engine; what it had brought stays."""
    num = max(1, len(breaks))
    workers, hook = [Worker(number) for number in range(num)], Notes()
    for worker, each in zip(workers, breaks, strict=False):
        names = [f"{one} {worker.number}" if one == "rollout worker" else one for one in each]
        worker.breaks = [HashableFault(f"{one} died", one) for one in names]
    played = rollouts_of(workers, [hook])
    tasks = [Task(key=f"t{number}", question="") for number in range(2 * num)]
    report = played.run(tasks, modes=("plain",), training_step=0)
    assert [one.task for one in report.traces] == tasks
    assert hook.records == [*range(num), *(task.key for task in tasks)]  # once, however often it was played
    for number, worker in enumerate(workers):
        tries = 1 + (len(breaks[number]) if number < len(breaks) else 0)
        assert [job.is_again for job in worker.jobs] == [False, *[True] * (tries - 1)]
        assert all(job.snapshots == worker.jobs[0].snapshots for job in worker.jobs)
    rounds = max(map(len, breaks), default=0)
    replaced = played._processes.replaced  # type: ignore[attr-defined]
    assert [num_groups for _, num_groups in replaced] == [
        2 * sum(len(each) > number for each in breaks) for number in range(rounds)
    ]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_further_round_has_the_remaining_calls_of_the_batch(breaks: bool) -> None:
    """Whoever plays it, and however often: the parts are those of the first round."""
    workers = [Worker(number) for number in range(2)]
    for worker, spent in zip(workers, (3, 4), strict=True):
        worker.num_spent = spent
    played = rollouts_of(workers, [])
    tasks = [Task(key=f"t{number}", question="") for number in range(7)]
    played.run(tasks[:5], modes=("plain",), training_step=0)
    if breaks:
        workers[1].breaks = [HashableFault("rollout worker 1 died", "rollout worker 1")]
    played.run(tasks[5:], modes=("plain",), training_step=0, continued=True)
    assert [(job.calls, job.num_spent) for job in workers[0].jobs] == [((0, 3, 5), 0), ((0, 3, 5), 3)]
    again = [((3, 5, 5), 4)] * (2 if breaks else 1)
    assert [(job.calls, job.num_spent) for job in workers[1].jobs] == [((3, 5, 5), 0), *again]
    assert [job.is_again for job in workers[1].jobs[1:]] == [False, True][: len(again)]


@given(st.integers(0, 9), st.integers(0, 12))
def test_a_budget_continues_from_the_calls_of_another_one(cap: int, num: int) -> None:
    first, other = CallBudget(cap), CallBudget(cap)
    first.begin_batch(limited=True)
    for _ in range(num):
        first.count()
    other.set_share(0, 1, 1)
    other.resume_batch(first.num_executed)
    first.begin_round()
    assert (other.is_open, other.num_executed) == (first.is_open, num)


def test_no_cap_has_no_shares() -> None:
    budget = CallBudget(None)
    budget.set_share(0, 1, 2)
    assert budget.limit is None


def test_an_invalid_batch_is_refused_before_any_rollout() -> None:
    workers = [Worker(0)]
    task = Task(key="a", question="")
    with pytest.raises(ValueError, match="share a key"):
        rollouts_of(workers, []).run([task, task], modes=("plain",), training_step=0)
    with pytest.raises(ValueError, match="differ in size"):
        rollouts_of(workers, []).run(
            [task, Task(key="b", question="")], modes=lambda group: ("plain",) * (group + 1), training_step=0
        )
    assert not workers[0].jobs


def test_a_hook_that_has_no_copies_is_named() -> None:
    class Own(Hook):
        """A hook that says nothing about copies."""

    with pytest.raises(ConfigError, match="Own has no copies in other processes"):
        rollouts_of([Worker(0)], [Own()])


def test_a_plug_in_beside_the_recipe_is_found_in_another_process(tmp_path: Path) -> None:
    """Its module has to be looked for there before the settings can be read."""
    (tmp_path / "beside_recipe.py").write_text(
        "from outrider.engines.base import EngineSettings\n"
        "class Mine:\n    class Settings(EngineSettings):\n        size: int = 3\n"
        "    def generate(self, requests): ...\n    def release(self, cache_keys): ...\n"
        "    def free_cache(self): ...\n    def load(self, version): ...\n"
    )
    (tmp_path / "recipe.toml").write_text(
        '[environment]\ntype = "factbook"\n[algorithm]\ntype = "grpo"\n'
        '[engine]\ntype = "beside_recipe:Mine"\nsize = 8\n'
    )
    settings = load_settings(RunSettings, file=tmp_path / "recipe.toml", overrides=[])
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_send_engine, args=(there, Recipe.from_settings(settings)), daemon=True)
    process.start()
    assert here.poll(120) and here.recv() == (8, "beside_recipe", "beside_recipe:Mine")
    process.join(60)


def _send_engine(pipe: Any, recipe: Recipe) -> None:
    assert "beside_recipe" not in sys.modules
    engine: Any = recipe.settings().engine
    pipe.send((engine.size, type(engine).__module__, engine.type))


class Refunded(Together):
    """Counts what was charged, and what was refunded."""

    def __init__(self, workers: list[Worker]) -> None:
        super().__init__(workers)
        self.num_charged = 0

    def replace(self, gone: Mapping[str, ProcessLost], *, num_groups: int) -> None:
        super().replace(gone, num_groups=num_groups)
        self.num_charged += sum(fault.is_charged for fault in gone.values())

    def refund(self, num_repairs: int) -> None:
        self.num_charged -= num_repairs


class Breaking(Worker):
    """Breaks whenever it plays one of these tasks."""

    def __init__(self, number: int, tasks: set[str], *, is_silent: bool) -> None:
        super().__init__(number)
        self.tasks, self.is_silent = tasks, is_silent

    def _run(self, job: Job) -> Any:
        if broken := sorted(self.tasks & {task.key for task in job.tasks}):
            what = "did not end a heartbeat" if self.is_silent else "died"
            name = f"rollout worker {self.number}"
            message = f"{name} {what}, last seen at {broken[0]}/0: a step; go on"
            self.breaks = [HashableFault(message, name, self.is_silent)]
        return super()._run(job)


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("poisoned", [{"t1"}, {"t1", "t5"}, {"t1", "t2"}, {"t1", "t3", "t5"}])
def test_a_group_that_breaks_its_worker_is_masked_and_named(poisoned: set[str], is_silent: bool) -> None:
    workers: list[Worker] = [Breaking(number, poisoned, is_silent=is_silent) for number in range(2)]
    hook, tasks = Notes(), [Task(key=f"t{number}", question="") for number in range(6)]
    played = rollouts_of(workers, [hook])
    crew = played._processes = Refunded(workers)  # type: ignore[assignment]
    report = played.run(tasks, modes=("plain", "other"), training_step=0)
    assert [trace.task for trace in report.traces] == tasks
    for trace in report.traces:
        outcomes = [leaf.outcome for leaf, _ in trace.rollouts()]
        assert outcomes == ([Outcome.ENVIRONMENT_FAULT] * 2 if trace.task.key in poisoned else [])
    assert report.faults["environment_fault"] == 2 * len(poisoned)
    named = [reason for reason in report.fault_reasons if reason.startswith("environment_fault")]
    assert len(named) == len(poisoned)
    for key in poisoned:
        assert any(f"in {key}: " in reason and f"last seen at {key}/0: a step" in reason for reason in named)
    assert all(str(fault) for fault in named) and "; go on" not in "".join(named)
    # A worker plays all of its groups together again, and then each of them alone.
    most = 2 if is_silent else 4
    for number, worker in enumerate(workers):
        mine = {task.key for task in tasks[number::2]} & poisoned
        sizes = [len(job.tasks) for job in worker.jobs]
        assert sizes == ([3] * most + [1] * 3 if mine else [3])
    assert crew.num_charged <= (0 if is_silent else 6)


def test_a_group_that_is_alone_from_the_beginning_runs_twice() -> None:
    workers: list[Worker] = [Breaking(0, {"t0"}, is_silent=True)]
    played = rollouts_of(workers, [])
    crew = played._processes = Refunded(workers)  # type: ignore[assignment]
    report = played.run([Task(key="t0", question="")], modes=("plain",), training_step=0)
    assert [len(job.tasks) for job in workers[0].jobs] == [1, 1]
    assert (report.faults["environment_fault"], crew.num_charged) == (1, 0)


def test_the_calls_of_a_batch_are_divided_when_its_groups_run_one_by_one() -> None:
    workers: list[Worker] = [Breaking(0, {"t1"}, is_silent=True)]
    workers[0].num_spent = 2
    played = rollouts_of(workers, [])
    played._processes = Refunded(workers)  # type: ignore[assignment]
    tasks = [Task(key=f"t{number}", question="") for number in range(3)]
    played.run(tasks, modes=("plain",), training_step=0)
    assert [job.calls for job in workers[0].jobs] == [(0, 3, 3)] * 2 + [(0, 1, 3), (1, 2, 3), (2, 3, 3)]
    assert played._num_spent == {0: 4}


@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_an_evaluation_has_the_same_tasks_in_the_same_order_with_any_number_of_workers(
    num_workers: int,
) -> None:
    tasks = [Task(key=f"game {number}", question=str(number)) for number in range(140)]
    workers = [Worker(number) for number in range(num_workers)]
    report = rollouts_of(workers, []).run(tasks, modes=("evaluation",) * 2, training_step=-1)
    assert [trace.task for trace in report.traces] == tasks
    assert hash_tasks([trace.task for trace in report.traces]) == hash_tasks(tasks)
    played = Counter(task.key for worker in workers for job in worker.jobs for task in job.tasks)
    assert played == dict.fromkeys((task.key for task in tasks), 1)
    assert {job.training_step for worker in workers for job in worker.jobs} == {-1}
