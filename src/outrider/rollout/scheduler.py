"""Runs the rollouts of many groups with bounded concurrency, retries and exactly one outcome each."""

import asyncio
import heapq
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

import numpy as np

from outrider.engines.base import Engine, Generation, Request
from outrider.environments.base import Env, EnvironmentFactory
from outrider.environments.conversations import ExternalAgent
from outrider.errors import EngineFault, EnvironmentFault, InvalidResult, ToolFault
from outrider.rollout.branching import (
    BranchingGroupScheduler,
    Copies,
    Enqueue,
    Expansion,
    ExpansionScheduler,
    Fork,
    GroupScheduler,
    fork_environment,
)
from outrider.rollout.episode import EpisodeRunner, Sampling
from outrider.rollout.external_agent import ExternalAgentRunner
from outrider.rollout.faults import (
    FaultLog,
    cancelled_leaf,
    fault_detail,
    locate_invalid_result,
    lost_leaf,
    rejoin,
    run_guarded,
)
from outrider.rollout.hooks import Hook, RolloutStatus, as_hooks
from outrider.rollout.settings import Limits
from outrider.tokens import ChatRenderer
from outrider.tools.base import CallBudget
from outrider.trace import Leaf, Trace
from outrider.types import Origin, Task

# Collects the requests of all running episodes into one engine batch per round.
#
# A batch is formed only when every running episode waits for the engine, and new episodes begin only then. So
# its content depends on ids and never on how fast a tool answered, and the same seed gives the same bits.


class RoundBatcher:
    """Shared by the workers of one scheduler run; each counts as running from :meth:`join` until it leaves.

    ``admit`` is called whenever all of them wait: it may let more join, which the batch then waits for.
    """

    def __init__(self, engine: Engine, *, admit: Callable[[int], None]) -> None:
        self.engine = engine
        self._admit = admit
        self._num_running = 0
        self._waiting: dict[str, tuple[Request, asyncio.Future[Generation]]] = {}
        self.num_batches = 0

    async def generate(self, request: Request) -> Generation:
        """Wait for the round's batch and return this request's part of it."""
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} is already waiting")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = (request, future)
        self._flush_if_complete()
        try:
            return await future
        finally:
            self._waiting.pop(request.request_id, None)  # nobody waits for a cancelled request

    def join(self) -> None:
        """One more worker runs."""
        self._num_running += 1

    def leave(self) -> None:
        """A worker's episode has ended."""
        self._num_running -= 1
        self._flush_if_complete()

    def _flush_if_complete(self) -> None:
        if len(self._waiting) < self._num_running:
            return
        # Whoever is let in now runs and has not asked yet: then the batch waits for it.
        self._admit(self._num_running)
        if not self._waiting or len(self._waiting) < self._num_running:
            return
        # By request id: the order of arrival is a matter of who was fast.
        entries = [self._waiting[key] for key in sorted(self._waiting)]
        self._waiting = {}
        self.num_batches += 1
        results: Sequence[Generation | EngineFault]
        try:
            results = self.engine.generate([request for request, _ in entries])
        except EngineFault as fault:
            # One object each: a raised exception collects the traceback of whoever raises it.
            results = [EngineFault(str(fault)) for _ in entries]
        # Through the loop: the worker whose request completed the batch must wait its turn too, or the
        # slowest acts first.
        asyncio.get_running_loop().call_soon(_deliver, [future for _, future in entries], results)


def _deliver(
    futures: Sequence[asyncio.Future[Generation]], results: Sequence[Generation | EngineFault]
) -> None:
    for future, result in zip(futures, results, strict=True):
        if future.done():  # cancelled meanwhile
            continue
        if isinstance(result, EngineFault):
            future.set_exception(result)
        else:
            future.set_result(result)


# Every request at once, to an engine that batches by itself: no turn waits for those of other rollouts.


class StreamingEngine(Engine, Protocol):
    """An engine that takes requests one by one, while others are under way."""

    async def stream(self, request: Request) -> Generation:
        """Sample one. Raises what :meth:`outrider.engines.base.Engine.generate` raises."""
        ...


class StreamBatcher:
    """In the place of :class:`outrider.rollout.scheduler.RoundBatcher`. Rollouts begin as soon as there is
    room.

    Which requests share a batch of the engine depends on who is fast, and so do the last bits of log-probs.
    The tree does not: forks are decided in an order that nobody's speed changes
    (:mod:`outrider.rollout.branching`).
    """

    def __init__(self, engine: StreamingEngine, *, admit: Callable[[int], None]) -> None:
        self.engine = engine
        self._admit = admit
        self._num_running = 0
        self.num_batches = 0  # requests: each is a batch of its own here

    async def generate(self, request: Request) -> Generation:
        """This request's continuation."""
        generation = await self.engine.stream(request)
        self.num_batches += 1
        self._admit(self._num_running)  # forks may be owed since this rollout asked
        return generation

    def join(self) -> None:
        """One more worker runs."""
        self._num_running += 1

    def leave(self) -> None:
        """A worker's episode has ended: there is room."""
        self._num_running -= 1
        self._admit(self._num_running)


# An event loop for a batch of rollouts, whether or not the caller has one.


T = TypeVar("T")


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, also where a loop runs in this thread already, as in a notebook: then in a thread of
    its own.

    An interruption cancels what runs there and is raised once that has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def run_main() -> T:
        if not started.set_running_or_notify_cancel():
            main.close()
            raise asyncio.CancelledError
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await main

    finished = threading.Event()

    def run_in_loop() -> T:
        try:
            return asyncio.run(run_main())
        finally:
            finished.set()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts") as pool:
        try:
            return pool.submit(run_in_loop).result()
        except BaseException:
            if not started.cancel():
                loop, task = started.result()
                assert task is not None  # a coroutine runs in one
                with suppress(RuntimeError):  # the loop has closed: it was the batch that broke
                    loop.call_soon_threadsafe(task.cancel)
                # An interruption within `submit` leaves the pool without the thread that it has started.
                finished.wait()
            raise


# How late the event loop comes back to what is due, while episodes are played in it: a loop that is held up
# makes every answer of an engine or an environment wait.


_EVERY_S: Final = 0.05
_QUANTILE: Final = 0.99


@dataclass(slots=True)
class LoopLag:
    """Seconds by which each of many short waits was too long."""

    seconds: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def measure(self) -> AsyncIterator[None]:
        """Measure, as long as this is open, in the loop that runs it."""
        watch = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.seconds.append(max(0.0, loop.time() - due))

    @property
    def p99(self) -> float | None:
        """The 99th percentile; None where there was no time for a wait."""
        return float(np.quantile(self.seconds, _QUANTILE)) if self.seconds else None


def largest(lags: list[float | None]) -> float | None:
    """Of several loops; None where none of them was measured."""
    return max((lag for lag in lags if lag is not None), default=None)


# Runs the rollouts of many groups with bounded concurrency, retries and exactly one outcome each.


Modes = Sequence[str] | Callable[[int], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """The groups in the order asked, and what was counted on the way.

    ``faults`` counts every fault by its outcome, also those that a retry made good, ``retries``,
    ``close``: environments that broke while they were closed, which changes no outcome, and ``non_finite``:
    rollouts that were lost because of NaN or infinity. ``fault_reasons`` is what each of them said.
    ``loop_lag_s`` is how late the event loop came back to what was due (99th percentile), where requests go
    to the engine one by one; a round holds the loop, which waits for it.
    """

    traces: list[Trace]
    num_batches: int
    num_retries: int
    faults: Counter[str] = field(default_factory=Counter)
    fault_reasons: tuple[str, ...] = ()
    loop_lag_s: float | None = None


class Rollouts(Protocol):
    """Whatever plays the groups of a training step: :class:`Scheduler` in this process."""

    def run(
        self, tasks: Sequence[Task], *, modes: Modes, training_step: int, continued: bool = False
    ) -> RolloutReport: ...


@dataclass(frozen=True, slots=True, order=True)
class _PendingRollout:
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
    # stragglers too: a group of training that takes longer gives up what is under way
    group_timeout_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    is_over: Callable[[], bool] = lambda: False  # nobody wants these groups any more: they are given up
    streams: bool = False  # the engine takes every request at once (StreamingEngine)
    # elsewhere: where copies of the hooks play, the originals see the groups
    ends_groups: bool = True
    on_finished: Callable[[int, int], None] | None = None  # rollouts done and owed: live progress
    rollout_status: RolloutStatus = field(default_factory=RolloutStatus)  # for the one who watches

    def run(
        self, tasks: Sequence[Task], *, modes: Modes, training_step: int, continued: bool = False
    ) -> RolloutReport:
        """Play ``len(modes)`` rollouts of every task; rollout i of a group has mode ``modes[i]``.

        A function of the group's number gives every group its own; all groups have one size. ``continued``:
        these are further tasks of the batch before, which share what is left of its calls.

        Raises ValueError when two tasks share a key (their random streams would coincide).
        """
        self.hooks = as_hooks(self.hooks)
        if len({task.key for task in tasks}) != len(tasks):
            raise ValueError("two tasks of one batch share a key")
        try:
            group_modes = [modes(number) if callable(modes) else modes for number in range(len(tasks))]
            if len({len(rollout_modes) for rollout_modes in group_modes}) > 1:
                raise ValueError("groups of one batch differ in size")
            traces = [
                Trace(task=task, modes=rollout_modes)
                for task, rollout_modes in zip(tasks, group_modes, strict=True)
            ]
            return run_to_end(_Batch(self, traces, training_step, continued=continued).play())
        except BaseExceptionGroup as group:  # a hook or an engine broke: the first cause, as what it is
            cause: BaseException = group
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            raise cause from group

    def _make_group_scheduler(
        self, traces: Sequence[Trace], *, size: int, training_step: int, enqueue: Enqueue, copies: Copies
    ) -> GroupScheduler:
        """Who begins when, as the hooks want it."""
        expansion = next((hook for hook in self.hooks if isinstance(hook, Expansion)), None)
        if expansion is not None:
            return ExpansionScheduler(
                expansion, run_seed=self.run_seed, training_step=training_step, enqueue=enqueue, copies=copies
            )
        brancher = next((hook for hook in self.hooks if hook.first_wave is not None), None)
        return BranchingGroupScheduler(traces, size=size, brancher=brancher, enqueue=enqueue, copies=copies)

    async def _play(
        self,
        make_runner: Callable[[Env], EpisodeRunner],
        pending: _PendingRollout,
        faults: FaultLog,
        is_late: Callable[[], bool],
    ) -> Leaf:
        """One rollout with retries; every try gets an environment of its own, and its nodes hang anew under
        where it began.
        """
        trace, rollout, fork = pending.trace, pending.rollout, pending.fork
        mode, name = _mode(trace, rollout, fork), f"{trace.task.key}/{rollout}"
        for attempt in range(self.max_retries + 1):
            environment: Env | None = None
            if is_late():
                return cancelled_leaf(rollout)
            try:
                self.rollout_status.set(name, "a new environment")
                environment = await fork_environment(
                    fork, self.factory, trace, timeout_s=self.limits.step_timeout_s
                )
                return await make_runner(environment).run(
                    task=trace.task,
                    trace=trace,
                    environment=environment,
                    rollout=rollout,
                    mode=mode,
                    fork=fork,
                    is_late=is_late,
                )
            except InvalidResult as error:
                raise locate_invalid_result(environment, trace.task.key, error) from error
            # Nothing else is tried again: any other exception is a defect of code, not of infrastructure.
            except (ToolFault, EnvironmentFault, EngineFault) as fault:
                outcome = faults.add(
                    fault, group=pending.group, rollout=rollout, attempt=attempt, task_key=trace.task.key
                )
                if attempt == self.max_retries:
                    faults.add_lost(fault)
                    return lost_leaf(rollout, outcome, fault_detail(fault, environment))
                faults.counts["retries"] += 1
            finally:
                self.rollout_status.set(name, "closing its environment")
                if environment is not None:
                    await self._close(environment, faults)
                self.rollout_status.remove(name)
        raise AssertionError("unreachable: the last attempt returns")

    async def _close(self, environment: Env, faults: FaultLog) -> None:
        try:
            await run_guarded(environment.close, timeout_s=self.limits.step_timeout_s)
        except (ToolFault, EnvironmentFault) as fault:
            faults.add_close(fault)


class _Batch:
    """The groups of one call while they are played: which rollouts are owed, and which have ended."""

    def __init__(
        self, scheduler: Scheduler, traces: list[Trace], training_step: int, *, continued: bool
    ) -> None:
        self._scheduler = scheduler
        self._traces = traces
        self._size = len(traces[0].modes) if traces else 0
        self._numbers = {trace.task.key: number for number, trace in enumerate(traces)}
        self._pending: list[_PendingRollout] = []  # a heap
        self._start_times: dict[int, float] = {}  # group -> when its first rollout did
        self._faults = FaultLog()
        self._finished: set[str] = set()  # rollouts whose keys and values the engine still has
        # rollout -> number of batches when a fork of it was last waiting for its first
        self._needed: dict[str, int] = {}
        self._copies = Copies(
            close=lambda environment: self._tasks.create_task(scheduler._close(environment, self._faults))
        )
        self._group_scheduler = scheduler._make_group_scheduler(
            traces, size=self._size, training_step=training_step, enqueue=self._enqueue, copies=self._copies
        )
        for trace in traces:
            for rollout in self._group_scheduler.first:
                self._enqueue(trace, rollout, None)
        self._batcher = (
            StreamBatcher(cast(StreamingEngine, scheduler.engine), admit=self._admit)
            if scheduler.streams
            else RoundBatcher(scheduler.engine, admit=self._admit)
        )
        self._training_step = training_step
        # State that the environments share; a new batch has it afresh.
        self._budget: CallBudget | None = getattr(scheduler.factory, "call_budget", None)
        if self._budget is not None and not continued:
            self._budget.begin_batch(limited=scheduler.limits_calls)
        self._lag = LoopLag()

    async def play(self) -> RolloutReport:
        """Until every rollout has its outcome."""
        try:
            lag_monitor = self._lag.measure() if self._scheduler.streams else nullcontext()
            async with lag_monitor, asyncio.TaskGroup() as self._tasks:
                self._admit(0)
        finally:
            self._scheduler.engine.release(sorted(self._finished))
            for environment in self._copies.open:  # of a run that broke
                await self._scheduler._close(environment, self._faults)
        for trace in self._traces:
            if self._faults.counts["retries"]:
                rejoin(trace)
            if len(trace.leaves) != self._size:
                raise AssertionError(
                    f"task {trace.task.key}: {len(trace.leaves)} outcomes for {self._size} rollouts"
                )
            trace.number_by_rollout()  # an order that does not depend on who was fast
            for hook in self._scheduler.hooks if self._scheduler.ends_groups else ():
                hook.after_group(trace)
        return RolloutReport(
            traces=self._traces,
            num_batches=self._batcher.num_batches,
            num_retries=self._faults.counts["retries"],
            faults=self._faults.counts,
            fault_reasons=self._faults.reasons,
            loop_lag_s=self._lag.p99,
        )

    def _make_runner(self, environment: Env) -> EpisodeRunner:
        runner = ExternalAgentRunner if isinstance(environment, ExternalAgent) else EpisodeRunner
        return runner(
            batcher=self._batcher,
            renderer=self._scheduler.renderer,
            limits=self._scheduler.limits,
            sampling=self._scheduler.sampling,
            hooks=self._scheduler.hooks,
            run_seed=self._scheduler.run_seed,
            training_step=self._training_step,
            rollout_status=self._scheduler.rollout_status,
            scheduler=self._group_scheduler,
        )

    def _enqueue(self, trace: Trace, rollout: int, fork: Fork | None) -> None:
        # A heap: a fork that is granted late still begins before rollouts of later groups.
        heapq.heappush(self._pending, _PendingRollout(self._numbers[trace.task.key], rollout, trace, fork))

    def _admit(self, num_running: int) -> None:
        """Begin what there is room for, first groups first, however early or late it came to be owed."""
        if self._budget is not None:
            self._budget.begin_round()
        num = min(self._scheduler.max_concurrent - num_running, len(self._pending))
        started = [heapq.heappop(self._pending) for _ in range(num)]
        for rollout in started:
            # Counted now, not when it first asks: the next batch has to wait for it.
            self._batcher.join()
            self._tasks.create_task(self._work(rollout))
        self._release([*started, *self._pending])

    def _release(self, waiting: Sequence[_PendingRollout]) -> None:
        """A fork shares its parent's keys and values when it first asks, in a later batch: until then they
        stay.
        """
        num_batches = self._batcher.num_batches
        for rollout in waiting:
            if rollout.fork:
                self._needed[f"{rollout.trace.task.key}/{rollout.fork.state.rollout}"] = num_batches
        # Sorted: a set has no order of its own, and equal runs ask an engine for the same.
        released = [key for key in sorted(self._finished) if num_batches > self._needed.get(key, -1)]
        self._scheduler.engine.release(released)
        self._finished.difference_update(released)

    def _is_late(self, group: int) -> bool:
        limit = self._scheduler.group_timeout_s
        late = limit is not None and self._scheduler.clock() - self._start_times[group] > limit
        return late or self._scheduler.is_over()

    async def _work(self, pending: _PendingRollout) -> None:
        self._start_times.setdefault(pending.group, self._scheduler.clock())
        is_late = partial(self._is_late, pending.group)
        pending.trace.finish(await self._scheduler._play(self._make_runner, pending, self._faults, is_late))
        self._finished.add(f"{pending.trace.task.key}/{pending.rollout}")
        self._group_scheduler.on_rollout_end(pending.trace, pending.rollout)
        if self._scheduler.on_finished is not None:
            num_done = sum(len(trace.leaves) for trace in self._traces)
            self._scheduler.on_finished(num_done, len(self._traces) * self._size)
        # not after an exception: it would start one more batch for workers that end anyway
        self._batcher.leave()


def _mode(trace: Trace, rollout: int, fork: Fork | None) -> str:
    """The mode of this number; a fork whose shared part holds a retrieved step has the mode that its parent
    could retrieve in.
    """
    if fork is not None and any(
        node.origin is Origin.BUFFER for node in trace.path(fork.state.last_node.node_id)
    ):
        trace.modes = (*trace.modes[:rollout], trace.modes[fork.state.rollout], *trace.modes[rollout + 1 :])
    return trace.modes[rollout]
