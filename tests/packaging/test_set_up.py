"""Plain torch is the CUDA build on Linux; which index has the other one, and what both take, is told
everywhere alike.
"""

import re
import shutil
import subprocess
import tomllib

import pytest

from tests.packaging.wheels import ROOT

URL = "https://index.example/cpu"


def told(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def set_up(*variables: str) -> list[str]:
    """The lines of ``make setup`` in an empty clone, none of which is run."""
    asked = ["make", "--always-make", "--dry-run", "setup", "VENV=empty", *variables]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_torch_comes_from_the_given_index() -> None:
    pinned = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    for variables, index in (((), ""), ((f"TORCH_INDEX={URL}",), f"--extra-index-url {URL} ")):
        (line,) = [line for line in set_up(*variables) if " torch==" in line]
        assert f"{index}{pinned}" in line and line.count("index") == 2 * bool(index)


def test_every_extra_is_in_the_installation_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for_us = {"dev", "docs", "mutation", "viewer-tests"}
    extras = set(project["optional-dependencies"]) - for_us - {"demo", "gguf", "minilm", "factbook"}
    _, _, table = told("docs/install.md").partition("| extra | for |")
    assert extras - set(re.findall(r"`([a-z-]+)`", table)) == set()
