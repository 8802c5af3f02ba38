"""All trainer ranks as one: a call goes to every rank, and none is waited for without a limit."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from outrider.errors import ClusterFault, OutriderError
from outrider.scale.rank import Rank, RankSettings
from outrider.scale.session import Session

_TICK_S: Final = 1.0  # how long a signal may have to wait


class RankGroup:
    """``size`` actors of the class ``kind``, placed and joined. Raises ClusterFault where that does not come
    to be.
    """

    def __init__(
        self, session: Session, settings: RankSettings, *, size: int, kind: type[Rank] = Rank
    ) -> None:
        self._session, self._ray, self._timeout_s = session, session.ray, settings.timeout_s
        self._actors: list[Any] = []
        self._call_lock = threading.Lock()
        resources = settings.resources
        self.placement_group = placement_group = session.reserve(
            [resources.rank_bundle] * size, subject=f"cluster.num_trainers = {size} needs"
        )
        variables = {"GLOO_SOCKET_IFNAME": "lo"} if session.is_local else {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Not restarted: a rank that Ray starts again has its first weights.
        actor = self._ray.remote(max_restarts=0, **resources.rank)(kind)
        for rank in range(size):
            placed = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=rank)
            options = {"scheduling_strategy": placed, "runtime_env": {"env_vars": variables}}
            self._actors.append(actor.options(**options).remote(settings, rank, size))
        host = "127.0.0.1" if session.is_local else self._ray.util.get_node_ip_address()
        [port] = self._wait([self._actors[0].open_store.remote(host)], "open_store")
        self.built = self.call("build", host, port)

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks, in their order."""
        return [pid for pid, _ in self.built]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What every rank returned. Raises a rank's own error where it is one of ours, and ClusterFault for a
        rank that broke, died or took longer than ``cluster.update_timeout_s``; the ranks are ended then.
        """
        # once into the store, however many ranks read it
        references = [self._ray.put(argument) for argument in arguments]
        with self._call_lock:  # two threads in two orders: ranks would wait for each other
            calls = [getattr(actor, method).remote(*references) for actor in self._actors]
        return self._wait(calls, method)

    def _wait(self, references: Sequence[Any], method: str) -> list[Any]:
        until = time.monotonic() + self._timeout_s
        waiting = list(references)
        try:
            while waiting:
                # One at a time, and soon: where one rank has died, the others wait for it.
                ready, waiting = self._ray.wait(waiting, num_returns=1, timeout=_TICK_S)
                for reference in ready:
                    self._ray.get(reference)
                if waiting and time.monotonic() > until:
                    number = references.index(waiting[0])
                    raise ClusterFault(
                        f"trainer rank {number} did not end {method} within {self._timeout_s:g} s "
                        "(cluster.update_timeout_s)"
                    )
            return list(self._ray.get(list(references)))
        except BaseException as error:
            self.close()
            raise self._convert_error(error, method) from error

    def _convert_error(self, error: BaseException, method: str) -> BaseException:
        cause = getattr(error, "cause", None)
        if isinstance(error, self._ray.exceptions.RayTaskError) and isinstance(cause, OutriderError):
            return cause
        if isinstance(error, self._ray.exceptions.RayError):
            reason = (str(cause or error).strip() or type(error).__name__).splitlines()[0]
            return ClusterFault(
                f"a trainer rank broke or died in {method}: {type(cause or error).__name__}: {reason[:300]}; "
                "continue from the newest checkpoint with --resume"
            )
        return error

    def close(self) -> None:
        """End all ranks; may be called twice."""
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor, no_restart=True)
        if self._actors:
            self._session.release(self.placement_group)
        self._actors = []
