"""The time limit of an environment's call."""

import asyncio
import threading
import time

import pytest

from outrider.errors import EnvironmentFault
from outrider.rollout.faults import run_guarded


def test_an_answer_that_came_in_time_counts_though_the_loop_was_busy_for_longer_than_the_limit() -> None:
    async def main() -> str:
        answered = threading.Event()

        def call() -> str:
            answered.set()
            return "in time"

        waiting = asyncio.ensure_future(run_guarded(call, timeout_s=0.05))
        await asyncio.sleep(0)  # the call begins
        assert answered.wait(10)
        time.sleep(0.3)  # a prefill that takes the loop for longer than the limit
        return await waiting

    assert asyncio.run(main()) == "in time"


def test_no_answer_is_a_fault_at_the_limit() -> None:
    never = threading.Event()
    try:
        with pytest.raises(EnvironmentFault, match=r"no answer within 0\.05 s"):
            asyncio.run(run_guarded(lambda: never.wait(60), timeout_s=0.05))
    finally:
        never.set()
