"""The recipes of ALFWorld, played from the command line by a tiny model: trained and evaluated."""

import json
from pathlib import Path

import pytest

from outrider.cli import main
from tests.tiny import save_tiny_model

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = (
    "num_threads=1", "model.precision=float32", "environment.show_admissible=false",
    "environment.num_train=2", "algorithm.group_size=2", "rollout.max_turns=2", "rollout.max_turn_tokens=24",
    "rollout.max_response_tokens=2000", "evaluation.num_tasks=2", "evaluation.panel=none",
)  # fmt: skip
ONE_STEP = ("train.tasks_per_step=1", "train.num_steps=1", "train.checkpoint_every=1")


@pytest.mark.parametrize(
    ("recipe", "own"),
    [
        ("alfworld-gigpo", ()),
        ("alfworld-window-gigpo", ()),
        ("alfworld-empo2", ("algorithm.memory.embedder=hash",)),
    ],
)
def test_a_recipe_trains_and_is_evaluated(
    recipe: str, own: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, model = str(RECIPES / f"{recipe}.toml"), str(save_tiny_model(tmp_path / "model", context=4096))
    assert main(["train", file, "--dry-run"]) == 0
    assert 'type = "alfworld"' in capsys.readouterr().out
    quiet = ["--model", model, "--progress", "none", *SMALL, *own]
    assert main(["train", file, "--run", str(tmp_path / "run"), *quiet, *ONE_STEP]) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
    capsys.readouterr()
    assert main(["eval", file, "--run", str(tmp_path / "eval"), *quiet]) == 0
    (line,) = [json.loads(one) for one in (tmp_path / "eval" / "evaluations.jsonl").read_text().splitlines()]
    assert line["num_tasks"] == 2 and line["num_faults"] == 0
    assert {key.split("/")[:3][2] for key in line["task_scores"]} == {"test"}
