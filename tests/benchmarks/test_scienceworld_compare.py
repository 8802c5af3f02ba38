"""The ScienceWorld comparison trains on tasks that come again: its memory is one a task, whatever the
recipe's is.
"""

import importlib
from pathlib import Path

import pytest

from outrider.algorithms.exploration import Empo2Settings
from outrider.algorithms.tips import never_shows_a_tip
from outrider.config import load_settings
from outrider.training.settings import RunSettings

ROOT = Path(__file__).parents[2]


def test_every_run_has_a_memory_per_task_and_tips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # it runs as a script
    module = importlib.import_module("scienceworld_compare")
    begun: dict[str, list[str]] = {}
    monkeypatch.setattr(
        module, "train", lambda run, arguments, last_label="": begun.update({run.name: list(arguments)})
    )
    monkeypatch.setattr(module, "at_equal_tokens", lambda run: ["train.max_policy_tokens=1000"])
    recipe = str(ROOT / "recipes" / "scienceworld-cpu.toml")
    monkeypatch.setattr(module, "costs", lambda *given: "")
    for name in ("panel", "scores"):
        monkeypatch.setattr(module, name, lambda *given: "")
    monkeypatch.setattr("sys.argv", ["x", "--out", str(tmp_path), "--seeds", "1", "--recipe", recipe])
    module.main()
    assert set(begun) == {"cold-0", "empo2-0", "grpo-0"}
    for name, arguments in begun.items():
        settings = load_settings(RunSettings, file=Path(arguments[0]), overrides=arguments[1:])
        chosen = settings.algorithm
        assert isinstance(chosen, Empo2Settings)
        assert (chosen.memory.scope, chosen.memory.rank, chosen.memory.capacity) == ("task", "score", 1000)
        if name == "empo2-0":
            num_groups = settings.train.num_steps * settings.train.tasks_per_step
            assert not never_shows_a_tip(chosen, num_groups=num_groups, num_tasks=6)
    assert "environment.num_train_variations=6" in begun["empo2-0"]
