"""recipes/gsm8k-python-qwen.toml and the script that writes its files from a file of GSM8K."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from outrider import api
from outrider.config import load_settings
from outrider.environments.base import make_task_set
from outrider.rollout.episode import play_texts
from outrider.smoke import NO_SERVER, smoke_assets, smoke_overrides
from outrider.training.experts import read_demonstrations
from outrider.training.settings import RunSettings

RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k-python-qwen.toml"
EGGS = {
    "question": "A hen lays 16 eggs a day. Jan eats 3 and sells the rest for $2 each. What does she earn?",
    "answer": "Jan sells 16 - 3 = <<16-3=13>>13 eggs.\nShe earns 13 * 2 = $<<13*2=26>>26.\n#### 26",
}
OTHERS = [
    "2<<1+1=2>> and <<2+2=4>>4\n#### 4",
    "It is 1+1=<<1+1=2>>2\n#### 3",
    "Two.\n#### 2",
    *["#### 1"] * 300,
]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSettings:
    """The recipe's, in a folder with its files."""
    monkeypatch.chdir(tmp_path)
    rows = [EGGS, *({"question": str(number), "answer": text} for number, text in enumerate(OTHERS))]
    Path("gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["script", "gsm8k.jsonl"])
    runpy.run_path(str(RECIPE.with_name("gsm8k_python_qwen.py")), run_name="__main__")
    return api.run_settings(RECIPE)


def test_the_splits_share_no_task(settings: RunSettings) -> None:
    task_set = make_task_set(settings.environment)
    tasks = {split: [task.question for task in task_set.tasks(split)] for split in ("train", "valid", "test")}
    numbers = [str(number) for number in range(len(OTHERS))]
    assert tasks == {
        "train": [EGGS["question"], *numbers[:3]], "valid": numbers[3:103], "test": numbers[103:]
    }  # fmt: skip


def test_a_solution_with_one_calculation_per_line_is_a_demonstration_that_solves_its_task(
    settings: RunSettings,
) -> None:
    task_set = make_task_set(settings.environment)
    tasks = task_set.tasks("train")
    assert settings.cold_start.demonstrations is not None
    shown = read_demonstrations(settings.cold_start.demonstrations, tasks, settings.environment)
    assert shown.keys() == {tasks[0].key}
    texts = [step.text for step in shown[tasks[0].key] or ()]
    assert len(texts) == 3 and '"code": "print(13*2)"' in texts[1] and "26" not in texts[1]
    factory = task_set.make()
    try:
        _, result = play_texts(factory, tasks[0], texts, seed=0, timeout_s=60)
    finally:
        factory.close()
    assert result.success and result.episode_return == 1.0


def test_a_smoke_run_has_room_for_demonstrated_turns_and_none_without_their_file(
    settings: RunSettings,
) -> None:
    def shrink() -> RunSettings:
        smaller = smoke_overrides(settings, smoke_assets(), server=NO_SERVER)
        return load_settings(RunSettings, file=RECIPE, overrides=smaller)

    shown = Path("data/gsm8k/demonstrations.jsonl")
    [_, action, *_] = json.loads(shown.read_text())["messages"]
    small = shrink()
    assert small.cold_start.num_examples == 2
    assert small.rollout.max_turn_tokens > len(json.dumps(action))  # one token per character
    shown.unlink()
    small = shrink()
    assert small.cold_start.num_examples == 0 and small.cold_start.demonstrations is None
