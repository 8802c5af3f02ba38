"""Ten thousand rollouts with every kind of fault in one process: does it leak memory, processes, threads,
ports or files?

    python -m benchmarks.soak [--rollouts 10000] [--each 500] [--cases arpo empo2] [--out runs/soak]

Complete runs of the trainer with a tiny model, one after another, with alternating cases
(tests/training/whole_runs.py; the Python tool with real servers). Tools, environments and engine fail at
random (soak_faults.py). soak.jsonl records the resources of the process after every ``--every`` rollouts and
at the end of every run, when all of them must be released. The same command continues, with a warm-up of its
own. Prints tables, and exits with status 1 if the resources after a run have grown after the warm-up: memory
by 2 % or more, anything else at all. The warm-up is two runs of every case: pools of native threads (Arrow's,
torch's) start a thread when work first waits for one, and allocators keep what the largest run has needed.
"""

import argparse
import functools
import gc
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tests.training.whole_runs import CASES, command, write_data

from benchmarks.kills import read
from benchmarks.markdown_table import markdown
from benchmarks.soak_faults import STEP_TIMEOUT_S, Faults, FaultyFactory, break_engine
from benchmarks.soak_measure import growth, held
from outrider.cli import main as outrider
from outrider.doctor import processor
from outrider.training import setup as start
from outrider.training.checkpoint import newest_step
from outrider.training.components import Components
from outrider.types import Outcome
from outrider.viewer.trackers import TrackerSet

MOST_GROWTH: Final = 0.02
DEFAULT_CASES: Final = ("arpo", "empo2", "evolve", "rollout_replay")
_PER_STEP: Final = 4 * 8
_WARM_UP: Final = 2  # runs of every case
_COUNTED: Final = ("processes", "threads", "ports", "files", "temporary")
_OVERRIDES: Final = (
    "train.tasks_per_step=4", "algorithm.group_size=8", "train.checkpoint_every=5", "evaluation.every=10",
    "evaluation.num_tasks=2", "train.max_retries=1", f"rollout.step_timeout_s={STEP_TIMEOUT_S}",
)  # fmt: skip
_PYTHON: Final = ("environment.python.wall_seconds=0.3", "environment.python.num_servers=2")


@dataclass(slots=True, kw_only=True)
class Soak:
    """A campaign in this process. ``done`` are the lines on file, of earlier processes too."""

    out: Path
    every: int
    done: list[dict[str, Any]]
    process: int = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)  # of the run under way
    num_rollouts: int = 0  # of the run under way

    def __post_init__(self) -> None:
        self.process = 1 + max((one["process"] for one in self.done), default=-1)

    def play(self, number: int, case: str, num_steps: int) -> None:
        """Run once from start to end, and remove the files of an earlier process."""
        run = self.out / "run"
        shutil.rmtree(run, ignore_errors=True)
        faults, self.counts, self.num_rollouts = Faults(f"soak {number} {self.process}"), Counter(), 0
        arguments = [*command(self.out / "data", run, case), *_OVERRIDES, f"train.num_steps={num_steps}"]
        with self._broken(faults, number, case):
            status = outrider([str(one) for one in [*arguments, *(_PYTHON if case == "arpo" else ())]])
        if status or newest_step(run / "checkpoints") != num_steps:
            raise SystemExit(
                f"run {number} ({case}) was stopped or failed, with status "
                f"{status}; the same command continues"
            )
        shutil.rmtree(run)
        self.write(number, case, "closed", faults=+faults.counts, outcomes=+self.counts)

    @contextmanager
    def _broken(self, faults: Faults, number: int, case: str) -> Iterator[None]:
        """Within the context, every run of this process has faulty parts and is observed."""
        build = start.build

        def broken(*arguments: Any, **named: Any) -> Components:
            parts = build(*arguments, **named)
            parts.factory = FaultyFactory(parts.factory, faults)  # type: ignore[arg-type]
            break_engine(parts.engine, faults)
            return parts

        def watch(step: int, metrics: Mapping[str, float]) -> None:
            if "reward/mean" not in metrics:  # an evaluation's
                return
            ended = Counter({one.value: int(metrics.get(f"rollout/num_{one.value}", 0)) for one in Outcome})
            self.counts += ended
            before, self.num_rollouts = self.num_rollouts, self.num_rollouts + ended.total()
            if before // self.every != self.num_rollouts // self.every:
                self.write(number, case, "running")

        trackers = TrackerSet({})
        trackers.log = watch  # type: ignore[method-assign, assignment]
        with (
            mock.patch.object(start, "build", broken),
            mock.patch.object(start, "make_trackers", lambda *a, **b: trackers),
        ):
            yield

    def write(self, number: int, case: str, where: str, **more: Any) -> None:
        """Write a line with the current resources."""
        gc.collect()
        line = {
            "process": self.process,
            "run": number,
            "case": case,
            "where": where,
            "rollouts": self.num_rollouts,
        }
        line |= {**held(temporary=Path(tempfile.gettempdir())).as_dict(), **more}
        with (self.out / "soak.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        self.done.append(line)
        print(json.dumps(line), flush=True)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=10_000, help="of all runs together, over all calls")
    parser.add_argument(
        "--each", type=int, default=500, help="of one run, rounded up to whole training steps"
    )
    parser.add_argument("--every", type=int, default=250, help="between two measurements during a run")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=DEFAULT_CASES)
    arguments = parser.parse_args(given)
    out = arguments.out.resolve()
    if (
        out.is_dir()
        and any(out.iterdir())
        and not (out / "data").is_dir()
        and not (out / "soak.jsonl").exists()
    ):
        parser.error(f"{out} is neither empty nor a folder of this command, which would clear parts of it")
    if not (out / "data" / "shown.jsonl").exists():
        shutil.rmtree(out / "data", ignore_errors=True)
        write_data(out / "data")
    shutil.rmtree(out / "tmp", ignore_errors=True)
    (out / "tmp").mkdir()
    soak = Soak(out=out, every=arguments.every, done=read(out / "soak.jsonl"))
    with (
        mock.patch.dict(os.environ, TMPDIR=str(out / "tmp")),
        mock.patch.object(tempfile, "tempdir", str(out / "tmp")),
    ):
        while sum(one["rollouts"] for one in behind(soak.done)) < arguments.rollouts:
            number = len(behind(soak.done))
            soak.play(number, arguments.cases[number % len(arguments.cases)], -(-arguments.each // _PER_STEP))
    grown = growths(soak.done)
    print(table(soak.done), causes(soak.done), growth_table(grown), f"processor: {processor()}", sep="\n\n")
    return int(any(value >= (MOST_GROWTH if name == "memory_mib" else 1e-9) for name, value in grown.items()))


def behind(done: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines written after runs had released their resources."""
    return [one for one in done if one["where"] == "closed"]


def growths(done: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the largest growth of each resource in any process, after runs, since the end of its warm-up; 0
    if there was none.
    """
    closed, found = behind(done), Counter(dict.fromkeys(("memory_mib", *_COUNTED), 0.0))  # type: Any, Any
    for process in {one["process"] for one in closed}:
        ours = [one for one in closed if one["process"] == process]
        warm = ours[_WARM_UP * len({one["case"] for one in ours}) - 1 :]
        if not warm:
            continue
        found["memory_mib"] = max(found["memory_mib"], growth([one["memory_mib"] for one in warm]))
        for name in _COUNTED:
            found[name] = max(found[name], max(one[name] for one in warm) - warm[0][name])
    return dict(found)


def table(done: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row per run: the most resources while it ran, and those after it."""
    rows, total = [], 0
    for one in behind(done):
        total += one["rollouts"]
        inside = [
            other
            for other in done
            if other["where"] == "running" and (other["run"], other["process"]) == _of(one)
        ]
        most = functools.partial(_most, [*inside, one])
        cells = [f"{most(name)} / {one[name]}" for name in ("processes", "threads", "ports", "files")]
        rows.append(
            [
                str(total),
                one["case"],
                f"{most('memory_mib')} / {one['memory_mib']}",
                *cells,
                str(one["temporary"]),
            ]
        )
    header = (
        "rollouts",
        "case",
        "memory, MiB",
        "processes",
        "threads",
        "sockets",
        "open files",
        "temporary files",
    )
    return "most during / after the run\n\n" + markdown(header, rows)


def causes(done: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of outcomes and of injected faults."""
    kinds = ("outcomes", "faults")
    sums = {kind: sum((Counter(one[kind]) for one in behind(done)), Counter()) for kind in kinds}
    return "\n".join(
        f"{kind}: {', '.join(f'{num} {name}' for name, num in sorted(sums[kind].items()))}" for kind in kinds
    )


def growth_table(grown: Mapping[str, float]) -> str:
    """Return a table of the growth after the warm-up."""
    cells = [
        f"{100 * value:.2f} %" if name == "memory_mib" else f"{value:g}" for name, value in grown.items()
    ]
    return "growth between runs after the warm-up\n\n" + markdown(
        [name.replace("_mib", "") for name in grown], [cells]
    )


def _most(lines: Sequence[Mapping[str, Any]], name: str) -> Any:
    return max(one[name] for one in lines)


def _of(one: Mapping[str, Any]) -> tuple[int, int]:
    return one["run"], one["process"]


if __name__ == "__main__":
    raise SystemExit(main())
