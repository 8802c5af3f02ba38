"""Groups of several steps on the rollout workers, one call a group: group g of a step is worker g mod W's,
and engine g mod E's.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.errors import ProcessLost
from outrider.rollout.hooks import Hook
from outrider.rollout.whereabouts import RolloutStatus
from outrider.scale.rollouts import Crew, HeartbeatMonitor, Part, portable, worker_name
from outrider.scale.waiting import add_location, get_answer
from outrider.scale.worker import Job, JobResult
from outrider.train.in_flight import GroupName
from outrider.train.state.flight_queue import GroupResult, PendingStep

_TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A group that plays, and how often each process had been replaced when it began."""

    name: GroupName
    part: Part
    snapshots: Any
    before: Counter[str]


class RemoteGroupPlayer:
    """See :class:`outrider.train.in_flight.GroupPlayer`. Where a process is gone another one takes its place,
    and the groups that it broke are begun again: beside others at first, then alone on their worker; a group
    that breaks it alone is masked.
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
        """See :class:`outrider.train.in_flight.GroupPlayer`."""
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
        """See :class:`outrider.train.in_flight.GroupPlayer`."""
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
        """See :class:`outrider.train.in_flight.GroupPlayer`."""
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
