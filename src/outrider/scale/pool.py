"""All engines of a run for the process that trains: they get the learner's weights, by a carrier or from the
ranks' GPUs, and whoever takes an engine's place gets them too.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.engines.base import EngineSettings, Generation, Request
from outrider.errors import ClusterFault, ProcessLost
from outrider.scale.engine import RemoteEngine
from outrider.scale.waiting import results
from outrider.scale.weights import Carrier, Parcel, drop, engine_weights, pack
from outrider.train.learner import Learner

if TYPE_CHECKING:
    from outrider.scale.learner import ShardedLearner

_AnswerT = TypeVar("_AnswerT")


class EnginePool(RemoteEngine):
    """The engine of the process that trains: :meth:`load` sends the learner's weights to all engines, and
    keeps what was sent for engines that take the place of others.
    """

    def __init__(
        self,
        learner: Learner,
        carrier: Carrier,
        *,
        settings: EngineSettings,
        load_s: float,
        anew: Callable[[ProcessLost, bool], None],
        **options: Any,
    ) -> None:
        super().__init__(client="controller", **options)
        self._learner, self._carrier, self._load_s, self._anew = learner, carrier, load_s, anew
        self._settings = settings
        self._parcel: Parcel | None = None
        self.sent: dict[str, float] = {}  # metrics of the newest transfer

    def load(self, version: int) -> None:
        """Raises ClusterFault where not every engine says within the limit that it has these weights, and no
        other one may take its place.
        """
        began = time.perf_counter()
        self.drop_parcel()
        weights = engine_weights(self._learner, self._settings)
        parcel = self._parcel = pack(weights, version=version, carrier=self._carrier)
        while True:
            try:
                self._send(parcel, dict(enumerate(self._actors)))
                break
            except ProcessLost as error:
                self._anew(error, True)  # which sends it too
        super().load(version)
        self.sent = {
            "weights/bytes": float(parcel.num_bytes * len(self._actors)),
            "weights/rpcs": float(len(self._actors)),
            "time/weights": time.perf_counter() - began,
        }

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See :class:`RemoteEngine`: of an engine that is gone, another one is asked."""
        return self._retrying(partial(super().generate, requests))

    def free_cache(self) -> None:
        """See :class:`RemoteEngine`."""
        self._retrying(super().free_cache)

    def busy_s(self) -> float:
        """See :class:`RemoteEngine`."""
        return self._retrying(super().busy_s)

    def _retrying(self, call: Callable[[], _AnswerT]) -> _AnswerT:
        """An engine that died between two batches is noticed here first. Raises ClusterFault where no other
        one may take its place.
        """
        while True:
            try:
                return call()
            except ProcessLost as error:
                self._anew(error, False)

    def put(self, number: int, actor: Any) -> None:
        """Another process is engine ``number`` from now on, with the weights that were sent last."""
        if self._parcel is not None:
            self._send(self._parcel, {number: actor})
        super().put(number, actor)

    def _send(self, parcel: Parcel, actors: Mapping[int, Any]) -> None:
        answers = results(
            self._ray,
            {f"engine {number}": actor.load.remote(parcel) for number, actor in actors.items()},
            action=f"loading the weights of version {parcel.version}",
            limit_s=self._load_s,
            setting="cluster.update_timeout_s",
        )
        if wrong := [str(answer) for answer in answers if tuple(answer) != (parcel.version, parcel.checksum)]:
            raise ClusterFault(
                f"engines have other weights than version {parcel.version}: {', '.join(wrong)}"
            )

    def drop_parcel(self) -> None:
        """Nobody needs the weights that were sent last any more."""
        if self._parcel is not None:
            drop(self._parcel.pieces, self._carrier)
            self._parcel = None


class DirectPool(EnginePool):
    """The ranks send from their GPUs (:mod:`outrider.scale.direct`): nothing is kept here."""

    def __init__(self, ranks: "ShardedLearner", *args: Any, **kwargs: Any) -> None:
        super().__init__(ranks, *args, **kwargs)
        self._ranks = ranks

    def load(self, version: int) -> None:
        """Raises ClusterFault where not every engine says within the limit that it has these weights: the
        ranks have ended then, and all begin anew.
        """
        self._load(version, is_again=False)

    def _load(self, version: int, *, is_again: bool) -> None:
        began = time.perf_counter()
        try:
            num_bytes, num_calls = self._ranks.send(version, self._actors, is_again=is_again)
        except ProcessLost as error:  # nobody is to take its place
            raise ClusterFault(str(error)) from error
        RemoteEngine.load(self, version)
        self.sent = {
            "weights/bytes": float(num_bytes * len(self._actors)),
            "weights/rpcs": float(num_calls * len(self._actors)),
            "time/weights": time.perf_counter() - began,
        }

    def put(self, number: int, actor: Any) -> None:
        """Another process is engine ``number`` from now on; all engines meet the ranks anew. Raises
        ClusterFault where the ranks' weights have moved since.
        """
        super().put(number, actor)
        self._load(self.weight_version, is_again=True)


def make_pool(
    learner: Learner, ranks: "ShardedLearner | None", carrier: Carrier, **options: Any
) -> EnginePool:
    """``ranks``: those that send by themselves."""
    return EnginePool(learner, carrier, **options) if ranks is None else DirectPool(ranks, carrier, **options)
