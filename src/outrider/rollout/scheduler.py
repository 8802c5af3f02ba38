"""Runs the rollouts of many groups with bounded concurrency, retries and exactly one outcome each."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.engines.base import Engine
from outrider.environments.base import Environment, EnvironmentFactory, RoundAware
from outrider.errors import EngineFault, EnvironmentFault, ToolFault
from outrider.rollout.batcher import RoundBatcher
from outrider.rollout.blocking import guarded
from outrider.rollout.branch import Book, Brancher, Copies, Fork, Owe, fork_environment
from outrider.rollout.episode import EpisodeRunner, Limits, Sampling
from outrider.rollout.faults import FaultLog, lost
from outrider.rollout.group_book import GroupBook
from outrider.rollout.hooks import Hook
from outrider.rollout.rejoin import rejoin
from outrider.rollout.tree_growth import Expansion, ExpansionBook
from outrider.rollout.whereabouts import Whereabouts
from outrider.tokens import ChatRenderer
from outrider.trace import Leaf, Trace
from outrider.types import Origin, Task

Modes = Sequence[str] | Callable[[int], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """The groups in the order asked, and what was counted on the way.

    ``faults`` counts every fault by its outcome, also those that a retry made good, ``retries``, and
    ``close``: environments that broke while they were closed, which changes no outcome. ``fault_reasons`` is
    what each of them said.
    """

    traces: list[Trace]
    num_batches: int
    num_retries: int
    faults: Counter[str] = field(default_factory=Counter)
    fault_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class _Owed:
    """A rollout that must end in one outcome: from its prompt, or from a fork on. Ordered by group and
    number.
    """

    group: int
    rollout: int
    trace: Trace = field(compare=False)
    fork: Fork | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Plays groups of rollouts. ``max_concurrent`` bounds the batch; ``max_retries`` fresh tries follow a
    fault.
    """

    engine: Engine
    renderer: ChatRenderer
    factory: EnvironmentFactory
    limits: Limits
    sampling: Sampling
    run_seed: int
    hooks: Sequence[Hook] = ()
    max_concurrent: int = 64
    max_retries: int = 2
    # a batch's cap on calls is for training: an evaluation must not depend on its size
    limits_calls: bool = False
    on_finished: Callable[[int, int], None] | None = None  # rollouts done and owed: live progress
    whereabouts: Whereabouts = field(default_factory=Whereabouts)  # for the one who watches

    def run(
        self, tasks: Sequence[Task], *, modes: Modes, training_step: int, continued: bool = False
    ) -> RolloutReport:
        """Play ``len(modes)`` rollouts of every task; rollout i of a group has mode ``modes[i]``.

        A function of the group's number gives every group its own; all groups have one size. ``continued``:
        these are further tasks of the batch before, which share what is left of its calls.

        Raises ValueError when two tasks share a key (their random streams would coincide).
        """
        if len({task.key for task in tasks}) != len(tasks):
            raise ValueError("two tasks of one batch share a key")
        try:
            each = [modes(number) if callable(modes) else modes for number in range(len(tasks))]
            if len({len(one) for one in each}) > 1:
                raise ValueError("groups of one batch differ in size")
            traces = [Trace(task=task, modes=one) for task, one in zip(tasks, each, strict=True)]
            return asyncio.run(self._run(traces, training_step, continued=continued))
        except BaseExceptionGroup as group:  # a hook or an engine broke: the first cause, as what it is
            raise _first(group) from group

    async def _run(self, traces: list[Trace], training_step: int, *, continued: bool) -> RolloutReport:
        size = len(traces[0].modes) if traces else 0
        owed: list[_Owed] = []
        numbers = {trace.task.key: number for number, trace in enumerate(traces)}
        faults = FaultLog()

        def owe(trace: Trace, rollout: int, fork: Fork | None) -> None:
            heapq.heappush(owed, _Owed(numbers[trace.task.key], rollout, trace, fork))

        copies = Copies(close=lambda environment: group.create_task(self._close(environment, faults)))
        book = self._book(traces, size=size, training_step=training_step, owe=owe, copies=copies)
        for trace in traces:
            for rollout in book.first:
                owe(trace, rollout, None)
        batcher = RoundBatcher(self.engine, admit=lambda num_running: admit(num_running))
        runner = EpisodeRunner(
            batcher=batcher,
            renderer=self.renderer,
            limits=self.limits,
            sampling=self.sampling,
            hooks=self.hooks,
            run_seed=self.run_seed,
            training_step=training_step,
            whereabouts=self.whereabouts,
            book=book,
        )
        rounds = self._rounds(continued=continued)
        ended: set[str] = set()  # rollouts whose keys and values the engine still has
        # rollout -> number of batches when a fork of it was last waiting for its first
        needed: dict[str, int] = {}

        def admit(num_running: int) -> None:
            """Begin what there is room for, first groups first, however early or late it came to be owed."""
            rounds.begin_round()
            begun = [heapq.heappop(owed) for _ in range(min(self.max_concurrent - num_running, len(owed)))]
            for one in begun:
                batcher.join()
                group.create_task(work(one))
            # A fork shares its parent's keys and values when it first asks, in a later batch.
            needed.update(
                {
                    f"{o.trace.task.key}/{o.fork.parent}": batcher.num_batches
                    for o in (*begun, *owed)
                    if o.fork
                }
            )
            gone = [key for key in sorted(ended) if batcher.num_batches > needed.get(key, -1)]
            self.engine.release(gone)
            ended.difference_update(gone)

        async def work(one: _Owed) -> None:
            one.trace.finish(await self._play(runner, one, faults))
            ended.add(f"{one.trace.task.key}/{one.rollout}")
            book.ended(one.trace, one.rollout)
            if self.on_finished is not None:
                self.on_finished(sum(len(trace.leaves) for trace in traces), len(traces) * size)
            # not after an exception: it would start one more batch for workers that end anyway
            batcher.leave()

        try:
            async with asyncio.TaskGroup() as group:
                admit(0)
        finally:
            self.engine.release(sorted(ended))
            await self._close_all(copies.open, faults)
        for trace in traces:
            if faults.counts["retries"]:
                rejoin(trace)
            self._complete(trace, size)
        return _report(traces, batcher, faults)

    def _rounds(self, *, continued: bool) -> RoundAware:
        """What the environments share; a new batch has it afresh."""
        rounds = self.factory if isinstance(self.factory, RoundAware) else _NoRounds()
        if not continued:
            rounds.begin_batch(limited=self.limits_calls)
        return rounds

    def _book(
        self, traces: Sequence[Trace], *, size: int, training_step: int, owe: Owe, copies: Copies
    ) -> Book:
        """Who begins when, as the hooks want it."""
        expansion = next((hook for hook in self.hooks if isinstance(hook, Expansion)), None)
        if expansion is not None:
            return ExpansionBook(
                expansion, run_seed=self.run_seed, training_step=training_step, owe=owe, copies=copies
            )
        brancher = next((hook for hook in self.hooks if isinstance(hook, Brancher)), None)
        return GroupBook(traces, size=size, brancher=brancher, owe=owe, copies=copies)

    def _complete(self, trace: Trace, size: int) -> None:
        """A group has ended: all of its outcomes are there, in an order that does not depend on who was
        fast.
        """
        if len(trace.leaves) != size:
            raise AssertionError(f"task {trace.task.key}: {len(trace.leaves)} outcomes for {size} rollouts")
        trace.number_by_rollout()
        for hook in self.hooks:
            hook.after_group(trace)

    async def _play(self, runner: EpisodeRunner, owed: _Owed, faults: FaultLog) -> Leaf:
        """One rollout with retries; every try gets an environment of its own, and its nodes hang anew under
        where it began.
        """
        trace, rollout, fork = owed.trace, owed.rollout, owed.fork
        mode, name = _mode(trace, rollout, fork), f"{trace.task.key}/{rollout}"
        for attempt in range(self.max_retries + 1):
            environment: Environment | None = None
            try:
                self.whereabouts.at(name, "a new environment")
                environment = await fork_environment(
                    fork, self.factory, trace, timeout_s=self.limits.step_timeout_s
                )
                return await runner.run(
                    task=trace.task,
                    trace=trace,
                    environment=environment,
                    rollout=rollout,
                    mode=mode,
                    fork=fork,
                )
            except (ToolFault, EnvironmentFault, EngineFault) as fault:
                outcome = faults.add(
                    fault, group=owed.group, rollout=rollout, attempt=attempt, task_key=trace.task.key
                )
                if attempt == self.max_retries:
                    return lost(rollout, outcome, str(fault))
                faults.counts["retries"] += 1
            finally:
                self.whereabouts.at(name, "closing its environment")
                if environment is not None:
                    await self._close(environment, faults)
                self.whereabouts.ended(name)
        raise AssertionError("unreachable: the last attempt returns")

    async def _close_all(self, environments: Sequence[Environment], faults: FaultLog) -> None:
        """What a run that broke has left of the copies that forks are taken from."""
        for environment in environments:
            await self._close(environment, faults)

    async def _close(self, environment: Environment, faults: FaultLog) -> None:
        try:
            await guarded(environment.close, timeout_s=self.limits.step_timeout_s)
        except (ToolFault, EnvironmentFault) as fault:
            faults.add_close(fault)


class _NoRounds:
    """Environments that share nothing."""

    def begin_batch(self, *, limited: bool) -> None:
        """Nothing to do."""

    def begin_round(self) -> None:
        """Nothing to do."""


def _mode(trace: Trace, rollout: int, fork: Fork | None) -> str:
    """The mode of this number; a fork whose shared part holds a retrieved step has the mode that its parent
    could retrieve in.
    """
    if fork is not None and any(node.origin is Origin.BUFFER for node in trace.path(fork.tip.node_id)):
        trace.modes = (*trace.modes[:rollout], trace.modes[fork.parent], *trace.modes[rollout + 1 :])
    return trace.modes[rollout]


def _report(traces: list[Trace], batcher: RoundBatcher, faults: FaultLog) -> RolloutReport:
    return RolloutReport(
        traces=traces,
        num_batches=batcher.num_batches,
        num_retries=faults.counts["retries"],
        faults=faults.counts,
        fault_reasons=faults.reasons,
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    cause: BaseException = group
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause
