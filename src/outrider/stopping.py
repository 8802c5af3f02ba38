"""SIGINT (Ctrl-C) and SIGTERM: the first asks for a stop, a second one of either kind ends the process at
once.

The second one is a thread's work, which hears of a signal where the interpreter's own C handler tells it
(:func:`signal.set_wakeup_fd`): the main thread may be inside a long operation of torch, in a clean-up that
waits, or in code that swallows KeyboardInterrupt, and would never come to run a handler.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_REPEAT_S: Final = 0.1  # `timeout` signals its child and the child's group: one request, which comes twice
_TELL_S: Final = 0.5  # a pipe that nobody reads must not hold up the end
_SHOW_CURSOR: Final = b"\x1b[?25h"  # the live display has hidden it


@contextmanager
def second_signal_ends(how_to_go_on: str) -> Iterator[None]:
    """Within the block a second SIGINT or SIGTERM, whichever came first, ends the process with status 128 +
    its number.

    Nothing is cleaned up: what is on disk is what a kill leaves, and checkpoints are whole because they come
    by a rename. ``how_to_go_on`` is told in the one line that is written. In another thread than the main
    one, which alone may listen to signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(heard, how_to_go_on), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)  # which ends the thread


@contextmanager
def first_signal_asks(request_stop: Callable[[], None]) -> Iterator[threading.Event]:
    """Within the block the first SIGINT or SIGTERM calls ``request_stop``. The event tells of an interruption
    by SIGINT."""
    interrupted, asked = threading.Event(), threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            return
        asked.set()
        if number == signal.SIGINT:
            interrupted.set()
        request_stop()
        os.write(2, b"\noutrider: stopping; what is finished goes into a checkpoint. A second signal ends at once.\n")

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(heard: int, how_to_go_on: str) -> None:
    first: tuple[int, float] | None = None
    with open(heard, "rb", buffering=0) as numbers:
        while read := numbers.read(1):
            number, now = read[0], time.monotonic()
            if number not in _SIGNALS:
                continue
            if first is None:
                first = number, now
            elif number != first[0] or now - first[1] > _REPEAT_S:
                _end(number, how_to_go_on)


def _end(number: int, how_to_go_on: str) -> None:
    teller = threading.Thread(target=_tell, args=(how_to_go_on,), daemon=True)
    teller.start()
    teller.join(_TELL_S)
    os._exit(128 + number)


def _tell(how_to_go_on: str) -> None:
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)
    os.write(2, f"\noutrider: ended at once by a second signal{how_to_go_on}\n".encode())
