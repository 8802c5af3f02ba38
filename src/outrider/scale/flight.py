"""Groups of several steps on the rollout workers, one call a group: group g of a step is worker g mod W's,
and engine g mod E's.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.errors import ProcessGone
from outrider.rollout.hooks import Hook
from outrider.rollout.whereabouts import Whereabouts
from outrider.scale.rollouts import Beats, Crew, portable, who
from outrider.scale.waiting import answered
from outrider.scale.worker import Job, Played
from outrider.train.in_flight import GroupName
from outrider.train.state.flight_queue import OpenStep, PlayedGroup

_TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A group that plays, and how often each process had been replaced when it began."""

    name: GroupName
    job: Job
    snapshots: Any
    before: Counter[str]


class RemoteFlight:
    """See :class:`outrider.train.in_flight.GroupPlayer`. Where a process is gone another one takes its place,
    and the groups that it broke are begun again.
    """

    def __init__(
        self,
        ray: Any,
        crew: Crew,
        *,
        hooks: Sequence[Hook],
        version: Callable[[], int],
        heartbeat_s: float,
        whereabouts: Whereabouts,
    ) -> None:
        self._ray, self._crew, self._copied = ray, crew, portable(hooks)
        self._version, self._heartbeat_s, self._whereabouts = version, heartbeat_s, whereabouts
        self._calls: dict[Any, _Call] = {}
        self._beats = self._new_beats()

    def begin(self, step: OpenStep, groups: Sequence[int], *, is_again: bool) -> None:
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
            self._send((step.step, number), job, snapshots)
        if is_again:
            self._crew.replace({}, num_groups=len(groups))

    def _send(self, name: GroupName, job: Job, snapshots: Any) -> None:
        worker = self._crew.workers[name[1] % len(self._crew.workers)]
        call = worker.play.options(concurrency_group="play").remote(job, snapshots)
        before = Counter(self._crew.num_replaced)
        self._calls[call] = _Call(name=name, job=job, snapshots=snapshots, before=before)

    def ended(self, *, waits: bool) -> Mapping[GroupName, PlayedGroup]:
        """See :class:`outrider.train.in_flight.GroupPlayer`."""
        found: dict[GroupName, PlayedGroup] = {}
        broken: list[_Call] = []
        if self._asked_when != self._crew.num_replaced:  # an evaluation has other workers now
            self._beats = self._new_beats()
        gone = dict(self._beats())
        calls = list(self._calls)
        if calls:
            ready, _ = self._ray.wait(calls, num_returns=1, timeout=_TICK_S if waits else 0)
            if ready:  # and whatever else is
                ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
            for reference in ready:
                call = self._calls.pop(reference)
                outcome = answered(self._ray, reference, self._who(call), "its rollouts")
                if isinstance(outcome, ProcessGone):
                    broken.append(call)
                    # else it has been replaced since this group began: of that it broke as well
                    if self._crew.num_replaced[outcome.who] == call.before[outcome.who]:
                        gone[outcome.who] = outcome
                else:
                    found[call.name] = _group(outcome)
        if gone or broken:
            self._crew.replace(gone, num_groups=len(broken))
            self._beats = self._new_beats()
        for call in broken:
            self._send(call.name, call.job, call.snapshots)
        return found

    def give_up(self) -> None:
        """See :class:`outrider.train.in_flight.GroupPlayer`."""
        for worker in self._crew.workers:
            worker.leave.remote()
        self._calls.clear()
        self._beats.close()

    def _new_beats(self) -> Beats:
        self._asked_when = Counter(self._crew.num_replaced)
        return Beats(
            self._ray,
            {who(number): worker for number, worker in enumerate(self._crew.workers)},
            limit_s=self._heartbeat_s,
            whereabouts=self._whereabouts,
            on_ended=lambda num_ended: None,
        )

    def _who(self, call: _Call) -> str:
        return who(call.name[1] % len(self._crew.workers))


def _group(played: Played) -> PlayedGroup:
    return PlayedGroup(report=played.report, gathered=played.gathered, seconds=played.seconds)
