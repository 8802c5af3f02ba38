"""One rollout worker: an actor with environments, tools and copies of the hooks, which runs whole groups with
the scheduler of a single process.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from transformers import AutoTokenizer

from outrider.algorithms.base import Algorithm
from outrider.distributed.engines import RemoteEngine
from outrider.distributed.ray_session import Recipe, SharedRolloutStatus
from outrider.engines.base import Generation, Request
from outrider.engines.local.model import resolve_model
from outrider.environments.base import make_task_set
from outrider.errors import ClusterFault, ConfigError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.plugins.listing import server_digests
from outrider.rollout.episode import Sampling
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.tools.base import CallBudget
from outrider.training.components import Components
from outrider.training.policy import set_threads
from outrider.training.setup import make_algorithm, make_renderer
from outrider.types import Task


class AsyncGroupEngine(RemoteEngine):
    """The engine of one group, with the weights at the group's start or newer ones.

    ``step`` distinguishes its rollouts from those of the same task in another pending step.
    """

    or_newer: ClassVar[bool] = True

    def __init__(self, *args: Any, step: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step = step

    async def stream(self, request: Request) -> Generation:
        key = None if request.cache_key is None else self._scoped_key(request.cache_key)
        own = replace(request, request_id=self._scoped_key(request.request_id), cache_key=key)
        generation = await super().stream(own)
        if generation.weight_version < self.weight_version:
            raise ClusterFault(
                f"a turn of a group that began with weights {self.weight_version} has those of "
                f"{generation.weight_version}"
            )
        return generation

    def release(self, cache_keys: Sequence[str]) -> None:
        super().release([self._scoped_key(key) for key in cache_keys])

    def _scoped_key(self, key: str) -> str:
        return f"step {self._step}/{key}"


class RolloutSlots:
    """Slots for ``size`` rollouts, reserved by whole groups in order of arrival; a larger group
    runs alone.
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
    """Groups to run.

    Args:
        version: Version of the weights.
        snapshots: Snapshots of the hooks; empty in an evaluation.
        calls: The worker's share of the batch's limit on tool calls: groups ``calls[0]`` to ``calls[1]`` of
            ``calls[2]``.
        num_spent: Calls already spent in a ``continued`` batch.
        engine: Engine of the group, for :meth:`RolloutWorker.play`.
        is_again: Whether a process was lost in the previous attempt.
    """

    tasks: Sequence[Task]
    modes: Sequence[Sequence[str]]
    training_step: int
    continued: bool
    is_training: bool
    version: int
    snapshots: Sequence[Any]
    calls: tuple[int, int, int]
    num_spent: int
    max_concurrent: int
    engine: int = 0
    is_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result of a job: the groups, what the copies of the hooks gathered, and the spent part of the worker's
    share of tool calls. ``gathered`` is None for a group that is masked because it breaks its worker.
    """

    report: RolloutReport
    gathered: list[Any] | None
    num_spent: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sign of life: finished rollouts, time of the last change, and location of the longest waiting
    rollout.
    """

    num_finished: int
    changed: float
    location: str | None


class RolloutWorker:
    """Runs groups in one thread, or in one thread per group (:meth:`play`); other threads answer requests."""

    def __init__(self, number: int, engines: Sequence[Any]) -> None:
        self._number, self._engines = number, list(engines)
        self._is_built = False
        self._rollout_status = SharedRolloutStatus()
        self._num_finished = 0
        self._free_algorithms: list[Algorithm] = []  # with copies of the hooks, for :meth:`play`
        self._stop_requested = threading.Event()

    def build(self, worker_settings: WorkerSettings) -> int:
        """Build everything for rollouts from the settings and return the process id. Raises ConfigError if a
        tool server differs from that of the run's start.
        """
        import ray

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
        self._buffer: StepTraceBuffer | None = None
        if worker_settings.buffer is not None:
            path, revision = worker_settings.buffer
            embedder = load_embedder(settings.buffer.embedder)
            self._buffer = StepTraceBuffer(path, embedder, mode="read", revision=revision)
        self._algorithm = self._new_algorithm()
        self._slots = RolloutSlots(max(1, settings.num_concurrent // settings.cluster.num_rollout_workers))
        self._engine_options: dict[str, Any] = {
            "client": f"worker {self._number}",
            "tokenizer": self._renderer.tokenizer,
            "context_length": worker_settings.context_length,
            "timeout_s": settings.cluster.turn_timeout_s,
        }
        self._engine = RemoteEngine(ray, self._engines, first=self._number, **self._engine_options)
        self._is_built = True
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

    def use_engine(self, number: int, engine: Any) -> None:
        """Replace engine ``number``."""
        self._engines[number] = engine
        if self._is_built:  # not yet if the engine died in the first transfer of the run
            self._engine.put(number, engine)

    def run(self, job: Job) -> JobResult:
        """Run the groups. Raises the exceptions of :meth:`outrider.rollout.scheduler.Scheduler.run`, and
        ClusterFault of an engine.
        """
        self._num_finished = 0
        self._engine.load(job.version)
        if job.is_again:
            self._engine.clear()
        return self._play(job, self._algorithm, self._engine)

    def play(self, job: Job, snapshots: Sequence[Any]) -> JobResult:
        """Run one group concurrently with other calls; each turn uses the weights of ``job.version`` or newer
        ones. ``snapshots`` are those of the job. Raises the exceptions of :meth:`run`.
        """
        import ray

        with self._slots.reserve(len(job.modes[0])):
            began = time.perf_counter()
            engine = AsyncGroupEngine(
                ray, self._engines, first=job.engine, step=job.training_step, **self._engine_options
            )
            engine.load(job.version)
            try:
                algorithm = self._free_algorithms.pop()
            except IndexError:
                algorithm = self._new_algorithm()
            try:
                mine = replace(
                    job, snapshots=snapshots, max_concurrent=min(job.max_concurrent, self._slots.size)
                )
                result = self._play(mine, algorithm, engine)
            finally:
                self._free_algorithms.append(algorithm)
            return replace(result, seconds=time.perf_counter() - began)

    def leave(self) -> None:
        """Cancel all groups of :meth:`play`: no further turn starts."""
        self._stop_requested.set()

    def _play(self, job: Job, algorithm: Algorithm, engine: RemoteEngine) -> JobResult:
        hooks = algorithm.hooks if job.is_training else ()
        copies = [hook for hook in hooks if hook.is_portable]
        for hook, snapshot in zip(copies, job.snapshots, strict=True):
            hook.restore(snapshot)
        budget: CallBudget | None = getattr(self._factory, "call_budget", None)
        if budget is not None:
            budget.set_share(*job.calls)
            if job.continued:
                budget.resume_batch(job.num_spent)
        modes = [tuple(group_modes) for group_modes in job.modes]
        settings = self._settings
        temperature = 1.0 if job.is_training else settings.evaluation.temperature
        truncation = {} if job.is_training else settings.evaluation.truncation
        scheduler = Scheduler(
            engine=engine,
            renderer=self._renderer,
            factory=self._factory,
            limits=settings.limits,
            sampling=Sampling(temperature=temperature, stop=self._task_set.stop, **truncation),
            run_seed=settings.seed,
            hooks=hooks,
            max_concurrent=job.max_concurrent,
            max_retries=settings.train.max_retries,
            is_training=job.is_training,
            group_timeout_s=settings.train.group_timeout_s if job.is_training else None,
            on_finished=self._on_finished,
            rollout_status=self._rollout_status,
            ends_groups=False,
            marks_observations=job.is_training and settings.algorithm.observation_nll > 0,
            is_over=lambda: job.is_training and self._stop_requested.is_set(),
            streams=settings.cluster.batching == "stream",
        )
        report = scheduler.run(
            job.tasks, modes=modes.__getitem__, training_step=job.training_step, continued=job.continued
        )
        return JobResult(
            report=report,
            gathered=[hook.gathered() for hook in copies],
            num_spent=0 if budget is None else budget.num_executed,
        )

    def _on_finished(self, num_finished: int, num_pending: int) -> None:
        self._num_finished = num_finished

    def beat(self) -> Heartbeat:
        statuses = self._rollout_status.snapshot()
        location = f"{statuses[0].longest}: {statuses[0].location}" if statuses else None
        return Heartbeat(
            num_finished=self._num_finished, changed=self._rollout_status.changed, location=location
        )

    def close(self) -> None:
        """Close environments and tools."""
        self._factory.close()
