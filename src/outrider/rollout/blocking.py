"""Calls of environments in threads: bounded in time, and whatever breaks in them is a typed fault."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from outrider.errors import EnvironmentFault, ToolFault

ResultT = TypeVar("ResultT")


async def guarded(call: Callable[..., ResultT], *arguments: object, timeout_s: float) -> ResultT:
    """Run ``call`` in a thread of its own and wait for at most ``timeout_s`` seconds.

    Raises ToolFault or EnvironmentFault and nothing else. The thread is a daemon and not one of a pool: a call that hangs
    can take no place from others (whose wait would then look like slowness) and cannot keep the process alive.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[tuple[ResultT, None] | tuple[None, BaseException]] = loop.create_future()

    def deliver(outcome: tuple[ResultT, None] | tuple[None, BaseException]) -> None:
        if not answered.done():
            answered.set_result(outcome)

    def run() -> None:
        outcome: tuple[ResultT, None] | tuple[None, BaseException]
        try:
            outcome = (call(*arguments), None)
        except BaseException as error:  # SystemExit too: a tool that exits must not end the run
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for a call that outlived the run
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = await asyncio.wait_for(answered, timeout_s)
    except TimeoutError as late:
        raise EnvironmentFault(f"no answer within {timeout_s:g} s") from late
    if isinstance(error, ToolFault | EnvironmentFault):
        raise error
    if error is not None:
        raise EnvironmentFault(f"{type(error).__name__}: {error}") from error
    return result  # type: ignore[return-value]  # without an error there is a result
