"""All measurements on a GPU, in at most 25 minutes: contracts and determinism, speeds compared with
``generate`` and vLLM, shares of the device's limits, memory compared with ``outrider plan``, the demo.

    make gpu                      # or, with the Python at hand: python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --shapes tiny --record FOLDER/gpu.json --page FOLDER/gpu.md

Models have random weights, created on the device; only the demo needs its own. Every stage is a process with
a time limit. If a package is missing, a stage fails or there is no time left, a row reports it and the next
stage runs. Rows are stored in a record and written to docs/gpu.md (benchmarks.figures). You can try the
command on a CPU; its rows are recorded only with ``--record``.
"""

import argparse
import datetime
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu_rows import Row, RowFile
from benchmarks.gpu_shapes import SHAPES
from benchmarks.markdown_table import markdown

_ENDING_S: Final = 20.0  # of the budget: to stop a stage and to write the page
_PYTHON: Final = (3, 11)
_NEEDED: Final = ("torch", "transformers", "numpy", "pydantic", "safetensors", "rich", "jinja2")
RECORD, PAGE = Path("records/gpu.json"), Path("docs/gpu.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage takes at most ``share`` seconds, and is skipped if fewer than ``least`` are left."""

    name: str
    shape: str
    share: float
    least: float


def plan_stages(shapes: Sequence[str]) -> list[Stage]:
    """Return the stages: first the references, then the contracts, then speeds from the smallest to the
    largest model, because a slow device runs out of time at the largest.
    """
    first, *_ = shapes
    return [
        Stage(name="limits", shape=first, share=60, least=20),
        Stage(name="contracts", shape=first, share=180, least=30),
        Stage(name="determinism", shape=first, share=300, least=60),
        Stage(name="demo", shape=first, share=300, least=90),
        *(
            Stage(name=name, shape=shape, share=share, least=60)
            for shape in shapes
            for name, share in (("generation", 240.0), ("update", 120.0))
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if every stage ran, 1 if one failed or was skipped, 2 if none could start."""
    given = _parser().parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes - _ENDING_S
    if problem := missing(given.device):
        print(problem, file=sys.stderr)
        return 2
    folder = given.out / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder.mkdir(parents=True)
    rows: list[Row] = []
    is_whole = True
    for stage in plan_stages(given.shapes):
        if given.only and stage.name not in given.only:
            continue
        found, went_well = run_stage(stage, given, folder, deadline)
        rows += found
        is_whole &= went_well
    cells = [[row.what, row.measured, row.beside] for row in rows]
    print(markdown(["what", "measured", "beside"], cells))
    record = given.record or (RECORD if given.device != "cpu" else None)
    if record is not None:
        from benchmarks.gpu_record import described_device, write_page, write_record

        write_record(record, described_device(given.device), rows)
        write_page(given.page, record)
        print(f"written: {record}, {given.page}")
    return 0 if is_whole else 1


def missing(device: str) -> str | None:
    """Return one line about missing requirements, or None."""
    if sys.version_info < _PYTHON:
        return f"{sys.executable} is too old: Outrider needs Python {'.'.join(map(str, _PYTHON))} or newer"
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        told = ", ".join(lacking)
        return f"{sys.executable} lacks {told}: pip install them, or name another with make gpu GPU_PYTHON=…"
    from outrider.engines.local.model import require_device
    from outrider.errors import ConfigError

    try:
        require_device(device)
    except ConfigError as error:
        told = str(error).removeprefix("model.device = ").partition("; without a GPU")[0]
        return f"no GPU to measure: {told}; --device cpu --shapes tiny tries the command"
    return None


def run_stage(
    stage: Stage, given: argparse.Namespace, folder: Path, deadline: float
) -> tuple[list[Row], bool]:
    """Return the rows of a stage and whether it finished. A stopped stage keeps its rows."""
    name = f"{stage.name} of {stage.shape}"
    left = deadline - time.monotonic()
    if left < stage.least:
        return [
            Row(what=name, measured=f"skipped: {max(0.0, left):.0f} s left, it wants {stage.least:.0f}")
        ], False
    limit = min(stage.share, left)
    command = [sys.executable, "-m", "benchmarks.gpu_stage", stage.name, stage.shape]
    command += ["--device", given.device, "--folder", str(folder), "--repeats", str(given.repeats)]
    command += ["--vllm", given.vllm] if given.vllm else []
    print(f"{name}, at most {limit:.0f} s", flush=True)
    log = folder / f"{stage.name}-{stage.shape}.log"
    status = _run(command, log, limit)
    rows = RowFile(folder / f"{stage.name}-{stage.shape}.jsonl").read()
    if status is None:
        return [*rows, Row(what=name, measured=f"stopped: not done after {limit:.0f} s")], False
    if status:
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"])[-1]
        return [*rows, Row(what=name, measured=f"failed: {last[:200]}", beside=str(log))], False
    return rows, True


def _run(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Return the exit status, or None if the process was stopped together with its children (a run, vLLM),
    which are in its process group.
    """
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=25.0, help="the whole takes no longer")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["demo", "1.5B", "7B"])
    parser.add_argument("--repeats", type=int, default=3, help="rates are medians of this number")
    parser.add_argument("--only", nargs="+", help="names of stages")
    parser.add_argument("--vllm", help="a Python that has vLLM, where this one has not")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="logs and runs")
    parser.add_argument("--record", type=Path, help=f"default: {RECORD}, and none for a CPU")
    parser.add_argument("--page", type=Path, default=PAGE)
    return parser


if __name__ == "__main__":
    sys.exit(main())
