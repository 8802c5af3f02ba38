"""Groups of rollouts on the rollout workers: the worker process, and the pool of groups under way.

The unit is the group. A worker plays it from its first prompt to its last outcome, with one engine. A worker
begins its groups in the order of their tasks, as many at a time as it has room for. If a process is lost, the
pool plays its groups again.
"""

import os
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transformers import AutoTokenizer

from outrider.algorithms.base import Algorithm
from outrider.distributed.engines import GroupEngine
from outrider.distributed.processes import (
    PROGRESS,
    TICK_S,
    Process,
    SharedRolloutStatus,
    location_path,
    outcome,
)
from outrider.distributed.recipe import Recipe
from outrider.engines.local.model import resolve_model
from outrider.environments.base import EnvironmentFactory, make_task_set
from outrider.errors import ConfigError, ProcessLost
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.plugins.listing import server_digests
from outrider.rollout.episode import Sampling
from outrider.rollout.faults import lost_leaf
from outrider.rollout.hooks import Hook, RolloutStatus
from outrider.rollout.scheduler import Modes, RolloutReport, Scheduler
from outrider.trace import Trace
from outrider.training.async_rollouts import GroupName, GroupResult, absorb, merge_reports
from outrider.training.components import Components
from outrider.training.policy import set_threads
from outrider.training.settings import RunSettings
from outrider.training.setup import make_algorithm, make_renderer
from outrider.types import Outcome, Task

if TYPE_CHECKING:
    from outrider.distributed.remote import RemoteProcesses

_MAX_BREAKS: Final = 3  # of its worker by one group, before the group is masked
_NEVER: Final = 10**9  # rollouts


# --- The worker ---


class RolloutSlots:
    """Slots for ``size`` rollouts, reserved by whole groups in order of arrival; a larger group runs
    alone.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = threading.Semaphore(size)
        self._order = threading.Lock()

    @contextmanager
    def reserve(self, num: int) -> Iterator[None]:
        """Wait for the slots of ``num`` rollouts and occupy them."""
        num = min(num, self.size)
        with self._order:  # a waiting group blocks later ones
            for _ in range(num):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(num)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of a run for a worker. ``buffer`` is the path and the revision of the step-trace buffer,
    ``servers`` are digests of the tool servers at the start of the run.
    """

    recipe: Recipe
    vocabulary_size: int
    context_length: int
    train_tasks: Sequence[Task]
    buffer: tuple[str, int] | None
    servers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_components(cls, parts: Components, recipe: Recipe, *, context_length: int) -> "WorkerSettings":
        model, buffer = parts.learner.language_model.model, parts.buffer
        return cls(
            recipe=recipe,
            vocabulary_size=int(model.config.get_text_config().vocab_size),
            context_length=context_length,
            train_tasks=list(parts.train_tasks),
            buffer=None if buffer is None else (str(buffer.path.resolve()), buffer.revision),
            servers=server_digests(parts.settings.environment),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A group to play.

    Attributes:
        version: version of the weights at its start.
        snapshots: pickled snapshots of the hooks, shared by the groups of a step; empty in an evaluation.
        max_calls: the group's share of the batch's limit on tool calls; None without a limit.
        number: number of the attempt among all of the run, which makes the name of its caches unique: the
            engine may drop those of an earlier attempt later.
    """

    task: Task
    modes: tuple[str, ...]
    training_step: int
    is_training: bool
    version: int
    engine: Process
    snapshots: bytes
    max_calls: int | None
    number: int

    @property
    def cache_name(self) -> str:
        """Name of the group's keys and values in the engine."""
        kind = "train" if self.is_training else "evaluation"
        return f"{kind} {self.training_step}/{self.task.key}/{self.number}"


class RolloutWorker:
    """A process with environments, tools and copies of the hooks, which plays groups, each in a thread."""

    def __init__(self, number: int, folder: str) -> None:
        self._number = number
        path = location_path(folder, worker_name(number))
        self._rollout_status = SharedRolloutStatus(path) if Path(folder).is_dir() else RolloutStatus()
        PROGRESS.location = self._location
        self._free: list[tuple[Algorithm, EnvironmentFactory]] = []  # those of groups that have ended
        self._lock = threading.Lock()
        self._stop_requested = threading.Event()

    def build(self, worker_settings: WorkerSettings) -> int:
        """Build everything for rollouts from the settings and return the process id. Raises ConfigError if a
        tool server differs from that of the run's start.
        """
        settings = self._settings = worker_settings.recipe.settings()
        self._worker_settings = worker_settings
        there, here = worker_settings.servers, server_digests(settings.environment)
        if other := [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]:
            name = other[0]
            raise ConfigError(
                f"rollout worker {self._number} has another environment.{name} ({here.get(name, 'none')}) "
                f"than the process that was started ({there.get(name, 'none')}): every machine "
                "needs the same server"
            )
        set_threads(settings.num_threads, device="cpu")
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(settings.model.name))
        self._renderer = make_renderer(tokenizer, settings.model, settings.environment)
        self._task_set = make_task_set(settings.environment)
        self._factory = self._task_set.make()
        self._factories = [self._factory]
        self._buffer: StepTraceBuffer | None = None
        if worker_settings.buffer is not None:
            path, revision = worker_settings.buffer
            embedder = load_embedder(settings.buffer.embedder)
            self._buffer = StepTraceBuffer(path, embedder, mode="read", revision=revision)
        self._free = [(self._new_algorithm(), self._factory)]
        size = worker_room(settings)
        # an evaluation does not wait for groups of later steps
        self._slots = {is_training: RolloutSlots(size) for is_training in (True, False)}
        return os.getpid()

    def _new_algorithm(self) -> Algorithm:
        return make_algorithm(
            self._settings,
            self._buffer,
            vocabulary_size=self._worker_settings.vocabulary_size,
            stateful=self._task_set.stateful,
            count_tokens=self._renderer.count_tokens,
            train_tasks=self._worker_settings.train_tasks,
        )

    def _new_factory(self) -> EnvironmentFactory:
        """Return the worker's factory, or a further one if it counts the calls of a group."""
        if getattr(self._factory, "call_budget", None) is None:
            return self._factory
        self._factories.append(self._task_set.make())
        return self._factories[-1]

    def play(self, job: Job) -> GroupResult:
        """Play a group when there is room for its rollouts. Raises the exceptions of
        :meth:`outrider.rollout.scheduler.Scheduler.run`, and ClusterFault of the engine.
        """
        with self._slots[job.is_training].reserve(len(job.modes)):
            began = time.perf_counter()
            with self._lock:
                algorithm, factory = (
                    self._free.pop() if self._free else (self._new_algorithm(), self._new_factory())
                )
            settings = self._settings
            engine = GroupEngine(
                process=job.engine,
                name=job.cache_name,
                tokenizer=self._renderer.tokenizer,
                context_length=self._worker_settings.context_length,
                weight_version=job.version,
                is_alone=settings.has_group_batches,
                or_newer=settings.cluster.max_staleness > 1,
            )
            try:
                report, gathered, num_calls = self._play(job, algorithm, factory, engine)
            finally:
                engine.close()
                self._free.append((algorithm, factory))
            return GroupResult(
                report=report, gathered=gathered, seconds=time.perf_counter() - began, num_calls=num_calls
            )

    def _play(
        self, job: Job, algorithm: Algorithm, factory: EnvironmentFactory, engine: GroupEngine
    ) -> tuple[RolloutReport, list[Any], int]:
        hooks = algorithm.hooks if job.is_training else ()
        copies = [hook for hook in hooks if hook.is_portable]
        snapshots: list[Any] = pickle.loads(job.snapshots) if job.snapshots else []
        for hook, snapshot in zip(copies, snapshots, strict=True):
            hook.restore(snapshot)
        if (budget := getattr(factory, "call_budget", None)) is not None:
            budget.limit = job.max_calls
        settings = self._settings
        truncation = {} if job.is_training else settings.evaluation.truncation
        scheduler = Scheduler(
            engine=engine,
            renderer=self._renderer,
            factory=factory,
            limits=settings.limits,
            sampling=Sampling(
                temperature=1.0 if job.is_training else settings.evaluation.temperature,
                stop=self._task_set.stop,
                **truncation,
            ),
            run_seed=settings.seed,
            hooks=hooks,
            max_concurrent=(
                settings.group_concurrent if settings.has_group_batches else self._slots[job.is_training].size
            ),
            max_retries=settings.train.max_retries,
            is_training=job.is_training,
            group_timeout_s=settings.train.group_timeout_s if job.is_training else None,
            on_finished=lambda done, total: PROGRESS.advance(),
            rollout_status=self._rollout_status,
            ends_groups=False,
            marks_observations=job.is_training and settings.algorithm.observation_nll > 0,
            is_over=lambda: job.is_training and self._stop_requested.is_set(),
            streams=not settings.has_group_batches,
        )
        report = scheduler.run([job.task], modes=job.modes, training_step=job.training_step)
        num_calls = 0 if budget is None else budget.num_executed
        return report, [hook.gathered() for hook in copies], num_calls

    def _location(self) -> str | None:
        statuses = self._rollout_status.snapshot()
        return f"{statuses[0].longest}: {statuses[0].location}" if statuses else None

    def cancel(self) -> None:
        """Cancel all groups of training: no further turn starts."""
        self._stop_requested.set()

    def close(self) -> None:
        """Close environments and tools."""
        for factory in self._factories:
            factory.close()


# --- The pool ---


@dataclass(slots=True, kw_only=True)
class _Group:
    """A group of the pool. ``num_breaks`` counts its attempts in which its worker was lost."""

    name: GroupName
    task: Task
    modes: tuple[str, ...]
    training_step: int
    is_training: bool
    snapshots: bytes
    max_calls: int | None
    num_breaks: int = 0
    last_fault: ProcessLost | None = None
    worker: Process | None = None
    engine: Process | None = None
    cache_name: str = ""

    def masked(self, fault: ProcessLost) -> GroupResult:
        """Return the group without rollouts, because it breaks its worker."""
        reason = str(fault).partition("; ")[0]
        detail = f"masked, because it breaks its rollout worker: {reason}"
        trace = Trace(task=self.task, modes=self.modes)
        for rollout in range(len(self.modes)):
            trace.finish(lost_leaf(rollout, Outcome.ENVIRONMENT_FAULT, detail))
        trace.number_by_rollout()
        kind = Outcome.ENVIRONMENT_FAULT.value
        report = RolloutReport(
            traces=[trace],
            num_batches=0,
            num_retries=0,
            faults=Counter({kind: len(self.modes)}),
            fault_reasons=(f"{kind} in {self.task.key}: {detail}",),
        )
        return GroupResult(report=report, gathered=None, seconds=0.0)


class GroupPool:
    """Groups under way, and those that have ended (``finished``, by name) until their step takes them.

    A group that was lost with its worker starts again with the same seeds and with no other group beside it
    on its worker; after three losses it is masked. Raises ClusterFault if a process cannot be replaced.
    """

    def __init__(self, processes: "RemoteProcesses", hooks: Sequence[Hook], status: RolloutStatus) -> None:
        self._processes, self._status = processes, status
        self.hooks = portable(hooks)
        self.finished: dict[GroupName, GroupResult] = {}
        self._lost: deque[_Group] = deque()  # to be played again
        self._calls: dict[Future[Any], _Group] = {}
        self._locations: dict[str, Any] = {}
        self._numbers = count()

    def submit(
        self,
        tasks: Mapping[GroupName, tuple[Task, Sequence[str]]],
        *,
        training_step: int,
        is_training: bool,
        max_calls: int | None = None,
    ) -> None:
        """Start groups by name. They begin with the present state of the hooks and the newest weights;
        ``max_calls`` is the limit on tool calls of all of them together.
        """
        snapshots = pickle.dumps([hook.snapshot() for hook in self.hooks]) if is_training else b""
        num = len(tasks)
        for number, (name, (task, modes)) in enumerate(tasks.items()):
            share = None
            if max_calls is not None:
                share = max_calls * (number + 1) // num - max_calls * number // num
            group = _Group(
                name=name,
                task=task,
                modes=tuple(modes),
                training_step=training_step,
                is_training=is_training,
                snapshots=snapshots,
                max_calls=share,
            )
            self._start(group, self._least_loaded(self._processes.workers, "worker"))

    def _start(self, group: _Group, worker: Process) -> None:
        # a group stays with its engine, which has its keys and values
        group.worker, group.engine = worker, self._least_loaded(self._processes.engines, "engine")
        job = Job(
            task=group.task,
            modes=group.modes,
            training_step=group.training_step,
            is_training=group.is_training,
            version=self._processes.engine.weight_version,
            engine=group.engine,
            snapshots=group.snapshots,
            max_calls=group.max_calls,
            number=next(self._numbers),
        )
        group.cache_name = job.cache_name
        self._calls[worker.call("play", job)] = group

    def _least_loaded(self, processes: Mapping[str, Process], kind: str) -> Process:
        """Return the process with the fewest rollouts, the first one of equals."""
        loads = dict.fromkeys(processes, 0)
        for group in self._calls.values():
            if (name := getattr(group, kind).name) in loads:
                # nothing joins a group that broke its worker
                loads[name] += len(group.modes) + (_NEVER if kind == "worker" and group.num_breaks else 0)
        return processes[min(loads, key=loads.__getitem__)]

    def poll(self, *, timeout_s: float) -> None:
        """Move groups that have ended to ``finished``, and play lost ones again; waits for the first one up
        to ``timeout_s``.
        """
        wait_futures(list(self._calls), timeout_s, FIRST_COMPLETED)
        faults = self._processes.faults()
        under_way = list(self._calls.values())
        lost: list[_Group] = []
        for call in list(self._calls):
            group = self._calls[call]
            assert group.worker is not None and group.engine is not None
            if not call.done():
                continue
            del self._calls[call]
            answer = outcome(call)
            if not isinstance(answer, ProcessLost):
                self.finished[group.name] = answer
                continue
            lost.append(group)
            for process in (group.worker, group.engine):
                if answer.process == process.name and self._processes.is_current(process):
                    faults.setdefault(process.name, self._processes.cluster.locate(answer))
        for group in lost:
            assert group.worker is not None and group.engine is not None
            group.engine.call("end_group", group.cache_name)  # which a lost worker did not call
            fault = faults.get(group.worker.name)
            self._count_loss(group, fault if group in self._begun(group.worker, under_way) else None)
        for fault in faults.values():
            # a task that breaks its worker again is no fault of the cluster
            is_task = any(group.num_breaks > 1 and group.last_fault is fault for group in lost)
            self._processes.replace(fault, is_charged=not is_task)
        if lost:
            self._processes.repairs.count("rollout/num_groups_replayed", len(lost))
        self._start_lost()
        for name, location in self._processes.cluster.locations().items():
            if name in self._processes.workers and self._locations.get(name) != location:
                self._locations[name] = location
                self._status.set(name, location[1])

    def _begun(self, worker: Process, groups: Sequence[_Group]) -> list[_Group]:
        """Return those of the groups that a worker has begun, which begins them in order as it has room."""
        begun: list[_Group] = []
        for is_training in (True, False):
            room = worker_room(self._processes.settings)
            for group in groups:
                if group.worker is worker and group.is_training == is_training:
                    if room < min(len(group.modes), worker_room(self._processes.settings)):
                        break
                    room -= len(group.modes)
                    begun.append(group)
        return begun

    def _count_loss(self, group: _Group, fault: ProcessLost | None) -> None:
        """``fault`` is that of the group's worker, or None if the group had not begun or another process was
        lost.
        """
        if fault is not None:
            group.num_breaks += 1
            group.last_fault = fault
        if group.num_breaks < _MAX_BREAKS:
            self._lost.append(group)
        else:
            assert group.last_fault is not None
            self.finished[group.name] = group.masked(group.last_fault)
            self._processes.repairs.refund(1)

    def _start_lost(self) -> None:
        """Start lost groups in order; one that broke its worker waits for a worker without groups."""
        for group in [self._lost.popleft() for _ in range(len(self._lost))]:
            free = {
                name: worker
                for name, worker in self._processes.workers.items()
                if not any(other.worker is worker for other in self._calls.values())
            }
            if not group.num_breaks:
                self._start(group, self._least_loaded(self._processes.workers, "worker"))
            elif free:
                self._start(group, next(iter(free.values())))
            else:
                self._lost.append(group)

    def cancel(self) -> None:
        """Give up all groups."""
        for worker in self._processes.workers.values():
            worker.call("cancel")
        self._calls.clear()
        self._lost.clear()
        for name in self._processes.workers:
            self._status.remove(name)


class PoolRollouts:
    """Plays the groups of a batch to their end, as :class:`outrider.rollout.scheduler.Scheduler` does in one
    process. The hooks here absorb what the workers' copies gathered, and then see all groups in order.
    """

    def __init__(
        self,
        pool: GroupPool,
        *,
        hooks: Sequence[Hook],
        is_training: bool,
        max_calls: int | None,
        on_finished: Callable[[int, int], None],
    ) -> None:
        self._pool, self._hooks, self._is_training = pool, hooks, is_training
        self._max_calls = self._calls_left = max_calls if is_training else None
        self._on_finished = on_finished

    def run(
        self, tasks: Sequence[Task], *, modes: Modes, training_step: int, continued: bool = False
    ) -> RolloutReport:
        """Play groups as :meth:`outrider.rollout.scheduler.Scheduler.run` does."""
        if len({task.key for task in tasks}) != len(tasks):
            raise ValueError("two tasks of one batch share a key")
        each = [tuple(modes(number) if callable(modes) else modes) for number in range(len(tasks))]
        if len({len(entry) for entry in each}) > 1:
            raise ValueError("groups of one batch differ in size")
        if not continued:
            self._calls_left = self._max_calls
        # an evaluation during training must not be mistaken for a group of the step
        names = [(training_step if self._is_training else -1, number) for number in range(len(tasks))]
        self._pool.submit(
            dict(zip(names, zip(tasks, each, strict=True), strict=True)),
            training_step=training_step,
            is_training=self._is_training,
            max_calls=self._calls_left,
        )
        finished = self._pool.finished
        num_total = sum(map(len, each))
        try:
            while missing := [name for name in names if name not in finished]:
                self._on_finished(num_total - sum(len(each[number]) for _, number in missing), num_total)
                self._pool.poll(timeout_s=TICK_S)
            self._on_finished(num_total, num_total)
        except BaseException:
            self._pool.cancel()
            raise
        groups = [finished.pop(name) for name in names]
        if self._calls_left is not None:
            self._calls_left = max(0, self._calls_left - sum(group.num_calls for group in groups))
        if self._is_training:
            absorb(self._pool.hooks, self._hooks, groups)
        return merge_reports([group.report for group in groups])


def worker_room(settings: RunSettings) -> int:
    """Return how many rollouts of a kind (training or evaluation) a worker plays at a time."""
    return max(1, settings.num_concurrent // settings.cluster.num_rollout_workers)


def worker_name(number: int) -> str:
    """Return the name of a worker in errors."""
    return f"rollout worker {number}"


def portable(hooks: Sequence[Hook]) -> list[Hook]:
    """Return the hooks if all can be copied. Raises ConfigError for one that cannot."""
    for hook in hooks:
        if not hook.is_portable:
            raise ConfigError(
                f"{type(hook).__name__} has no copies in other processes (snapshot, restore, gathered, "
                "absorb: docs/concepts/hooks.md): train in one process, without cluster.num_engines, "
                "cluster.num_rollout_workers and cluster.weights"
            )
    return list(hooks)
