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
GB = r"(\d+\.\d) GB"


def told(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def set_up(*variables: str) -> list[str]:
    """The lines of ``make setup`` in an empty clone, none of which is run."""
    asked = ["make", "--always-make", "--dry-run", "setup", "VENV=empty", *variables]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_index_that_is_given_is_where_torch_comes_from() -> None:
    pinned = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    for variables, index in (((), ""), ((f"TORCH_INDEX={URL}",), f"--extra-index-url {URL} ")):
        (line,) = [line for line in set_up(*variables) if " torch==" in line]
        assert f"{index}{pinned}" in line and line.count("index") == 2 * bool(index)


def test_both_sizes_are_the_same_wherever_they_are_told() -> None:
    """Makefile, README and the page of installation; it was "about 2 GB", of more than 5."""
    made = re.search(rf"on disk {GB} with the CPU build of torch, {GB} with the CUDA build", told("Makefile"))
    readme = told("README.md")
    cuda = re.search(rf"{GB} to download with its companions, {GB} on disk in all", readme)
    cpu = re.search(rf"the CPU build, {GB} to download and {GB} on disk in all", readme)
    assert made is not None and cuda is not None and cpu is not None
    assert (cpu[2], cuda[2]) == made.groups()
    page = told("docs/install.md")
    assert f"| CPU build | {cpu[1]} GB | {cpu[2]} GB |" in page
    assert f"| CUDA build | {cuda[1]} GB with its companions | {cuda[2]} GB |" in page


def test_the_way_to_the_cpu_build_is_told_in_words_and_there_is_a_part_for_every_machine() -> None:
    for page in (told("README.md"), told("docs/install.md")):
        assert "make setup TORCH_INDEX=URL" in page
        assert re.search(r"PyTorch's own installation page (gives|shows)", page)
    headings = (ROOT / "docs" / "install.md").read_text().splitlines()
    assert {"## No GPU", "## One GPU", "## Several GPUs"} <= set(headings)


def test_every_extra_is_told_where_it_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for_us = {"dev", "docs", "mutation", "viewer-tests"}
    extras = set(project["optional-dependencies"]) - for_us - {"demo", "gguf", "minilm", "factbook"}
    begun, _, _ = told("docs/install.md").partition("pip install -e '.[demo]'")
    named = begun.rpartition("# and ")[2]
    assert {one for one in extras if one not in re.findall(r"[a-z-]+", named)} == {"vllm"}
