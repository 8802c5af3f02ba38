"""Speed of `outrider view` with 100,000 recorded rollouts: first paint, filter, search, memory of the server.

    python -m benchmarks.viewer [--rollouts 100000] [--run FOLDER]

Writes a generated run (:mod:`benchmarks.viewer_run`) unless the folder has one, serves it in its own process
and opens it in chromium. Times are those of the browser: from the start of the navigation to the first
contentful paint, and from the input to the result on the page. A first search uses a new server, as soon as
the page of all rollouts has its first rows. Exits with status 1 if a median is above its bound.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.viewer_run import write_run

BOUNDS = {"first paint": 1.5, "filter": 0.5, "first search": 0.5, "search": 0.5, "memory": 500.0}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
REPEATS = 5
FIRST = 3


@contextmanager
def server(run: Path) -> Iterator[tuple[str, int]]:
    """Its address and its process."""
    command = [sys.executable, "-m", "outrider", "view", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait()


def largest_mib(pid: int) -> float:
    """Return the peak memory of the process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def timed(page: Any, act: str, until: str) -> float:
    """Return the seconds in the page from ``act`` until ``until`` is true; both are JavaScript."""
    code = f"""async () => {{
        const began = performance.now();
        {act};
        while (!({until})) await new Promise(requestAnimationFrame);
        return performance.now() - began;
    }}"""
    return float(page.evaluate(code)) / 1000


def measure(address: str, browser: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"first paint": [], "filter": [], "search": []}
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("tbody tr a")
    link = page.locator("tbody tr a").first.get_attribute("href")
    for path in ("", link, f"{link}/all"):
        page.goto("about:blank")
        page.goto(f"{address}{path}")
        page.wait_for_selector("main h1")
        page.wait_for_function(f"({PAINT}) !== null")
        found["first paint"].append(page.evaluate(PAINT) / 1000)
    total = "document.querySelector('[data-total]').dataset.total"
    for kind in ["hybrid", "on-policy"] * (REPEATS // 2) + ["hybrid"]:
        choose = f"""const before = {total}; const field = document.querySelector('select[name=kind]');
            field.value = '{kind}'; field.dispatchEvent(new Event('change'))"""
        found["filter"].append(timed(page, choose, f"{total} !== before"))
    found["search"] = [searched(page, number) for number in range(REPEATS)]
    return found


def searched(page: Any, number: int) -> float:
    """Return the seconds of a search for words of a single turn, which reads all files."""
    words = f"{100 + 40 * number}-{1000 + number}"
    write = f"""const field = document.querySelector('input[type=search]'); field.value = '{words}';
        field.dispatchEvent(new Event('input'))"""
    return timed(page, write, f"document.querySelector('.hits mark')?.textContent === '{words}'")


def first_search(run: Path, number: int, browser: Any) -> float:
    """Return the seconds of the first search of a new server."""
    with server(run) as (address, _):
        page = browser.new_page()
        page.goto(address)
        page.goto(f"{address}{page.locator('tbody tr a').first.get_attribute('href')}/all")
        page.wait_for_selector("tbody tr td.n a")
        return searched(page, number)


def show(found: dict[str, list[float]], memory: float, num_rollouts: int) -> bool:
    table = Table(
        "what",
        "first",
        "median",
        "largest",
        "bound",
        title=f"outrider view on {num_rollouts:,} rollouts, load {os.getloadavg()[0]:.1f}",
    )
    for name, values in found.items():
        row = (values[0], statistics.median(values), max(values))
        table.add_row(name, *(f"{value:.2f} s" for value in row), f"{BOUNDS[name]:.2f} s")
    table.add_row("memory", "", "", f"{memory:.0f} MiB", f"{BOUNDS['memory']:.0f} MiB")
    Console().print(table)
    return memory <= BOUNDS["memory"] and all(
        statistics.median(values) <= BOUNDS[name] for name, values in found.items()
    )


def main() -> int:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--run", type=Path)
    given = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        parser.error("no chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        run = given.run or write_run(Path(folder) / "run", given.rollouts)
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
            firsts = [first_search(run, number, browser) for number in range(FIRST)]
            with server(run) as (address, pid):
                found = {"first search": firsts, **measure(address, browser)}
                is_kept = show(found, largest_mib(pid), given.rollouts)
            browser.close()
    return int(not is_kept)


if __name__ == "__main__":
    sys.exit(main())
