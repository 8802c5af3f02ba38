"""The tutorials are executed block by block, with a tiny model and short trainings."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from outrider.cli import main
from outrider.config import validate
from outrider.training.settings import RunSettings
from tests.tiny import save_tiny_model

START = Path(__file__).parents[2] / "docs" / "start"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# The trainings of the pages take minutes.
SMALL = (
    "num_threads=1", "model.precision=float32", "algorithm.group_size=4", "train.num_steps=1",
    "train.tasks_per_step=2", "rollout.max_turns=4", "rollout.max_turn_tokens=24", "buffer.embedder=hash",
    "evaluation.num_tasks=2", "evaluation.num_samples=1",
)  # fmt: skip


def follow(
    page: str, kinds: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> None:
    """Execute all blocks of a page in an empty folder, with ``overrides`` of its trainings."""
    model = save_tiny_model(folder / "model", context=4096)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    blocks = BLOCK.findall((START / page).read_text(encoding="utf-8"))
    assert [kind for kind, *_ in blocks] == kinds
    for kind, title, body in blocks:
        if title:
            Path(title).write_text(body, encoding="utf-8")
        elif kind == "sh":
            for line in body.replace("\\\n", " ").splitlines():
                name, *arguments = shlex.split(line)
                assert name == "outrider"
                if arguments[0] == "train":
                    arguments += [f"model.name={model}", *SMALL, *overrides]
                if "--run" in arguments:
                    arguments += ["--progress", "none"]
                assert main(arguments) == 0
        else:
            exec(compile(body, page, "exec"), {"__name__": "tutorial"})
    for name in ("guess", "lift", "my_tools", "my_agent", "my_rewards"):
        sys.modules.pop(name, None)


def test_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow("own_environment.md", ["python", "python", "toml", "sh", "sh", "python"], tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert 'type = "guess:Guess"  # recipe' in printed and "rapo" in printed
    assert (tmp_path / "runs" / "grpo" / "report.html").exists(), printed[-2000:]


def test_own_gymnasium_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium", reason="needs the extra gym")
    follow("own_gym.md", ["python", "python", "toml", "sh"], tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "arpo" / "report.html").exists()


@pytest.mark.long
def test_own_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai", reason="needs the package openai")
    follow("own_agent.md", ["python", "json", "json", "python", "toml", "sh"], tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "arpo" / "report.html").exists()


def test_own_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["python", "python", "python", "toml", "sh"]
    # a token of the tiny model is a character
    follow("own_functions.md", kinds, tmp_path, monkeypatch, "rollout.max_turn_tokens=64")
    printed = capsys.readouterr().out
    assert "Write <multiply>" in printed
    demonstrations = pq.read_table(tmp_path / "runs" / "tags" / "rollouts" / "cold-start.parquet")
    assert demonstrations.column("success").to_pylist() == [1.0] * 24
    assert demonstrations.column("num_failed_calls").to_pylist() == [0] * 24
    for run in ("tags", "native"):
        assert (tmp_path / "runs" / run / "report.html").exists(), printed[-2000:]
    assert 'protocol = "hermes"' in (tmp_path / "runs" / "native" / "config.toml").read_text()


def test_from_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow("from_trl.md", ["json", "python", "toml", "sh"], tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "sums" / "report.html").exists()


def test_every_setting_of_the_page_about_trl_exists() -> None:
    table = [line for line in (START / "from_trl.md").read_text("utf-8").splitlines() if line.startswith("|")]
    cells = [line.split(" | ")[1] for line in table[2:]]
    keys = {key for cell in cells for key in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)", cell)}
    assert len(keys) > 20
    tree = {
        "algorithm": {"type": "grpo"},
        "environment": {"type": "tools", "tools": [], "protocol": "hermes"},
        "engine": {"type": "vllm"},
    }
    settings = validate(RunSettings, tree)
    for key in keys:
        value: Any = settings
        for part in key.split("."):
            assert part in type(value).model_fields, key
            value = getattr(value, part)


def test_the_expert_of_the_tutorial_finds_every_number_in_its_turns() -> None:
    blocks = BLOCK.findall((START / "own_environment.md").read_text(encoding="utf-8"))
    [body] = [text for _, title, text in blocks if title == "guess.py"]
    names: dict[str, Any] = {"__name__": "guess_of_the_page"}
    exec(compile(body, "guess.py", "exec"), names)
    task_set = names["Guess"].build(names["Guess"].Settings())
    assert len(body.splitlines()) <= 40
    for task in (*task_set.tasks("train"), *task_set.tasks("test")):
        assert len(task_set.expert(task, 0)) <= task_set.settings.num_turns
