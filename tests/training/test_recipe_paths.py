"""Paths in a recipe: relative to the recipe, else to the current folder; absolute in the run; and a
one-line error with setting, path and folders if there is no such file.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from outrider import api
from outrider.cli import main
from outrider.config import require_paths
from outrider.environments.base import make_task_set
from outrider.errors import DataError
from outrider.plugins.imports import search_folders
from outrider.training.settings import RunSettings

RECIPE = """
[environment]
type = "tools"
tools = ["search"]
corpus = "data/passages.jsonl"
train = {{ path = "data/train.jsonl" }}
test = {{ path = "data/train.jsonl" }}
{environment}
[algorithm]
type = "{algorithm}"
{rest}
"""


def questions(path: Path, *answers: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"q{number}?", "answer": answer} for number, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def passages(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"id": "a", "title": "A", "text": "The a."}\n')
    return path


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with its data beside it, and another current folder."""
    folder, here = tmp_path / "project", tmp_path / "elsewhere"
    here.mkdir()
    questions(folder / "data/train.jsonl", "recipe")
    passages(folder / "data/passages.jsonl")
    monkeypatch.chdir(here)
    file = folder / "recipe.toml"
    file.write_text(RECIPE.format(environment="", algorithm="grpo", rest=""))
    return file


def answers(settings: RunSettings) -> list[str]:
    return [task.answers[0] for task in make_task_set(settings.environment).tasks("train")]


def test_a_path_is_relative_to_the_recipe_and_absolute_in_the_settings(recipe: Path) -> None:
    settings = api.run_settings(recipe)
    environment: Any = settings.environment
    assert environment.train.path == recipe.parent / "data/train.jsonl"
    assert environment.corpus == recipe.parent / "data/passages.jsonl"
    assert answers(settings) == ["recipe"]
    require_paths(settings, search_folders())


def test_a_path_may_be_relative_to_the_current_folder(recipe: Path) -> None:
    (recipe.parent / "data/train.jsonl").rename(recipe.parent / "data/other")
    here = questions(Path.cwd() / "data/train.jsonl", "here")
    settings = api.run_settings(recipe)
    assert settings.environment.train.path == here  # type: ignore[attr-defined]
    assert answers(settings) == ["here"]


def test_of_two_files_the_recipes_is_used_and_a_line_reports_it(
    recipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = questions(Path.cwd() / "data/train.jsonl", "here")
    with caplog.at_level(logging.WARNING):
        assert answers(api.run_settings(recipe)) == ["recipe"]
        api.run_settings(recipe)
    reason = [one.getMessage() for one in caplog.records if "environment.train.path" in one.getMessage()]
    assert reason == [f"environment.train.path: {recipe.parent / 'data/train.jsonl'} is used, not {here}"]


def test_the_same_file_by_two_names_needs_no_line(recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("data").symlink_to(recipe.parent / "data")
    with caplog.at_level(logging.WARNING):
        api.run_settings(recipe)
    assert not caplog.records


def test_a_path_of_the_command_line_is_relative_to_the_current_folder_first(recipe: Path) -> None:
    questions(Path.cwd() / "own.jsonl", "here")
    questions(recipe.parent / "own.jsonl", "recipe")
    override = "environment.train.path=own.jsonl"
    assert answers(api.run_settings(recipe, overrides=[override])) == ["here"]
    Path("own.jsonl").unlink()
    assert answers(api.run_settings(recipe, overrides=[override])) == ["recipe"]


@pytest.mark.parametrize(
    ("override", "setting", "path"),
    [
        ("environment.corpus=gone.jsonl", "environment.corpus", "gone.jsonl"),
        ("environment.pages=gone.jsonl", "environment.pages", "gone.jsonl"),
        ("model.initial_checkpoint=runs/gone", "model.initial_checkpoint", "runs/gone"),
        ("engine={type='retrospex',critic='c.st',allow_training=true}", "engine.critic", "c.st"),
        ("environment={type='webshop',products='p',attributes='a'}", "environment.products", "p"),
        ("environment={type='alfworld',data='games'}", "environment.data", "games"),
        ("cold_start={num_examples=2,demonstrations='c.jsonl'}", "cold_start.demonstrations", "c.jsonl"),
        ("algorithm={type='luffy',demonstrations='d.jsonl'}", "algorithm.demonstrations", "d.jsonl"),
        ("environment.corpus=/no/such/file.jsonl", "environment.corpus", "/no/such/file.jsonl"),
    ],
)  # fmt: skip
def test_a_missing_file_names_setting_path_and_folders(
    recipe: Path, override: str, setting: str, path: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        api.train(recipe, run=tmp_path / "run", overrides=[override])
    line = str(error.value)
    assert line.startswith(f"{setting}: {path}: no such file or folder")
    if not path.startswith("/"):
        assert f"{recipe.parent} and " in line and str(Path.cwd()) in line
    assert "\n" not in line and not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["tools", "agent"])
def test_a_missing_data_set_names_setting_path_and_folders(recipe: Path, kind: str) -> None:
    override = (
        "environment.train.path=trian.jsonl"
        if kind == "tools"
        else "environment={type='agent',function='m:run',train={path='trian.jsonl'}}"
    )
    settings = api.run_settings(recipe, overrides=[override])
    with pytest.raises(DataError, match=r"^environment\.train\.path: trian\.jsonl: no such file") as e:
        make_task_set(settings.environment).tasks("train")
    assert str(recipe.parent) in str(e.value) and str(Path.cwd()) in str(e.value)


def test_what_a_run_does_not_read_need_not_exist(recipe: Path) -> None:
    """A buffer without retrieval, a split that nobody plays."""
    overrides = ["buffer.path=gone.sqlite", "environment.valid.path=gone.jsonl"]
    require_paths(api.run_settings(recipe, overrides=overrides), search_folders())


def test_a_home_folder_and_folders_that_are_made(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(recipe.parent))
    settings: Any = api.run_settings(
        recipe, overrides=["environment.corpus=~/data/passages.jsonl", "environment.search.cache_dir=cache"]
    )
    assert settings.environment.corpus == recipe.parent / "data/passages.jsonl"
    assert settings.environment.search.cache_dir == Path.cwd() / "cache"
    made: Any = api.run_settings(recipe, overrides=["environment={type='textworld',cache='games'}"])
    assert made.environment.cache == Path.cwd() / "games"


def test_a_model_folder_beside_the_recipe(recipe: Path) -> None:
    (recipe.parent / "models/tiny").mkdir(parents=True)
    (recipe.parent / "smollm2-135m-instruct").mkdir()
    assert api.run_settings(recipe).model.name == "smollm2-135m-instruct"
    named = api.run_settings(recipe, overrides=["model.name=models/tiny"]).model.name
    assert named == str(recipe.parent / "models/tiny")
    assert api.run_settings(recipe, overrides=["model.name=Qwen/Qwen3-4B"]).model.name == "Qwen/Qwen3-4B"


def test_a_mapping_is_relative_to_the_current_folder(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    tree = {
        "environment": {"type": "tools", "tools": ["python"], "train": {"path": "data/train.jsonl"}},
        "algorithm": {"type": "grpo"},
    }
    settings: Any = api.run_settings(tree)
    assert settings.environment.train.path == recipe.parent / "data/train.jsonl"


def test_dry_run_prints_absolute_paths(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", str(recipe), "--dry-run", "--smoke"])
    assert f'corpus = "{recipe.parent / "data/passages.jsonl"}"' in capsys.readouterr().out
