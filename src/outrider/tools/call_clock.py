"""The time limit of an environment's call. It does not run while the call waits for a shared process."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class CallAbandoned(Exception):
    """Raised in a waiting call whose caller no longer waits for it."""


class CallClock:
    """Measures one call that runs in a thread of its own; safe to use from several threads.

    Waiting in a queue behind the calls of other episodes, and work that has a limit of its own (grading,
    code in the sandbox), is not the call's time: what one policy writes must not become a fault of another.
    """

    def __init__(self, limit_s: float) -> None:
        self._lock = threading.Lock()
        self._left_s = limit_s
        self._num_pauses = 0
        self._since = time.monotonic()
        self._is_abandoned = False
        self._wake_ups: list[Callable[[], None]] = []

    def seconds_left(self) -> float:
        """Seconds until the limit if the clock runs from now on; 0 or less at the limit."""
        with self._lock:
            return self._left_s - (0.0 if self._num_pauses else time.monotonic() - self._since)

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the call any more."""
        return self._is_abandoned

    def abandon(self) -> None:
        """Nobody waits for the call any more: it leaves the queues that it waits in."""
        with self._lock:
            self._is_abandoned = True
            wake_ups = list(self._wake_ups)
        for wake_up in wake_ups:
            wake_up()

    @contextlib.contextmanager
    def paused(self, wake_up: Callable[[], None]) -> Iterator[None]:
        """Stop the clock for the block; ``wake_up`` is called if the call is abandoned meanwhile."""
        with self._lock:
            if not self._num_pauses:
                self._left_s -= time.monotonic() - self._since
            self._num_pauses += 1
            self._wake_ups.append(wake_up)
            is_abandoned = self._is_abandoned
        try:
            if is_abandoned:
                wake_up()
            yield
        finally:
            with self._lock:
                self._wake_ups.remove(wake_up)
                self._num_pauses -= 1
                self._since = time.monotonic()

    @contextlib.contextmanager
    def running_here(self) -> Iterator[None]:
        """Make this the clock of the calling thread for the block."""
        _THREAD.clock = self
        try:
            yield
        finally:
            _THREAD.clock = None


_THREAD = threading.local()


@contextlib.contextmanager
def uncounted(wake_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Stop the clock of this thread's call, if it has one; see :meth:`CallClock.paused`."""
    clock: CallClock | None = getattr(_THREAD, "clock", None)
    if clock is None:
        yield
        return
    with clock.paused(wake_up):
        yield


def is_abandoned() -> bool:
    """Whether nobody waits for this thread's call any more."""
    clock: CallClock | None = getattr(_THREAD, "clock", None)
    return clock is not None and clock.is_abandoned
