"""SIGINT (Ctrl-C) and SIGTERM: the first requests a stop, a second one of either kind ends the process.

A thread handles the second one. The interpreter's C handler writes to its pipe
(:func:`signal.set_wakeup_fd`), because the main thread may never run a Python handler: it may be inside a
long operation of torch, in a clean-up that waits, or in code that swallows KeyboardInterrupt.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Final

from pydantic_core import SchemaError

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_REPEAT_S: Final = 0.1  # `timeout` signals its child and the child's group: one request that arrives twice
_BEHIND_S: Final = 0.001  # a callback of the interpreter usually ends within it; else wait once more
_REPEAT_LOST_S: Final = 0.05
_MESSAGE_TIMEOUT_S: Final = 0.5  # a full pipe without a reader must not delay the exit
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
_own: list[None] = []  # one element per pending signal that this module sent, which is no second request


@contextmanager
def exit_on_second_signal(resume_hint: str) -> Iterator[None]:
    """Within the block a second SIGINT or SIGTERM ends the process with status 128 + its number.

    Nothing is cleaned up, as after a kill; checkpoints are complete because they are written by a rename.
    One line with ``resume_hint`` is printed. Outside of the main thread, which alone can handle signals, this
    does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _own.clear()  # left from before this block
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
    """Within the block a KeyboardInterrupt that Python would print and ignore is raised again a moment later.

    Python cannot raise an exception from code that it calls back itself, such as a finaliser or the end of
    the lock that every import has. Outside of the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is not KeyboardInterrupt:
            before(lost)
            return
        handler = signal.getsignal(signal.SIGINT)
        handled: list[None] = []

        def handle(number: int, frame: FrameType | None) -> None:
            handled.append(None)
            signal.signal(signal.SIGINT, handler)
            if callable(handler):
                handler(number, frame)

        signal.signal(signal.SIGINT, handle)
        # No Thread object: the code that was called back may hold the locks that one takes.
        _thread.start_new_thread(_interrupt_again, (hook.__code__, handle, handled))

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt_again(hook: CodeType, handle: object, handled: Sequence[None]) -> None:
    """Send SIGINT until ``handle`` has run and filled ``handled``, but not before the main thread has left
    the hook, which would lose it too. If another SIGINT has arrived in the meantime, none is sent.
    """
    time.sleep(_BEHIND_S)
    while _is_running(hook):
        time.sleep(_BEHIND_S)
    # Repeatedly: a signal that arrives just before the main thread waits for a lock does not wake it.
    # The first one is sent to any handler: the main thread may have installed another one in the meantime.
    while not handled:
        _own.append(None)
        # interrupt_main() would not wake a main thread that waits for a lock or a socket. The signal goes to
        # the process, because that thread may block it.
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_REPEAT_LOST_S)
        if signal.getsignal(signal.SIGINT) is not handle:
            return


def _is_running(code: CodeType) -> bool:
    """Whether the main thread runs it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def is_interruption(error: BaseException) -> bool:
    """Whether an error was caused by a KeyboardInterrupt. If one is raised while pydantic builds a schema,
    only the text of pydantic's error mentions it, and an import fails with that error.
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
    """Register a function that clears a live display before a second signal prints its line, which the
    display would overwrite. Returns a function that unregisters it.

    ``clear`` runs in its own thread for at most half a second.
    """
    _live.add(clear)
    return lambda: _live.discard(clear)


@contextmanager
def stop_on_first_signal(request_stop: Callable[[], object]) -> Iterator[threading.Event]:
    """Within the block the first SIGINT or SIGTERM calls ``request_stop``. The event is set by SIGINT.

    The function runs in the signal handler, so it must not take a lock. Unless it returns True, because a
    display reports the stop, one line on stderr does.
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
    """Within the block the first SIGINT calls ``request_stop`` and sets the event; a second one raises
    KeyboardInterrupt as usual, for a program or notebook that continues afterwards. Outside of the main
    thread, or if the program has its own SIGINT handler, this does nothing. The handler of ``asyncio.run``
    is replaced, too, because it cannot act while the block runs.
    """
    stop_requested = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    owner = getattr(getattr(before, "func", None), "__self__", None)  # asyncio.run sets a partial function
    is_default = before is signal.default_int_handler or type(owner).__module__ == "asyncio.runners"
    if threading.current_thread() is not threading.main_thread() or not is_default:
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
    # If the display never releases its lock, only its own line is missing.
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
