"""A run's progress on disk, for whoever looks at it from outside: ``live.json`` says where the run is now,
``notes.jsonl`` keeps every line that was told."""

import json
import logging
import os
import platform
import re
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from outrider.watch.progress import SET_UP, Progress
from outrider.watch.stage_clock import Clock, Field, StageClocks, TimeLeft

LIVE: Final = "live.json"
NOTES: Final = "notes.jsonl"
_EVERY_S: Final = 1.0
_STEP: Final = re.compile(r"\bstep (\d+)\b")
_log = logging.getLogger(__name__)


class RecordedProgress:
    """Another display, and what it is told on disk: at most once a second, and at every stage and note.

    Nothing is written before the set-up is over: a run that is refused then, or has nothing left to do, stays
    as it was. A disk that is full ends the record and not the run.
    """

    def __init__(self, inner: Progress, run: Path, *, clock: Clock = time.monotonic) -> None:
        self._inner = inner
        self._run = run
        self._clock = clock
        self._last_write = -float("inf")
        self._is_broken = False
        self._clocks = StageClocks(clock)
        self._stage = self._clocks.begin("", None, done=0, num_parallel=1)
        self._has_begun = False
        self._setup_lines: list[str] = []  # lines of the set-up
        self._state: dict[str, Any] = {
            "pid": os.getpid(),
            "host": platform.node(),
            "stage": "",
            "total": None,
            "done": 0,
            "fields": {},
            "has_ended": False,
        }

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        done: int = 0,
        num_parallel: int = 1,
        time_left: TimeLeft | None = None,
    ) -> None:
        """See :class:`~outrider.watch.progress.Progress`."""
        self._inner.stage(name, total, done=done, num_parallel=num_parallel, time_left=time_left)
        self._stage = self._clocks.begin(
            name, total, done=done, num_parallel=num_parallel, time_left=time_left
        )
        self._state |= {"stage": name, "total": total, "done": done, "fields": {}}
        if name != SET_UP and not self._has_begun:
            self._has_begun = True
            for line in self._setup_lines:
                self._guarded(partial(self._append, line))
        self._write()

    def advance(self, done: int, **fields: Field) -> None:
        """See :class:`~outrider.watch.progress.Progress`."""
        self._inner.advance(done, **fields)
        self._stage.advance(done, dict(fields))
        self._state["done"] = done
        self._state["fields"] |= fields
        if self._clock() - self._last_write >= _EVERY_S:
            self._write()

    def note(self, text: str) -> None:
        """See :class:`~outrider.watch.progress.Progress`; the step is the one that the line names, else the
        newest."""
        self._inner.note(text)
        match = _STEP.search(text)
        step = int(match[1]) if match else self._state["done"] if self._state["stage"] == "train" else None
        line = {"time": time.time(), "stage": self._state["stage"], "step": step, "text": text}
        if self._has_begun:
            self._guarded(partial(self._append, json.dumps(line)))
        else:
            self._setup_lines.append(json.dumps(line))

    def stopping(self) -> bool:
        """See :class:`~outrider.watch.progress.Progress`; called in a signal handler, so nothing is
        written."""
        return self._inner.stopping()

    def close(self) -> None:
        """The last state, which says that the process did end its work, and the end of the display."""
        self._state["has_ended"] = True
        self._write()
        self._inner.close()

    def _append(self, line: str) -> None:
        with (self._run / NOTES).open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def _write(self) -> None:
        self._last_write = self._clock()
        if self._has_begun:
            self._guarded(self._replace)

    def _replace(self) -> None:
        # Neither forced to disk nor locked: it says what is now, and a second later something else.
        temporary = self._run / f"{LIVE}.new"
        temporary.write_text(
            json.dumps(self._state | {"line": self._stage.summary(), "time": time.time()}), encoding="utf-8"
        )
        temporary.replace(self._run / LIVE)

    def _guarded(self, write: Any) -> None:
        if self._is_broken:
            return
        try:
            write()
        except (OSError, ValueError, TypeError) as error:
            self._is_broken = True
            _log.warning("the run's progress is no longer recorded, the run goes on: %s", error)
