"""A fork server for mutants: ``python -m benchmarks.mutation_worker ORDERS``.

It imports pytest and the heavy libraries once. Changes of functions go into forks of a process that has
collected the tests; a change of a constant, a class body or a default needs its file imported anew, in a fork
of a process that has not imported it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.mutation_children import (
    KILLED,
    NO_IMPORT,
    NOT_SWAPPED,
    SURVIVED,
    ChangedFile,
    live_functions,
    run_child,
    swap_code,
)
from benchmarks.mutation_pytest import MARKERS, OPTIONS, Baseline, Frugal, Serving, of_file, run_items

Job = Mapping[str, Any]
Order = Mapping[str, Any]
Items = Mapping[str, pytest.Item]
Seconds = Mapping[str, float]
PRELOADED = (np, torch, transformers)
FACTOR = 10.0  # a mutant's limit: so many times the processor time that its tests take unchanged
SPARE, WALL_SPARE = 4.0, 120.0  # seconds on top: forking, importing; a busy machine
ANEW = 20.0  # and for importing the package and collecting the tests
FOREVER = {"cpu_seconds": 3600.0, "wall_seconds": 7200.0}


class Worker:
    """The orders of several targets: jobs, tests with the place of their baseline, and the record for
    results.
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self.orders = orders
        self.sources = sorted({source for order in orders for source in order["sources"]})
        self.kept = {test: Path(file) for order in orders for test, file in order["tests"].items()}
        self.baseline = Baseline()

    def run(self) -> int:
        """First what forks from collected tests, then the rest."""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                pytest.main([*OPTIONS, *MARKERS, *self.kept], plugins=[Serving(self.sources, self._serve)])
                code = 0 if all(file.exists() for file in self.kept.values()) else 1
            finally:
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
            wrong = [test for test, file in self.kept.items() if not file.exists()]
            print(f"the unchanged tests do not pass in a fork: {', '.join(wrong)}", file=sys.stderr)
            return 1
        self._read()
        for order in self.orders:
            left = [job for job in order["jobs"] if job["key"] not in _done(order)]
            if left and not self._controlled(order, left[0]):
                print(f"{left[0]['file']} does not pass unchanged when it is imported anew", file=sys.stderr)
                return 1
            for job in left:
                self._timed(
                    order,
                    job,
                    lambda order=order, job=job: _anew(job, order, self._of(order)),
                    self._of(order),
                    ANEW,
                )
        return 0

    def _serve(self, serving: Serving, items: Sequence[pytest.Item]) -> None:
        for test, file in self.kept.items():
            if not file.exists():
                mine = of_file(items, test)
                run_child(lambda mine=mine, file=file: serving.measure(mine, file), **FOREVER)
        if not all(file.exists() for file in self.kept.values()):
            return
        self._read()
        functions = live_functions(self.sources)
        by_name = {item.nodeid: item for item in items}
        for order in self.orders:
            for job in order["jobs"]:
                lines = range(*job["lines"])
                if job["function"] is not None and not serving.imported[job["path"]] & set(lines):
                    found = functions.get((job["path"], job["function"]), [])
                    self._swapped(serving, order, job, found, by_name)

    def _swapped(self, serving: Serving, order: Order, job: Job, functions: Any, by_name: Items) -> None:
        lines = self.baseline.tests_of_line.get(job["path"], {})
        wanted = {test for line in range(*job["lines"]) for test in lines.get(line, [])}
        seconds = {test: time for test, time in self._of(order).items() if test in wanted}
        if not seconds:
            self._note(order, job, "not run", 0.0, 0)
            return

        def work() -> int:
            if not swap_code(functions, job["source"], job["path"]):
                return NOT_SWAPPED
            run_items([by_name[test] for test in sorted(seconds, key=seconds.__getitem__)], serving.failed)
            return KILLED if serving.failed else SURVIVED

        self._timed(order, job, work, seconds, SPARE)

    def _controlled(self, order: Order, job: Job) -> bool:
        seconds = self._of(order)
        fastest = {test: seconds[test] for test in sorted(seconds, key=seconds.__getitem__)[:5]}
        unchanged = {**job, "source": Path(job["path"]).read_text()}
        return run_child(lambda: _anew(unchanged, order, fastest), **FOREVER) == "survived"

    def _timed(self, order: Order, job: Job, work: Callable[[], int], seconds: Seconds, spare: float) -> None:
        begun = time.monotonic()
        cpu, wall = sum(seconds.values()), sum(self.baseline.wall[test] for test in seconds)
        limit = FACTOR * (wall + spare) + WALL_SPARE
        result = run_child(work, cpu_seconds=FACTOR * cpu + spare, wall_seconds=limit)
        if result != "not swapped":
            self._note(order, job, result, time.monotonic() - begun, len(seconds))

    def _note(self, order: Order, job: Job, result: str, seconds: float, num_tests: int) -> None:
        line = {
            name: value for name, value in job.items() if name not in ("source", "path", "module", "lines")
        }
        line |= {"result": result, "seconds": round(seconds, 2), "num_tests": num_tests}
        with Path(order["record"]).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self) -> None:
        for file in self.kept.values():
            self.baseline.add(file)

    def _of(self, order: Order) -> dict[str, float]:
        """The seconds of an order's tests."""
        names = tuple(test.partition("/tests/")[2] + "::" for test in order["tests"])
        every = self.baseline.seconds.items()
        return {test: time for test, time in every if test.removeprefix("tests/").startswith(names)}


def _anew(job: Job, order: Order, seconds: Seconds) -> int:
    """Run tests with one file imported from the job's source, in a process that has not imported it."""
    ChangedFile(job["module"], job["path"], job["source"]).install()
    frugal = Frugal(seconds)
    code = pytest.main([*OPTIONS, *MARKERS, *order["tests"]], plugins=[frugal])
    if frugal.failed:
        return KILLED
    return SURVIVED if code == pytest.ExitCode.OK else NO_IMPORT


def _done(order: Order) -> set[str]:
    """The jobs of an order that have a line with its tests."""
    file = Path(order["record"])
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    return {line["key"] for line in lines if line["run"] == order["run"]}


def main() -> int:
    """The orders are a JSON file."""
    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "outrider" for name in sys.modules)
    return Worker(json.loads(Path(sys.argv[1]).read_text())).run()


if __name__ == "__main__":
    sys.exit(main())
