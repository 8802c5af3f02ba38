"""Plug-ins by name: what a recipe may say, and the one line that it gets where it cannot be."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.cli import main
from outrider.config import load_settings, to_toml
from outrider.errors import ConfigError
from outrider.plugins import imports
from outrider.plugins import registry as names
from outrider.plugins.imports import find_origin
from outrider.plugins.registry import BUILT_IN, KINDS, load_settings_class, resolve
from outrider.training.settings import RunSettings
from tests.tiny import save_tiny_model

FAMILY = '''
from outrider.environments.base import EnvironmentSettings
from tests.plugins.test_api import Own

class MineSettings(EnvironmentSettings):
    size: int = 3

class Mine(Own):
    """Somebody's own."""
    Settings = MineSettings

class Bare:
    pass

class Wrong:
    Settings = int
'''


@pytest.fixture
def module(tmp_path: Path) -> Iterator[str]:
    """The name of a module beside ``recipe.toml`` in ``tmp_path``; the process is afterwards as it was."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FAMILY)
    path, folders = list(sys.path), list(imports._folders)
    yield name
    sys.path[:] = path
    imports._folders[:] = folders
    sys.modules.pop(name, None)


def recipe(folder: Path, environment: str, *lines: str) -> Path:
    file = folder / "recipe.toml"
    file.write_text(
        "\n".join(["[environment]", f'type = "{environment}"', *lines, "[algorithm]", 'type = "grpo"', ""])
    )
    return file


def refusal(folder: Path, environment: str, *lines: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(RunSettings, file=recipe(folder, environment, *lines))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in BUILT_IN[kind]])
def test_built_in_plugins_resolve_like_import_paths(kind: Any, name: str) -> None:
    assert resolve(kind, name) is resolve(kind, BUILT_IN[kind][name])  # as anybody's import path is
    assert find_origin(resolve(kind, name)).is_built_in


def test_a_class_of_a_module_beside_the_recipe(module: str, tmp_path: Path) -> None:
    settings = load_settings(RunSettings, file=recipe(tmp_path, f"{module}:Mine", "size = 7"))
    assert (settings.environment.type, settings.environment.size) == (  # type: ignore[attr-defined]
        f"{module}:Mine",
        7,
    )
    again = tmp_path / "resolved.toml"
    again.write_text(to_toml(settings.model_dump(mode="json")))
    assert load_settings(RunSettings, file=again) == settings
    origin = find_origin(resolve("environments", f"{module}:Mine"))
    assert (origin.package, origin.file) == (None, str(tmp_path / f"{module}.py")) and len(
        origin.digest or ""
    ) == 64


def test_keys_of_a_plugin_are_checked(module: str, tmp_path: Path) -> None:
    assert (
        refusal(tmp_path, f"{module}:Mine", "siz = 7")
        == "environment.siz: unknown key, did you mean environment.size?"
    )
    assert "environment.size: Input should be a valid integer" in refusal(
        tmp_path, f"{module}:Mine", 'size = "x"'
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{module}:Mien", "({file}) has no 'Mien', did you mean Mine?"),
        (
            "{module}:Bare",
            "({file}) is not an environment: it has no class Settings (a subclass of EnvironmentSettings)",
        ),
        ("{module}:Wrong", "Settings are no subclass of outrider.environments.base.EnvironmentSettings"),
        (
            "nowhere_at_all.thing:Mine",
            "there is no module 'nowhere_at_all', neither among the installed packages nor in ",
        ),
        ("{module}.inside:Mine", "there is no module"),
        ("json:dumps", "json:dumps is no class"),
        ("json:JSONDecoder", "is not an environment"),
        ("hous", "environment.type: there is no 'hous', did you mean house? (one of factbook, tools,"),
        ("not an import path:Mine", "there is no 'not an import path:Mine'"),
        ("outrider.algorithms.grpo:Grpo", "Settings are no subclass of"),
    ],
)
def test_an_unknown_name_is_one_line(name: str, message: str, module: str, tmp_path: Path) -> None:
    file = tmp_path / f"{module}.py"
    line = refusal(tmp_path, name.format(module=module))
    assert message.format(file=file) in line and line.startswith("environment.type: ")


def test_the_message_about_a_missing_module_names_each_folder_once(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(tmp_path, "nowhere_at_all:Mine").count(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_like_this\n", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("class Mine(:\n", "SyntaxError"),
        ("import sys; sys.exit('gone')\n", "SystemExit: gone"),
        ("raise ValueError('a\\nb' * 9999)\n", "ValueError: a ba"),
    ],
)
def test_a_failing_import_is_one_line_with_its_location(
    code: str, message: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"{module}.py"
    file.write_text(f"x = 1\n{code}")
    run = tmp_path / "run"
    assert main(["train", str(recipe(tmp_path, f"{module}:Mine")), "--run", str(run)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("outrider: environment.type: ")
        and message in line
        and module in line
        and len(line) < 700
    )
    assert str(file) in line or "SyntaxError" in message
    assert not run.exists()


def test_a_dry_run_names_a_split_without_tasks(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = "lambda cls, settings, split: Own.tasks(settings, split) * (split == 'train')"
    tasks = f"    tasks = classmethod({tasks})"
    (tmp_path / f"{module}.py").write_text(FAMILY.replace("class Bare", f"{tasks}\n\nclass Bare"))
    model = save_tiny_model(tmp_path / "model")
    dry = ["train", str(recipe(tmp_path, f"{module}:Mine")), "--dry-run", f"model.name={model}"]
    assert main([*dry, "train.tasks_per_step=2"]) == 0
    assert "WARNING: the split 'test' has no tasks" in capsys.readouterr().out
    assert main([*dry, "train.num_steps=0"]) == 2
    assert "the split 'test' has no tasks to evaluate on" in capsys.readouterr().err
    run = tmp_path / "run"
    for more in ([], ["--adapt", "1"]):
        evaluation = ["eval", *dry[1:2], *dry[3:], "--run", str(run), "--progress", "none", *more]
        assert main(evaluation) == main([*evaluation, "--dry-run"]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert errors[-1] == errors[-2] and "the split 'test' has no tasks to evaluate on" in errors[-1]
        assert not run.exists()
    assert main(["eval", "--tasks", f"{module}:Mine", "--model", str(model), "--run", str(run)]) == 2
    assert "the split 'test' has no tasks to evaluate on" in capsys.readouterr().err


def test_a_dry_run_shows_its_settings(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "model")
    small = [f"model.name={model}", "train.tasks_per_step=2"]
    assert main(["train", str(recipe(tmp_path, f"{module}:Mine")), "--dry-run", *small]) == 0
    printed = capsys.readouterr().out
    assert f'[environment]\ntype = "{module}:Mine"  # recipe\n' in printed
    assert "# environment: size = 3\n" in printed


@pytest.mark.parametrize("name", ["Other", "Mine"])
def test_modules_of_one_name_in_two_folders_are_an_error(module: str, tmp_path: Path, name: str) -> None:
    load_settings(RunSettings, file=recipe(tmp_path, f"{module}:Mine"))
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{module}.py").write_text(FAMILY.replace("class Mine(Own):", f"class {name}(Own):"))
    line = refusal(other, f"{module}:{name}")
    assert f"is {tmp_path / module}.py, not {other / module}.py" in line


def test_a_file_beside_the_recipe_takes_no_package_s_place(tmp_path: Path, module: str) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError('not this one')\n")
    load_settings(RunSettings, file=recipe(tmp_path, f"{module}:Mine"))
    installed = str(Path(np.__file__).parents[1])
    assert sys.path.index(str(tmp_path)) > sys.path.index(installed)


def _register(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    def registered(kind: str) -> dict[str, tuple[EntryPoint, ...]]:
        chosen = [point for point in points if point.group == f"outrider.{kind}"]
        return {point.name: tuple(one for one in chosen if one.name == point.name) for point in chosen}

    monkeypatch.setattr(names, "registered", registered)


def test_a_registered_name_and_one_that_two_packages_claim(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "outrider.environments"
    _register(monkeypatch, EntryPoint(f"short-{module}", f"{module}:Mine", group))
    settings = load_settings(RunSettings, file=recipe(tmp_path, f"short-{module}"))
    assert settings.environment.type == f"short-{module}"
    assert f"did you mean short-{module}?" in refusal(tmp_path, f"shorty-{module}")
    _register(monkeypatch, EntryPoint("twice", "a:A", group), EntryPoint("twice", "b:B", group))
    assert "'twice' is registered by" in refusal(tmp_path, "twice")


def test_built_in_names_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, EntryPoint("house", "json:JSONDecoder", "outrider.environments"))
    assert resolve("environments", "house").__name__ == "HouseEnvironment"


def test_a_tool_by_its_import_path_with_and_without_settings(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(
        "from outrider.config import Settings\n"
        "class LoudSettings(Settings):\n    mark: str = '!'\n"
        "class Loud:\n    Settings = LoudSettings\n    name = 'loud'\n    run_text = print\n"
        "class Needy:\n    name = 'needy'\n    run_text = print\n"
        "    class Settings(Settings):\n        must: int\n"
        "class Think:\n    name = 'think'\n    run_text = print\n"
    )

    def tools(text: str) -> Any:
        return load_settings(RunSettings, file=recipe(tmp_path, "tools", f"tools = {text}")).environment

    assert tools(f'["python", "{module}:Loud"]').tool_names() == ("python", "loud")
    chosen = tools(f'[{{ type = "{module}:Loud", mark = "?" }}]')
    assert chosen.tool_names() == ("loud",) and chosen.tools[0].mark == "?"
    for text, message in (
        (f'[{{ type = "{module}:Loud", mrk = "?" }}]',
         "environment.tools.0.mrk: unknown key, did you mean environment.tools.0.mark?"),
        (f'["{module}:Needy"]', "environment.tools.0.must: Field required"),
        (f'["{module}:Think"]', "a tool cannot have the tag name 'think'"),
        (f'["{module}:Loud", "{module}:Loud"]', "each once"),
        ('["python", "pyton"]', "environment.tools.1: there is no 'pyton', did you mean python?"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            tools(text)
        assert message in str(caught.value)


def test_settings_of_another_process_are_the_same(module: str, tmp_path: Path) -> None:
    import pickle

    settings = load_settings(RunSettings, file=recipe(tmp_path, f"{module}:Mine", "size = 4")).environment
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert load_settings_class("environments", f"{module}:Mine") is type(settings)
