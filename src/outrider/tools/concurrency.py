"""The time limit of an environment's call. It does not run while the call waits for a shared process."""

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar


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


# Things that many threads share one at a time, handed out in the order in which the threads asked.


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


# A bounded cache in which everything is made once, however many threads ask for it at a time.


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


# A cap on the tool calls of a whole training batch, which does not depend on how fast tools answer.


class CallBudget:
    """Counts the calls that all episodes of a batch execute. Once ``limit`` are spent, the next round is
    refused its calls.

    Whether there are calls left is decided when a round begins and holds for the whole round: decided call by
    call, the fastest tools would choose who is refused, and one seed would not give one batch. So the last
    round may go over the limit by its own calls. Outside a limited batch nothing is refused.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._whole = limit  # of the batch, where several processes play it
        self.num_executed = 0
        self._limited = False
        self._open = True
        self._lock = threading.Lock()

    def set_share(self, begin: int, end: int, num_groups: int) -> None:
        """From the next batch on, have the part of the limit that is due to the groups ``begin`` to ``end``
        of ``num_groups``, if several processes play one batch; the parts of all groups add up to the limit.
        """
        if self._whole is not None:
            self.limit = self._whole * end // num_groups - self._whole * begin // num_groups

    def resume_batch(self, num_spent: int) -> None:
        """Continue a limited batch of whose part ``num_spent`` calls are spent: by another process, or before
        a process was restarted.
        """
        self._limited = self.limit is not None
        self.num_executed = num_spent
        self.begin_round()

    def begin_batch(self, *, limited: bool) -> None:
        """A new batch has all its calls."""
        self._limited = limited and self.limit is not None
        self.num_executed = 0
        self.begin_round()

    def begin_round(self) -> None:
        """Nobody executes anything now: decide about the next round."""
        self._open = not self._limited or self.limit is None or self.num_executed < self.limit

    @property
    def is_open(self) -> bool:
        """Whether calls of this round are executed."""
        return self._open

    def count(self) -> None:
        """One call was executed."""
        with self._lock:
            self.num_executed += 1
