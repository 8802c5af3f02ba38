"""The tutorial "your own environment" is done as it is written, block by block, with a tiny model."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from tests.tiny import save_tiny_model

START = Path(__file__).parents[2] / "docs" / "start"
PAGE = START / "own_environment.md"
FUNCTIONS = START / "own_functions.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)

# The page's own model takes minutes; its other settings are what it says.
SMALL = ("num_threads=1", "model.precision=float32", "train.num_steps=2", "algorithm.group_size=4")


SHORT = ("train.tasks_per_step=2", "rollout.max_turns=2", "rollout.max_turn_tokens=16", "train.num_steps=1")


def run_shell(text: str, model: str, more: tuple[str, ...] = ()) -> None:
    for line in text.splitlines():
        name, *arguments = shlex.split(line)
        assert name == "outrider"
        small = (
            [f"model.name={model}", "buffer.embedder=hash", *SMALL, *more] if arguments[0] == "train" else []
        )
        assert main([*arguments, *small, *(["--progress", "none"] if "--run" in arguments else [])]) == 0


def follow(
    page: Path,
    kinds: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    more: tuple[str, ...] = (),
    **model_sizes: int,
) -> None:
    """Do what the page says, in an empty folder; ``more`` settings make it small."""
    model = str(save_tiny_model(folder / "model", **model_sizes))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert [kind for kind, *_ in blocks] == kinds
    for kind, title, body in blocks:
        if title:
            Path(title).write_text(body, encoding="utf-8")
        elif kind == "sh":
            run_shell(body, model, more)
        else:
            exec(compile(body, str(page), "exec"), {"__name__": "tutorial"})
    for name in ("guess", "lift", "my_tools", "my_agent"):
        sys.modules.pop(name, None)


def test_the_gymnasium_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gymnasium", reason="needs the extra gym")
    follow(START / "own_gym.md", ["python", "python", "toml", "sh"], tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "arpo" / "report.html").exists(), capsys.readouterr().out[-2000:]


@pytest.mark.long
def test_the_page_of_an_agent_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai", reason="needs the package openai")
    kinds = ["python", "json", "json", "python", "toml", "sh"]
    follow(START / "own_agent.md", kinds, tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "arpo" / "report.html").exists(), capsys.readouterr().out[-2000:]


def test_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(PAGE, ["python", "python", "toml", "sh", "sh", "python"], tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert 'type = "guess:Guess"  # recipe' in printed and "rapo" in printed
    assert (tmp_path / "runs" / "grpo" / "report.html").exists(), printed[-2000:]


def test_the_page_of_functions_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(
        FUNCTIONS,
        ["python", "python", "json", "json", "toml", "sh"],
        tmp_path,
        monkeypatch,
        more=SHORT,
        context=4096,
    )
    printed = capsys.readouterr().out
    assert "Write <multiply>" in printed
    for run in ("tags", "native"):
        assert (tmp_path / "runs" / run / "report.html").exists(), printed[-2000:]
    assert 'protocol = "hermes"' in (tmp_path / "runs" / "native" / "config.toml").read_text()


def test_the_expert_finds_every_number_in_its_turns(tmp_path: Path) -> None:
    """What the page says of its world holds: the expert solves all tasks, so imitation and retrieval can."""
    (body,) = [
        text for _, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if title == "guess.py"
    ]
    names: dict[str, object] = {"__name__": "guess_of_the_page"}
    exec(compile(body, "guess.py", "exec"), names)
    guess: Any = names["Guess"]
    family = guess.build(guess.Settings())
    assert len(body.splitlines()) <= 40
    for task in (*family.tasks("train"), *family.tasks("test")):
        assert len(family.expert(task, 0)) <= family.settings.num_turns
