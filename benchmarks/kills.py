"""Runs that are killed and stopped at random moments, and resumed: are their final bits those of an
uninterrupted run?

    python -m benchmarks.kills --count 1000 [--out runs/kills] [--cases rapo empo2]

Tiny models, every algorithm with state (tests/training/whole_runs.py). An interrupted run receives one to six
signals (SIGKILL, SIGTERM, SIGINT), each at a random processor time or before a random one of its writes to
disk (kill_moments.py), and is then resumed until its end. A signal counts if it arrived while the command
ran. kills.jsonl has one line per interrupted run, and the same command continues the campaign. It prints a
table at the end and exits with 1 if a run was lost or differs.
"""

import argparse
import functools
import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.training.forked import ForkedOutrider
from tests.training.whole_runs import CASES, command, differences, write_data

from benchmarks import kill_moments
from benchmarks.markdown_table import markdown
from outrider.doctor import processor
from outrider.training.checkpoint import newest_step

NUM_STEPS: Final = 4
MOMENTS: Final = ("time", "write")
_SHORT: Final = (f"train.num_steps={NUM_STEPS}", "evaluation.every=2", "evaluation.num_tasks=1")
_SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_STATUSES: Final = {"SIGKILL": (-9,), "SIGTERM": (0, -15, 143), "SIGINT": (0, 130)}
_MOST_SIGNALS: Final = 6
# of the processor time of a complete run; a resumed run has less
_SET_UP: Final = 0.25
_LOST: Final = ("lost", "hung", "status")
_OTHERWISE: Final = (*_LOST, "a traceback")  # than in its files
_PATIENCE_S: Final = 600.0  # a stop that takes longer counts as a hang; a busy machine is slow


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=1000, help="signals that met a running command, over all calls"
    )
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
        print(
            (
                f"{number}: {one['case']}, {len(one['signals'])} signals, "
                f"{', '.join(one['wrong'])[:200] or 'the same bits'}"
            ),
            flush=True,
        )
    print(table(done), f"processor: {processor()}", sep="\n")
    return int(any(one["wrong"] for one in done))


def play(out: Path, case: str, number: int) -> dict[str, Any]:
    """Run one interrupted run to its end. Returns its signals and errors."""
    draws = random.Random(f"broken run {number}")
    reference, life = _whole(out, case)
    run = out / f"broken-{case}"
    shutil.rmtree(run, ignore_errors=True)
    signals: list[dict[str, Any]] = []
    wrong: list[str] = []
    for _ in range(draws.randint(1, _MOST_SIGNALS)):
        sent, moment = draws.choice(_SIGNALS), draws.choice(MOMENTS)
        left = 1 - (1 - _SET_UP) * (newest_step(run / "checkpoints") or 0) / NUM_STEPS
        process, met, hung = _broken(out, run, case, sent, moment, draws.uniform(0.0, left * life[moment]))
        if met is not None:
            signals.append(met)
        wrong += [hung] if hung else _end(process, met)
        if wrong or met is None:
            break  # the run ended before the signal
    process = ForkedOutrider(*_arguments(out, run, case))
    wrong += _end(process, None)
    if process.returncode != 0:
        wrong.append(f"lost: the last continuation ended with status {process.returncode}")
    else:
        wrong += differences(reference, run, num_steps=NUM_STEPS)
    if wrong:
        shutil.copytree(run, out / f"wrong-{number}", dirs_exist_ok=True)
    return {"number": number, "case": case, "signals": signals, "wrong": wrong}


def table(done: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row per case and a total."""
    rows = [_row(case, [one for one in done if one["case"] == case]) for case in CASES]
    header = (
        "case",
        "broken runs",
        *(one.name for one in _SIGNALS),
        "before a write",
        "lost",
        "unequal",
        "tracebacks",
    )
    return markdown(header, [*(row for row in rows if row[1] != "0"), _row("all", done)])


def read(path: Path) -> list[dict[str, Any]]:
    """Return complete lines; the run of a torn line is repeated."""
    if not path.exists():
        return []
    whole, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def _row(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    signals = [one for run in runs for one in run["signals"]]
    sent = [one["signal"] for one in signals]
    lost = sum(any(text.startswith(_LOST) for text in run["wrong"]) for run in runs)
    tracebacks = sum(any(text.startswith("a traceback") for text in run["wrong"]) for run in runs)
    unequal = sum(any(not text.startswith(_OTHERWISE) for text in run["wrong"]) for run in runs)
    writes = sum(one["moment"] == "write" for one in signals)
    counts = (len(runs), *(sent.count(one.name) for one in _SIGNALS), writes, lost, unequal, tracebacks)
    return [name, *map(str, counts)]


def _whole(out: Path, case: str) -> tuple[Path, dict[str, float]]:
    """Return the uninterrupted run, its seconds of processor time and its number of writes. It is created
    once.
    """
    run, told = out / f"whole-{case}", out / f"whole-{case}.json"
    if not told.exists():
        shutil.rmtree(run, ignore_errors=True)
        process = ForkedOutrider(*_begin(out, run, case), prepare=kill_moments.count)
        began = used = kill_moments.wait_until_ready(process)
        while process.poll() is None:
            used = max(used, process.cpu_seconds)
            time.sleep(0.01)
        _, stderr = process.communicate(_PATIENCE_S)
        if process.returncode != 0:
            raise RuntimeError(f"{case} does not run: {stderr}")
        told.write_text(json.dumps({"time": used - began, "write": kill_moments.num_writes(process)}))
    life: dict[str, float] = json.loads(told.read_text())
    return run, life


def _broken(
    out: Path, run: Path, case: str, sent: signal.Signals, moment: str, at: float
) -> tuple[ForkedOutrider, dict[str, Any] | None, str]:
    """Run until the signal. Returns the process, the signal (None if it was too late), and whether the
    process hung.

    A child that hangs is killed, and its status is then that of a kill, so the caller needs the flag.
    """
    send = functools.partial(kill_moments.send, sent=sent, at=int(at)) if moment == "write" else None
    process = ForkedOutrider(*_arguments(out, run, case), prepare=send)
    met: Callable[[], str] = functools.partial(kill_moments.sent_before, process)
    if moment == "time":
        kill_moments.wait_for_cpu(process, at)
        now = time.monotonic()
        process.send_signal(sent)
        met = functools.partial(_came_in_time, process, now)
    problem = _end_of(process)
    what = met()
    if not what and not problem:
        return process, None, ""
    met_by = {
        "signal": sent.name,
        "moment": moment,
        "at": round(at, 3),
        "before": what,
        "num_metrics": _num_lines(run),
    }
    return process, met_by, problem


def _came_in_time(process: ForkedOutrider, now: float) -> str:
    """Return whether a signal of that time arrived before the command returned."""
    return "time" if process.returned is None or now < process.returned[0] else ""


def _end(process: ForkedOutrider, met: dict[str, Any] | None) -> list[str]:
    """What is wrong with the end of a life."""
    if problem := _end_of(process):
        return [problem]
    _, stderr = process.communicate()
    _, traceback, told = stderr.partition("Traceback (most recent call last)")
    wrong = [f"a traceback: {told[-2000:]}"] if traceback else []
    # a late signal may arrive after the command
    returned = process.returned if met is None else None
    status = process.returncode if returned is None else returned[1]
    if status not in (_STATUSES[met["signal"]] if met else (0,)):
        last = (stderr.splitlines() or [""])[-1]
        wrong.append(f"status {status} after {met['signal'] if met else 'nothing'}: {last}")
    return wrong


def _end_of(process: ForkedOutrider) -> str:
    try:
        process.communicate(_PATIENCE_S)
    except TimeoutError:
        return f"hung: no end within {_PATIENCE_S:g} s"
    return ""


def _begin(out: Path, run: Path, case: str) -> list[str | Path]:
    return [*command(out / "data", run, case), *_SHORT]


def _arguments(out: Path, run: Path, case: str) -> list[str | Path]:
    """Return the arguments that resume the run, or start it again if it was killed before it recorded its
    settings.
    """
    begun = (run / "config.toml").exists()
    return ["train", "--resume", run, "--progress", "plain"] if begun else _begin(out, run, case)


def _num_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    raise SystemExit(main())
