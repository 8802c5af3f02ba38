"""Runs of two steps in this process, and the same as a kill in the second one leaves them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from outrider.config import load_settings
from outrider.training.checkpoint import read_checksummed, write_checksummed
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training


def begin(recipe: Path, run: Path, *overrides: str) -> Path:
    """Two steps, of which the checkpoint of the first is then the newest."""
    given = ["evaluation.every=0", "train.num_steps=2", "evaluation.num_tasks=1", *overrides]
    settings = load_settings(RunSettings, file=recipe, overrides=given)
    run_training((RunDirectory.create(run, settings), settings), progress="none", on_start=lambda stop: None)
    return run


def interrupted(run: Path) -> Path:
    """The run as a kill in its second step leaves it: the checkpoint is missing, later lines are there."""
    copy = run.with_name(f"{run.name}-interrupted")
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000002")
    return copy


def resume(run: Path, *, progress: Literal["none", "plain"] = "none") -> None:
    run_training(RunDirectory.open(run), progress=progress, on_start=lambda stop: None)


def assert_same(one: Path, other: Path) -> None:
    last = Path("checkpoints") / "step-000002"
    for name in ("masters.safetensors", "optimizer.safetensors", "state.json"):
        assert (one / last / name).read_bytes() == (other / last / name).read_bytes(), name
    assert (one / "evaluations.jsonl").read_bytes() == (other / "evaluations.jsonl").read_bytes()


@contextmanager
def rewrite_state(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """The state as another process might have written it: what is changed gets the checksum that belongs to
    it.
    """
    state = read_checksummed(checkpoint / "state.json")
    yield state
    write_checksummed(checkpoint / "state.json", state)
