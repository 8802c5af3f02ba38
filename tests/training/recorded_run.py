"""A small real run with everything that records can contain: tips, retrieved steps, forks, and faults."""

import itertools
from pathlib import Path

import pytest

from outrider.config import load_settings
from outrider.environments.base import StepResult
from outrider.environments.tool_qa.environment import ToolEnvironment
from outrider.errors import ToolFault
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import RunSettings
from outrider.training.setup import run_training
from tests.training.tool_run import write_tool_run
from tests.training.whole_runs import CASES

REASON = "the search index <b>went away</b>"


def record_run(root: Path) -> Path:
    """Three steps of two epochs, the second with ratios that are not 1; its folder below ``root``."""
    recipe = write_tool_run(root)
    recipe.write_text(recipe.read_text().replace("num_hybrid = 2\n", ""))
    overrides = [*CASES["combined"], "train.num_steps=3", "evaluation.every=0", "update.num_epochs=2"]
    settings = load_settings(
        RunSettings, file=recipe, overrides=[*overrides, "train.max_retries=0", "buffer.evolve=true"]
    )
    calls = itertools.count()
    step = ToolEnvironment.step

    def flaky(environment: ToolEnvironment, action: str) -> StepResult:
        if next(calls) % 11 == 9:
            raise ToolFault(REASON)
        return step(environment, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToolEnvironment, "step", flaky)
        directory = RunDirectory.create(root / "run", settings)
        run_training((directory, settings), progress="none", on_start=lambda stop: None)
    return root / "run"
