"""Objects for processes of the tests, in a module of few imports: every process imports it anew."""

import asyncio
import os
import re
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from outrider.distributed.processes import PROGRESS, SharedRolloutStatus, location_path
from outrider.distributed.recipe import Recipe
from outrider.distributed.rollouts import Job
from outrider.engines.base import EngineSettings
from outrider.rollout.scheduler import RolloutReport
from outrider.trace import Trace
from outrider.training.async_rollouts import GroupResult


class Unreadable(Exception):
    """Can be pickled and not read again, because its constructor has two arguments."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Worker:
    """Does what a call requests. ``folder`` is that of the cluster, for its location."""

    def __init__(self, folder: str, name: str) -> None:
        self._status = SharedRolloutStatus(location_path(folder, name))

    def echo(self, value: Any) -> Any:
        return value

    def unreadable(self) -> Exception:
        return Unreadable(1, 2)

    def random(self) -> float:
        return float(np.random.random())

    def fail(self, error: BaseException) -> None:
        raise error

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def sleep_in_steps(self, num: int, seconds: float) -> str:
        for _ in range(num):
            time.sleep(seconds)
            PROGRESS.advance()
        return "slept"

    def compute(self, seconds: float) -> str:
        """Hold the interpreter's lock, as a regular expression in a reward does."""
        self._status.set("task/3", "an environment's step")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            re.match(r"(a+)+$", "a" * 22 + "b")
        return "computed"

    def hold_lock(self) -> None:
        self._status.set("task/3", "an environment's step")
        re.match(r"(a+)+$", "a" * 60 + "b")

    async def coroutine(self, value: Any) -> Any:
        await asyncio.sleep(0.01)
        return value


class Player:
    """A worker whose results name the job. The question of a task is what it does to its worker."""

    def __init__(self, folder: str, name: str) -> None:
        self._status = SharedRolloutStatus(location_path(folder, name))

    def build(self, *arguments: Any) -> None:
        """Do nothing."""

    def play(self, job: Job) -> GroupResult:
        self._status.set(f"{job.task.key}/0", "an environment's step")
        if job.task.question == "die":
            os._exit(1)
        if job.task.question == "hold the lock":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if job.task.question == "die once" and job.number < 8:
            time.sleep(0.05)
            os._exit(1)
        reason = f"{job.engine.name} {job.version} {job.training_step} {job.max_calls} {job.number}"
        report = RolloutReport(
            traces=[Trace(task=job.task, modes=job.modes)],
            num_batches=1,
            num_retries=1,
            faults=Counter(retries=1),
            fault_reasons=(reason,),
        )
        return GroupResult(report=report, gathered=[job.task.key], seconds=0.0, num_calls=2)

    def cancel(self) -> None:
        """Do nothing."""


class Reader:
    """Reads the settings of a run in another process."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def read(self) -> tuple[int, str, str]:
        assert "beside_recipe" not in sys.modules
        engine: EngineSettings = self._recipe.settings().engine
        return engine.size, type(engine).__module__, engine.type  # type: ignore[attr-defined]
