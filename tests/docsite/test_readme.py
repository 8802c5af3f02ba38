"""README: its Python example runs, and it names every command."""

import re
from pathlib import Path

import pytest

import outrider
from outrider.cli import COMMANDS
from tests.docsite.test_tutorial import SMALL
from tests.tiny import save_tiny_model

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
RECIPE = """\
[model]
name = "{model}"

[algorithm]
type = "grpo"

[rollout]
max_response_tokens = 256
"""


def test_the_example_trains_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe contains what the example does not show; the run is shortened."""
    [example] = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    model = save_tiny_model(tmp_path / "model", context=4096)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    train = outrider.train
    monkeypatch.setattr(outrider, "train", lambda *args, **kwargs: train(*args, overrides=SMALL, **kwargs))
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert len(outrider.load_run("runs/first").metrics("train")) == 1
    assert "0" in capsys.readouterr().out  # no turn of a random model is one of the words


def test_every_command_is_named() -> None:
    assert [name for name in COMMANDS if not re.search(rf"\boutrider {name}\b(?!-)", README)] == []
