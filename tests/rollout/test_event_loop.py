"""A batch is played to its end also where a loop runs already, as in a notebook."""

import asyncio
import signal
import threading

import pytest

from outrider.rollout.scheduler import run_to_end


async def _thread() -> int:
    await asyncio.sleep(0)
    return threading.get_ident()


async def _broken() -> None:
    await asyncio.sleep(0)
    raise LookupError("of the batch")


async def _inside(main: "asyncio._CoroutineLike[object]") -> object:
    return run_to_end(main)  # blocks the loop that it is called from, as a cell of a notebook does


def test_without_a_loop_it_is_played_here() -> None:
    assert run_to_end(_thread()) == threading.get_ident()


def test_inside_a_loop_it_is_played_beside_it() -> None:
    assert asyncio.run(_inside(_thread())) not in (None, threading.get_ident())


@pytest.mark.parametrize("inside", [False, True])
def test_what_breaks_there_is_raised_here(inside: bool) -> None:
    with pytest.raises(LookupError, match="of the batch"):
        asyncio.run(_inside(_broken())) if inside else run_to_end(_broken())


def test_an_interruption_ends_what_is_played_and_then_is_raised() -> None:
    ended = threading.Event()

    async def endless() -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def as_a_kernel() -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                run_to_end(endless())
        finally:
            signal.signal(signal.SIGINT, before)
        assert ended.is_set()

    asyncio.run(as_a_kernel())
