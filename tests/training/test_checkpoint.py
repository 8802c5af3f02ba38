"""Checkpoints on disk: which ones are kept, and that damage is found before weights are used."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.errors import CheckpointError
from outrider.training.checkpoint import (
    checkpoints_newest_first,
    load_checkpoint,
    load_reference,
    prune_checkpoints,
    save_checkpoint,
    save_reference,
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


def make(checkpoints: Path, *names: str) -> None:
    for name in names:
        (checkpoints / name).mkdir(parents=True)


def test_a_run_that_went_back_keeps_what_it_writes_and_not_the_damaged_ones_in_front_of_it(
    tmp_path: Path,
) -> None:
    """Steps 20 and 30 were damaged, so the run went back to 0 and has now saved step 10: that is the one to
    continue from.
    """
    make(tmp_path, "step-000000", "step-000010", "step-000020", "step-000030")
    prune_checkpoints(tmp_path, max_checkpoints=2, newest=10)
    assert folders(tmp_path) == ["step-000000", "step-000010"]


def test_the_newest_and_the_first_stay(tmp_path: Path) -> None:
    make(tmp_path, *(f"step-{step:06d}" for step in range(0, 60, 10)))
    prune_checkpoints(tmp_path, max_checkpoints=2, newest=50)
    assert folders(tmp_path) == ["step-000000", "step-000040", "step-000050"]


def test_folders_that_a_user_made_are_no_checkpoints_and_stay(tmp_path: Path) -> None:
    make(tmp_path, "step-000010", "step-000020", "step-000010-best", "step-best", "notes")
    assert [path.name for path in checkpoints_newest_first(tmp_path)] == ["step-000020", "step-000010"]
    prune_checkpoints(tmp_path, max_checkpoints=1, newest=20)
    assert folders(tmp_path) == ["notes", "step-000010-best", "step-000020", "step-best"]


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


KILLED = """
import os, signal, sys
from pathlib import Path
from outrider.training.checkpoint import prune_checkpoints
num_gone, unlink, rmdir = [0], os.unlink, os.rmdir
def counted(real):
    def call(*a, **k):
        real(*a, **k)
        num_gone[0] += 1
        if num_gone[0] == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
    return call
os.unlink, os.rmdir = counted(unlink), counted(rmdir)
prune_checkpoints(Path(sys.argv[1]), max_checkpoints=1, newest=2)
"""


@pytest.mark.parametrize(
    "num_removed", [2, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 3, 4))]
)
def test_a_kill_while_a_checkpoint_is_removed_leaves_it_whole_or_nothing(
    tmp_path: Path, num_removed: int
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2):
        folder = checkpoints / f"step-{step:06d}"
        (folder / "queue").mkdir(parents=True)
        for name in ("state.json", "masters.safetensors", "queue/rows.json"):
            (folder / name).write_text("x")
    done = subprocess.run([sys.executable, "-c", KILLED, str(checkpoints), str(num_removed)], check=False)
    assert done.returncode == -signal.SIGKILL
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


def test_damaged_reference_weights_are_found(tmp_path: Path) -> None:
    """The KL term would hold the policy to other weights than those it began from."""
    path = tmp_path / "reference.safetensors"
    saved = save_reference(path, policy(0).frozen_copy())
    reference = policy(1).frozen_copy()
    load_reference(path, reference, checksum=saved)
    flip_last_bit(path)
    with pytest.raises(CheckpointError, match="not what was written"):
        load_reference(path, reference, checksum=saved)
    load_reference(path, reference, checksum=None)  # of a run whose checkpoints do not know it
