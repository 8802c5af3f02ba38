"""Two short trainings of one seed in one process give the same bits; what other code drew before does not
matter.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outrider.config import load_settings
from outrider.engines.local import cpu_kernels as onednn
from outrider.errors import ConfigError
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from outrider.viewer.records import TraceReader
from tests.training.tool_run import write_tool_run

NUM_STEPS = 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("determinism"))


def _train(recipe: Path, name: str, *overrides: str) -> Path:
    settings = load_settings(RunSettings, file=recipe, overrides=["evaluation.every=0", *overrides])
    run = recipe.parent / name
    run_training((RunDirectory.create(run, settings), settings), progress="none", on_start=lambda stop: None)
    return run


def _weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "masters.safetensors")


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_seed_gives_equal_bits_and_another_seed_does_not(recipe: Path) -> None:
    length = f"train.num_steps={NUM_STEPS}"
    first = _train(recipe, "first", length)
    torch.manual_seed(99)  # the global generators belong to nobody
    torch.rand(7)
    np.random.seed(5)
    second = _train(recipe, "second", length)
    other = _train(recipe, "other", length, "seed=4")
    learned = _weights(first, NUM_STEPS)
    assert not _equal(learned, _weights(first, 0)), "nothing was learned, so nothing was compared"
    assert _equal(learned, _weights(second, NUM_STEPS))
    assert not _equal(learned, _weights(other, NUM_STEPS))


def test_the_evaluation_before_training_may_be_left_out_and_changes_no_bit(recipe: Path) -> None:
    with_it = _train(recipe, "evaluated", "train.num_steps=1")
    without = _train(recipe, "not-evaluated", "train.num_steps=1", "evaluation.at_start=false")
    assert _equal(_weights(with_it, 1), _weights(without, 1)) and not _equal(
        _weights(without, 1), _weights(without, 0)
    )
    labels = [
        [one["label"] for one in RunDirectory(run).finished_evaluations()] for run in (with_it, without)
    ]
    assert len(labels[0]) == 2 and labels[1] == labels[0][1:]
    with pytest.raises(ConfigError, match="nothing to do"):
        load_settings(RunSettings, file=recipe, overrides=["train.num_steps=0", "evaluation.at_start=false"])


def test_bfloat16_trains_without_packed_layers_for_it(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It crashed in the first rollout. From the rollout over the gate of log-probs to the update."""
    monkeypatch.setattr(onednn, "can_pack", lambda dtype: False)
    run = _train(recipe, "bfloat16", "train.num_steps=1", "model.precision=bfloat16")
    assert not _equal(_weights(run, 1), _weights(run, 0))


def test_concurrency_decides_no_draw(recipe: Path) -> None:
    """Which rollouts share a batch changes at most the last digits of a log-prob, and with it no token of
    these.
    """
    texts = []
    for number in (1, 64):
        run = _train(recipe, f"concurrent-{number}", f"train.max_concurrent={number}", "train.num_steps=1")
        rows = TraceReader(run / "traces").read(1)
        path: dict[tuple[str, int], list[tuple[str, str]]] = {(row.task_key, row.rollout): [] for row in rows}
        for row in rows:
            path[row.task_key, row.rollout].append((row.origin, row.text))
        texts.append(path)
    assert texts[0] == texts[1]
