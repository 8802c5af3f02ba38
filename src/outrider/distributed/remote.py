"""Engines and rollout workers of a run in other processes: started, replaced and ended together."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outrider.distributed.engines import EnginePool, EngineProcess, VllmProcess, probes
from outrider.distributed.processes import Cluster, Process
from outrider.distributed.recipe import Recipe
from outrider.distributed.rollouts import (
    GroupPool,
    PoolRollouts,
    RolloutWorker,
    WorkerSettings,
    portable,
    worker_name,
)
from outrider.distributed.weights import WeightFiles
from outrider.errors import ClusterFault, ProcessLost
from outrider.rollout.scheduler import Rollouts
from outrider.trace import Trace
from outrider.training.components import Components
from outrider.training.learner import Learner
from outrider.training.restarts import Allowance
from outrider.training.settings import RunSettings

if TYPE_CHECKING:
    from outrider.distributed.learner import ShardedLearner


_CLOSE_S: Final = 10.0
COUNTED: Final = ("cluster/worker_deaths", "cluster/engine_deaths", "cluster/engine_hangs",
                  "weights/num_failed", "rollout/num_groups_replayed")  # fmt: skip


class Repairs:
    """Counts replaced processes. ``allowance`` is that of the run, which also counts restarts of
    everything.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._counts: Counter[str] = Counter()
        self._notes: list[str] = []

    def allow(self, fault: ProcessLost, *, is_charged: bool) -> None:
        """Count the replacement of a process. Raises NoRepair if the limit is exceeded."""
        counted = ""
        if is_charged:
            number = self._allowance.spend(fault)
            counted = f", repair {number} of {self._allowance.limit} within an hour"
        message = str(fault).partition("; ")[0]
        self._notes.append(f"{message}; replaced{counted}")
        if fault.process.startswith("rollout worker"):
            self.count("cluster/worker_deaths")
        else:
            self.count("cluster/engine_hangs" if fault.is_silent else "cluster/engine_deaths")

    def refund(self, num: int) -> None:
        """Do not count the newest ``num`` repairs, because a task caused them."""
        self._allowance.refund(num)

    def count(self, name: str, num: int = 1) -> None:
        self._counts[name] += num

    def pop_counts(self) -> dict[str, float]:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in COUNTED}

    def note(self, line: str) -> None:
        self._notes.append(line)

    def pop_notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self._notes = self._notes, []
        return notes


class RemoteProcesses:
    """Engines and rollout workers, by name; ``engine`` stands for all engines and sends weights.

    ``ranks`` is a learner with processes of its own.
    """

    def __init__(
        self,
        settings: RunSettings,
        learner: Learner,
        cluster: Cluster,
        *,
        folder: Path,
        allowance: Allowance | None = None,
        ranks: "ShardedLearner | None" = None,
    ) -> None:
        self.settings, self.cluster, self._ranks = settings, cluster, ranks
        self._recipe = Recipe.from_settings(settings)
        self._folder = folder
        self._parts: Components | None = None
        self._pool: GroupPool | None = None
        self.engines: dict[str, Process] = {}
        self.workers: dict[str, Process] = {}
        self.repairs = Repairs(allowance or Allowance(settings.cluster.max_restarts))
        cluster.note = self.repairs.note
        self._files = WeightFiles(cluster, folder)
        try:
            cluster.reserve(settings, "rollouts")
            for number in range(settings.cluster.num_engines):
                self._start_engine(number)
            for number in range(settings.cluster.num_rollout_workers):
                self._start_worker(number)
            calls = {name: engine.call("build") for name, engine in self.engines.items()}
            [(_, context_length), *_] = cluster.results(calls)
            self.engine = EnginePool(learner, self, self._files, context_length=context_length)
            self.engine.load(0)
        except BaseException:
            self.close()
            raise

    def _start_engine(self, number: int) -> None:
        name = f"engine {number}"
        kind = VllmProcess if self.settings.engine.has_own_processes else EngineProcess
        self.engines[name] = self.cluster.start(
            name,
            kind,
            self._recipe,
            number,
            str(self._folder),
            busy_s=self.settings.cluster.stall_s,
            place=("engine", number),
        )

    def _start_worker(self, number: int) -> None:
        name = worker_name(number)
        self.workers[name] = self.cluster.start(
            name,
            RolloutWorker,
            number,
            str(self.cluster.folder),
            busy_s=self.settings.limits.step_timeout_s,
            has_progress=False,  # it waits for engines
            place=("worker", number),
        )

    def begin(self, parts: Components) -> None:
        """Build the workers. Raises ConfigError for a hook without copies."""
        portable(parts.algorithm.hooks)
        self._parts = parts
        self._pool = GroupPool(self, parts.algorithm.hooks, parts.rollout_status)
        self.cluster.call_all(list(self.workers.values()), "build", self._worker_settings())

    def _worker_settings(self) -> WorkerSettings:
        # always anew, because a buffer may have been rolled back
        assert self._parts is not None
        return WorkerSettings.from_components(
            self._parts, self._recipe, context_length=self.engine.context_length
        )

    def is_current(self, process: Process) -> bool:
        """Whether a process has not been replaced."""
        return process in (self.engines.get(process.name), self.workers.get(process.name))

    def faults(self) -> dict[str, ProcessLost]:
        """Return the engines and workers that are lost. Raises ClusterFault for a lost trainer rank."""
        faults = self.cluster.check()
        for name, fault in faults.items():
            if name not in self.engines and name not in self.workers:
                raise ClusterFault(str(fault))
        return faults

    def replace(self, fault: ProcessLost, *, is_charged: bool = True) -> None:
        """Replace a lost process. Raises ClusterFault if it cannot be replaced, or if another one is lost
        meanwhile; then everything may be restarted.
        """
        self.repairs.allow(fault, is_charged=is_charged)
        kind, _, number = fault.process.rpartition(" ")
        try:
            if kind == "engine":
                self.cluster.kill(self.engines[fault.process])
                self._start_engine(int(number))
                engine = self.engines[fault.process]
                self.cluster.results({engine.name: engine.call("build")})
                if self.settings.uses_nccl:
                    self.send_directly(self.engine.weight_version, is_again=True)
                else:
                    self.engine.send_newest(engine)
            else:
                self.cluster.kill(self.workers[fault.process])
                self._start_worker(int(number))
                self.cluster.call_all([self.workers[fault.process]], "build", self._worker_settings())
        except ProcessLost as another:
            raise ClusterFault(str(another)) from another

    def send_directly(self, version: int, *, is_again: bool = False) -> tuple[int, int]:
        """Let the ranks send the weights from their GPUs to all engines; returns the bytes of one copy and
        the calls of one engine.
        """
        assert self._ranks is not None  # the settings require GPUs
        try:
            return self._ranks.send(version, list(self.engines.values()), is_again=is_again)
        except ProcessLost as error:
            raise ClusterFault(str(error)) from error

    @property
    def pool(self) -> GroupPool:
        """The groups under way."""
        assert self._pool is not None
        return self._pool

    def rollouts(
        self, parts: Components, *, training: bool, on_finished: Callable[[int, int], None]
    ) -> Rollouts:
        """Return the player of whole batches of groups."""
        return PoolRollouts(
            self.pool,
            hooks=parts.algorithm.hooks if training else (),
            is_training=training,
            max_calls=getattr(self.settings.environment, "max_batch_calls", None),
            on_finished=on_finished,
        )

    def probes(self, trace: Trace) -> list[Trace]:
        """Sample a few tokens of every engine after a group's prompt, which show the weights that it has."""
        return probes(self.engine, trace, num=len(self.engines))

    def busy_s(self) -> float:
        """Return the seconds of generation since the run began: mean over engines."""
        return self.engine.busy_s()

    def metrics(self) -> dict[str, float]:
        """Return metrics of the newest transfer and of replaced processes."""
        return self.engine.sent | self.repairs.pop_counts()

    def notes(self) -> list[str]:
        """Return what happened to processes since the last call, for the log."""
        return self.repairs.pop_notes()

    def close(self) -> None:
        """End all processes; may be called twice."""
        processes = [*self.workers.values(), *self.engines.values()]
        # their own children would survive if they were killed
        wait([process.call("close") for process in processes], _CLOSE_S)
        for process in processes:
            self.cluster.kill(process)
        self.workers, self.engines = {}, {}
        self._files.close()
        self.cluster.release("rollouts")
