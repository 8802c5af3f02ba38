"""Engines and rollout workers of a run as Ray actors: started, replaced and ended together."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.distributed.engines import (
    DirectPool,
    EngineActor,
    EnginePool,
    StreamEngineActor,
    VllmEngineActor,
    probes,
)
from outrider.distributed.ray_session import Recipe, Resources, Session, outcomes, results, timeout_error
from outrider.distributed.rollouts import (
    HeartbeatMonitor,
    NewMonitor,
    RemoteGroupPlayer,
    WorkerRollouts,
    portable,
    worker_name,
)
from outrider.distributed.weights import Carrier, Folder, ObjectStore
from outrider.distributed.worker import RolloutWorker, WorkerSettings
from outrider.errors import ClusterFault, ProcessLost
from outrider.rollout.scheduler import Rollouts
from outrider.trace import Trace
from outrider.training.async_rollouts import RolloutPrefetch
from outrider.training.components import Components
from outrider.training.learner import Learner
from outrider.training.restarts import Allowance
from outrider.training.settings import RunSettings

if TYPE_CHECKING:
    from outrider.distributed.learner import ShardedLearner


_CLOSE_S: Final = 10.0
_MOST_GROUPS: Final = 64  # of a worker at a time, with a thread each
COUNTED: Final = ("cluster/worker_deaths", "cluster/engine_deaths", "cluster/engine_hangs",
                  "weights/num_failed", "rollout/num_groups_replayed")  # fmt: skip


class Repairs:
    """Counts replaced processes. ``allowance`` is that of the run, which also counts restarts of
    everything.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._number = 0  # of the newest repair, within the hour
        self._counts: Counter[str] = Counter()
        self.num_replaced: Counter[str] = Counter()  # by name, of the whole run
        self._notes: list[str] = []

    def allow(self, fault: ClusterFault, *, is_another: bool = False) -> None:
        """Count the replacement of a process. Raises NoRepair if the limit is exceeded.

        ``is_another``: it was lost together with the previous one, and both count once.
        """
        is_free = isinstance(fault, ProcessLost) and not fault.is_charged
        if not is_another and not is_free:
            self._number = self._allowance.spend(fault)
        message = str(fault).partition("; ")[0]
        counted = f", repair {self._number} of {self._allowance.limit} within an hour"
        self._notes.append(f"{message}; replaced{'' if is_free else counted}")

    def refund(self, num: int) -> None:
        """Do not count the newest ``num`` repairs, because a task caused them."""
        self._allowance.refund(num)

    def count_process(self, fault: ProcessLost) -> None:
        self.num_replaced[fault.process] += 1
        if fault.process.startswith("rollout worker"):
            self._counts["cluster/worker_deaths"] += 1
        else:
            self._counts["cluster/engine_hangs" if fault.is_silent else "cluster/engine_deaths"] += 1

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
    """Engines and rollout workers in other processes; ``engine`` stands for all engines and sends weights.

    ``session`` is an existing session, ``ranks`` a learner with its own processes. Ray restarts no actor,
    because it would have the initial weights; :meth:`replace` does, with the newest weights.
    """

    def __init__(
        self,
        settings: RunSettings,
        learner: Learner,
        *,
        folder: Path,
        allowance: Allowance | None = None,
        session: Session | None = None,
        ranks: "ShardedLearner | None" = None,
    ) -> None:
        self._settings, cluster = settings, settings.cluster
        self._recipe = Recipe.from_settings(settings)
        self._resources = Resources.from_settings(settings)
        self._trainer_placement = None if ranks is None else ranks.placement_group
        self._session = Session(cluster) if session is None else session
        self._owns_session = session is None
        self.workers: list[Any] = []
        self._engines: list[Any] = []
        self._placement: Any = None
        self._folder = folder
        self._parts: Any = None  # the source of the workers' settings
        self.repairs = Repairs(allowance or Allowance(cluster.max_restarts))
        try:
            self._carrier: Carrier = ObjectStore(self._session.ray)
            if cluster.weights == "disk":
                self._carrier = Folder(folder.resolve())
            num_engine_bundles = 0 if self._resources.colocates else cluster.num_engines
            self._placement = self._session.reserve(
                [self._resources.engine_bundle] * num_engine_bundles
                + [{"CPU": 1}] * cluster.num_rollout_workers,
                subject=f"cluster.num_engines = {cluster.num_engines} and cluster.num_rollout_workers = "
                f"{cluster.num_rollout_workers} need",
            )
            self._engines = [self._new_engine(number) for number in range(cluster.num_engines)]
            self.workers = [self._new_worker(number) for number in range(cluster.num_rollout_workers)]
            built = self._build_actors(
                {f"engine {number}": actor for number, actor in enumerate(self._engines)}
            )
            self.engine_pids = [pid for pid, _ in built]
            options: dict[str, Any] = {
                "settings": settings.engine,
                "load_s": cluster.update_timeout_s,
                "anew": self._replace_process,
                "ray": self._session.ray,
                "actors": self._engines,
                "tokenizer": learner.language_model.tokenizer,
                "context_length": built[0][1],
                "timeout_s": cluster.turn_timeout_s,
            }
            self.engine = (
                DirectPool(ranks, self._carrier, **options)
                if ranks is not None and cluster.sends_directly
                else EnginePool(learner, self._carrier, **options)
            )
            self.engine.load(0)
        except BaseException:
            self.close()
            raise

    def _actor(
        self, kind: type, bundle_index: int, num_calls: int, *, placement: Any = None, **options: Any
    ) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = PlacementGroupSchedulingStrategy(
            placement or self._placement, placement_group_bundle_index=bundle_index
        )
        made = self._session.ray.remote(max_restarts=0, **({"num_cpus": 1} | options))(kind)
        return made.options(scheduling_strategy=placed, max_concurrency=num_calls)

    def _new_engine(self, number: int) -> Any:
        kind: type = EngineActor
        if self._settings.engine.has_own_processes:
            kind = VllmEngineActor
        elif self._settings.cluster.batching == "stream":
            kind = StreamEngineActor
        placement = self._trainer_placement if self._resources.colocates else None
        actor = self._actor(
            kind, number, 1 if kind is EngineActor else 1000, placement=placement, **self._resources.engine
        )
        return actor.remote(self._recipe, number, str(self._folder), self._carrier)

    def _new_worker(self, number: int) -> Any:
        # One thread runs all groups, or one thread per group if weights arrive in between. Other threads
        # answer requests for heartbeats and the end.
        settings, options = self._settings, self._session.actor_options
        if settings.cluster.in_flight:
            num = max(1, settings.num_concurrent // settings.cluster.num_rollout_workers)
            options["concurrency_groups"] = {"play": min(num, _MOST_GROUPS)}
        num_before = 0 if self._resources.colocates else settings.cluster.num_engines
        actor = self._actor(RolloutWorker, num_before + number, 3, **options)
        return actor.remote(number, self._engines)

    def replace(self, faults: Mapping[str, ProcessLost], *, num_groups: int) -> None:
        """Replace processes that are gone, and any that fail meanwhile, until all of them run again.

        Args:
            faults: The faults, by the name of the process.
            num_groups: Number of groups whose rollouts are generated again.

        Raises ClusterFault if the limits on repairs are exceeded.
        """
        self.repairs.count("rollout/num_groups_replayed", num_groups)
        left, done = dict(faults), set[str]()
        while left:
            name = max(left)  # workers first, because replaced engines are announced to them
            fault = left.pop(name)
            self.repairs.allow(fault, is_another=bool(done) and name not in done)
            self.repairs.count_process(fault)
            left |= self._replace(name, fault, is_again=name in done)
            done.add(name)

    def _find_pid(self, name: str) -> int | None:
        """Return the process id of a worker if it certainly runs on this machine."""
        number = int(name.rpartition(" ")[2])
        return self.worker_pids[number] if self._session.is_local else None

    def _replace(self, name: str, fault: ProcessLost, *, is_again: bool) -> dict[str, ProcessLost]:
        """Replace one process and return others that were lost meanwhile.

        The new process may be lost too, if its node is failing. That is accepted once; then everything may be
        restarted.
        """
        kind, _, number = name.rpartition(" ")
        try:
            if kind == "engine":
                return self._replace_engine(int(number))
            if kind == "rollout worker" and self._parts is not None:
                self._replace_worker(int(number))
                return {}
        except ProcessLost as another:
            if is_again:
                raise
            return {another.process: another}
        raise fault

    def _replace_process(self, fault: ProcessLost, is_loading: bool) -> None:
        self.repairs.count("weights/num_failed", int(is_loading))
        self.replace({fault.process: fault}, num_groups=0)

    def _replace_worker(self, number: int) -> None:
        self._end(self.workers[number], self.worker_pids[number])
        self.workers[number] = self._new_worker(number)
        self._session.await_placement(self.workers[number], worker_name(number))
        [self.worker_pids[number]] = self._build_actors(
            {worker_name(number): self.workers[number]}, self._worker_settings()
        )

    def _replace_engine(self, number: int) -> dict[str, ProcessLost]:
        """Replace an engine; returns workers that are lost too, for example with the same node."""
        self._end(self._engines[number], self.engine_pids[number])
        actor = self._engines[number] = self._new_engine(number)
        self._session.await_placement(actor, f"engine {number}")
        [(self.engine_pids[number], _)] = self._build_actors({f"engine {number}": actor})
        self.engine.put(number, actor)
        calls = {
            worker_name(index): item.use_engine.remote(number, actor)
            for index, item in enumerate(self.workers)
        }
        action, setting = "taking another engine", "cluster.heartbeat_s"
        limit_s = self._settings.cluster.heartbeat_s
        until = time.monotonic() + limit_s

        def late() -> dict[str, ProcessLost]:
            is_late = time.monotonic() > until
            return {name: timeout_error(name, action, limit_s, setting) for name in calls} if is_late else {}

        answers = outcomes(self._session.ray, calls, action=action, watch=late)
        return {name: item for name, item in answers.items() if isinstance(item, ProcessLost)}

    def _end(self, actor: Any, pid: int) -> None:
        with suppress(Exception):
            self._session.ray.kill(actor, no_restart=True)
        if self._session.is_local:  # a stopped process does not react to Ray
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _build_actors(self, actors: dict[str, Any], *arguments: Any) -> list[Any]:
        return results(
            self._session.ray,
            {name: actor.build.remote(*arguments) for name, actor in actors.items()},
            action="its start",
            limit_s=self._settings.cluster.update_timeout_s,
            setting="cluster.update_timeout_s",
        )

    def begin(self, parts: Components) -> None:
        """Build the workers. Raises ConfigError for a hook without copies."""
        portable(parts.algorithm.hooks)
        self._parts = parts
        self.worker_pids = self._build_actors(
            {worker_name(number): worker for number, worker in enumerate(self.workers)},
            self._worker_settings(),
        )

    def _worker_settings(self) -> Any:
        # always anew, because a buffer may have been rolled back
        settings = WorkerSettings.from_components(
            self._parts, self._recipe, context_length=self.engine.context_length
        )
        return self._session.ray.put(settings)

    def rollouts(
        self,
        parts: Components,
        *,
        training: bool,
        on_finished: Callable[[int, int], None],
        prefetch: RolloutPrefetch | None = None,
    ) -> Rollouts:
        return WorkerRollouts(
            self._session.ray,
            self,
            hooks=parts.algorithm.hooks if training else (),
            is_training=training,
            version=lambda: self.engine.weight_version,
            max_concurrent=self._settings.num_concurrent,
            on_finished=on_finished,
            new_monitor=self._monitor_factory(parts),
            prefetch=prefetch,
        )

    def _monitor_factory(self, parts: Components) -> NewMonitor:
        return partial(
            HeartbeatMonitor,
            self._session.ray,
            limit_s=self._settings.cluster.heartbeat_s,
            rollout_status=parts.rollout_status,
            busy_s=self._settings.limits.step_timeout_s,
            find_pid=self._find_pid,
            note=self.repairs.note,
        )

    def group_player(self, parts: Components) -> RemoteGroupPlayer:
        """Return the player of groups that run concurrently while new weights arrive."""
        return RemoteGroupPlayer(
            self._session.ray,
            self,
            hooks=parts.algorithm.hooks,
            version=lambda: self.engine.weight_version,
            new_monitor=self._monitor_factory(parts),
        )

    def probes(self, trace: Trace) -> list[Trace]:
        """Sample a few tokens of every engine after a group's prompt, which show the weights that it has."""
        return probes(self.engine, trace, num=len(self._engines))

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
        """End all actors, and Ray if it was started for them; may be called twice."""
        ray = self._session.ray
        with suppress(Exception):
            # their own children would survive if they were killed
            started = [*self.workers]
            if self._settings.engine.has_own_processes:
                started += self._engines
            ray.wait(
                [process.close.remote() for process in started],
                num_returns=max(1, len(started)),
                timeout=_CLOSE_S,
            )
        for actor in [*self.workers, *self._engines]:
            with suppress(Exception):
                ray.kill(actor, no_restart=True)
        self.workers, self._engines = [], []
        if hasattr(self, "engine"):
            self.engine.drop_parcel()
        if self._placement is not None:
            self._session.release(self._placement)
            self._placement = None
        if self._owns_session:
            self._session.close()
