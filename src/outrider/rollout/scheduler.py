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
from outrider.errors import ConfigError, EngineFault, EnvironmentFault, InvalidResult, ToolFault, unwrap_group
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

# Batching of requests to the engine.


class RoundBatcher:
    """Collects the requests of all running rollouts into one engine batch per round.

    A batch is formed only when every running rollout waits for the engine, and new rollouts start only then.
    The content of a batch therefore depends on request ids and not on the speed of tools, so the same seed
    produces the same bits.

    The workers of one scheduler run share the batcher. A worker counts as running from :meth:`join` to
    :meth:`leave`. ``admit`` is called with the number of running workers when all of them wait. It may start
    more workers; the batch then waits for their requests too.
    """

    def __init__(self, engine: Engine, *, admit: Callable[[int], None]) -> None:
        self.engine = engine
        self._admit = admit
        self._num_running = 0
        self._waiting: dict[str, tuple[Request, asyncio.Future[Generation]]] = {}
        self.num_batches = 0

    async def generate(self, request: Request) -> Generation:
        """Wait for the round's batch and return the generation of this request.

        Raises:
            ValueError: if a request with this id is already waiting.
            EngineFault: if the engine fails on the batch.
        """
        if request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} is already waiting")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = (request, future)
        self._flush_if_complete()
        try:
            return await future
        finally:
            self._waiting.pop(request.request_id, None)  # no worker waits for a cancelled request

    def join(self) -> None:
        """Count one more running worker."""
        self._num_running += 1

    def leave(self) -> None:
        """Remove a finished worker, which may complete the batch of the others."""
        self._num_running -= 1
        self._flush_if_complete()

    def _flush_if_complete(self) -> None:
        if len(self._waiting) < self._num_running:
            return
        # Workers that start here count as running but have no request yet, so the batch waits for them.
        self._admit(self._num_running)
        if not self._waiting or len(self._waiting) < self._num_running:
            return
        # Sort by request id, because the order of arrival depends on timing.
        entries = [self._waiting[key] for key in sorted(self._waiting)]
        self._waiting = {}
        self.num_batches += 1
        results: Sequence[Generation | EngineFault]
        try:
            results = self.engine.generate([request for request, _ in entries])
        except EngineFault as fault:
            # One exception per request: raising adds a traceback to the object, which must not be shared.
            results = [EngineFault(str(fault)) for _ in entries]
        # Deliver from the event loop. Otherwise the worker that completed the batch, the slowest, would
        # continue before the others and not in the order of request ids.
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


# Streaming to an engine with continuous batching.


class StreamingEngine(Engine, Protocol):
    """An engine that accepts single requests while others are running."""

    async def stream(self, request: Request) -> Generation:
        """Sample one request. Raises the errors of :meth:`outrider.engines.base.Engine.generate`."""


class StreamBatcher:
    """Sends every request to the engine at once. Same interface as :class:`RoundBatcher`.

    Rollouts start as soon as there is room, and no turn waits for other rollouts. The composition of the
    engine's batches depends on timing, and so do the last bits of log-probs. Branching decisions do not
    depend on timing, see :mod:`outrider.rollout.branching`.
    """

    def __init__(self, engine: StreamingEngine, *, admit: Callable[[int], None]) -> None:
        self.engine = engine
        self._admit = admit
        self._num_running = 0
        self.num_batches = 0  # number of requests; each counts as a batch

    async def generate(self, request: Request) -> Generation:
        """Sample this request."""
        generation = await self.engine.stream(request)
        self.num_batches += 1
        self._admit(self._num_running)  # forks may have become pending in the meantime
        return generation

    def join(self) -> None:
        """Count one more running worker."""
        self._num_running += 1

    def leave(self) -> None:
        """Remove a finished worker and start pending rollouts in its place."""
        self._num_running -= 1
        self._admit(self._num_running)


# The event loop of a batch of rollouts.


T = TypeVar("T")


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like ``asyncio.run``, even if an event loop already runs in this thread.

    In that case, for example in a notebook, the coroutine runs in a new thread. An interruption cancels the
    coroutine and is raised after it has ended.
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
                assert task is not None  # a running coroutine has a task
                with suppress(RuntimeError):  # the loop is closed if the coroutine itself failed
                    loop.call_soon_threadsafe(task.cancel)
                # If `submit` was interrupted, the pool does not know its thread and would not wait for it.
                finished.wait()
            raise


# Lag of the event loop: a blocked loop delays every response of an engine or an environment.


_EVERY_S: Final = 0.05
_QUANTILE: Final = 0.99


@dataclass(slots=True)
class LoopLag:
    """Measures how late the event loop resumes a short sleep, in seconds per sleep."""

    seconds: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def measure(self) -> AsyncIterator[None]:
        """Measure the running event loop until the context exits."""
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
        """The 99th percentile in seconds; None if no sleep was measured."""
        return float(np.quantile(self.seconds, _QUANTILE)) if self.seconds else None


def largest(lags: list[float | None]) -> float | None:
    """Return the largest lag of several loops, or None if none was measured."""
    return max((lag for lag in lags if lag is not None), default=None)


# The scheduler.


Modes = Sequence[str] | Callable[[int], Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """The groups of one scheduler run and its counters.

    Attributes:
        traces: one per task, in the order of the tasks.
        num_batches: number of engine batches; with a streaming engine, number of requests.
        num_retries: number of retried rollouts.
        faults: number of faults per outcome, including those that a retry repaired. Further keys:
            ``retries``; ``close`` and ``reflection``, environments that failed to close and reflections that
            failed, which change no outcome; in a training step ``expert``, experts that failed;
            ``non_finite``, rollouts that were lost because of NaN or infinity.
        fault_reasons: the messages of the faults.
        loop_lag_s: 99th percentile of the event loop's lag, in seconds. Measured only with a streaming
            engine: a batch of rounds blocks the loop by design.
    """

    traces: list[Trace]
    num_batches: int
    num_retries: int
    faults: Counter[str] = field(default_factory=Counter)
    fault_reasons: tuple[str, ...] = ()
    loop_lag_s: float | None = None


class Rollouts(Protocol):
    """Generates the groups of a training step. :class:`Scheduler` does so in this process."""

    def run(
        self, tasks: Sequence[Task], *, modes: Modes, training_step: int, continued: bool = False
    ) -> RolloutReport: ...


@dataclass(frozen=True, slots=True, order=True)
class _PendingRollout:
    """A rollout that has not started yet, ordered by group and rollout number. ``fork`` None: starts at the
    prompt.
    """

    group: int
    rollout: int
    trace: Trace = field(compare=False)
    fork: Fork | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Runs groups of rollouts with at most ``max_concurrent`` rollouts at a time.

    After a fault, a rollout starts again in a new environment, at most ``max_retries`` times.
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
    # Training has the turn limit of its step and the call budget of a batch; results of an evaluation must
    # not depend on its size.
    is_training: bool = False
    # Cancel the unfinished rollouts of a group after this time, in seconds. For training only.
    group_timeout_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    is_over: Callable[[], bool] = lambda: False  # if True, cancel all rollouts
    streams: bool = False  # engine is a StreamingEngine
    # Call Hook.after_group. False in rollout workers: there, the main process calls it on the original hooks.
    ends_groups: bool = True
    marks_observations: bool = False  # see EpisodeRunner
    on_finished: Callable[[int, int], None] | None = None  # (number finished, total), for progress bars
    rollout_status: RolloutStatus = field(default_factory=RolloutStatus)  # read by watchdog and display

    def run(
        self, tasks: Sequence[Task], *, modes: Modes, training_step: int, continued: bool = False
    ) -> RolloutReport:
        """Run ``len(modes)`` rollouts of every task.

        Args:
            tasks: one per group.
            modes: ``modes[i]`` is the mode of rollout i; or a function that returns the modes of a group from
                its number. All groups have the same size.
            training_step: part of every seed.
            continued: whether the tasks belong to the previous batch and share its remaining call budget.

        Raises:
            ValueError: if two tasks share a key, because their random streams would coincide, or if groups
                differ in size.
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
        except BaseExceptionGroup as group:  # a hook or engine failed: raise the first cause
            raise unwrap_group(group) from group

    def _make_group_scheduler(
        self, traces: Sequence[Trace], *, size: int, training_step: int, enqueue: Enqueue, copies: Copies
    ) -> GroupScheduler:
        """Create the group scheduler that the hooks require."""
        expansion = next((hook for hook in self.hooks if isinstance(hook, Expansion)), None)
        brancher = next((hook for hook in self.hooks if hook.first_wave is not None), None)
        if (expansion or brancher) and any(hook.num_episodes > 1 for hook in self.hooks):
            raise ConfigError("rollouts with several episodes cannot fork: use one of the two hooks")
        if expansion is not None:
            return ExpansionScheduler(
                expansion, run_seed=self.run_seed, training_step=training_step, enqueue=enqueue, copies=copies
            )
        return BranchingGroupScheduler(traces, size=size, brancher=brancher, enqueue=enqueue, copies=copies)

    async def _play(
        self,
        make_runner: Callable[[Env], EpisodeRunner],
        pending: _PendingRollout,
        faults: FaultLog,
        is_late: Callable[[], bool],
    ) -> Leaf:
        """Run one rollout with retries.

        Every attempt has a new environment and appends new nodes at the prompt or fork.
        """
        trace, rollout, fork = pending.trace, pending.rollout, pending.fork
        mode, name = _mode(trace, rollout, fork), f"{trace.task.key}/{rollout}"
        environment: Env | None = None

        async def renew() -> Env:
            nonlocal environment
            self.rollout_status.set(name, "a new environment")
            finished, environment = environment, None
            if finished is not None:
                await self._close(finished, faults)
            environment = await fork_environment(
                None, self.factory, trace, timeout_s=self.limits.step_timeout_s
            )
            return environment

        for attempt in range(self.max_retries + 1):
            environment = None
            if is_late():
                return cancelled_leaf(rollout)
            try:
                self.rollout_status.set(name, "a new environment")
                environment = await fork_environment(
                    fork, self.factory, trace, timeout_s=self.limits.step_timeout_s
                )
                leaf = await make_runner(environment).run(
                    task=trace.task,
                    trace=trace,
                    environment=environment,
                    rollout=rollout,
                    mode=mode,
                    fork=fork,
                    is_late=is_late,
                    renew=renew,
                )
                if leaf.detail and leaf.node_id is not None:
                    faults.add_reflection(
                        leaf.detail,
                        group=pending.group,
                        rollout=rollout,
                        attempt=attempt,
                        task_key=trace.task.key,
                    )
                return leaf
            except InvalidResult as error:
                raise locate_invalid_result(environment, trace.task.key, error) from error
            # Only infrastructure faults are retried. Any other exception is a bug and ends the run.
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
            faults.add_harmless("close", fault)


class _Batch:
    """State of one call of :meth:`Scheduler.run`: pending, running and finished rollouts."""

    def __init__(
        self, scheduler: Scheduler, traces: list[Trace], training_step: int, *, continued: bool
    ) -> None:
        self._scheduler = scheduler
        self._traces = traces
        self._size = len(traces[0].modes) if traces else 0
        self._numbers = {trace.task.key: number for number, trace in enumerate(traces)}
        self._pending: list[_PendingRollout] = []  # a heap
        self._start_times: dict[int, float] = {}  # group -> start of its first rollout
        self._faults = FaultLog()
        self._finished: set[str] = set()  # finished rollouts whose KV cache the engine still stores
        # rollout -> number of batches when one of its forks was last pending or starting
        self._needed: dict[str, int] = {}
        self._copies = Copies(
            close=lambda environment: self._tasks.create_task(scheduler._close(environment, self._faults)),
            on_fault=partial(self._faults.add_harmless, "copy"),
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
        self._limits = scheduler.limits.at_step(training_step) if scheduler.is_training else scheduler.limits
        # The environments share the call budget; a new batch resets it.
        self._budget: CallBudget | None = getattr(scheduler.factory, "call_budget", None)
        if self._budget is not None and not continued:
            self._budget.begin_batch(limited=scheduler.is_training)
        self._lag = LoopLag()

    async def play(self) -> RolloutReport:
        """Run until every rollout has an outcome."""
        try:
            lag_monitor = self._lag.measure() if self._scheduler.streams else nullcontext()
            async with lag_monitor, asyncio.TaskGroup() as self._tasks:
                self._admit(0)
        finally:
            self._scheduler.engine.release(sorted(self._finished))
            for environment in self._copies.open:  # left over only if the run failed
                await self._scheduler._close(environment, self._faults)
        for trace in self._traces:
            if self._faults.counts["retries"]:
                rejoin(trace)
            if len(trace.leaves) != self._size:
                raise AssertionError(
                    f"task {trace.task.key}: {len(trace.leaves)} outcomes for {self._size} rollouts"
                )
            trace.number_by_rollout()  # an order that does not depend on timing
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
            limits=self._limits,
            sampling=self._scheduler.sampling,
            hooks=self._scheduler.hooks,
            run_seed=self._scheduler.run_seed,
            training_step=self._training_step,
            rollout_status=self._scheduler.rollout_status,
            scheduler=self._group_scheduler,
            marks_observations=self._scheduler.marks_observations,
        )

    def _enqueue(self, trace: Trace, rollout: int, fork: Fork | None) -> None:
        # A heap, so that a fork that is granted late still starts before rollouts of later groups.
        heapq.heappush(self._pending, _PendingRollout(self._numbers[trace.task.key], rollout, trace, fork))

    def _admit(self, num_running: int) -> None:
        """Start pending rollouts while there is room, in the order of groups and not of arrival."""
        if self._budget is not None:
            self._budget.begin_round()
        num = min(self._scheduler.max_concurrent - num_running, len(self._pending))
        started = [heapq.heappop(self._pending) for _ in range(num)]
        for rollout in started:
            # Join before the task runs: the next batch must wait for its first request.
            self._batcher.join()
            self._tasks.create_task(self._work(rollout))
        self._release([*started, *self._pending])

    def _release(self, waiting: Sequence[_PendingRollout]) -> None:
        """Release the KV cache of finished rollouts whose forks have all sent their first request.

        A fork reuses its parent's KV cache in its first request, which is part of a later batch.
        """
        num_batches = self._batcher.num_batches
        for rollout in waiting:
            if rollout.fork:
                self._needed[f"{rollout.trace.task.key}/{rollout.fork.state.rollout}"] = num_batches
        # Sorted, because the order of a set differs between runs and requests to the engine must not.
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
        # Not in a `finally`: after an exception, it would start a batch for workers that are being cancelled.
        self._batcher.leave()


def _mode(trace: Trace, rollout: int, fork: Fork | None) -> str:
    """Return the mode of a rollout.

    If the prefix of a fork contains a retrieved step, the fork has its parent's mode, which allows retrieval.
    """
    if fork is not None and any(
        node.origin is Origin.BUFFER for node in trace.path(fork.state.last_node.node_id)
    ):
        trace.modes = (*trace.modes[:rollout], trace.modes[fork.state.rollout], *trace.modes[rollout + 1 :])
    return trace.modes[rollout]
