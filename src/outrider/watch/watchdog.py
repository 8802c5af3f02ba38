"""A run without progress says where it waits: one line to the display, and never an end of the run."""

import sys
import threading
import time
from typing import Final

from outrider.rollout.whereabouts import RolloutStatus
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
        self,
        display: Progress,
        *,
        rollout_status: RolloutStatus,
        after_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._display = display
        self._rollout_status = rollout_status
        self._after_s = after_s
        self._clock = clock
        self._name, self._done = "the beginning", 0
        self._total: int | None = None
        self._reported = self._last_note = clock()
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
        time_left: TimeLeft | None = None,
    ) -> None:
        """Handed on."""
        self._reported = self._clock()
        self._name, self._total, self._done = name, total, done
        self._display.stage(name, total, done=done, num_parallel=num_parallel, time_left=time_left)

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
        last = max(self._reported, self._rollout_status.changed)
        if now - max(last, self._last_note) >= self._after_s:
            self._last_note = now
            self._display.note(
                f"NO PROGRESS for {now - last:.0f} s {self._describe_location()}; {_program()}"
            )

    def _describe_location(self) -> str:
        stage = self._name if self._total is None else f"{self._name} {self._done}/{self._total}"
        locations = [
            f"{group.num_rollouts} in {group.location} (longest: {group.longest}, {group.seconds:.0f} s)"
            for group in self._rollout_status.snapshot()
        ]
        return f"in {stage}; rollouts: {', '.join(locations) or 'none is open'}"


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
