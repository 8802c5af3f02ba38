"""Cost of records of version 2 compared with version 1: time of a training step, and bytes on disk.

    python -m benchmarks.records [--steps 3] [--recipe recipes/demo.toml] [KEY=VALUE ...]

One run of the recipe without cold start and evaluations. At the end of every step, its rollouts are written
in both versions, and the time that version 2 takes inside the update is measured there.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from outrider.config import load_settings
from outrider.trace import Trace
from outrider.training import step_records as trace_records
from outrider.training import trainer as trainer_module
from outrider.training import update as update_module
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from outrider.training.step_records import RecordFiles

OLD = 16  # columns of version 1, which are first
ALONE = [
    "cold_start.num_examples=0",
    "evaluation.at_start=false",
    "evaluation.every=0",
    "evaluation.num_tasks=2",
]


@dataclass(slots=True)
class Clock:
    """Seconds of one step by purpose."""

    taken: float = 0.0  # out of the update
    written: list[tuple[float, float]] = field(default_factory=list)  # by step: version 2 in all, version 1
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            found = call(*given, **named)
            self.taken += time.perf_counter() - began
            return found

        return wrapped


@contextmanager
def watched(clock: Clock, scratch: Path) -> Iterator[None]:
    write = RecordFiles.write_step

    def both(self: RecordFiles, parts: Any, traces: Sequence[Trace], values: Any, *, step: int) -> None:
        old = before(parts, traces, step) if step % 2 else 0.0  # the first one has cold caches
        began = time.perf_counter()
        write(self, parts, traces, values, step=step)
        new = time.perf_counter() - began
        old = old or before(parts, traces, step)
        clock.written.append((new + clock.taken, old))
        clock.taken = 0.0
        run = self.traces.directory.parent
        clock.sizes.append((_size(run, step), _size(scratch, step)))

    def before(parts: Any, traces: Sequence[Trace], step: int) -> float:
        began = time.perf_counter()
        with mock.patch.object(trace_records, "_rollout", lambda *given: None):
            rows = trace_records.trace_rows(traces, step=step, tokenizer=parts.renderer.tokenizer).nodes
        with mock.patch("outrider.viewer.records.pq.write_table", _without_new):
            RecordFiles.from_run(scratch).traces.write(step, rows)
        return time.perf_counter() - began

    with (
        mock.patch.object(RecordFiles, "write_step", both),
        mock.patch.object(update_module, "token_record", clock.timed(update_module.token_record)),
        mock.patch.object(
            trainer_module, "collect_node_values", clock.timed(trainer_module.collect_node_values)
        ),
    ):
        yield


def _without_new(table: Any, stream: Any, compression: str, write: Any = pq.write_table) -> None:
    write(table.select(list(range(OLD))), stream, compression=compression)


def _size(run: Path, step: int) -> int:
    return sum(path.stat().st_size for path in run.glob(f"*/step-{step:06d}.parquet"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/demo.toml"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    overrides = [*ALONE, f"train.num_steps={given.steps}", *given.overrides]
    settings = load_settings(RunSettings, file=given.recipe, overrides=overrides)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(Path(folder) / "run", settings)
        with watched(clock, Path(folder) / "old"):
            run_training((run, settings), progress="plain", on_start=lambda stop: None)
        metrics = _metrics(Path(folder) / "run")
    show(clock, metrics)


def _metrics(run: Path) -> list[float]:
    import outrider

    return [float(row["time/step"]) for row in outrider.load_run(run).metrics().to_pylist()]


def show(clock: Clock, step_s: Sequence[float]) -> None:
    table = Table("step", "seconds", "records 2", "records 1", "slower by", "bytes 2", "bytes 1", "ratio")
    shares, ratios = [], []
    for number, (seconds, (new, old), (size, before)) in enumerate(
        zip(step_s, clock.written, clock.sizes, strict=True), start=1
    ):
        shares.append((new - old) / seconds)
        ratios.append(size / before)
        table.add_row(
            str(number), f"{seconds:.1f}", f"{new * 1e3:.0f} ms", f"{old * 1e3:.0f} ms",
            f"{shares[-1]:.2%}", f"{size:,}", f"{before:,}", f"{ratios[-1]:.2f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(
        f"median: a step is {statistics.median(shares):.2%} slower, "
        f"its records {statistics.median(ratios):.2f} times as large"
    )


if __name__ == "__main__":
    main()
