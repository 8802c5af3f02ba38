"""An event loop for a batch of rollouts, whether or not the caller has one."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, also where a loop runs in this thread already, as in a notebook: then in a thread of
    its own.

    An interruption cancels what runs there and is raised once that has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def run_main() -> T:
        if not started.set_running_or_notify_cancel():
            main.close()
            raise asyncio.CancelledError
        started.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await main

    finished = threading.Event()

    def run_in_loop() -> T:
        try:
            return asyncio.run(run_main())
        finally:
            finished.set()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts") as pool:
        try:
            return pool.submit(run_in_loop).result()
        except BaseException:
            if not started.cancel():
                loop, task = started.result()
                assert task is not None  # a coroutine runs in one
                with suppress(RuntimeError):  # the loop has closed: it was the batch that broke
                    loop.call_soon_threadsafe(task.cancel)
                # An interruption within `submit` leaves the pool without the thread that it has started.
                finished.wait()
            raise
