"""How often processes of a run were replaced: counted for the metrics of a step, and bounded by the hour."""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from outrider.errors import ClusterFault, ProcessGone

_HOUR_S: Final = 3600.0
COUNTED: Final = ("cluster/worker_deaths", "cluster/engine_deaths", "cluster/engine_hangs",
                  "weights/num_failed", "rollout/num_groups_replayed")  # fmt: skip


class Repairs:
    """So many processes may be replaced within an hour: :meth:`allow` raises the fault of one more."""

    def __init__(self, max_restarts: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_restarts, self._clock = max_restarts, clock
        self._times: deque[float] = deque()
        self._counts: Counter[str] = Counter()
        self._notes: list[str] = []

    def allow(self, fault: ClusterFault) -> None:
        """A process is to be replaced, because of this fault."""
        now = self._clock()
        while self._times and now - self._times[0] > _HOUR_S:
            self._times.popleft()
        if len(self._times) >= self._max_restarts:
            if not self._max_restarts:
                raise fault
            message = f"{fault} (after {len(self._times)} replacements within an hour, cluster.max_restarts)"
            raise ClusterFault(message) from fault
        self._times.append(now)
        number = len(self._times)
        told = str(fault).partition("; ")[0]
        self._notes.append(f"{told}; replaced, {number} of {self._max_restarts} within an hour")

    def count_process(self, gone: ProcessGone) -> None:
        """An engine or a rollout worker that died or was silent."""
        if gone.who.startswith("rollout worker"):
            self._counts["cluster/worker_deaths"] += 1
        else:
            self._counts["cluster/engine_hangs" if gone.is_silent else "cluster/engine_deaths"] += 1

    def count(self, name: str, num: int = 1) -> None:
        """One of :data:`COUNTED`."""
        self._counts[name] += num

    def take_counts(self) -> dict[str, float]:
        """Since the last call."""
        counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in COUNTED}

    def take_notes(self) -> list[str]:
        """Since the last call: for the person who watches."""
        notes, self._notes = self._notes, []
        return notes
