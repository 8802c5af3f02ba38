"""SIGINT (Ctrl-C) and SIGTERM: the first asks for a stop, a second one of either kind ends the process at
once.

The second one is a thread's work, which hears of a signal where the interpreter's own C handler tells it
(:func:`signal.set_wakeup_fd`): the main thread may be inside a long operation of torch, in a clean-up that
waits, or in code that swallows KeyboardInterrupt, and would never come to run a handler.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Final

from pydantic_core import SchemaError

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_REPEAT_S: Final = 0.1  # `timeout` signals its child and the child's group: one request, which comes twice
_BEHIND_S: Final = 0.001  # what Python calls back ends within it, mostly; else once more
_MESSAGE_TIMEOUT_S: Final = 0.5  # a pipe that nobody reads must not hold up the end
_SHOW_CURSOR: Final = b"\x1b[?25h"  # the live display has hidden it
STOPPING: Final = "stopping (an update in flight ends first); Ctrl-C again ends at once"  # within 80 columns
_STOP_MESSAGE: Final = (
    b"\noutrider: stopping (an update in flight ends first); what is finished goes into a checkpoint. "
    b"A second signal ends at once.\n"
)
_INTERRUPT_MESSAGE: Final = (
    b"\noutrider: stopping (an update in flight ends first); what is finished goes into a checkpoint. "
    b"A second interruption ends the run at once.\n"
)
_live: set[Callable[[], None]] = set()
_own: list[None] = []  # an element for every signal of ours on its way, which is no second one


@contextmanager
def exit_on_second_signal(resume_hint: str) -> Iterator[None]:
    """Within the block a second SIGINT or SIGTERM, whichever came first, ends the process with status 128 +
    its number.

    Nothing is cleaned up: what is on disk is what a kill leaves, and checkpoints are whole because they come
    by a rename. ``resume_hint`` is told in the one line that is written. In another thread than the main
    one, which alone may listen to signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _own.clear()  # of a time when nobody listened
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(read_fd, resume_hint), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write_fd)  # which ends the thread


@contextmanager
def reraise_lost_interrupts() -> Iterator[None]:
    """Within the block a KeyboardInterrupt that Python would print and forget is raised again a moment later.

    It cannot raise one out of what it calls back itself: a finaliser, or the end of an import's lock, which
    every import has. In another thread than the main one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is not KeyboardInterrupt:
            before(lost)
            return
        # No Thread object: whoever was called back may hold the locks that one takes.
        _thread.start_new_thread(_interrupt_again, (hook.__code__,))

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt_again(code: CodeType) -> None:
    """Once the main thread has left the hook, which would lose it too: on a busy machine it takes a while."""
    time.sleep(_BEHIND_S)
    while _is_running(code):
        time.sleep(_BEHIND_S)
    _own.append(None)
    # A signal: interrupt_main() would not wake a main thread that waits for a lock or a socket. One of the
    # process and not of that thread, which may have it blocked.
    os.kill(os.getpid(), signal.SIGINT)


def _is_running(code: CodeType) -> bool:
    """Whether the main thread runs it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def is_interruption(error: BaseException) -> bool:
    """Whether an error is a KeyboardInterrupt, also in other words: one that meets pydantic while it builds a
    schema becomes the text of its error, which an import then fails with.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        if isinstance(seen, SchemaError) and str(seen).rstrip().endswith("KeyboardInterrupt:"):
            return True
        seen = seen.__cause__
    return False


def clear_before_exit(clear: Callable[[], None]) -> Callable[[], None]:
    """Have a live display cleared before the line that a second signal writes, which it would draw over. What
    is returned takes that back.

    ``clear`` is called in a thread of its own, and not waited for longer than half a second.
    """
    _live.add(clear)
    return lambda: _live.discard(clear)


@contextmanager
def stop_on_first_signal(request_stop: Callable[[], object]) -> Iterator[threading.Event]:
    """Within the block the first SIGINT or SIGTERM calls ``request_stop``. The event tells of an interruption
    by SIGINT.

    The request runs in the signal handler: it must take no lock. Unless it returns True, for a display that
    says so itself, one line on stderr says what happens now.
    """
    interrupted, stop_requested = threading.Event(), threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop_requested.is_set():
            return
        stop_requested.set()
        if number == signal.SIGINT:
            interrupted.set()
        if request_stop() is not True:
            os.write(2, _STOP_MESSAGE)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_interrupt(request_stop: Callable[[], object]) -> Iterator[threading.Event]:
    """Within the block the first SIGINT calls ``request_stop``, and a second one raises KeyboardInterrupt, as
    it does without this: for a program or a notebook that goes on afterwards. The event tells of the first.
    In another thread than the main one, or where somebody else handles SIGINT, this does nothing.
    """
    stop_requested = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield stop_requested
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop_requested.is_set():
            signal.default_int_handler(number, frame)
        stop_requested.set()
        request_stop()
        os.write(2, _INTERRUPT_MESSAGE)

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop_requested
    finally:
        signal.signal(signal.SIGINT, before)


def _listen(read_fd: int, resume_hint: str) -> None:
    first: tuple[int, float] | None = None
    with open(read_fd, "rb", buffering=0) as numbers:
        while read := numbers.read(1):
            number, now = read[0], time.monotonic()
            if number not in _SIGNALS:
                continue
            if number == signal.SIGINT and _own:
                _own.pop()
                continue
            if first is None:
                first = number, now
            elif number != first[0] or now - first[1] > _REPEAT_S:
                _end(number, resume_hint)


def _end(number: int, resume_hint: str) -> None:
    # a lock of the display that is never freed costs its line only
    for work in (_clear, lambda: _print_exit(resume_hint)):
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(_MESSAGE_TIMEOUT_S)
    os._exit(128 + number)


def _clear() -> None:
    for clear in list(_live):
        clear()


def _print_exit(resume_hint: str) -> None:
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)
    os.write(2, f"\noutrider: ended at once by a second signal{resume_hint}\n".encode())
