"""Engines and rollout workers of a run as Ray actors: started together, ended together."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.errors import ProcessGone
from outrider.rollout.scheduler import Rollouts
from outrider.scale.engine import EngineActor
from outrider.scale.flight import RemoteFlight
from outrider.scale.pool import pool_of
from outrider.scale.probes import probes
from outrider.scale.recipe import Recipe
from outrider.scale.repairs import Repairs
from outrider.scale.resources import Resources
from outrider.scale.rollouts import RemoteRollouts, portable, who
from outrider.scale.session import Session
from outrider.scale.stream import StreamEngineActor
from outrider.scale.vllm import VllmEngineActor
from outrider.scale.waiting import outcomes, results, silent
from outrider.scale.weights import Carrier, Folder, ObjectStore
from outrider.scale.worker import RolloutWorker, WorkerSettings
from outrider.trace import Trace
from outrider.train.cluster_restarts import Allowance
from outrider.train.components import Components
from outrider.train.in_flight import GroupPlayer
from outrider.train.learner import Learner
from outrider.train.overlap import Ahead
from outrider.train.settings import RunSettings

if TYPE_CHECKING:
    from outrider.scale.learner import ShardedLearner

_CLOSE_S: Final = 10.0
_MOST_GROUPS: Final = 64  # of a worker at a time, a thread each


class Remote:
    """See :class:`outrider.train.components.Elsewhere`. ``session`` is a Ray that is there already,
    ``ranks`` the learner where it is in processes of its own. Ray restarts no actor, since that would have
    its first weights: :meth:`replace` does, with the newest.
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
        self._recipe = Recipe.of(settings)
        self._ask = Resources.of(settings)
        self._beside = None if ranks is None else ranks.places
        self._session = Session(cluster) if session is None else session
        self._owns_session = session is None
        self.workers: list[Any] = []
        self._engines: list[Any] = []
        self._places: Any = None
        self._folder = folder
        self._parts: Any = None  # what workers are told comes of them
        self.repairs = Repairs(allowance or Allowance(cluster.max_restarts))
        try:
            self._carrier = self._made_carrier(folder)
            self._places = self._own_places()
            self._engines = [self._new_engine(number) for number in range(cluster.num_engines)]
            self.workers = [self._new_worker(number) for number in range(cluster.num_rollout_workers)]
            built = self._built({f"engine {number}": one for number, one in enumerate(self._engines)})
            self.engine_pids = [pid for pid, _ in built]
            self.engine = pool_of(
                learner,
                ranks if cluster.sends_directly else None,
                self._carrier,
                settings=settings.engine,
                load_s=cluster.update_timeout_s,
                anew=self._replace_asked,
                ray=self._session.ray,
                actors=self._engines,
                tokenizer=learner.language_model.tokenizer,
                context_length=built[0][1],
                timeout_s=cluster.turn_timeout_s,
            )
            self.engine.load(0)
        except BaseException:
            self.close()
            raise

    def _own_places(self) -> Any:
        """Of the engines, where those are not on the ranks' GPUs, and of the workers behind them."""
        cluster = self._settings.cluster
        return self._session.places(
            [self._ask.engine_place] * (0 if self._ask.colocates else cluster.num_engines)
            + [{"CPU": 1}] * cluster.num_rollout_workers,
            of=f"cluster.num_engines = {cluster.num_engines} and cluster.num_rollout_workers = "
            f"{cluster.num_rollout_workers} need",
        )

    def _made_carrier(self, folder: Path) -> Carrier:
        if self._settings.cluster.weights == "disk":
            return Folder(folder.resolve())
        return ObjectStore(self._session.ray)

    def _actor(self, kind: type, place: int, num_calls: int, *, places: Any = None, **asked: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = PlacementGroupSchedulingStrategy(places or self._places, placement_group_bundle_index=place)
        made = self._session.ray.remote(max_restarts=0, **({"num_cpus": 1} | asked))(kind)
        return made.options(scheduling_strategy=placed, max_concurrency=num_calls)

    def _new_engine(self, number: int) -> Any:
        kind: type = EngineActor
        if self._settings.engine.has_own_processes:
            kind = VllmEngineActor
        elif self._settings.cluster.batching == "stream":
            kind = StreamEngineActor
        places = self._beside if self._ask.colocates else None
        actor = self._actor(
            kind, number, 1 if kind is EngineActor else 1000, places=places, **self._ask.engine
        )
        return actor.remote(self._recipe, number, str(self._folder), self._carrier)

    def _new_worker(self, number: int) -> Any:
        """Beside the engines. One thread plays, or one a group where weights come in between; others are
        asked for beats and for the end.
        """
        settings, asked = self._settings, self._session.own_end
        if settings.cluster.in_flight:
            num = max(1, settings.num_concurrent // settings.cluster.num_rollout_workers)
            asked["concurrency_groups"] = {"play": min(num, _MOST_GROUPS)}
        num_before = 0 if self._ask.colocates else settings.cluster.num_engines
        actor = self._actor(RolloutWorker, num_before + number, 3, **asked)
        return actor.remote(number, self._engines)

    @property
    def num_replaced(self) -> Counter[str]:
        """How often each process was replaced, by its name."""
        return self.repairs.num_replaced

    def replace(self, gone: Mapping[str, ProcessGone], *, num_groups: int) -> None:
        """Replace processes that are gone, and any that fail meanwhile, until all of them run again.

        Args:
            gone: The faults, by the name of the process.
            num_groups: Number of groups whose rollouts are generated again.

        Raises ClusterFault if the limits on repairs are exceeded.
        """
        self.repairs.count("rollout/num_groups_replayed", num_groups)
        left, done = dict(gone), set[str]()
        while left:
            name = max(left)  # workers first: those are told of new engines
            fault = left.pop(name)
            self.repairs.allow(fault, is_another=bool(done) and name not in done)
            self.repairs.count_process(fault)
            left |= self._replace(name, fault, is_again=name in done)
            done.add(name)

    def refund(self, num_repairs: int) -> None:
        """Do not count the last ``num_repairs`` repairs: a task caused them, and its group is masked."""
        self.repairs.refund(num_repairs)

    def _pid_of(self, name: str) -> int | None:
        """The process of a worker, if it runs on this machine for certain."""
        number = int(name.rpartition(" ")[2])
        return self.worker_pids[number] if self._session.is_local else None

    def _replace(self, name: str, fault: ProcessGone, *, is_again: bool) -> dict[str, ProcessGone]:
        """Those that are gone since: the new process too, where a node that is being lost took it in. That
        happens once; then all may begin anew.
        """
        kind, _, number = name.rpartition(" ")
        try:
            if kind == "engine":
                return self._replace_engine(int(number))
            if kind == "rollout worker" and self._parts is not None:
                self._replace_worker(int(number))
                return {}
        except ProcessGone as another:
            if is_again:
                raise
            return {another.who: another}
        raise fault

    def _replace_asked(self, gone: ProcessGone, is_loading: bool) -> None:
        self.repairs.count("weights/num_failed", int(is_loading))
        self.replace({gone.who: gone}, num_groups=0)

    def _replace_worker(self, number: int) -> None:
        self._end(self.workers[number], self.worker_pids[number])
        self.workers[number] = self._new_worker(number)
        self._session.await_place(self.workers[number], who(number))
        [self.worker_pids[number]] = self._built({who(number): self.workers[number]}, self._told())

    def _replace_engine(self, number: int) -> dict[str, ProcessGone]:
        """The workers that cannot be told of it, because they are gone too: a node has both."""
        self._end(self._engines[number], self.engine_pids[number])
        actor = self._engines[number] = self._new_engine(number)
        self._session.await_place(actor, f"engine {number}")
        [(self.engine_pids[number], _)] = self._built({f"engine {number}": actor})
        self.engine.put(number, actor)
        calls = {who(index): one.use_engine.remote(number, actor) for index, one in enumerate(self.workers)}
        what, setting = "taking another engine", "cluster.heartbeat_s"
        limit_s = self._settings.cluster.heartbeat_s
        until = time.monotonic() + limit_s

        def late() -> dict[str, ProcessGone]:
            is_late = time.monotonic() > until
            return {name: silent(name, what, limit_s, setting) for name in calls} if is_late else {}

        found = outcomes(self._session.ray, calls, what=what, watch=late)
        return {name: one for name, one in found.items() if isinstance(one, ProcessGone)}

    def _end(self, actor: Any, pid: int) -> None:
        with suppress(Exception):
            self._session.ray.kill(actor, no_restart=True)
        if self._session.is_local:  # a process that stands still hears nothing of Ray's
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _built(self, actors: dict[str, Any], *given: Any) -> list[Any]:
        return results(
            self._session.ray,
            {name: actor.build.remote(*given) for name, actor in actors.items()},
            what="its start",
            limit_s=self._settings.cluster.update_timeout_s,
            setting="cluster.update_timeout_s",
        )

    def begin(self, parts: Components) -> None:
        """Tell the workers what to play. Raises ConfigError for a hook that has no copies, and what a start
        raises.
        """
        portable(parts.algorithm.hooks)
        self._parts = parts
        self.worker_pids = self._built(
            {who(number): one for number, one in enumerate(self.workers)}, self._told()
        )

    def _told(self) -> Any:
        """Made when it is asked for: a buffer may have been rolled back since the run began."""
        given = WorkerSettings.of(self._parts, self._recipe, context_length=self.engine.context_length)
        return self._session.ray.put(given)

    def rollouts(
        self,
        parts: Components,
        *,
        training: bool,
        on_finished: Callable[[int, int], None],
        ahead: Ahead | None = None,
    ) -> Rollouts:
        """Of training, with the algorithm's hooks, or of an evaluation."""
        return RemoteRollouts(
            self._session.ray,
            self,
            hooks=parts.algorithm.hooks if training else (),
            is_training=training,
            version=lambda: self.engine.weight_version,
            max_concurrent=self._settings.num_concurrent,
            heartbeat_s=self._settings.cluster.heartbeat_s,
            on_finished=on_finished,
            whereabouts=parts.whereabouts,
            ahead=ahead,
            busy_s=self._settings.limits.step_timeout_s,
            pid_of=self._pid_of,
            note=self.repairs.note,
        )

    def flight(self, parts: Components) -> GroupPlayer:
        """See :class:`outrider.train.components.Elsewhere`."""
        return RemoteFlight(
            self._session.ray,
            self,
            hooks=parts.algorithm.hooks,
            version=lambda: self.engine.weight_version,
            heartbeat_s=self._settings.cluster.heartbeat_s,
            whereabouts=parts.whereabouts,
            busy_s=self._settings.limits.step_timeout_s,
            pid_of=self._pid_of,
            note=self.repairs.note,
        )

    def probes(self, trace: Trace) -> list[Trace]:
        """See :class:`outrider.train.components.Elsewhere`."""
        return probes(self.engine, trace, num=len(self._engines))

    def busy_s(self) -> float:
        """See :class:`outrider.train.components.Elsewhere`."""
        return self.engine.busy_s()

    def metrics(self) -> dict[str, float]:
        """Of the newest weights that were sent, and of processes that were replaced."""
        return self.engine.sent | self.repairs.take_counts()

    def notes(self) -> list[str]:
        """See :class:`outrider.train.components.Elsewhere`."""
        return self.repairs.take_notes()

    def close(self) -> None:
        """End all actors, and Ray where it was started for them; may be called twice."""
        ray = self._session.ray
        with suppress(Exception):
            # what they started would outlive a process that is killed
            started = [*self.workers]
            if self._settings.engine.has_own_processes:
                started += self._engines
            ray.wait(
                [one.close.remote() for one in started], num_returns=max(1, len(started)), timeout=_CLOSE_S
            )
        for actor in [*self.workers, *self._engines]:
            with suppress(Exception):
                ray.kill(actor, no_restart=True)
        self.workers, self._engines = [], []
        if hasattr(self, "engine"):
            self.engine.let_go()
        if self._places is not None:
            self._session.give_back(self._places)
            self._places = None
        if self._owns_session:
            self._session.close()
