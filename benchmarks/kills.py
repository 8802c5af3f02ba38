"""Runs that are killed and stopped at random moments, and continued: do they end in the bits of the run that nobody touched?

    python -m benchmarks.kills --count 1000 [--out runs/kills] [--cases rapo empo2]

Tiny models, every algorithm with a state of its own (tests/train/whole_runs.py). A broken run gets one to six signals (SIGKILL,
SIGTERM, SIGINT) at random moments of its life and is then continued to its end. One line a broken run goes to kills.jsonl; the same
command continues. It ends with a table, and with status 1 where a run was lost or is not the same.
"""

import argparse
import json
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.train.forked import ForkedOutrider
from tests.train.whole_runs import CASES, command, differences, write_data

from benchmarks.markdown_table import markdown
from outrider.train.doctor_machine import processor

_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_MOST_SIGNALS = 6
_PATIENCE_S = 600.0  # a stop that takes longer hangs; a busy machine is slow


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="signals that met a running process, over all calls")
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    arguments = parser.parse_args(given)
    out = arguments.out.resolve()
    if not (out / "data" / "shown.jsonl").exists():
        shutil.rmtree(out / "data", ignore_errors=True)
        write_data(out / "data")
    done = read(out / "kills.jsonl")
    while sum(len(one["signals"]) for one in done if one["case"] in arguments.cases) < arguments.count:
        number = len(done)
        one = play(out, arguments.cases[number % len(arguments.cases)], number)
        with (out / "kills.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(one) + "\n")
        done.append(one)
        print(f"{number}: {one['case']}, {len(one['signals'])} signals, {', '.join(one['wrong']) or 'the same bits'}", flush=True)
    print(table(done), f"processor: {processor()}", sep="\n")
    return int(any(one["wrong"] for one in done))


def play(out: Path, case: str, number: int) -> dict[str, Any]:
    """One broken run from its first signal to its end: the signals that it got, and what is wrong with it."""
    draws = random.Random(f"broken run {number}")
    reference, seconds = _whole(out, case)
    run = out / f"broken-{case}"
    shutil.rmtree(run, ignore_errors=True)
    signals: list[dict[str, Any]] = []
    wrong: list[str] = []
    for _ in range(draws.randint(1, _MOST_SIGNALS)):
        sent, delay = draws.choice(_SIGNALS), draws.uniform(0.0, seconds)
        process = ForkedOutrider(*_arguments(out, run, case))
        _wait(process, delay)
        if process.poll() is None:
            process.send_signal(sent)
            signals.append({"signal": sent.name, "after_s": round(delay, 3), "num_metrics": _num_lines(run / "metrics.jsonl")})
        elif process.returncode:
            wrong.append("a continued run failed")
        wrong += _end(process)
    process = ForkedOutrider(*_arguments(out, run, case))
    wrong += _end(process)
    if process.returncode != 0:
        wrong.append(f"lost: the last continuation ended with status {process.returncode}")
    else:
        wrong += differences(reference, run)
    if wrong:
        shutil.copytree(run, out / f"wrong-{number}", dirs_exist_ok=True)
    return {"number": number, "case": case, "signals": signals, "wrong": wrong}


def table(done: Sequence[dict[str, Any]]) -> str:
    """One row a case and one for all of them."""
    rows = [_row(case, [one for one in done if one["case"] == case]) for case in CASES]
    header = ("case", "broken runs", *(one.name for one in _SIGNALS), "lost", "unequal", "tracebacks")
    return markdown(header, [*(row for row in rows if row[1] != "0"), _row("all", done)])


def read(path: Path) -> list[dict[str, Any]]:
    """Whole lines; one that a kill of this command tore off is played again."""
    if not path.exists():
        return []
    whole, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def _row(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    sent = [one["signal"] for run in runs for one in run["signals"]]
    lost = sum(any(text.startswith(("lost", "a continued", "hung")) for text in run["wrong"]) for run in runs)
    tracebacks = sum("a traceback" in run["wrong"] for run in runs)
    unequal = sum(bool(run["wrong"]) for run in runs) - lost
    counts = (len(runs), *(sent.count(one.name) for one in _SIGNALS), lost, unequal, tracebacks)
    return [name, *map(str, counts)]


def _whole(out: Path, case: str) -> tuple[Path, float]:
    """The run that nobody touched, and how long it took; made once."""
    run, took = out / f"whole-{case}", out / f"whole-{case}.seconds"
    if not took.exists():
        shutil.rmtree(run, ignore_errors=True)
        began = time.monotonic()
        process = ForkedOutrider(*command(out / "data", run, case))
        _, stderr = process.communicate(_PATIENCE_S)
        if process.returncode != 0:
            raise RuntimeError(f"{case} does not run: {stderr}")
        took.write_text(str(time.monotonic() - began))
    return run, float(took.read_text())


def _arguments(out: Path, run: Path, case: str) -> list[str | Path]:
    """Begun anew where it was killed before it had written down what it is."""
    begun = (run / "config.toml").exists()
    return ["train", "--resume", run, "--progress", "plain"] if begun else command(out / "data", run, case)


def _wait(process: ForkedOutrider, seconds: float) -> None:
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.001)


def _end(process: ForkedOutrider) -> list[str]:
    try:
        _, stderr = process.communicate(_PATIENCE_S)
    except TimeoutError:
        return [f"hung: no end within {_PATIENCE_S:g} s"]
    return ["a traceback"] if "Traceback (most recent call last)" in stderr else []


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    raise SystemExit(main())
