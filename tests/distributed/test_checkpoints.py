"""Checkpoints of two ranks are read by one, two and three ranks and by one process, and the other way
round.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.distributed.learner import RankGroup
from outrider.errors import CheckpointError
from outrider.training.checkpoint import load_checkpoint, save_checkpoint
from outrider.training.setup import load_weights
from tests.distributed.groups import groups
from tests.distributed.probe import SETTINGS, alone, distance, run
from tests.distributed.test_rank_updates import objective_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
RanksOf = Callable[[int], RankGroup]


class Saved:
    """A group of ranks as a checkpoint sees it."""

    def __init__(self, ranks: RankGroup, *, num_steps: int = 0) -> None:
        self.ranks, self.num_steps = ranks, num_steps

    def save(self, folder: Path) -> None:
        self.ranks.call("save", str(folder))

    def load(self, folder: Path, *, num_steps: int) -> None:
        [(self.num_steps, _), *_] = self.ranks.call("load", str(folder), num_steps)


@pytest.fixture(scope="module")
def written(
    ranks_of: RanksOf, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint of two ranks, its weights, and those one step later."""
    ranks, objective = ranks_of(2), objective_of("grpo")
    first = ranks.call("found", groups(4), objective, SETTINGS)[0]
    folder = tmp_path_factory.mktemp("checkpoints") / "step-000001"
    save_checkpoint(folder, Saved(ranks, num_steps=1), {"step": 1})
    return folder, first.weights, ranks.call("found", groups(4, seed=2), objective, SETTINGS)[0].weights


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_reads_the_checkpoint_of_two(
    ranks_of: RanksOf, written: tuple, size: int
) -> None:
    folder, weights, later = written
    ranks = ranks_of(size)
    saved = Saved(ranks)
    assert load_checkpoint(folder, saved)["step"] == 1 and saved.num_steps == 1
    read = ranks.call("state")[0]
    assert all(read[name].equal(one) for name, one in weights.items())
    found = ranks.call("found", groups(4, seed=2), objective_of("grpo"), SETTINGS)[0]
    if size == 2:
        assert all(found.weights[name].equal(one) for name, one in later.items())
    assert distance(found.weights, later) < 1e-6  # the moments came along, or it would be 1e-3


def test_one_process_reads_the_checkpoint_of_two_ranks(written: tuple, folder: Path) -> None:
    checkpoint, weights, later = written
    policy, _ = alone(folder)
    load_checkpoint(checkpoint, policy)
    assert all(policy.masters[name].equal(one) for name, one in weights.items())
    found = run(policy, None, groups(4, seed=2), objective_of("grpo"), SETTINGS)
    assert distance(found.weights, later) < 1e-6
    other, _ = alone(folder)
    load_weights(other, checkpoint)
    assert all(other.masters[name].equal(one) for name, one in weights.items())


def test_ranks_read_the_checkpoint_of_one_process(ranks_of: RanksOf, folder: Path, tmp_path: Path) -> None:
    policy, _ = alone(folder)
    run(policy, None, groups(4), objective_of("grpo"), SETTINGS)
    save_checkpoint(tmp_path / "step-000001", policy, {"step": 1})
    ranks = ranks_of(2)
    load_checkpoint(tmp_path / "step-000001", Saved(ranks))
    assert all(ranks.call("state")[0][name].equal(one) for name, one in policy.masters.items())
    wanted = run(policy, None, groups(4, seed=2), objective_of("grpo"), SETTINGS)
    found = ranks.call("found", groups(4, seed=2), objective_of("grpo"), SETTINGS)[0]
    assert distance(found.weights, wanted.weights) < 1e-6


def test_shards_are_safetensors_and_each_is_checked(written: tuple, folder: Path) -> None:
    checkpoint = written[0]
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    assert {path.suffix for path in files} == {".safetensors", ".json"}  # no pickle
    shards = [path for path in files if path.parent.name == "weights" and path.suffix == ".safetensors"]
    assert len(shards) == 2
    names = json.loads((checkpoint / "state.json").read_text())["checksums"]
    assert {f"weights/{path.name}" for path in shards} <= set(names)
    content = shards[1].read_bytes()
    policy, _ = alone(folder)
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), None):
        shards[1].unlink()
        if damaged is not None:
            shards[1].write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            load_checkpoint(checkpoint, policy)
        with pytest.raises(CheckpointError):
            load_weights(policy, checkpoint)
        shards[1].write_bytes(content)
    load_checkpoint(checkpoint, policy)
