"""The measurements of ``cluster_figures.py``, one function per row."""

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.distributed.command_runs import CommandRuns
from tests.distributed.components import components_on
from tests.distributed.groups import groups
from tests.tiny import save_tiny_model
from tests.training.whole_runs import command, write_data

from outrider.config import validate
from outrider.distributed import open_cluster, start_ranks
from outrider.distributed.fsdp import Shape, assign_to_ranks
from outrider.rollout.scheduler import LoopLag
from outrider.training.components import Components
from outrider.training.settings import RunSettings
from outrider.training.setup import local_learner
from outrider.training.update import rollout_paths
from outrider.viewer.run_reader import read_records

_OVERLAP = (
    "environment.type=factbook", "environment.hops=[1]", "environment.num_train=64", "algorithm.type=grpo",
    "algorithm.group_size=4", "rollout.max_turns=2", "rollout.max_turn_tokens=64", "train.num_steps=6",
    "train.tasks_per_step=4", "train.checkpoint_every=6", "evaluation.num_tasks=1",
    "evaluation.at_start=false", "algorithm.kl_weight=0.01",  # else groups of equal rewards are not computed
    "evaluation.every=0", "num_threads=1", "model.precision=float32", "cluster.weights=files",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A row of the table."""

    name: str
    measured: str
    accepted: str


def settings_of(model: str, *, num_tasks: int = 4, size: int = 4, **cluster: Any) -> RunSettings:
    """A small task; ``cluster`` are fields of its section."""
    return validate(
        RunSettings,
        {
            "environment": {"type": "factbook", "num_train": max(64, num_tasks)},
            "algorithm": {"type": "grpo", "group_size": size},
            "model": {"name": model, "precision": "float32"},
            "rollout": {"max_turns": 2, "max_turn_tokens": 32},
            "train": {"tasks_per_step": num_tasks, "max_concurrent": num_tasks * size},
            # the groups' log-probs are drawn: no engine wrote them
            "update": {"max_tokens": 1024, "max_logprob_gap": 1e9},
            "num_threads": 1,
            "cluster": cluster,
        },
    )


def imbalance(model: str, folder: Path, num: int) -> list[Figure]:
    """Of the rollouts of 4 groups a rank, over many draws; no process is started."""
    shape = Shape(num_parameters=135_000_000, num_layers=30, attention_width=576)
    worst = []
    for seed in range(50):
        for num_ranks in (2, 4, 8):
            paths = rollout_paths(groups(4 * num_ranks, rollouts=8, seed=seed, longest=400))
            loads = [shape.cost(one) for one in assign_to_ranks(paths, num_ranks=num_ranks, cost=shape.cost)]
            worst.append(max(loads) * num_ranks / sum(loads))
    told = f"median {statistics.median(worst):.3f}, largest {max(worst):.3f} of {len(worst)} draws"
    return [Figure(name="cost of the heaviest rank over the mean, 4 groups a rank", measured=told,
                   accepted="at most 1.10")]  # fmt: skip


def two_ranks(model: str, folder: Path, num: int) -> list[Figure]:
    """Measure the update of the same groups by one process and by two, without the steps after it."""
    traces = groups(8, rollouts=8, seed=1, longest=200)
    num_tokens = sum(len(node.token_ids) for trace in traces for node in trace.nodes)
    seconds: dict[int, float] = {}
    settings = settings_of(model, num_trainers=2)
    with open_cluster(settings) as cluster:
        for ranks, start in ((1, local_learner), (2, partial(start_ranks, cluster=cluster))):
            learner: Any = start(settings, initial=False)
            try:
                algorithm = _algorithm(settings)
                # the first call of each: pages that were never touched
                update = partial(learner.update, traces, algorithm, on_batch=lambda n: None)
                taken = [_timed(update) for _ in range(num + 1)]
                seconds[ranks] = statistics.median(taken[1:])
            finally:
                learner.close()
    told = (
        f"{seconds[1] / seconds[2]:.2f} ({seconds[1]:.1f} and {seconds[2]:.1f} s, {num_tokens} unique tokens)"
    )
    return [Figure(name="update, 2 ranks against 1 process, one thread each, with the copy of the weights",
                   measured=told, accepted="at least 1.4")]  # fmt: skip


def _algorithm(settings: RunSettings) -> Any:
    from outrider.training.setup import make_algorithm

    return make_algorithm(
        settings, None, vocabulary_size=100, stateful=False, count_tokens=len, train_tasks=()
    )


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def crew(model: str, folder: Path, **given: Any) -> Iterator[Components]:
    """Two engines and two rollout workers, unless something else is ``given``."""
    settings = settings_of(model, **{"num_engines": 2, "num_rollout_workers": 2, "max_restarts": 99, **given})
    with open_cluster(settings) as cluster, components_on(cluster, settings, folder) as parts:
        yield parts


def transfer(model: str, folder: Path, num: int) -> list[Figure]:
    """Weights that have all changed, through a file to two engines."""
    with crew(model, folder) as parts:
        remote: Any = parts.remote
        transfers = []
        for version in range(1, num + 1):
            parameters = list(parts.learner.language_model.model.parameters())
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(1.01)
            remote.engine.load(version)
            transfers.append(remote.metrics())
        num_bytes = sum(parameter.nbytes for parameter in parameters)
    share = transfers[0]["weights/bytes"] / (2 * num_bytes)
    seconds = statistics.median(each["time/weights"] for each in transfers)
    return [
        Figure(name="bytes of a transfer an engine over those of the weights", measured=f"{share:.4f}",
               accepted="at most 1.01"),
        Figure(name="calls of a transfer an engine", measured=f"{transfers[0]['weights/rpcs'] / 2:g}",
               accepted="at most 4"),
        Figure(name="seconds of a transfer to 2 engines", measured=f"{seconds:.1f}", accepted=""),
    ]  # fmt: skip


def recovery(model: str, folder: Path, num: int) -> list[Figure]:
    """Measure how much longer a batch takes if a process is killed."""
    draw = random.Random(0)
    lost: dict[str, list[float]] = {"engine": [], "rollout worker": []}
    with crew(model, folder) as parts:
        remote: Any = parts.remote

        def play() -> float:
            rollouts = remote.rollouts(parts, training=True, on_finished=lambda done, owed: None)
            return _timed(lambda: rollouts.run(parts.train_tasks[:4], modes=("plain",) * 4, training_step=0))

        play()
        whole = statistics.median(play() for _ in range(num))
        for _ in range(num):
            for name, processes in (("engine", remote.engines), ("rollout worker", remote.workers)):
                os.kill(draw.choice(list(processes.values())).pid, signal.SIGKILL)
                lost[name].append(play() - whole)
    limits = {"engine": "at most 20 s", "rollout worker": "at most 15 s"}
    return [
        Figure(name=f"a batch of {whole:.1f} s is longer where one {name} is killed",
               measured=f"median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s",
               accepted=limits[name])
        for name, seconds in lost.items()
    ]  # fmt: skip


def restarts(model: str, folder: Path, num: int) -> list[Figure]:
    """Measure the start of a run of a tiny model with two ranks, two engines and two workers, and the time
    from a killed rank to the next step.
    """
    starts, losses = [], []
    write_data(folder / "tiny")
    for repeat in range(num):
        run, runs = folder / f"tiny-{repeat}", CommandRuns()
        began = time.perf_counter()
        process = runs.start(
            *command(folder / "tiny", run, "combined"), "train.num_steps=20", "train.checkpoint_every=1",
            "evaluation.every=0", "evaluation.num_tasks=1", "cluster.num_trainers=2",
            "cluster.num_engines=2", "cluster.num_rollout_workers=2",
        )  # fmt: skip
        _await_steps(process, run, 1)
        starts.append(time.perf_counter() - began)
        _await_steps(process, run, 2)
        [rank] = [pid for pid, name in runs.processes().items() if name == "trainer rank 1"]
        os.kill(rank, signal.SIGKILL)
        began = time.perf_counter()
        _await_steps(process, run, 1, restarts=1)
        losses.append(time.perf_counter() - began)
        runs.end(process)
    return [
        Figure(name=name, measured=f"median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s",
               accepted=limit)
        for name, seconds, limit in (
            ("from the command to the end of the first step, tiny model", starts, "at most 20 s"),
            ("from a killed rank to the end of the next step, tiny model", losses, "at most 30 s"),
        )
    ]  # fmt: skip


def _await_steps(process: "subprocess.Popen[str]", run: Path, num: int, *, restarts: int = 0) -> None:
    """Wait for the record of a step that ended after this number of restarts."""
    while sum(step.get("cluster/trainer_restarts", 0) >= restarts for step in _train_steps(run)) < num:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def _train_steps(run: Path) -> list[dict[str, Any]]:
    return [one for one in read_records(run / "metrics.jsonl") if one["kind"] == "train"]


def loop_lag(model: str, folder: Path, num: int) -> list[Figure]:
    """Measure the lag with 512 and with 64 concurrent episodes in one rollout worker.

    The model is tiny, so the engine, which is another process, does not block the loop.
    """
    size, figures = 8, []
    tiny = str(save_tiny_model(folder / "tiny"))
    given = {"num_tasks": 512 // size, "size": size, "num_engines": 1, "num_rollout_workers": 1}
    with crew(tiny, folder / "lag", weights="files", **given) as parts:
        for num_episodes in (512, 64):
            found = [_lags(parts, num_episodes // size, size, step) for step in range(num + 1)]
            places = ("the controller", "the worker that plays them")
            figures += [
                Figure(name=f"lag of an event loop in {place}, {num_episodes} episodes, 99th percentile",
                       measured=f"median {statistics.median(lags):.3f} s, most {max(lags):.3f} s",
                       accepted="at most 0.2 s")
                for place, lags in zip(places, zip(*found[1:], strict=True), strict=True)
            ]  # fmt: skip
    return figures


def _lags(parts: Components, num_groups: int, size: int, step: int) -> tuple[Any, Any]:
    """Return the lags of this process and of the worker during a step."""
    remote: Any = parts.remote
    rollouts = remote.rollouts(parts, training=True, on_finished=lambda done, owed: None)
    with own_lag() as own:
        tasks = parts.train_tasks[:num_groups]
        report = rollouts.run(tasks, modes=("plain",) * size, training_step=step)
    assert sum(len(trace.leaves) for trace in report.traces) == num_groups * size
    return own.p99, report.loop_lag_s


@contextmanager
def own_lag() -> Iterator[LoopLag]:
    """Of a loop in a thread of this process, which has nothing else to do."""
    lag, ended = LoopLag(), threading.Event()

    async def watch() -> None:
        async with lag.measure():
            while not ended.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(watch()))
    thread.start()
    try:
        yield lag
    finally:
        ended.set()
        thread.join()


def overlap(model: str, folder: Path, num: int) -> list[Figure]:
    """Compare a run with rollouts during updates to one that alternates."""
    ratios, idle, shapes = [], [], []
    for pair in range(num):
        steps = {age: _steps(model, folder / f"overlap-{pair}-{age}", age) for age in (0, 1)}
        medians = {age: statistics.median(one["time/step"] for one in own) for age, own in steps.items()}
        ratios.append(medians[0] / medians[1])
        shapes.append(
            [statistics.median(one[f"time/{name}"] for one in steps[0]) for name in ("rollout", "update")]
        )
        idle.append(
            [
                statistics.median(one[f"time/idle_{who}"] for one in steps[1])
                for who in ("trainers", "engines")
            ]
        )
    rollout, update = (statistics.median(one[n] for one in shapes) for n in (0, 1))
    trainers, engines = (statistics.median(one[n] for one in idle) for n in (0, 1))
    told = (
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; in turn rollouts "
        f"{rollout:.1f} s and update {update:.1f} s; beside each other trainers idle {trainers:.0%}, "
        f"engines {engines:.0%})"
    )
    return [Figure(name="steps a second, rollouts beside updates against in turn", measured=told,
                   accepted="at least 1.6 idle, 1.35 busy")]  # fmt: skip


def _steps(model: str, run: Path, age: int) -> list[dict[str, float]]:
    """Return metrics of all steps except the first, which generates two batches, and the last, which
    generates none.
    """
    recipe = run.with_suffix(".toml")
    recipe.write_text(f'[model]\nname = "{model}"\n')
    command = [
        sys.executable,
        "-m",
        "outrider",
        "train",
        str(recipe),
        "--run",
        str(run),
        "--progress",
        "none",
    ]
    subprocess.run(
        [*command, *_OVERLAP, f"cluster.max_staleness={age}"], check=True, capture_output=True, text=True
    )
    return [one for one in read_records(run / "metrics.jsonl") if one["kind"] == "train"][1:-1]
