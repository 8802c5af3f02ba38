"""Ranks without Ray: children of one process that has done the imports, which meet over real gloo. What Ray
adds is tested in test_faults.py and test_whole_run.py.
"""

import multiprocessing
import time
from pathlib import Path
from typing import Any

from tests.distributed.probe import ProbedRank, rank_settings

_LIMIT_S = 200.0
CONTEXT = multiprocessing.get_context("forkserver")
# one server for these and for tests/training/forked.py, whichever comes first
CONTEXT.set_forkserver_preload(["tests.training.forked_imports", "tests.distributed.probe"])


class ForkedRanks:
    """``size`` processes with the face of :class:`outrider.distributed.learner.RankGroup`."""

    def __init__(self, folder: Path, size: int, **changed: Any) -> None:
        self._pipes = []
        self._processes = []
        for rank in range(size):
            own, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(theirs, rank_settings(folder, **changed), rank, size), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(own)
            self._processes.append(process)
        port = self._ask(self._pipes[:1], "open_store", "127.0.0.1")[0]
        self.built = self.call("build", "127.0.0.1", port)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self._ask(self._pipes, method, *arguments)

    def _ask(self, pipes: list[Any], method: str, *arguments: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send((method, arguments))
        until, found = time.monotonic() + _LIMIT_S, []
        for pipe in pipes:
            if not pipe.poll(max(0.0, until - time.monotonic())):
                self.close()
                raise TimeoutError(f"a rank did not end {method} within {_LIMIT_S} s")
            found.append(pipe.recv())
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)


def _serve(pipe: Any, *arguments: Any) -> None:
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank = ProbedRank(*arguments)
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(rank, method)(*given))
        except Exception as error:
            pipe.send(error)
