"""The cost of a call of the Python tool, and the longest wait of many callers, here and at an earlier commit.

    python -m benchmarks.tool_calls [--against COMMIT] [--calls 200] [--threads 8] [--rounds 3]

Every thread calls again as soon as its call returns. A fair queue serves callers in the order of arrival: its
longest wait is computed from the measured arrivals and service times. Rounds of the two commits alternate, in
processes of their own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from outrider.tools.python.tool import PythonTool, PythonToolConfig

_CODE = "print(sum(i * i for i in range(1000)))"
_ROOT = Path(__file__).resolve().parents[1]


def fair_waits(arrivals: Sequence[float], services: Sequence[float]) -> list[float]:
    """Return the waits in seconds of callers that one server serves in the order of ``arrivals`` (ascending),
    each for its service time.
    """
    free, waits = 0.0, []
    for arrival, service in zip(arrivals, services, strict=True):
        waits.append(max(0.0, free - arrival))
        free = max(free, arrival) + service
    return waits


def measure(num_calls: int, num_threads: int) -> dict[str, float]:
    """Milliseconds: median and 95th percentile of a lone call and of a call among others; slowest wait,
    measured and fair.
    """
    calls: list[tuple[float, float, float]] = []  # arrival, total time, service
    left = iter(range(num_calls))
    lock = threading.Lock()
    with PythonTool(PythonToolConfig()) as tool:
        alone = [timed(tool)[1] for _ in range(num_calls // 4)]

        def caller() -> None:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                found = timed(tool)
                with lock:
                    calls.append(found)

        threads = [threading.Thread(target=caller) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    arrivals, whole, services = zip(*sorted(calls), strict=True)
    waits = [one - service for one, service in zip(whole, services, strict=True)]
    # What the tool takes beside the program (to hand over, to clean up) belongs to the service that others
    # wait for.
    busy = (max(a + w for a, w, _ in calls) - arrivals[0]) / num_calls
    figures = {
        "alone, median": statistics.median(alone),
        "alone, p95": percentile(alone, 0.95),
        "a call's own time, median": statistics.median(services),
        "a call's own time, p95": percentile(services, 0.95),
        "the batch, per call": busy,
        "among others, median": statistics.median(whole),
        "among others, p95": percentile(whole, 0.95),
        "slowest wait": max(waits),
        "slowest wait, fair queue": max(fair_waits(arrivals, [max(busy, service) for service in services])),
    }
    return {name: 1000 * value for name, value in figures.items()}


def timed(tool: PythonTool) -> tuple[float, float, float]:
    """Arrival, seconds until the answer, and seconds of the program itself."""
    start = time.perf_counter()
    result = tool.run(_CODE)
    assert result.status == "ok", result
    return start, time.perf_counter() - start, result.seconds


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def round_of(source: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One measurement in a process of its own, with the library of ``source``."""
    command = [
        sys.executable,
        __file__,
        "--measure",
        "--calls",
        str(arguments.calls),
        "--threads",
        str(arguments.threads),
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": f"{source}"}, check=True, stdout=subprocess.PIPE
    )
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.calls, arguments.threads)))
        return
    # an earlier commit, which only measures, need not have it
    from outrider.doctor import processor

    with TemporaryDirectory() as folder:
        sources = {"here": _ROOT / "src"}
        if arguments.against:
            archive = subprocess.run(
                ["git", "-C", str(_ROOT), "archive", arguments.against, "src"],
                check=True,
                capture_output=True,
            )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            sources[arguments.against] = Path(folder) / "src"
        rounds = {name: [] for name in sources}  # type: dict[str, list[dict[str, float]]]
        for _ in range(arguments.rounds):
            for name, source in sources.items():
                rounds[name].append(round_of(source, arguments))
    table = Table(
        "milliseconds",
        *sources,
        title=(
            f"{arguments.calls} calls from {arguments.threads} threads, median of {arguments.rounds} rounds"
        ),
    )
    for figure in rounds["here"][0]:
        table.add_row(
            figure, *(f"{statistics.median(one[figure] for one in rounds[name]):.1f}" for name in sources)
        )
    Console().print(table, f"processor: {processor()}", sep="\n")


if __name__ == "__main__":
    main()
