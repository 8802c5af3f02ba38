"""Rollouts of the next step beside the update of this one (``cluster.max_staleness`` 1).

A thread waits for the processes that play; what they gather is taken in only when the step before is on
record. So no line of this process runs beside another one that reads what it changes, and the order of
everything is that of a run that plays and trains in turn: the same bits, however fast either is.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from outrider.train.components import Components
from outrider.train.data.task_sampling import SampledStep, play_step
from outrider.train.state.queue import QueuedStep

_TICK_S: Final = 0.5  # how long the person who watches may have to wait
_LEAVE_S: Final = 10.0  # a thread that replaces a process may take longer to end


class _Cancelled(Exception):
    """Ends the thread: nobody wants these rollouts any more."""


class RolloutPrefetch:
    """One step's rollouts, under way. The methods of the first part are called by the thread that plays.

    ``play`` gets this object, and returns the step; :meth:`sent` and :meth:`ended` have to be called in it.
    """

    def __init__(
        self, play: Callable[["RolloutPrefetch"], SampledStep], *, counts: list[dict[str, int]]
    ) -> None:
        self._counts = counts
        self._sent, self._done, self._released = (threading.Event() for _ in range(3))
        self._is_cancelled = False
        self._sampled: SampledStep | None = None
        self._error: BaseException | None = None
        self._began = time.perf_counter()
        self._seconds = 0.0
        self.progress = ""
        self._thread = threading.Thread(
            target=self._run, args=(play,), name="rollouts of the next step", daemon=True
        )
        self._thread.start()

    def _run(self, play: Callable[["RolloutPrefetch"], SampledStep]) -> None:
        try:
            self._sampled = play(self)
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._sent.set()
            self._done.set()

    def mark_sent(self) -> None:
        """Those who play have all that they need of this process."""
        self._sent.set()
        self.raise_if_cancelled()

    def mark_done(self) -> None:
        """The rollouts are there; waits until this process may take in what came of them."""
        if not self._done.is_set():  # else further ones for groups that a filter left out
            self._seconds = time.perf_counter() - self._began
        self._done.set()
        self._released.wait()
        self.raise_if_cancelled()

    def on_finished(self, num_done: int, num_total: int) -> None:
        """Progress of the rollouts, kept for :meth:`wait`."""
        self.progress = f"{num_done}/{num_total}"
        self.raise_if_cancelled()

    def raise_if_cancelled(self) -> None:
        """To be called again and again while the rollouts are waited for: ends the thread once nobody wants
        them.
        """
        if self._is_cancelled:
            raise _Cancelled

    def wait_until_sent(self) -> None:
        """From here on this process may change what rollouts begin with. Raises what the thread raised."""
        self._sent.wait()
        self._raise()

    def wait(self, *, on_tick: Callable[[str], None]) -> None:
        """Until the rollouts have ended: engines are idle now, and may get new weights. Raises what the
        thread raised.
        """
        while not self._done.wait(_TICK_S):
            on_tick(self.progress)
        self._raise()

    def collect(self) -> QueuedStep:
        """Take in what came of them. Raises what the thread raised."""
        self._released.set()
        self._thread.join()
        self._raise()
        assert self._sampled is not None
        return QueuedStep(sampled=self._sampled, counts=self._counts, seconds=self._seconds)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Nothing of these rollouts is taken in, and their thread ends: it must not see the processes end
        that it waits for, which it would replace.
        """
        self._is_cancelled = True
        self._released.set()
        self._thread.join(_LEAVE_S)


@contextmanager
def prefetch_rollouts(
    parts: Components, report: SampledStep, *, step: int, is_last: bool
) -> Iterator[RolloutPrefetch | None]:
    """Around the update of ``report``: the rollouts of the next ``step`` under way; None where the run plays
    and trains in turn, or ends. They are given up where the update breaks.
    """
    remote, cluster = parts.remote, parts.settings.cluster
    if remote is None or not cluster.max_staleness or cluster.in_flight or is_last:
        yield None
        return

    def play(prefetch: RolloutPrefetch) -> SampledStep:
        rollouts = remote.rollouts(parts, training=True, on_finished=prefetch.on_finished, prefetch=prefetch)
        return play_step(parts, rollouts, step=step, cursor=report.cursor)

    prefetch = RolloutPrefetch(play, counts=parts.algorithm.counts())
    try:
        prefetch.wait_until_sent()
        yield prefetch
    except BaseException:
        prefetch.cancel()
        raise
