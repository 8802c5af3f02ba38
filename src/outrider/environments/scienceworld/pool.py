"""A fixed number of simulators; an environment borrows one for one episode."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from outrider.environments.scienceworld.gateway import Simulator
from outrider.errors import EnvironmentFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """A borrowed simulator and the place in the pool to which it returns."""

    slot: int
    simulator: Simulator


class SimulatorPool:
    """Up to ``num_workers`` simulators, started when first wanted and replaced when dead. Thread-safe.

    ``num_starts`` counts started simulators, ``num_replaced`` those of them that took the place of a dead
    one.
    """

    def __init__(self, *, start: Callable[[], Simulator], num_workers: int, borrow_limit_s: float) -> None:
        """Start nothing yet; ``borrow_limit_s`` bounds the wait for a free simulator."""
        self._start = start
        self._borrow_limit_s = borrow_limit_s
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._simulators: dict[int, Simulator] = {}
        self._num_closings = 0
        # Last in, first out: a started simulator is preferred to starting another one.
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for slot in reversed(range(num_workers)):
            self._free.put(slot)
        self.num_starts = 0
        self.num_replaced = 0

    def borrow(self) -> Loan:
        """A living simulator for one episode. Raises :class:`EnvironmentFault` when none comes free or none
        starts.
        """
        try:
            slot = self._free.get(timeout=self._borrow_limit_s)
        except queue.Empty:
            raise EnvironmentFault(
                f"no free ScienceWorld simulator within {self._borrow_limit_s:g} s: all {self._num_workers} "
                "are on loan (raise num_workers, lower the rollout concurrency, "
                "or close finished environments)"
            ) from None
        try:
            return Loan(slot=slot, simulator=self._live_simulator(slot))
        except BaseException:
            self._free.put(slot)
            raise

    def release(self, loan: Loan) -> None:
        """Return a borrowed simulator, dead or alive; call it once per loan."""
        if not loan.simulator.is_alive():
            loan.simulator.close()
        self._free.put(loan.slot)

    def close(self) -> None:
        """Kill every simulator, also those on loan (their episodes end in a fault). May be called twice."""
        with self._lock:
            simulators = list(self._simulators.values())
            self._simulators.clear()
            self._num_closings += 1
        for simulator in simulators:
            simulator.close()

    def _live_simulator(self, slot: int) -> Simulator:
        with self._lock:
            simulator, num_closings = self._simulators.get(slot), self._num_closings
        if simulator is not None and simulator.is_alive():
            return simulator
        if simulator is not None:
            simulator.close()
        started = self._start()
        with self._lock:
            self.num_starts += 1
            self.num_replaced += simulator is not None
            if num_closings == self._num_closings:
                self._simulators[slot] = started
                return started
        started.close()
        raise EnvironmentFault("the ScienceWorld pool was closed while a simulator started")
