"""The groups of a step on several rollout workers: group g goes to worker g mod W."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

from outrider.distributed.ray_session import (
    add_location,
    convert_error,
    cpu_seconds,
    get_answer,
    outcomes,
    read_location,
    timeout_error,
)
from outrider.distributed.worker import Heartbeat, Job, JobResult
from outrider.errors import ConfigError, ProcessLost
from outrider.rollout.base import RolloutStatus
from outrider.rollout.faults import lost_leaf
from outrider.rollout.hooks import Hook
from outrider.rollout.scheduler import Modes, RolloutReport, largest
from outrider.trace import Trace
from outrider.training.async_rollouts import GroupName, GroupResult, PendingStep, RolloutPrefetch
from outrider.types import Outcome, Task

_BETWEEN_BEATS_S: Final = 1.0
_BUSY_SHARE: Final = 0.05  # of one processor
_MOST_BREAKS: Final = 2  # plays that end with a silent worker, before its groups are played one by one
_MOST_DEATHS: Final = 4  # the same for workers that die, which others may have killed


class Crew(Protocol):
    """The rollout workers of a run, in their order, and what happens where a process is gone."""

    @property
    def workers(self) -> Sequence[Any]:
        """Those that play now."""
        ...

    @property
    def num_replaced(self) -> Counter[str]:
        """How often each process was, by its name."""
        ...

    def replace(self, faults: Mapping[str, ProcessLost], *, num_groups: int) -> None:
        """Put other processes in the place of these; ``num_groups`` are played again. Raises ClusterFault
        where that may not be.
        """
        ...

    def refund(self, num_repairs: int) -> None:
        """These repairs were the fault of a task, which is masked: they are not counted."""
        ...


class WorkerRollouts:
    """See :class:`outrider.rollout.scheduler.Rollouts`. Hooks act as copies in the workers; those given here
    absorb what the copies gathered, worker by worker, and then see all groups in their order.
    """

    def __init__(
        self,
        ray: Any,
        crew: Crew,
        *,
        hooks: Sequence[Hook],
        is_training: bool,
        version: Callable[[], int],
        max_concurrent: int,
        heartbeat_s: float,
        on_finished: Callable[[int, int], None],
        rollout_status: RolloutStatus,
        prefetch: RolloutPrefetch | None = None,
        busy_s: float = 0.0,
        find_pid: Callable[[str], int | None] = lambda name: None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._prefetch, self._busy_s, self._find_pid, self._note = prefetch, busy_s, find_pid, note
        self._ray, self._crew = ray, crew
        self._hooks, self._copied = hooks, portable(hooks)
        self._is_training, self._version = is_training, version
        self._max_concurrent, self._heartbeat_s = max_concurrent, heartbeat_s
        self._on_finished, self._rollout_status = on_finished, rollout_status
        # by worker, of the batch: its part of the cap on calls, and what it has spent of that
        self._parts: dict[int, tuple[int, int, int]] = {}
        self._num_spent: dict[int, int] = {}

    def run(
        self, tasks: Sequence[Task], *, modes: Modes, training_step: int, continued: bool = False
    ) -> RolloutReport:
        """See :meth:`outrider.rollout.scheduler.Scheduler.run`. Where a process is gone or silent, another
        one takes its place and the groups that it broke are played again, to the same bits. A group that
        breaks its worker again and again is masked. Raises ClusterFault where that may not be.
        """
        if len({task.key for task in tasks}) != len(tasks):
            raise ValueError("two tasks of one batch share a key")
        each = [tuple(modes(number) if callable(modes) else modes) for number in range(len(tasks))]
        if len({len(entry) for entry in each}) > 1:
            raise ValueError("groups of one batch differ in size")
        jobs = self._jobs(tasks, each, training_step, continued=continued)
        # What is left for each worker to play, one part after the other.
        left = {number: [Part(job)] for number, job in jobs.items()}
        results: dict[int, list[JobResult]] = {number: [] for number in jobs}
        while now := {number: parts[0] for number, parts in left.items() if parts}:
            finished, faults = self._play(now, results, num_pending=sum(map(len, each)))
            self._raise_if_cancelled()
            for number, entry in finished.items():
                results[number].append(entry)
                del left[number][0]
            broken = {number: part for number, part in now.items() if number not in finished}
            for number, part in broken.items():
                part.note(faults.get(worker_name(number)))
            if faults:
                self._crew.replace(faults, num_groups=sum(len(part.job.tasks) for part in broken.values()))
            for number, part in broken.items():
                if part.is_lost:
                    results[number].append(part.masked())
                    self._crew.refund(len(part.charged))
                    part.charged.clear()
                left[number][:1] = part.again()
        if self._prefetch is not None:
            self._prefetch.mark_done()
        self._num_spent |= {
            number: job.num_spent + sum(entry.num_spent - job.num_spent for entry in results[number])
            for number, job in jobs.items()
        }
        # by worker, and not by who came to an end first
        return self._merged(results, len(tasks))

    def _play(
        self, parts: Mapping[int, "Part"], results: Mapping[int, Sequence[JobResult]], *, num_pending: int
    ) -> tuple[dict[int, JobResult], dict[str, ProcessLost]]:
        """Let the workers play: what they bring, and the processes that are gone."""
        workers = {worker_name(number): self._crew.workers[number] for number in parts}
        calls = {
            worker_name(number): workers[worker_name(number)].run.remote(part.job)
            for number, part in parts.items()
        }
        if self._prefetch is not None:
            self._prefetch.mark_sent()
        num_before = sum(_num_rollouts(result) for each in results.values() for result in each)
        beats = HeartbeatMonitor(
            self._ray,
            workers,
            limit_s=self._heartbeat_s,
            rollout_status=self._rollout_status,
            on_finished=lambda num: self._on_finished(num_before + num, num_pending),
            busy_s=self._busy_s,
            find_pid=self._find_pid,
            note=self._note,
        )
        try:
            worker_outcomes = outcomes(
                self._ray, calls, action="its rollouts", watch=partial(self._watch, beats)
            )
        finally:
            beats.close()
        finished: dict[int, JobResult] = {}
        faults: dict[str, ProcessLost] = {}
        for number in parts:
            outcome = worker_outcomes[worker_name(number)]
            if not isinstance(outcome, ProcessLost):
                finished[number] = outcome
            elif outcome.process == worker_name(number) and not outcome.is_silent:
                faults[outcome.process] = add_location(outcome, beats.last_location(outcome.process))
            else:
                faults[outcome.process] = outcome
        return finished, faults

    def _watch(self, beats: "HeartbeatMonitor") -> Mapping[str, ProcessLost]:
        self._raise_if_cancelled()
        return beats()

    def _raise_if_cancelled(self) -> None:
        if self._prefetch is not None:
            self._prefetch.raise_if_cancelled()

    def _jobs(
        self, tasks: Sequence[Task], modes: Sequence[Sequence[str]], step: int, *, continued: bool
    ) -> dict[int, Job]:
        size = len(self._crew.workers)
        snapshots = [hook.snapshot() for hook in self._copied]
        jobs: dict[int, Job] = {}
        begin = 0
        if not continued:
            self._parts, self._num_spent = {}, {}
        for number in range(min(size, len(tasks))):
            mine = range(number, len(tasks), size)
            if not continued:
                self._parts[number] = (begin, begin + len(mine), len(tasks))
            jobs[number] = Job(
                tasks=[tasks[group] for group in mine],
                modes=[modes[group] for group in mine],
                training_step=step,
                continued=continued,
                is_training=self._is_training,
                version=self._version(),
                snapshots=snapshots,
                calls=self._parts.get(number, (0, 0, 1)),
                num_spent=self._num_spent.get(number, 0),
                max_concurrent=max(1, self._max_concurrent // size),
            )
            begin += len(mine)
        return jobs

    def _merged(self, results: Mapping[int, Sequence[JobResult]], num_groups: int) -> RolloutReport:
        size = len(self._crew.workers)
        traces_by_worker = {
            number: [trace for result in each for trace in result.report.traces]
            for number, each in results.items()
        }
        traces: list[Trace] = [traces_by_worker[group % size][group // size] for group in range(num_groups)]
        all_results = [result for each in results.values() for result in each]
        for result in all_results:
            if result.gathered is None:  # masked
                continue
            for copied, gathered in zip(self._copied, result.gathered, strict=True):
                copied.absorb(gathered)
        for trace in traces:
            for hook in self._hooks:
                hook.after_group(trace)
        reports = [result.report for result in all_results]
        return RolloutReport(
            traces=traces,
            num_batches=max((result.num_batches for result in reports), default=0),
            num_retries=sum(result.num_retries for result in reports),
            faults=sum((result.faults for result in reports), Counter()),
            fault_reasons=tuple(reason for result in reports for reason in result.fault_reasons),
            loop_lag_s=largest([result.loop_lag_s for result in reports]),
        )


@dataclass(slots=True)
class Part:
    """Groups that a worker plays at a time. Those that break it again and again are played one by one, and
    one that breaks it alone is masked: its task would otherwise end the run, after each resume again.
    """

    job: Job
    is_alone: bool = False
    num_breaks: int = 0
    charged: list[ProcessLost] = field(default_factory=list)  # shared by the parts of one part
    faults: list[ProcessLost] = field(default_factory=list)

    def note(self, fault: ProcessLost | None) -> None:
        """The worker broke with this fault; None: another process did."""
        self.job = replace(self.job, is_again=True)
        if fault is None:
            return
        self.num_breaks += 1
        self.faults.append(fault)
        # Whoever breaks silently does so by what its task computes: that is not the cluster's fault.
        fault.is_charged = not self.is_alone and self.num_breaks <= (
            1 if fault.is_silent else _MOST_DEATHS - 1
        )
        if fault.is_charged:
            self.charged.append(fault)

    @property
    def is_spent(self) -> bool:
        """Whether it broke the worker too often to be played like this once more."""
        most = _MOST_BREAKS if self.faults and self.faults[-1].is_silent else _MOST_DEATHS
        return bool(self.num_breaks) and (self.is_alone or self.num_breaks >= most)

    @property
    def is_lost(self) -> bool:
        """Whether its one group is not played again."""
        return self.is_spent and len(self.job.tasks) == 1

    def again(self) -> list["Part"]:
        """What is played now: nothing, each group alone, or all at a time."""
        if not self.is_spent:
            return [self]
        if self.is_lost:
            return []
        begin, end, total = self.job.calls
        is_shared = end - begin == len(self.job.tasks)
        return [
            Part(
                replace(
                    self.job,
                    tasks=[task],
                    modes=[modes],
                    calls=(begin + index, begin + index + 1, total) if is_shared else self.job.calls,
                ),
                is_alone=True,
                charged=self.charged,
            )
            for index, (task, modes) in enumerate(zip(self.job.tasks, self.job.modes, strict=True))
        ]

    def masked(self) -> JobResult:
        """The group without its rollouts."""
        return masked_group(self.job, self.faults[-1], num_spent=self.job.num_spent)


def masked_group(job: Job, fault: ProcessLost, *, num_spent: int = 0) -> JobResult:
    """A group whose rollouts are all lost, because it breaks the worker that plays it."""
    [task], [modes] = job.tasks, job.modes
    reason = str(fault).partition("; ")[0]
    detail = f"not played again, because it breaks its rollout worker: {reason}"
    trace = Trace(task=task, modes=tuple(modes))
    for rollout in range(len(modes)):
        trace.finish(lost_leaf(rollout, Outcome.ENVIRONMENT_FAULT, detail))
    trace.number_by_rollout()
    report = RolloutReport(
        traces=[trace],
        num_batches=0,
        num_retries=0,
        faults=Counter({Outcome.ENVIRONMENT_FAULT.value: len(modes)}),
        fault_reasons=(f"{Outcome.ENVIRONMENT_FAULT.value} in {task.key}: {detail}",),
    )
    return JobResult(report=report, gathered=None, num_spent=num_spent)


def _num_rollouts(result: JobResult) -> int:
    return sum(len(trace.leaves) for trace in result.report.traces)


def worker_name(number: int) -> str:
    """How a worker is named in errors."""
    return f"rollout worker {number}"


def portable(hooks: Sequence[Hook]) -> list[Hook]:
    """The hooks as those that have copies. Raises ConfigError for one that can have none."""
    for hook in hooks:
        if not hook.is_portable:
            raise ConfigError(
                f"{type(hook).__name__} has no copies in other processes (snapshot, restore, gathered, "
                "absorb: docs/concepts/hooks.md): play in one process, without cluster.num_engines, "
                "cluster.num_rollout_workers and cluster.weights"
            )
    return list(hooks)


@dataclass(slots=True)
class _PendingHeartbeat:
    """A heartbeat that was asked for at ``since``, and the processor time that the worker had used at
    ``checked``.
    """

    reference: Any
    since: float
    checked: float
    cpu_s: float | None


class HeartbeatMonitor:
    """Asks every worker how far it is, again and again; called while its rollouts are waited for, it names
    those that are silent.

    A worker that does not answer but uses the processor is in a call that holds the interpreter's lock (a
    regular expression, computer algebra): it is silent only ``busy_s`` later.
    """

    def __init__(
        self,
        ray: Any,
        workers: Mapping[str, Any],
        *,
        limit_s: float,
        rollout_status: RolloutStatus,
        on_finished: Callable[[int], None],
        busy_s: float = 0.0,
        find_pid: Callable[[str], int | None] = lambda name: None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._note, self._busy = note, set[str]()
        self._ray, self._workers, self._limit_s = ray, workers, limit_s
        self._rollout_status, self._on_finished = rollout_status, on_finished
        self._busy_s, self._find_pid = busy_s, find_pid
        self._pending: dict[str, _PendingHeartbeat] = {}
        self._known: dict[str, Heartbeat] = {}
        self._silent: dict[str, ProcessLost] = {}
        self._num_reported = 0

    def __call__(self) -> dict[str, ProcessLost]:
        """Take what has been answered, and ask again."""
        for name, worker in self._workers.items():
            if name in self._silent:
                continue
            if name not in self._pending:
                now = time.monotonic()
                self._pending[name] = _PendingHeartbeat(worker.beat.remote(), now, now, self._cpu_s(name))
                continue
            pending = self._pending[name]
            ready, _ = self._ray.wait([pending.reference], timeout=0)
            now = time.monotonic()
            if ready and now - pending.since >= _BETWEEN_BEATS_S:
                self._receive(name, pending.reference)
                del self._pending[name]
            elif (
                not ready and now - pending.checked > self._limit_s and not self._is_busy(name, pending, now)
            ):
                fault = timeout_error(name, "a heartbeat", self._limit_s, "cluster.heartbeat_s")
                self._silent[name] = add_location(fault, self.last_location(name))
        num_finished = sum(beat.num_finished for beat in self._known.values())
        if num_finished > self._num_reported:
            self._num_reported = num_finished
            self._on_finished(num_finished)
        return self._silent

    def _is_busy(self, name: str, pending: _PendingHeartbeat, now: float) -> bool:
        used = self._cpu_s(name)
        if used is None or pending.cpu_s is None or now - pending.since > self._limit_s + self._busy_s:
            return False
        is_busy = used - pending.cpu_s > _BUSY_SHARE * (now - pending.checked)
        pending.checked, pending.cpu_s = now, used
        if is_busy and name not in self._busy:
            self._busy.add(name)
            self._note(
                f"{name} works but has not answered for {self._limit_s:g} s (cluster.heartbeat_s), last seen "
                f"at {self.last_location(name) or 'its start'}: a step that holds Python's lock delays the "
                "others"
            )
        return is_busy

    def _cpu_s(self, name: str) -> float | None:
        pid = self._find_pid(name)
        return None if pid is None else cpu_seconds(pid)

    def last_location(self, name: str) -> str | None:
        """Task and place that a worker was last seen at."""
        pid = self._find_pid(name)
        beat = self._known.get(name)
        return (None if pid is None else read_location(pid)) or (None if beat is None else beat.location)

    def _receive(self, name: str, reference: Any) -> None:
        try:
            beat: Heartbeat = self._ray.get(reference)
        except Exception as error:
            if isinstance(convert_error(self._ray, error, name, "its rollouts"), ProcessLost):
                return  # its rollouts say so too
            raise
        before = self._known.get(name)
        if beat.location is not None and (before is None or beat.changed != before.changed):
            self._rollout_status.set(name, beat.location)
        self._known[name] = beat

    def close(self) -> None:
        """No worker plays any more."""
        for name in self._workers:
            self._rollout_status.remove(name)


# Groups of several steps on the rollout workers, one call a group: group g of a step is worker g mod W's,
# and engine g mod E's.


_TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A group that plays, and how often each process had been replaced when it began."""

    name: GroupName
    part: Part
    snapshots: Any
    before: Counter[str]


class RemoteGroupPlayer:
    """See :class:`outrider.training.async_rollouts.GroupPlayer`. Where a process is gone another one takes
    its place, and the groups that it broke are begun again: beside others at first, then alone on their
    worker; a group that breaks it alone is masked.
    """

    def __init__(
        self,
        ray: Any,
        crew: Crew,
        *,
        hooks: Sequence[Hook],
        version: Callable[[], int],
        heartbeat_s: float,
        rollout_status: RolloutStatus,
        busy_s: float = 0.0,
        find_pid: Callable[[str], int | None] = lambda name: None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._busy_s, self._find_pid, self._note = busy_s, find_pid, note
        self._ray, self._crew, self._copied = ray, crew, portable(hooks)
        self._version, self._heartbeat_s, self._rollout_status = version, heartbeat_s, rollout_status
        self._calls: dict[Any, _Call] = {}
        self._waiting: dict[int, deque[_Call]] = {}  # by worker, in their order
        self._last_faults: dict[str, ProcessLost] = {}
        self._beats = self._new_beats()

    def begin(self, step: PendingStep, groups: Sequence[int], *, is_again: bool) -> None:
        snapshots = self._ray.put([hook.snapshot() for hook in self._copied])  # once for all groups
        for number in groups:
            job = Job(
                tasks=[step.tasks[number]],
                modes=[step.modes[number]],
                training_step=step.step,
                continued=False,
                is_training=True,
                version=self._version(),
                snapshots=(),
                calls=(0, 0, 1),
                num_spent=0,
                max_concurrent=max(1, len(step.modes[number])),
                engine=number,
            )
            self._enqueue((step.step, number), Part(job), snapshots)
        self._send()
        if is_again:
            self._crew.replace({}, num_groups=len(groups))

    def _enqueue(self, name: GroupName, part: Part, snapshots: Any) -> None:
        call = _Call(name=name, part=part, snapshots=snapshots, before=Counter())
        self._waiting.setdefault(self._worker(call), deque()).append(call)

    def _send(self) -> None:
        """Begin what is waiting; a group that has to play alone waits for its worker, and others for it."""
        for number, waiting in self._waiting.items():
            while waiting:
                now = [call for call in self._calls.values() if self._worker(call) == number]
                if any(call.part.is_alone for call in now) or (waiting[0].part.is_alone and now):
                    break
                call = replace(waiting.popleft(), before=Counter(self._crew.num_replaced))
                play = self._crew.workers[number].play.options(concurrency_group="play")
                self._calls[play.remote(call.part.job, call.snapshots)] = call

    def _worker(self, call: _Call) -> int:
        return call.name[1] % len(self._crew.workers)

    def poll(self, *, waits: bool) -> Mapping[GroupName, GroupResult]:
        results: dict[GroupName, GroupResult] = {}
        broken: list[tuple[_Call, ProcessLost]] = []
        if self._known_replacements != self._crew.num_replaced:  # an evaluation has other workers now
            self._beats = self._new_beats()
        faults = dict(self._beats())
        calls = list(self._calls)
        if calls:
            ready, _ = self._ray.wait(calls, num_returns=1, timeout=_TICK_S if waits else 0)
            if ready:  # and whatever else is
                ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
            for reference in ready:
                call = self._calls.pop(reference)
                outcome = get_answer(self._ray, reference, self._worker_name(call), "its rollouts")
                if isinstance(outcome, ProcessLost):
                    # else it has been replaced since this group began: of that it broke as well
                    if self._crew.num_replaced[outcome.process] == call.before[outcome.process]:
                        outcome = add_location(outcome, self._beats.last_location(outcome.process))
                        faults.setdefault(outcome.process, outcome)
                    else:
                        outcome = self._last_faults.get(outcome.process, outcome)
                    broken.append((call, faults.get(outcome.process, outcome)))
                else:
                    results[call.name] = _group(outcome)
        for worker, fault in faults.items():
            parts = [call.part for call in [*self._calls.values(), *(call for call, _ in broken)]
                    if worker_name(self._worker(call)) == worker]  # fmt: skip
            fault.is_charged = not any(part.num_breaks or part.is_alone for part in parts)
        self._last_faults |= faults
        if faults or broken:
            self._crew.replace(faults, num_groups=len(broken))
            self._beats = self._new_beats()
        for call, fault in broken:
            if (masked := self._retry(call, fault)) is not None:
                results[call.name] = masked
        self._send()
        return results

    def _retry(self, call: _Call, fault: ProcessLost) -> GroupResult | None:
        """Begin a group once more that broke with this fault, or mask it."""
        part = call.part
        if fault.process == self._worker_name(call):
            part.num_breaks += 1
            part.faults.append(fault)
        if part.is_spent and part.is_alone:
            self._crew.refund(1)
            return _group(part.masked())
        next_part = Part(part.job, is_alone=True) if part.is_spent else part
        self._enqueue(call.name, next_part, call.snapshots)
        return None

    def cancel(self) -> None:
        for worker in self._crew.workers:
            worker.leave.remote()
        self._calls.clear()
        self._waiting.clear()
        self._beats.close()

    def _new_beats(self) -> HeartbeatMonitor:
        self._known_replacements = Counter(self._crew.num_replaced)
        return HeartbeatMonitor(
            self._ray,
            {worker_name(number): worker for number, worker in enumerate(self._crew.workers)},
            limit_s=self._heartbeat_s,
            rollout_status=self._rollout_status,
            on_finished=lambda num_ended: None,
            busy_s=self._busy_s,
            find_pid=self._find_pid,
            note=self._note,
        )

    def _worker_name(self, call: _Call) -> str:
        return worker_name(self._worker(call))


def _group(result: JobResult) -> GroupResult:
    return GroupResult(report=result.report, gathered=result.gathered, seconds=result.seconds)
