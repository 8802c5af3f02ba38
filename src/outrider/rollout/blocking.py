"""Calls of environments in threads: bounded in time, and whatever breaks in them is a typed fault."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from outrider.errors import EnvironmentFault, InvalidResult, ToolFault
from outrider.tools.call_clock import CallClock

ResultT = TypeVar("ResultT")
_TICK = 0.05  # seconds between two looks at a clock that stands still
_Outcome: TypeAlias = tuple[ResultT, None] | tuple[None, BaseException]


async def run_guarded(call: Callable[..., ResultT], *arguments: object, timeout_s: float) -> ResultT:
    """Run ``call`` in a thread of its own and wait for at most ``timeout_s`` seconds.

    Raises ToolFault, EnvironmentFault or InvalidResult and nothing else; a cancellation always gets through.
    The thread is a daemon and not one of a pool: a call that hangs can take no place from others (whose wait
    would then look like slowness) and cannot keep the process alive. Waiting for shared processes is not
    counted (:mod:`outrider.tools.call_clock`); a call that nobody waits for any more leaves their queues.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Outcome[ResultT]] = loop.create_future()
    clock = CallClock(timeout_s)

    def deliver(outcome: _Outcome[ResultT]) -> None:
        if not future.done():
            future.set_result(outcome)

    def run() -> None:
        with clock.running_here():
            outcome = _run_call(call, *arguments)
        # the loop is closed: nobody waits for a call that outlived the run
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=run, daemon=True).start()
    try:
        # Not asyncio.wait_for: on Python 3.11 it swallows a cancellation that comes once the answer is there,
        # and a worker that goes on after a stop waits for a batch that never forms. A loop that was busy for
        # longer than the limit sees the answer and the limit in one go: the answer counts.
        while not future.done() and (left := clock.seconds_left()) > 0:
            await asyncio.wait({future}, timeout=max(left, _TICK))
        if not future.done():
            raise EnvironmentFault(f"no answer within {timeout_s:g} s")
    finally:
        if not future.done():
            clock.abandon()
    return _unwrap(future.result())


def run_timed(call: Callable[..., ResultT], *arguments: object, timeout_s: float) -> ResultT:
    """:func:`guarded` for code outside of an event loop: it blocks, and raises the same."""
    outcomes: queue.SimpleQueue[_Outcome[ResultT]] = queue.SimpleQueue()
    clock = CallClock(timeout_s)

    def run() -> None:
        with clock.running_here():
            outcomes.put(_run_call(call, *arguments))

    threading.Thread(target=run, daemon=True).start()
    outcome: _Outcome[ResultT] | None = None
    try:
        while outcome is None and (left := clock.seconds_left()) > 0:
            with contextlib.suppress(queue.Empty):
                outcome = outcomes.get(timeout=max(left, _TICK))
    finally:
        if outcome is None:
            clock.abandon()
    if outcome is None:
        raise EnvironmentFault(f"no answer within {timeout_s:g} s")
    return _unwrap(outcome)


def _run_call(call: Callable[..., ResultT], *arguments: object) -> _Outcome[ResultT]:
    try:
        return call(*arguments), None
    except BaseException as error:  # SystemExit too: a tool that exits must not end the run
        return None, error


def _unwrap(outcome: _Outcome[ResultT]) -> ResultT:
    result, error = outcome
    if isinstance(error, ToolFault | EnvironmentFault | InvalidResult):
        raise error
    if error is not None:
        raise EnvironmentFault(f"{type(error).__name__}: {error}") from error
    return result  # type: ignore[return-value]  # without an error there is a result
