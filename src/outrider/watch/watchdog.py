"""A run without progress says where it waits: one line to the display, and never an end of the run."""

import sys
import threading
import time
from typing import Final

from outrider.rollout.whereabouts import Whereabouts
from outrider.watch.progress import Progress
from outrider.watch.stage_clock import Clock, Field, TimeLeft

_LOOKS: Final = 8  # in the time after which a line comes


class WatchedProgress:
    """A display, and a thread that adds a line when nothing was reported and no rollout went on for
    ``after_s`` seconds (0: never).

    The line names the stage, in which calls how many rollouts are and since when, and where the program is.
    It comes again after as long a silence. The thread only reads, so it changes no result.
    """

    def __init__(
        self, display: Progress, *, whereabouts: Whereabouts, after_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._display = display
        self._whereabouts = whereabouts
        self._after_s = after_s
        self._clock = clock
        self._name, self._done = "the beginning", 0
        self._total: int | None = None
        self._reported = self._told = clock()
        self._is_closed = threading.Event()
        if after_s:
            threading.Thread(target=self._watch, daemon=True).start()

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        num_parallel: int = 1,
        left_by: TimeLeft | None = None,
    ) -> None:
        """Handed on."""
        self._reported = self._clock()
        self._name, self._total, self._done = name, total, done
        self._display.stage(name, total, done=done, num_parallel=num_parallel, left_by=left_by)

    def advance(self, done: int, **fields: Field) -> None:
        """Handed on."""
        self._reported, self._done = self._clock(), done
        self._display.advance(done, **fields)

    def note(self, text: str) -> None:
        """Handed on."""
        self._reported = self._clock()
        self._display.note(text)

    def stopping(self) -> bool:
        """Handed on."""
        return self._display.stopping()

    def close(self) -> None:
        """Ends the thread too."""
        self._is_closed.set()
        self._display.close()

    def _watch(self) -> None:
        while not self._is_closed.wait(self._after_s / _LOOKS):
            self.look()

    def look(self) -> None:
        """Say where the run waits, if it is time to."""
        now = self._clock()
        last = max(self._reported, self._whereabouts.changed)
        if now - max(last, self._told) >= self._after_s:
            self._told = now
            self._display.note(f"NO PROGRESS for {now - last:.0f} s {self._where()}; {_program()}")

    def _where(self) -> str:
        stage = self._name if self._total is None else f"{self._name} {self._done}/{self._total}"
        places = [
            f"{one.num_rollouts} in {one.place} (longest: {one.longest}, {one.seconds:.0f} s)"
            for one in self._whereabouts.told()
        ]
        return f"in {stage}; rollouts: {', '.join(places) or 'none is open'}"


def _program() -> str:
    """The innermost function of Outrider that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("outrider."):
        frame = frame.f_back
    if frame is None:
        return "the main thread is outside of Outrider"
    return (
        f"the main thread is in {frame.f_globals['__name__']}.{frame.f_code.co_name}, line {frame.f_lineno}"
    )
