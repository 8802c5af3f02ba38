"""A run whose processes broke begins anew from its newest checkpoint, as ``--resume`` would have it, and how
often that, or a process in the place of another one, may be.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from threading import Event
from typing import Final

from outrider.errors import ClusterFault, NoRepair

_HOUR_S: Final = 3600.0
Begin = Callable[[int, ExitStack], Callable[[], None]]


class Allowance:
    """``limit`` repairs within an hour, of a run: a process that is replaced, or all that begin anew."""

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._times: deque[float] = deque()

    def spend(self, fault: ClusterFault) -> int:
        """One repair, because of this fault; the number within the hour. Raises NoRepair where that is one
        too many.
        """
        now = self._clock()
        while self._times and now - self._times[0] > _HOUR_S:
            self._times.popleft()
        if len(self._times) >= self.limit:
            after = f" (after {len(self._times)} repairs within an hour, cluster.max_restarts)"
            raise NoRepair(f"{fault}{after if self.limit else ''}") from fault
        self._times.append(now)
        return len(self._times)

    def refund(self, num: int) -> None:
        """The newest ``num`` repairs do not count."""
        for _ in range(min(num, len(self._times))):
            self._times.pop()


def run_with_restarts(
    begin: Begin, *, allowance: Allowance, stop: Event, note: Callable[[str], None]
) -> None:
    """``begin`` sets a run up, given the number of restarts so far and what closes its parts, and returns
    what trains. After a ClusterFault of that it is called again, where the allowance has room and not once a
    ``stop`` was asked for; else the fault is raised, and so is one of the set-up: what it needs
    is not there.
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
                    f"{message}; all processes begin anew from the newest checkpoint, "
                    f"repair {num_repairs} of {allowance.limit} within an hour"
                )
