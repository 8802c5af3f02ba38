"""Runs of a few steps in this process, and the same as a kill in the second step leaves them."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from outrider.config import load_settings
from outrider.training.checkpoint import read_checksummed, write_checksummed
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training

Progress = Literal["none", "plain"]


def train(recipe: Path, run: str | Path, *overrides: str, progress: Progress = "none") -> Path:
    """Train the recipe without evaluations between the steps; ``run`` is relative to the recipe's folder."""
    path = recipe.parent / run
    settings = load_settings(RunSettings, file=recipe, overrides=["evaluation.every=0", *overrides])
    run_training(
        (RunDirectory.create(path, settings), settings), progress=progress, on_start=lambda stop: None
    )
    return path


def begin(recipe: Path, run: Path, *overrides: str) -> Path:
    """Two steps, of which the checkpoint of the first is then the newest."""
    return train(recipe, run, "train.num_steps=2", "evaluation.num_tasks=1", *overrides)


def interrupted(run: Path) -> Path:
    """The run as a kill in its second step leaves it: the checkpoint is missing, later lines are there."""
    copy = run.with_name(f"{run.name}-interrupted")
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000002")
    return copy


def resume(run: Path, *, progress: Progress = "none") -> None:
    run_training(RunDirectory.open(run), progress=progress, on_start=lambda stop: None)


def assert_same(one: Path, other: Path) -> None:
    last = Path("checkpoints") / "step-000002"
    for name in ("masters.safetensors", "optimizer.safetensors", "state.json"):
        assert (one / last / name).read_bytes() == (other / last / name).read_bytes(), name
    assert (one / "evaluations.jsonl").read_bytes() == (other / "evaluations.jsonl").read_bytes()


def records(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The metrics of every step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def labels(run: Path) -> list[tuple[str, int]]:
    """Labels and steps of the finished evaluations."""
    return [(one["label"], one["step"]) for one in RunDirectory(run).finished_evaluations()]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "masters.safetensors")


def same_weights(one: Path, other: Path, step: int, other_step: int | None = None) -> bool:
    """Whether two runs, or one at two steps, have the same weights."""
    first, second = weights(one, step), weights(other, step if other_step is None else other_step)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def content(run: Path) -> dict[str, bytes]:
    """Every file but the report, which tells how often the run was resumed."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != "report.html"
    }


@contextmanager
def rewrite_state(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """The state as another process might have written it: what is changed gets the checksum that belongs to
    it.
    """
    state = read_checksummed(checkpoint / "state.json")
    yield state
    write_checksummed(checkpoint / "state.json", state)
