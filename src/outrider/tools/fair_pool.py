"""Things that many threads share one at a time, handed out in the order in which the threads asked."""

import threading
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from outrider.tools.call_clock import CallAbandoned, is_abandoned, uncounted

ItemT = TypeVar("ItemT")


class FairPool(Generic[ItemT]):
    """First come, first served; of several idle items the one used last, which is warm.

    ``queue.Queue`` is not fair: a thread that gives an item back and asks again takes it before the one that
    was woken for it.
    """

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._idle = list(items)
        self._waiting: deque[_Turn[ItemT]] = deque()
        self._lock = threading.Lock()

    def acquire(self) -> ItemT:
        """An item for this thread alone; waits behind all who asked before. Give it back with
        :meth:`give`.

        The wait is not part of the time limit of an environment's call. Raises CallAbandoned if nobody waits
        for that call any more.
        """
        turn: _Turn[ItemT] = _Turn()
        try:
            with self._lock:
                if self._idle and not self._waiting:
                    return self._idle.pop()
                self._waiting.append(turn)
            with uncounted(turn.ready.set):
                turn.ready.wait()
            if is_abandoned():
                raise CallAbandoned
        except BaseException:  # interrupted: leave the line, or pass on what was handed over just now
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
            for item in turn.item:
                self.release(item)
            raise
        return turn.item[0]

    def release(self, item: ItemT) -> None:
        """Hand the item to the thread that has waited longest; it is idle when nobody waits."""
        with self._lock:
            if not self._waiting:
                self._idle.append(item)
                return
            turn = self._waiting.popleft()
            turn.item.append(item)
        turn.ready.set()


class _Turn(Generic[ItemT]):
    """One thread's place in the line."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.item: list[ItemT] = []
