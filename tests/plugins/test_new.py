"""``outrider new``: what it writes installs, passes its own test, is listed, and its recipe is read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.config import load_settings
from outrider.environments.base import Episode, make_task_set
from outrider.training.settings import RunSettings
from tests.plugins.packages import install
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.long

# All packages in one process: the import of torch is what takes long.
_RUN = """
import json, sys
import pytest
from outrider.cli import main
small = ["rollout.max_turns=2", "rollout.max_turn_tokens=24", "rollout.max_response_tokens=100"]
small += ["train.num_steps=1"]
small += ["evaluation.num_tasks=1", "model.precision=float32", "num_threads=1"]
for kind, name, *own in json.loads(sys.argv[1]):
    print(f"== {kind}", flush=True)
    status = pytest.main(["-q", "-p", "no:cacheprovider", f"{name}/tests"])
    assert status == 0, status
    assert main(["train", f"{name}/recipe.toml", "--dry-run"]) == 0
    assert main(["list", "environments" if kind in ("gym", "agent") else f"{kind}s"]) == 0
    command = ["train", f"{name}/recipe.toml", "--run", f"run-{kind}", "--model", "model"]
    assert main([*command, "--progress", "none", *small, *own]) == 0
"""
NEW = (
    ("environment", "word-count", "cold_start.num_examples=2"),
    ("gym", "word-lift", "cold_start.num_examples=0"),
    ("agent", "word-agent", "cold_start.num_examples=0"),
    ("tool", "word-length", "environment.prompt=short"),
    ("algorithm", "word-credit", "cold_start.num_examples=0"),
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of the packages and their runs, and what was printed, by kind."""
    root = tmp_path_factory.mktemp("new")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert [main(["new", kind, name]) for kind, name, _ in NEW] == [0] * len(NEW)
    target = install(*(root / name for _, name, _ in NEW), target=root / "target")
    save_tiny_model(root / "model")
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(NEW)], cwd=root, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    output = (part.partition("\n") for part in done.stdout.split("== ")[1:])
    return root, {kind: rest for kind, _, rest in output}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, name, _ in NEW])
def test_a_new_package_works_at_once(kind: str, name: str, played: tuple[Path, dict[str, str]]) -> None:
    root, output = played
    assert (root / f"run-{kind}" / "checkpoints" / "step-000001").is_dir()
    if kind == "gym":
        assert 'id = "word_lift:make"' in output[kind]
    elif kind == "agent":
        assert 'function = "word_agent:run"' in output[kind]
    else:
        assert f'type = "{name}"' in output[kind] and f"{name} 0.1.0" in output[kind]


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("House", "cannot be the name"),
        ("house", "is a built-in name"),
        ("a b", "cannot be the name"),
        ("json", "the module 'json' exists already"),
        ("class", "is a keyword of Python"),
        ("taken", "taken is not empty"),
        ("a-", "cannot be the name"),
    ],
)
def test_a_name_or_a_folder_that_cannot_be_is_one_line(
    name: str,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert main(["new", "environment", name]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert output in line
    assert main(["new", "tool", "think"]) == 2 and "a tag of the protocol" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "taken"]


def test_new_functions_are_tools_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "functions", "word-tools"]) == 0
    monkeypatch.syspath_prepend(str(tmp_path / "word-tools" / "src"))
    names: dict[str, Any] = {}
    exec((tmp_path / "word-tools" / "tests" / "test_word_tools.py").read_text(encoding="utf-8"), names)
    names["test_the_contract"]()
    settings = load_settings(RunSettings, file=tmp_path / "word-tools" / "recipe.toml")
    family = make_task_set(settings.environment)
    environment = family.make()(family.tasks("train")[0])
    environment.reset(0)
    assert "\n4\n" in Episode(environment).act("<count_words>the quick brown fox</count_words>").text
    sys.modules.pop("word_tools", None)


def test_the_test_of_a_new_algorithm_fails_if_its_setting_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "algorithm", "word-shift"]) == 0
    monkeypatch.syspath_prepend(str(tmp_path / "word-shift" / "src"))
    written = (tmp_path / "word-shift" / "tests" / "test_word_shift.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(written, names)
    tests = [name for name in names if name.startswith("test_")]
    for name in tests:
        names[name]()
    credit = names["WordShiftAlgorithm"].assign_advantages

    def without_memory(self: Any, trace: Any) -> Any:
        self._means.clear()
        return credit(self, trace)

    monkeypatch.setattr(names["WordShiftAlgorithm"], "assign_advantages", without_memory)
    for name in tests:
        with pytest.raises(AssertionError):
            names[name]()
    sys.modules.pop("word_shift", None)
