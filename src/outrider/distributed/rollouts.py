"""Groups on several rollout workers: group g runs on worker g mod W."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

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
from outrider.rollout.faults import lost_leaf
from outrider.rollout.hooks import Hook, RolloutStatus
from outrider.rollout.scheduler import Modes, RolloutReport, largest
from outrider.trace import Trace
from outrider.training.async_rollouts import GroupName, GroupResult, PendingStep, RolloutPrefetch
from outrider.types import Outcome, Task

if TYPE_CHECKING:
    from outrider.distributed.actors import RemoteProcesses

_TICK_S: Final = 0.5
_BETWEEN_BEATS_S: Final = 1.0
_BUSY_SHARE: Final = 0.05  # of one processor
_MOST_BREAKS: Final = 2  # attempts with a silent worker, before its groups are run one by one
_MOST_DEATHS: Final = 4  # the same for workers that die, possibly for external reasons


class WorkerRollouts:
    """Runs the groups of a step on the workers.

    Workers have copies of the hooks. The hooks here absorb what the copies gathered, worker by worker, and
    then see all groups in order.
    """

    def __init__(
        self,
        ray: Any,
        processes: "RemoteProcesses",
        *,
        hooks: Sequence[Hook],
        is_training: bool,
        version: Callable[[], int],
        max_concurrent: int,
        on_finished: Callable[[int, int], None],
        new_monitor: "NewMonitor",
        prefetch: RolloutPrefetch | None = None,
    ) -> None:
        self._ray, self._processes = ray, processes
        self._hooks, self._copied = hooks, portable(hooks)
        self._is_training, self._version, self._max_concurrent = is_training, version, max_concurrent
        self._on_finished, self._new_monitor, self._prefetch = on_finished, new_monitor, prefetch
        # by worker, for the batch: its share of the limit on tool calls, and the spent calls
        self._parts: dict[int, tuple[int, int, int]] = {}
        self._num_spent: dict[int, int] = {}

    def run(
        self, tasks: Sequence[Task], *, modes: Modes, training_step: int, continued: bool = False
    ) -> RolloutReport:
        """Run groups as :meth:`outrider.rollout.scheduler.Scheduler.run` does.

        A lost process is replaced and its groups are run again, with the same bits. A group that repeatedly
        breaks its worker is masked. Raises ClusterFault if the limits on repairs are exceeded.
        """
        if len({task.key for task in tasks}) != len(tasks):
            raise ValueError("two tasks of one batch share a key")
        each = [tuple(modes(number) if callable(modes) else modes) for number in range(len(tasks))]
        if len({len(entry) for entry in each}) > 1:
            raise ValueError("groups of one batch differ in size")
        jobs = self._jobs(tasks, each, training_step, continued=continued)
        # the remaining parts of each worker
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
                self._processes.replace(
                    faults, num_groups=sum(len(part.job.tasks) for part in broken.values())
                )
            for number, part in broken.items():
                if part.is_lost:
                    results[number].append(part.masked())
                    self._processes.repairs.refund(len(part.charged))
                    part.charged.clear()
                left[number][:1] = part.again()
        if self._prefetch is not None:
            self._prefetch.mark_done()
        self._num_spent |= {
            number: job.num_spent + sum(entry.num_spent - job.num_spent for entry in results[number])
            for number, job in jobs.items()
        }
        # in the order of workers, not of completion
        return self._merged(results, len(tasks))

    def _play(
        self, parts: Mapping[int, "Part"], results: Mapping[int, Sequence[JobResult]], *, num_pending: int
    ) -> tuple[dict[int, JobResult], dict[str, ProcessLost]]:
        """Run one part per worker; returns results and lost processes."""
        workers = {worker_name(number): self._processes.workers[number] for number in parts}
        calls = {
            worker_name(number): workers[worker_name(number)].run.remote(part.job)
            for number, part in parts.items()
        }
        if self._prefetch is not None:
            self._prefetch.mark_sent()
        traces = (trace for each in results.values() for result in each for trace in result.report.traces)
        num_before = sum(len(trace.leaves) for trace in traces)
        beats = self._new_monitor(workers, lambda num: self._on_finished(num_before + num, num_pending))
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
        size = len(self._processes.workers)
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
        size = len(self._processes.workers)
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
    """Groups that a worker runs together.

    Groups that repeatedly break the worker are run one by one, and a group that breaks it alone is masked;
    otherwise its task would end the run, and again after each resume.
    """

    job: Job
    is_alone: bool = False
    num_breaks: int = 0
    charged: list[ProcessLost] = field(default_factory=list)  # shared by the parts of one part
    faults: list[ProcessLost] = field(default_factory=list)

    def note(self, fault: ProcessLost | None) -> None:
        """Record the worker's fault, or None if another process failed."""
        self.job = replace(self.job, is_again=True)
        if fault is None:
            return
        self.num_breaks += 1
        self.faults.append(fault)
        # a worker becomes silent because of a task's computation, which is no fault of the cluster
        fault.is_charged = not self.is_alone and self.num_breaks <= (
            1 if fault.is_silent else _MOST_DEATHS - 1
        )
        if fault.is_charged:
            self.charged.append(fault)

    @property
    def is_spent(self) -> bool:
        """Whether it broke the worker too often to run again in this form."""
        most = _MOST_BREAKS if self.faults and self.faults[-1].is_silent else _MOST_DEATHS
        return bool(self.num_breaks) and (self.is_alone or self.num_breaks >= most)

    @property
    def is_lost(self) -> bool:
        """Whether its only group is not run again."""
        return self.is_spent and len(self.job.tasks) == 1

    def again(self) -> list["Part"]:
        """Return the parts to run now: none, each group alone, or all together."""
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
        """Return its only group without rollouts, because it breaks the worker."""
        [task], [modes] = self.job.tasks, self.job.modes
        reason = str(self.faults[-1]).partition("; ")[0]
        detail = f"masked, because it breaks its rollout worker: {reason}"
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
        return JobResult(report=report, gathered=None, num_spent=self.job.num_spent)


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


@dataclass(slots=True)
class _PendingHeartbeat:
    """A heartbeat requested at ``since``, and the worker's processor time at ``checked``."""

    reference: Any
    since: float
    checked: float
    cpu_s: float | None


class HeartbeatMonitor:
    """Requests heartbeats of all workers. Call it repeatedly while rollouts run; it returns silent workers.

    A worker that does not respond but uses the processor is in a call that holds the interpreter's lock (a
    regular expression, computer algebra); it counts as silent only ``busy_s`` later.
    """

    def __init__(
        self,
        ray: Any,
        workers: Mapping[str, Any],
        on_finished: Callable[[int], None] = lambda num: None,
        *,
        limit_s: float,
        rollout_status: RolloutStatus,
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
        """Process responses and send new requests."""
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
        """Return the task and the location at which a worker was last seen."""
        pid = self._find_pid(name)
        beat = self._known.get(name)
        return (None if pid is None else read_location(pid)) or (None if beat is None else beat.location)

    def _receive(self, name: str, reference: Any) -> None:
        try:
            beat: Heartbeat = self._ray.get(reference)
        except Exception as error:
            if isinstance(convert_error(self._ray, error, name, "its rollouts"), ProcessLost):
                return  # its rollouts report it too
            raise
        before = self._known.get(name)
        if beat.location is not None and (before is None or beat.changed != before.changed):
            self._rollout_status.set(name, beat.location)
        self._known[name] = beat

    def close(self) -> None:
        """Remove the workers from the rollout status."""
        for name in self._workers:
            self._rollout_status.remove(name)


NewMonitor = Callable[..., HeartbeatMonitor]  # of workers by name, and what is called with finished rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A running group, and the replacements of each process when it started."""

    name: GroupName
    part: Part
    snapshots: Any
    before: Counter[str]


class RemoteGroupPlayer:
    """Runs groups of several steps, one call per group; group g of a step runs on worker g mod W and engine
    g mod E.

    A lost process is replaced and its groups are started again: first with others, then alone on their
    worker; a group that breaks it alone is masked.
    """

    def __init__(
        self,
        ray: Any,
        processes: "RemoteProcesses",
        *,
        hooks: Sequence[Hook],
        version: Callable[[], int],
        new_monitor: NewMonitor,
    ) -> None:
        self._ray, self._processes, self._copied = ray, processes, portable(hooks)
        self._version, self._new_monitor = version, new_monitor
        self._calls: dict[Any, _Call] = {}
        self._waiting: dict[int, deque[_Call]] = {}  # by worker
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
            self._processes.replace({}, num_groups=len(groups))

    def _enqueue(self, name: GroupName, part: Part, snapshots: Any) -> None:
        call = _Call(name=name, part=part, snapshots=snapshots, before=Counter())
        self._waiting.setdefault(self._worker(call), deque()).append(call)

    def _send(self) -> None:
        """Start waiting groups; one that has to run alone waits for its worker, and others wait for it."""
        for number, waiting in self._waiting.items():
            while waiting:
                now = [call for call in self._calls.values() if self._worker(call) == number]
                if any(call.part.is_alone for call in now) or (waiting[0].part.is_alone and now):
                    break
                call = replace(waiting.popleft(), before=Counter(self._processes.repairs.num_replaced))
                play = self._processes.workers[number].play.options(concurrency_group="play")
                self._calls[play.remote(call.part.job, call.snapshots)] = call

    def _worker(self, call: _Call) -> int:
        return call.name[1] % len(self._processes.workers)

    def poll(self, *, waits: bool) -> Mapping[GroupName, GroupResult]:
        results: dict[GroupName, GroupResult] = {}
        broken: list[tuple[_Call, ProcessLost]] = []
        if self._known_replacements != self._processes.repairs.num_replaced:  # replaced during an evaluation
            self._beats = self._new_beats()
        faults = dict(self._beats())
        calls = list(self._calls)
        if calls:
            ready, _ = self._ray.wait(calls, num_returns=1, timeout=_TICK_S if waits else 0)
            if ready:  # also all others that are ready
                ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
            for reference in ready:
                call = self._calls.pop(reference)
                outcome = get_answer(self._ray, reference, worker_name(self._worker(call)), "its rollouts")
                if isinstance(outcome, ProcessLost):
                    # otherwise it was replaced after the start of this group
                    if self._processes.repairs.num_replaced[outcome.process] == call.before[outcome.process]:
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
            self._processes.replace(faults, num_groups=len(broken))
            self._beats = self._new_beats()
        for call, fault in broken:
            if (masked := self._retry(call, fault)) is not None:
                results[call.name] = masked
        self._send()
        return results

    def _retry(self, call: _Call, fault: ProcessLost) -> GroupResult | None:
        """Start a failed group again, or mask it."""
        part = call.part
        if fault.process == worker_name(self._worker(call)):
            part.num_breaks += 1
            part.faults.append(fault)
        if part.is_spent and part.is_alone:
            self._processes.repairs.refund(1)
            return _group(part.masked())
        next_part = Part(part.job, is_alone=True) if part.is_spent else part
        self._enqueue(call.name, next_part, call.snapshots)
        return None

    def cancel(self) -> None:
        for worker in self._processes.workers:
            worker.leave.remote()
        self._calls.clear()
        self._waiting.clear()
        self._beats.close()

    def _new_beats(self) -> HeartbeatMonitor:
        self._known_replacements = Counter(self._processes.repairs.num_replaced)
        workers = {worker_name(number): worker for number, worker in enumerate(self._processes.workers)}
        return self._new_monitor(workers)


def _group(result: JobResult) -> GroupResult:
    return GroupResult(report=result.report, gathered=result.gathered, seconds=result.seconds)
