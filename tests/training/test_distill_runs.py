"""Short runs with self-distillation and a tiny real model: help in the files of the run, equal bits after a
kill, and what the update learns from it.
"""

import json
from pathlib import Path

import pytest

from outrider.trace import Trace
from outrider.viewer.answers import group_view
from tests.training.short_runs import assert_same, begin, interrupted, records, resume, train
from tests.training.tool_run import write_tool_run

GRPO = ("algorithm.type=grpo", "algorithm.group_size=4", "evaluation.at_start=false", "evaluation.num_tasks=1")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions with a tool; the file of help has a text for every second one."""
    path = write_tool_run(tmp_path_factory.mktemp("runs"))
    path.write_text(path.read_text().replace('type = "rapo"\ngroup_size = 4\nnum_hybrid = 2', ""))
    return path


def run_with(recipe: Path, name: str, *options: str, num_steps: int = 2) -> Path:
    return train(recipe, name, *GRPO, f"train.num_steps={num_steps}", *(f"algorithm.distill.{o}" for o in options))
