"""Restarts of a run after a fault of its processes, from the newest checkpoint as with ``--resume``, and
the limit of restarts and replaced processes.
"""

import gc
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from threading import Event
from typing import Final

from outrider.errors import ClusterFault, NoRepair
from outrider.printing import plural

_HOUR_S: Final = 3600.0
Begin = Callable[[int, ExitStack], Callable[[], None]]


class Allowance:
    """A run's limit of repairs within an hour: a replaced process, or a restart of all."""

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._times: deque[float] = deque()

    def spend(self, fault: ClusterFault) -> int:
        """Count a repair because of this fault; returns the number within the hour. Raises NoRepair above
        the limit.
        """
        now = self._clock()
        while self._times and now - self._times[0] > _HOUR_S:
            self._times.popleft()
        if len(self._times) >= self.limit:
            after = f" (after {plural(len(self._times), 'repair')} within an hour, cluster.max_restarts)"
            raise NoRepair(f"{fault}{after if self.limit else ''}") from fault
        self._times.append(now)
        return len(self._times)

    def refund(self, num: int) -> None:
        """Take back the newest ``num`` repairs."""
        for _ in range(min(num, len(self._times))):
            self._times.pop()


def run_with_restarts(
    begin: Begin, *, allowance: Allowance, stop: Event, note: Callable[[str], None]
) -> None:
    """Set a run up and train, again after every ClusterFault of the training that the allowance permits.

    ``begin(number, cleanup)`` sets the run up, with the number of restarts so far and a stack for closing its
    components, and returns the training. The fault is raised after a requested ``stop``, or if the set-up
    fails.
    """
    number = 0
    while True:
        with ExitStack() as cleanup:
            train = begin(number, cleanup)
            try:
                train()
                return
            except NoRepair:
                raise
            except ClusterFault as fault:
                if stop.is_set():
                    raise
                num_repairs = allowance.spend(fault)
                number += 1
                message = str(fault).partition("; ")[0]
                note(
                    f"{message}; all processes restart from the newest checkpoint, "
                    f"repair {num_repairs} of {allowance.limit} within an hour"
                )
            finally:
                del train
        gc.collect()  # the models, before the next ones are built
