"""Checkpoints on disk: which ones are kept, and that damage is found before weights are used."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import CheckpointError
from outrider.training.checkpoint import (
    checkpoints_newest_first,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from outrider.training.policy import Policy
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import OptimizerSettings
from outrider.training.setup import load_weights
from tests.tiny import tiny_model


def policy(seed: int = 0) -> Policy:
    return Policy(tiny_model(seed=seed, num_layers=1), OptimizerSettings(learning_rate=1e-3))


def flip_last_bit(path: Path) -> None:
    """safetensors reads the file without a word."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def folders(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


@pytest.mark.parametrize(
    ("names", "max_checkpoints", "newest", "retained"),
    [
        # The newest ones and that of step 0.
        ([0, 10, 20, 30, 40, 50], 2, 50, [0, 40, 50]),
        # Steps 20 and 30 were damaged, so the run went back to 0 and has now saved step 10.
        ([0, 10, 20, 30], 2, 10, [0, 10]),
        # Folders that a user made are no checkpoints.
        ([10, 20, "step-000010-best", "step-best", "notes"], 1, 20,
         ["notes", "step-000010-best", 20, "step-best"]),
    ],
)  # fmt: skip
def test_which_checkpoints_are_retained(
    names: list[Any], max_checkpoints: int, newest: int, retained: list[Any], tmp_path: Path
) -> None:
    def named(values: list[Any]) -> list[str]:
        return [value if isinstance(value, str) else f"step-{value:06d}" for value in values]

    for name in named(names):
        (tmp_path / name).mkdir()
    steps = [value for value in names if isinstance(value, int)]
    assert [path.name for path in checkpoints_newest_first(tmp_path)] == named(steps[::-1])
    prune_checkpoints(tmp_path, max_checkpoints=max_checkpoints, newest=newest)
    assert folders(tmp_path) == named(retained)


def test_a_checkpoint_that_a_kill_left_half_written_goes_with_the_next_one(tmp_path: Path) -> None:
    """A stop writes one at any step; killed inside it, a run goes on from an earlier one and never saves that
    step again.
    """
    half = tmp_path / ".step-000007.partial"
    half.mkdir()
    (half / "masters.safetensors").write_bytes(b"half")
    save_checkpoint(tmp_path / "step-000010", policy(), {"step": 10})
    prune_checkpoints(tmp_path, max_checkpoints=1, newest=10)
    assert folders(tmp_path) == ["step-000010"]


def prune_and_die(checkpoints: Path, num_removed: int) -> None:
    """In a child: SIGKILL after so many calls that remove something."""
    calls = itertools.count(1)

    def counted(remove: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            remove(*arguments, **options)
            if next(calls) == num_removed:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    os.unlink, os.rmdir = counted(os.unlink), counted(os.rmdir)
    prune_checkpoints(checkpoints, max_checkpoints=1, newest=2)


@pytest.mark.parametrize("num_removed", [1, 2, 3, 4])
def test_a_kill_while_a_checkpoint_is_removed_leaves_it_whole_or_nothing(
    tmp_path: Path, num_removed: int
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2):
        folder = checkpoints / f"step-{step:06d}"
        (folder / "queue").mkdir(parents=True)
        for name in ("state.json", "masters.safetensors", "queue/rows.json"):
            (folder / name).write_text("x")
    if not (child := os.fork()):
        try:
            prune_and_die(checkpoints, num_removed)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert checkpoints_newest_first(checkpoints) == [checkpoints / "step-000002"]
    assert folders(checkpoints)[1:] == ["step-000002"]  # and one that is hidden
    run = RunDirectory(tmp_path)
    run.lock()  # as every command that goes on with a run does
    run.release()
    assert folders(checkpoints) == ["step-000002"]
    assert len([path for path in (checkpoints / "step-000002").rglob("*") if path.is_file()]) == 3


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saved, loaded = policy(0), policy(1)
    save_checkpoint(tmp_path / "step-000001", saved, {"step": 1})
    assert load_checkpoint(tmp_path / "step-000001", loaded)["step"] == 1
    assert all(torch.equal(saved.masters[name], loaded.masters[name]) for name in saved.masters)


def test_weights_for_another_run_are_checked_too(tmp_path: Path) -> None:
    """``--checkpoint`` and ``model.initial_checkpoint`` take the weights alone: a changed bit must not be
    evaluated in silence.
    """
    checkpoint = tmp_path / "step-000001"
    save_checkpoint(checkpoint, policy(0), {"step": 1})
    load_weights(policy(1), checkpoint)
    flip_last_bit(checkpoint / "masters.safetensors")
    with pytest.raises(CheckpointError, match="not what was written"):
        load_weights(policy(1), checkpoint)


def test_the_weights_alone_are_enough_for_another_run(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-000001", policy(0), {"step": 1})
    (tmp_path / "step-000001" / "state.json").unlink()
    loaded = policy(1)
    load_weights(loaded, tmp_path / "step-000001")
    assert all(torch.equal(loaded.masters[name], master) for name, master in policy(0).masters.items())
