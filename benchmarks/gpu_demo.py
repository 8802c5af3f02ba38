"""The demo on a device: steps, seconds, rewards and the held-out score of ``recipes/demo.toml``."""

import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.gpu_rows import RowFile
from benchmarks.gpu_shapes import TINY
from outrider.printing import score
from outrider.viewer.run_reader import read_records


def demo(shape: str, device: str, folder: Path, rows: RowFile) -> None:
    """Train once; ``tiny`` is a smoke run with a random model. Raises SystemExit with the last line of the
    run.
    """
    run = folder / "demo"
    command = [
        sys.executable, "-m", "outrider", "train", "recipes/demo.toml", "--run", str(run),
        "--progress", "plain", f"model.device={device}", "model.precision=auto",
    ]  # fmt: skip
    if shape == TINY:
        command.append("--smoke")
    with (folder / "demo.log").open("w+", encoding="utf-8") as log:  # what a stopped run had reached
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, text=True, check=False)
        log.seek(0)
        printed = log.read()
    for what, measured in told(run):
        rows.add(f"demo: {what}", measured)
    if done.returncode:
        raise SystemExit(" ".join(printed.split()[-40:]))


def told(run: Path) -> list[tuple[str, str]]:
    """Return the figures in a run directory, also of a stopped run."""
    records = read_records(run / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "train"]
    if not steps:
        return []
    seconds = [one["time/step"] for one in steps]
    rewards = f"{steps[0]['reward/mean']:.2f} to {steps[-1]['reward/mean']:.2f}"
    found = [
        ("steps, median seconds of one", f"{len(steps)}, {median(seconds):.1f}"),
        ("reward of the first and of the last step", rewards),
    ]
    if scores := [record for record in records if record["kind"] == "eval"]:
        last = scores[-1]
        text = score(last["eval/score"], last["eval/ci_low"], last["eval/ci_high"])
        found.append((f"score on {last['eval/num_tasks']:.0f} held-out questions", text))
    return found
