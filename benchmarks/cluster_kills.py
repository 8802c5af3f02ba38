"""Engines, rollout workers, trainer ranks and controllers killed or stopped at random times: does every run
end with the bits of an unbroken run, and does it leave nothing behind?

    python -m benchmarks.cluster_kills --count 50 [--out runs/cluster-kills] [--ranks 2]

A tiny model with the hooks that have a state, two engines and two workers, ``max_staleness`` 0 and 1 in turn.
Each run gets one to three signals (SIGKILL, or SIGSTOP for a process that is not the controller). It is
resumed if its controller was killed, or if a process was lost during its set-up, which ends with a line that
names the process. kills.jsonl has one line per run, and the same command continues the campaign. It prints a
table and exits with 1 if a run was lost, differs, or left something.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.distributed.command_runs import CommandRuns
from tests.distributed.test_remote_run import COUNTS
from tests.training.whole_runs import command, differences, metrics, write_data

from benchmarks.kills import read
from benchmarks.markdown_table import markdown
from outrider.doctor import processor

NUM_STEPS: Final = 4
KINDS: Final = ("engine", "worker", "rank", "controller")
_PATIENCE_S: Final = 900.0
_MAX_ENDED: Final = 5
_AGAIN: Final = "; continue from the newest checkpoint"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="signals that met a process, over all calls")
    parser.add_argument("--out", type=Path, default=Path("runs/cluster-kills"))
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks; 1: the controller trains")
    arguments = parser.parse_args(given)
    out = arguments.out.resolve()
    if not (out / "data" / "shown.jsonl").exists():
        shutil.rmtree(out / "data", ignore_errors=True)
        write_data(out / "data")
    done = read(out / "kills.jsonl")
    while sum(len(run["signals"]) for run in done) < arguments.count:
        run = play(out, len(done), arguments.ranks)
        with (out / "kills.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(run) + "\n")
        done.append(run)
        signals = ", ".join(f"{each['signal']} of {each['process']}" for each in run["signals"]) or "none"
        print(f"{run['number']}: {signals}: {', '.join(run['wrong'])[:300] or 'the same bits'}", flush=True)
    print(table(done), f"processor: {processor()}", sep="\n")
    return int(any(run["wrong"] for run in done))


def play(out: Path, number: int, num_ranks: int) -> dict[str, Any]:
    """Run one interrupted run to its end. Returns its signals and errors."""
    draws, staleness = random.Random(f"cluster run {number}"), number % 2
    reference, seconds = _whole(out, staleness, num_ranks)
    run, runs = out / "broken", CommandRuns()
    shutil.rmtree(run, ignore_errors=True)
    process, began = runs.start(*_begin(out, run, staleness, num_ranks)), time.monotonic()
    signals: list[dict[str, Any]] = []
    wrong: list[str] = []
    num_ended = 0  # in the set-up
    for moment in sorted(draws.uniform(0.0, seconds) for _ in range(draws.randint(1, 3))):
        while time.monotonic() < began + moment and process.poll() is None:
            time.sleep(0.005)
        kind = draws.choice(KINDS)
        how = signal.SIGKILL if kind == "controller" else draws.choice((signal.SIGKILL, signal.SIGSTOP))
        pid, pids = 0, {process.pid: "controller"}
        while not pid and process.poll() is None:  # a process that has not begun is awaited
            if kind != "controller":
                pids = runs.processes()
            pid = draws.choice(sorted(pid for pid, name in pids.items() if kind in name) or [0])
            time.sleep(0.05)
        if process.poll() is not None:
            continue
        os.kill(pid, how)
        at = round(time.monotonic() - began, 2)
        signals.append({"signal": how.name, "kind": kind, "process": pids[pid], "at": at})
        if kind == "controller":
            runs.kill(process)
            process = runs.start(*_arguments(out, run, staleness, num_ranks))
    try:
        _, stderr = process.communicate(timeout=_PATIENCE_S)
        # a process that is lost during the set-up ends the run with a line, before anything is computed
        while (
            process.returncode
            and num_ended < _MAX_ENDED
            and "; continue from the newest checkpoint" in stderr[-200:]
        ):
            num_ended += 1
            process = runs.start(*_arguments(out, run, staleness, num_ranks))
            _, stderr = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        runs.kill(process)
        wrong.append(f"hung: no end within {_PATIENCE_S:g} s")
    else:
        if process.returncode != 0:
            wrong.append(f"lost: status {process.returncode}: {stderr[-2000:]}")
        else:
            wrong += unequal(reference, run)
    subprocess.run([sys.executable, "-c", _SWEEP], check=True)  # what the next run removes
    wrong += [f"left behind: {each}" for each in sorted(runs.left_behind())]
    if wrong and run.exists():
        shutil.copytree(run, out / f"wrong-{number}", dirs_exist_ok=True)
    return {
        "number": number, "staleness": staleness, "signals": signals, "num_ended": num_ended, "wrong": wrong
    }  # fmt: skip


def unequal(reference: Path, run: Path) -> list[str]:
    """Return the parts that differ, except for counts of repairs and the checksums of files with counts."""
    names = [
        name
        for name in differences(reference, run, num_steps=NUM_STEPS)
        if name != "metrics.jsonl" and not name.endswith("state.json")
    ]
    mine, theirs = (
        [{name: value for name, value in record.items() if not name.startswith(COUNTS)} for record in each]
        for each in (metrics(reference), metrics(run))
    )
    return names + (["metrics.jsonl"] if mine != theirs else [])


def table(done: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row per kind of process and a total."""
    signals = Counter((each["kind"], each["signal"]) for run in done for each in run["signals"])
    rows = [[kind, *(str(signals[kind, how]) for how in ("SIGKILL", "SIGSTOP"))] for kind in KINDS]
    num_wrong, num_ended = sum(bool(run["wrong"]) for run in done), sum(run["num_ended"] for run in done)
    return (
        markdown(("process", "SIGKILL", "SIGSTOP"), rows)
        + f"\n{len(done)} runs, {num_wrong} lost, unequal or with something left; {num_ended} set-ups ended "
        "with a line and were started again"
    )


_SWEEP: Final = (
    "from outrider.distributed.processes import Cluster; "
    "from outrider.training.settings import ClusterSettings; Cluster(ClusterSettings()).close()"
)


def _whole(out: Path, staleness: int, num_ranks: int) -> tuple[Path, float]:
    """Return the unbroken run and its seconds. It is created once."""
    run, clock = out / f"whole-{staleness}", out / f"whole-{staleness}.json"
    if not clock.exists():
        shutil.rmtree(run, ignore_errors=True)
        began = time.monotonic()
        CommandRuns().run(*_begin(out, run, staleness, num_ranks), timeout=_PATIENCE_S)
        clock.write_text(json.dumps(time.monotonic() - began))
    return run, float(json.loads(clock.read_text()))


def _begin(out: Path, run: Path, staleness: int, num_ranks: int) -> list[str | Path]:
    return [*command(out / "data", run, "combined"), "buffer.evolve=true", f"train.num_steps={NUM_STEPS}",
            "train.checkpoint_every=1", "evaluation.every=2", "evaluation.num_tasks=1",
            f"cluster.num_trainers={num_ranks}", "cluster.num_engines=2", "cluster.num_rollout_workers=2",
            f"cluster.max_staleness={staleness}", "cluster.heartbeat_s=10",
            "cluster.max_restarts=20"]  # fmt: skip


def _arguments(out: Path, run: Path, staleness: int, num_ranks: int) -> list[str | Path]:
    """Return the arguments that resume the run, or start it again if it has not recorded its settings."""
    if (run / "config.toml").exists():
        return ["train", "--resume", run, "--progress", "plain"]
    return _begin(out, run, staleness, num_ranks)


if __name__ == "__main__":
    raise SystemExit(main())
