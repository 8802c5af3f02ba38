"""``outrider new``: what it writes installs, passes its own test, is listed, and its recipe is read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli import main
from tests.plugins.packages import install
from tests.tiny import save_tiny_model

_RUN = """
import sys
import pytest
from outrider.cli import main
status = pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]])
assert status == 0, status
assert main(["train", sys.argv[2], "--dry-run"]) == 0
assert main(["list", sys.argv[3]]) == 0
small = ["rollout.max_turns=2", "rollout.max_turn_tokens=24", \
"rollout.max_response_tokens=100", "train.num_steps=1"]
small += ["evaluation.num_tasks=1", "model.precision=float32", "num_threads=1", *sys.argv[5:]]
assert main(["train", sys.argv[2], "--run", "run", "--model", sys.argv[4], "--progress", "none", *small]) == 0
"""
SMALL = {
    "environment": ["cold_start.num_examples=2"],
    "tool": ["environment.prompt=short"],
    "algorithm": ["cold_start.num_examples=0"],
}


@pytest.mark.parametrize("kind", ["environment", "tool", "algorithm"])
def test_a_new_package_works_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", kind, "word-count"]) == 0
    package = tmp_path / "word-count"
    target = install(package, tmp_path / "target")
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(package / "tests"), "word-count/recipe.toml", f"{kind}s",
         str(save_tiny_model(tmp_path / "model")), *SMALL[kind]],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
    assert 'type = "word-count"' in done.stdout and "word-count 0.1.0" in done.stdout


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("House", "cannot be the name"),
        ("house", "is built in"),
        ("a b", "cannot be the name"),
        ("json", "there is a module 'json' already"),
        ("class", "is a word of Python"),
        ("taken", "taken is not empty"),
        ("a-", "cannot be the name"),
    ],
)
def test_a_name_or_a_folder_that_cannot_be_is_one_line(
    name: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert main(["new", "environment", name]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "taken"]
