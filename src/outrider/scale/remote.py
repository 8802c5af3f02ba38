"""Engines and rollout workers of a run as Ray actors: started together, ended together."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from outrider.errors import ClusterFault
from outrider.rollout.scheduler import Rollouts
from outrider.scale.engine import EngineActor, RemoteEngine
from outrider.scale.probes import probes
from outrider.scale.recipe import Recipe
from outrider.scale.rollouts import RemoteRollouts, portable, who
from outrider.scale.session import Session
from outrider.scale.waiting import results
from outrider.scale.weights import Carrier, Folder, ObjectStore, drop, pack
from outrider.scale.worker import RolloutWorker, WorkerSettings
from outrider.trace import Trace
from outrider.train.components import Components
from outrider.train.learner import Learner
from outrider.train.overlap import Ahead
from outrider.train.settings import RunSettings

_CLOSE_S: Final = 10.0


class EnginePool(RemoteEngine):
    """The engine of the process that trains: :meth:`load` sends the learner's weights to all engines."""

    def __init__(self, learner: Learner, carrier: Carrier, *, load_s: float, **given: Any) -> None:
        super().__init__(client="controller", **given)
        self._learner, self._carrier, self._load_s = learner, carrier, load_s
        self.sent: dict[str, float] = {}  # metrics of the newest transfer

    def load(self, version: int) -> None:
        """Raises ClusterFault where not every engine says within the limit that it has these weights."""
        began = time.perf_counter()
        names = self._learner.trained
        weights = {
            name: one for name, one in self._learner.language_model.model.named_parameters() if name in names
        }
        parcel = pack(weights, version=version, carrier=self._carrier)
        calls = {f"engine {number}": actor.load.remote(parcel) for number, actor in enumerate(self._actors)}
        try:
            answers = results(
                self._ray,
                calls,
                what=f"loading the weights of version {version}",
                limit_s=self._load_s,
                setting="cluster.update_timeout_s",
            )
        finally:
            drop(parcel.pieces, self._carrier)
        if wrong := [str(one) for one in answers if tuple(one) != (version, parcel.checksum)]:
            raise ClusterFault(f"engines have other weights than version {version}: {', '.join(wrong)}")
        super().load(version)
        self.sent = {
            "weights/bytes": float(parcel.num_bytes * len(self._actors)),
            "weights/rpcs": float(len(calls)),
            "time/weights": time.perf_counter() - began,
        }


class Remote:
    """See :class:`outrider.train.components.Elsewhere`. ``session`` is a Ray that is there already. No actor
    is restarted: one that Ray starts again has its first weights.
    """

    def __init__(
        self, settings: RunSettings, learner: Learner, *, folder: Path, session: Session | None = None
    ) -> None:
        self._settings, cluster = settings, settings.cluster
        self._recipe = Recipe.of(settings)
        self._session = Session(cluster) if session is None else session
        self._owns_session = session is None
        self._workers: list[Any] = []
        self._engines: list[Any] = []
        self._places: Any = None
        try:
            self._carrier = self._made_carrier(folder)
            self._places = self._session.places(
                cluster.num_engines + cluster.num_rollout_workers,
                of=f"cluster.num_engines = {cluster.num_engines} and cluster.num_rollout_workers = "
                f"{cluster.num_rollout_workers} need",
            )
            self._engines = [
                self._actor(EngineActor, number, 1).remote(self._recipe, number, str(folder), self._carrier)
                for number in range(cluster.num_engines)
            ]
            # Beside the engines. One thread plays, others are asked for beats and for the end.
            self._workers = [
                self._actor(RolloutWorker, cluster.num_engines + number, 3).remote(number, self._engines)
                for number in range(cluster.num_rollout_workers)
            ]
            built = self._built({f"engine {number}": one for number, one in enumerate(self._engines)})
            self.engine_pids = [pid for pid, _ in built]
            self.engine = EnginePool(
                learner,
                self._carrier,
                load_s=cluster.update_timeout_s,
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

    def _made_carrier(self, folder: Path) -> Carrier:
        if self._settings.cluster.weights == "disk":
            return Folder(folder.resolve())
        return ObjectStore(self._session.ray)

    def _actor(self, kind: type, place: int, num_calls: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=place)
        made = self._session.ray.remote(num_cpus=1, max_restarts=0)(kind)
        return made.options(scheduling_strategy=placed, max_concurrency=num_calls)

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
        model, buffer = parts.learner.language_model.model, parts.buffer
        given = WorkerSettings(
            recipe=self._recipe,
            vocabulary_size=int(model.config.get_text_config().vocab_size),
            context_length=self.engine.context_length,
            train_tasks=list(parts.train_tasks),
            buffer=None if buffer is None else (str(buffer.path.resolve()), buffer.revision),
        )
        self.worker_pids = self._built(
            {who(number): one for number, one in enumerate(self._workers)}, self._session.ray.put(given)
        )

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
            self._workers,
            hooks=parts.algorithm.hooks if training else (),
            is_training=training,
            version=lambda: self.engine.weight_version,
            max_concurrent=self._settings.num_concurrent,
            heartbeat_s=self._settings.cluster.heartbeat_s,
            on_finished=on_finished,
            whereabouts=parts.whereabouts,
            ahead=ahead,
        )

    def probes(self, trace: Trace) -> list[Trace]:
        """See :class:`outrider.train.components.Elsewhere`."""
        return probes(self.engine, trace, num=len(self._engines))

    def busy_s(self) -> float:
        """See :class:`outrider.train.components.Elsewhere`."""
        return self.engine.busy_s()

    def metrics(self) -> dict[str, float]:
        """Of the newest weights that were sent."""
        return dict(self.engine.sent)

    def close(self) -> None:
        """End all actors, and Ray where it was started for them; may be called twice."""
        ray = self._session.ray
        with suppress(Exception):
            # what environments started would outlive a worker that is killed
            ray.wait(
                [one.close.remote() for one in self._workers],
                num_returns=max(1, len(self._workers)),
                timeout=_CLOSE_S,
            )
        for actor in [*self._workers, *self._engines]:
            with suppress(Exception):
                ray.kill(actor, no_restart=True)
        self._workers, self._engines = [], []
        if self._places is not None:
            self._session.give_back(self._places)
            self._places = None
        if self._owns_session:
            self._session.close()
