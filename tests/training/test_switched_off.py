"""With its own part switched off, every method trains GRPO's weights bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.algorithms.base import ObjectiveSettings
from outrider.config import load_settings, validate
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from tests.training.tool_run import write_tool_run

OFF: dict[str, dict[str, Any]] = {
    "rapo": {"num_hybrid": 0, "group_size": 4},
    "empo2": {"memory_probability": 0, "intrinsic_coefficient": 0, "memory": {"embedder": "hash"}},
    "arpo": {"group_size": 4, "first_wave": 4},
    "combined": {},
    "gigpo": {"step_weight": 0.0, "normalization": "std"},
    "luffy": {"num_demonstrations": 0},
    "rollout_replay": {"fresh_share": 1.0},
}
NUM_STEPS = 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_run(tmp_path_factory.mktemp("off"))


def weights(recipe: Path, run: Path, algorithm: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """The weights before the first step and after the last one."""
    overrides = [
        "evaluation.every=0", "evaluation.at_start=false", "evaluation.num_tasks=1",
        f"train.num_steps={NUM_STEPS}", "optimizer.learning_rate=3e-3",
    ]  # fmt: skip
    base = load_settings(RunSettings, file=recipe, overrides=overrides).model_dump(mode="json")
    settings = validate(RunSettings, {**base, "algorithm": algorithm})
    run_training((RunDirectory.create(run, settings), settings), progress="none", on_start=lambda stop: None)
    return [
        load_file(run / "checkpoints" / f"step-{step:06d}" / "masters.safetensors") for step in (0, NUM_STEPS)
    ]


@pytest.mark.parametrize("method", OFF)
def test_switched_off_it_is_grpo_bit_for_bit(method: str, recipe: Path, tmp_path: Path) -> None:
    """GRPO with the method's own defaults of the objective, which for some of them are not those of GRPO."""
    off = {"type": method, **OFF[method]}
    settings = validate(RunSettings, {"environment": {"type": "factbook"}, "algorithm": off}).algorithm
    shared = {*ObjectiveSettings.model_fields, "group_size"}
    objective = settings.model_dump(mode="json", include=shared)
    start, ours = weights(recipe, tmp_path / method, off)
    _, grpo = weights(recipe, tmp_path / "grpo", {"type": "grpo", **objective})
    assert ours.keys() == grpo.keys() and all(torch.equal(ours[name], grpo[name]) for name in grpo)
    assert not all(torch.equal(start[name], grpo[name]) for name in grpo)
