"""The groups of a step on several rollout workers: group g goes to worker g mod W."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from outrider.errors import ConfigError, ProcessGone
from outrider.rollout.hooks import Hook, Portable
from outrider.rollout.loop_lag import largest
from outrider.rollout.scheduler import Modes, RolloutReport
from outrider.rollout.whereabouts import Whereabouts
from outrider.scale.waiting import outcomes, silent, told
from outrider.scale.worker import Beat, Job, Played
from outrider.trace import Trace
from outrider.train.overlap import Ahead
from outrider.types import Task

_BETWEEN_BEATS_S: Final = 1.0


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

    def replace(self, gone: Mapping[str, ProcessGone], *, num_groups: int) -> None:
        """Put other processes in the place of these; ``num_groups`` are played again. Raises ClusterFault
        where that may not be.
        """
        ...


class RemoteRollouts:
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
        whereabouts: Whereabouts,
        ahead: Ahead | None = None,
    ) -> None:
        self._ahead = ahead
        self._ray, self._crew = ray, crew
        self._hooks, self._copied = hooks, portable(hooks)
        self._is_training, self._version = is_training, version
        self._max_concurrent, self._heartbeat_s = max_concurrent, heartbeat_s
        self._on_finished, self._whereabouts = on_finished, whereabouts
        # by worker, of the batch: its part of the cap on calls, and what it has spent of that
        self._parts: dict[int, tuple[int, int, int]] = {}
        self._num_spent: dict[int, int] = {}

    def run(
        self, tasks: Sequence[Task], *, modes: Modes, training_step: int, continued: bool = False
    ) -> RolloutReport:
        """See :meth:`outrider.rollout.scheduler.Scheduler.run`. Where a process is gone or silent, another
        one takes its place and the groups that it broke are played again, to the same bits. Raises
        ClusterFault where that may not be.
        """
        if len({task.key for task in tasks}) != len(tasks):
            raise ValueError("two tasks of one batch share a key")
        each = [tuple(modes(number) if callable(modes) else modes) for number in range(len(tasks))]
        if len({len(one) for one in each}) > 1:
            raise ValueError("groups of one batch differ in size")
        jobs = self._jobs(tasks, each, training_step, continued=continued)
        played: dict[int, Played] = {}
        while missing := {number: job for number, job in jobs.items() if number not in played}:
            gone = self._play(missing, played, num_owed=sum(map(len, each)))
            self._leave_if_given_up()
            if gone:
                again = {number: job for number, job in jobs.items() if number not in played}
                self._crew.replace(gone, num_groups=sum(len(job.tasks) for job in again.values()))
                jobs |= {number: replace(job, is_again=True) for number, job in again.items()}
        if self._ahead is not None:
            self._ahead.ended()
        self._num_spent |= {number: one.num_spent for number, one in played.items()}
        # by worker, and not by who came to an end first
        return self._merged({number: played[number] for number in jobs}, len(tasks))

    def _play(
        self, jobs: Mapping[int, Job], played: dict[int, Played], *, num_owed: int
    ) -> dict[str, ProcessGone]:
        """Let the workers play; ``played`` gets what they bring. The processes that are gone."""
        workers = {who(number): self._crew.workers[number] for number in jobs}
        calls = {who(number): workers[who(number)].run.remote(job) for number, job in jobs.items()}
        if self._ahead is not None:
            self._ahead.sent()
        num_before = sum(_num_rollouts(one) for one in played.values())
        beats = Beats(
            self._ray,
            workers,
            limit_s=self._heartbeat_s,
            whereabouts=self._whereabouts,
            on_ended=lambda num: self._on_finished(num_before + num, num_owed),
        )
        try:
            found = outcomes(self._ray, calls, what="its rollouts", watch=partial(self._watch, beats))
        finally:
            beats.close()
        gone: dict[str, ProcessGone] = {}
        for number in jobs:
            outcome = found[who(number)]
            if isinstance(outcome, ProcessGone):
                gone[outcome.who] = outcome
            else:
                played[number] = outcome
        return gone

    def _watch(self, beats: "Beats") -> Mapping[str, ProcessGone]:
        self._leave_if_given_up()
        return beats()

    def _leave_if_given_up(self) -> None:
        if self._ahead is not None:
            self._ahead.leave_if_given_up()

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

    def _merged(self, played: Mapping[int, Played], num_groups: int) -> RolloutReport:
        size = len(self._crew.workers)
        traces: list[Trace] = [
            played[group % size].report.traces[group // size] for group in range(num_groups)
        ]
        for one in played.values():
            for copied, gathered in zip(self._copied, one.gathered, strict=True):
                copied.absorb(gathered)
        for trace in traces:
            for hook in self._hooks:
                hook.after_group(trace)
        reports = [one.report for one in played.values()]
        return RolloutReport(
            traces=traces,
            num_batches=max((one.num_batches for one in reports), default=0),
            num_retries=sum(one.num_retries for one in reports),
            faults=sum((one.faults for one in reports), Counter()),
            fault_reasons=tuple(reason for one in reports for reason in one.fault_reasons),
            loop_lag_s=largest([one.loop_lag_s for one in reports]),
        )


def _num_rollouts(played: Played) -> int:
    return sum(len(trace.leaves) for trace in played.report.traces)


def who(number: int) -> str:
    """How a worker is named in errors."""
    return f"rollout worker {number}"


def portable(hooks: Sequence[Hook]) -> list[Portable]:
    """The hooks as those that have copies. Raises ConfigError for one that can have none."""
    for hook in hooks:
        if not isinstance(hook, Portable):
            raise ConfigError(
                f"{type(hook).__name__} has no copies in other processes (snapshot, restore, gathered, "
                "absorb: docs/concepts/hooks.md): play in one process, without cluster.num_engines, "
                "cluster.num_rollout_workers and cluster.weights"
            )
    return [hook for hook in hooks if isinstance(hook, Portable)]


class Beats:
    """Asks every worker how far it is, again and again; called while its rollouts are waited for, it names
    those that are silent.
    """

    def __init__(
        self,
        ray: Any,
        workers: Mapping[str, Any],
        *,
        limit_s: float,
        whereabouts: Whereabouts,
        on_ended: Callable[[int], None],
    ) -> None:
        self._ray, self._workers, self._limit_s = ray, workers, limit_s
        self._whereabouts, self._on_ended = whereabouts, on_ended
        self._asked: dict[str, tuple[Any, float]] = {}
        self._known: dict[str, Beat] = {}
        self._silent: dict[str, ProcessGone] = {}
        self._num_told = 0

    def __call__(self) -> dict[str, ProcessGone]:
        """Take what has been answered, and ask again."""
        for name, worker in self._workers.items():
            if name in self._silent:
                continue
            if name not in self._asked:
                self._asked[name] = worker.beat.remote(), time.monotonic()
                continue
            reference, since = self._asked[name]
            ready, _ = self._ray.wait([reference], timeout=0)
            waited = time.monotonic() - since
            if ready and waited >= _BETWEEN_BEATS_S:
                self._take(name, reference)
                del self._asked[name]
            elif not ready and waited > self._limit_s:
                self._silent[name] = silent(name, "a heartbeat", self._limit_s, "cluster.heartbeat_s")
        num_ended = sum(beat.num_ended for beat in self._known.values())
        if num_ended > self._num_told:
            self._num_told = num_ended
            self._on_ended(num_ended)
        return self._silent

    def _take(self, name: str, reference: Any) -> None:
        try:
            beat: Beat = self._ray.get(reference)
        except Exception as error:
            if isinstance(told(self._ray, error, name, "its rollouts"), ProcessGone):
                return  # its rollouts say so too
            raise
        before = self._known.get(name)
        if beat.place is not None and (before is None or beat.changed != before.changed):
            self._whereabouts.at(name, beat.place)
        self._known[name] = beat

    def close(self) -> None:
        """No worker plays any more."""
        for name in self._workers:
            self._whereabouts.ended(name)
