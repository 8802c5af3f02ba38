"""A bounded cache in which everything is made once, however many threads ask for it at a time."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from outrider.tools.call_clock import CallAbandoned, is_abandoned, uncounted

ValueT = TypeVar("ValueT")


class SingleFlightCache(Generic[ValueT]):
    """Keeps ``size`` values; the one that was asked for longest ago goes first. What raised is not kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._futures: OrderedDict[Hashable, Future[ValueT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._futures)

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
            future = self._futures.get(key)
            if future is not None:
                self._futures.move_to_end(key)
            else:
                own_future: Future[ValueT] = Future()
                self._futures[key] = own_future
                if len(self._futures) > self._size:
                    self._futures.popitem(last=False)
        if future is not None:
            with uncounted():
                return future.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                if self._futures.get(key) is own_future:
                    del self._futures[key]
            own_future.set_exception(error)
            raise
        own_future.set_result(value)
        return value
