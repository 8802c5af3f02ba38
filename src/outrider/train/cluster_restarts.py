"""A run whose processes broke begins anew from its newest checkpoint, as ``--resume`` would have it."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from threading import Event
from typing import Final

from outrider.errors import ClusterFault

_HOUR_S: Final = 3600.0
Begin = Callable[[int, ExitStack], Callable[[], None]]


def restarted(
    begin: Begin,
    *,
    limit: int,
    stop: Event,
    note: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """``begin`` sets a run up, given the number of restarts so far and what closes its parts, and returns
    what trains. After a ClusterFault of that it is called again, at most ``limit`` times within an hour and
    not once a ``stop`` was asked for; else the fault is raised, and so is one of the set-up: what it needs is
    not there.
    """
    times: list[float] = []
    number = 0
    while True:
        with ExitStack() as ending:
            train = begin(number, ending)
            try:
                train()
                return
            except ClusterFault as fault:
                now = clock()
                times = [one for one in times if now - one <= _HOUR_S]
                if stop.is_set() or len(times) >= limit:
                    raise
                times.append(now)
                number += 1
                told = str(fault).partition("; ")[0]
                note(
                    f"{told}; all processes begin anew from the newest checkpoint, "
                    f"{len(times)} of {limit} times within an hour"
                )
