"""A bounded cache in which everything is made once, however many threads ask for it at a time."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from outrider.tools.call_clock import CallAbandoned, is_abandoned, uncounted

ValueT = TypeVar("ValueT")


class Once(Generic[ValueT]):
    """Keeps ``size`` values; the one that was asked for longest ago goes first. What raised is not kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Future[ValueT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        """The value of a key, made by the first who asks; the others wait for it, or for its exception.

        Their wait is not part of the time limit of an environment's call. If the first one's call is
        abandoned, the next one makes the value.
        """
        while True:
            try:
                return self._get(key, make)
            except CallAbandoned:
                if is_abandoned():
                    raise

    def _get(self, key: Hashable, make: Callable[[], ValueT]) -> ValueT:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            else:
                mine: Future[ValueT] = Future()
                self._kept[key] = mine
                if len(self._kept) > self._size:
                    self._kept.popitem(last=False)
        if found is not None:
            with uncounted():
                return found.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                if self._kept.get(key) is mine:
                    del self._kept[key]
            mine.set_exception(error)
            raise
        mine.set_result(value)
        return value
