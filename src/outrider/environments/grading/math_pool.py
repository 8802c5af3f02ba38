"""A few warm grading processes for mathematical answers, shared by all threads of this process."""

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.environments.grading.math_worker import ALIVE, STALL_SECONDS
from outrider.errors import EnvironmentFault
from outrider.tools.call_clock import uncounted
from outrider.tools.fair_pool import FairPool
from outrider.tools.once import SingleFlightCache

_NUM_PROCESSES = max(2, min(8, (os.cpu_count() or 1) // 4))  # a process starts only if all others are busy
_MAX_VERDICTS = 65_536
_CPU_SECONDS = 5  # of a pair; the slowest of the vectors takes 0.3
_START_SECONDS = 300.0  # a cold disk
# The worker must be of the same source tree as this module, whatever else is installed.
_BOOT = """
import sys
sys.path.insert(0, sys.argv[2])
from outrider.environments.grading.math_worker import main
main(int(sys.argv[1]), int(sys.argv[3]))
"""
_SOURCE = str(Path(__file__).resolve().parents[3])
# One hash seed, so that the same answers get the same verdicts; one thread, so that the trainer's are not
# disturbed.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def math_pool() -> "MathPool":
    """The pool of this process; a forked child gets one of its own."""
    return _process_pool(os.getpid())


@functools.cache
def _process_pool(_: int) -> "MathPool":
    return MathPool()


class MathPool:
    """Evaluates pairs of expressions, each within limits of time and memory (``math_worker``). Its processes
    start when needed.
    """

    def __init__(self, num_processes: int = _NUM_PROCESSES, cpu_seconds: int = _CPU_SECONDS) -> None:
        self._num_processes = num_processes
        self._workers = FairPool([_Worker(cpu_seconds) for _ in range(num_processes)])
        self._verdicts: SingleFlightCache[bool | None] = SingleFlightCache(_MAX_VERDICTS)

    def same_values(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """For every pair whether its values are equal; None if that cannot be decided within the limits.

        Equal pairs are evaluated once, whoever asks. Neither the wait nor the evaluation, which has limits of
        its own, is part of the time limit of an environment's call. Raises EnvironmentFault when a process
        cannot be started or is lost twice in a row.
        """
        return [self._verdicts.get(pair, functools.partial(self._evaluate, pair)) for pair in pairs]

    def _evaluate(self, pair: tuple[str, str]) -> bool | None:
        worker = self._workers.acquire()
        try:
            with uncounted():
                try:
                    return worker.evaluate([pair])[0]
                except (OSError, ValueError):
                    return worker.evaluate([pair])[0]
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"math grading: the process was lost twice: {error}") from error
        finally:
            self._workers.release(worker)

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        workers = [self._workers.acquire() for _ in range(self._num_processes)]
        for worker in workers:
            worker.stop()
            self._workers.release(worker)


class _Worker:
    """One grading process. Not thread-safe; starts at the first call and again after a loss."""

    def __init__(self, cpu_seconds: int) -> None:
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def evaluate(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Raises OSError or ValueError when the process is lost; it is ended then."""
        done = False
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(pairs).encode() + b"\n")
            process.stdin.flush()
            while (verdicts := _line(process, 2 * STALL_SECONDS)) == ALIVE:
                pass
            done = True
        finally:
            # also when this thread was interrupted: a late answer must not become that of the next call
            if not done:
                self.stop()
        return list(verdicts)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(os.getpid()), _SOURCE, str(self._cpu_seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
            _line(self._process, _START_SECONDS)
        return self._process

    def stop(self) -> None:
        """Kill it; the kernel then ends its child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # what could not be sent
                        stream.close()
        self._process = None


def _line(process: "subprocess.Popen[bytes]", seconds: float) -> Any:
    """The next line of the process, which comes as a whole. TimeoutError, or ValueError when it has ended."""
    assert process.stdout is not None
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    if not ready.poll(1000 * seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    return json.loads(process.stdout.readline())
