"""docs/papers.md: every command of the page runs end to end in its smoke size, in this process, on files and
servers that stand in for those of the papers.
"""

import importlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from outrider import cli
from outrider.runs import Run
from tests.test_papers import COMMANDS, ROOT

pytestmark = pytest.mark.long
SHRINKS = ("train", "eval", "buffer", "critic")
# what a benchmark has in the place of --smoke
SMALL = {
    "benchmarks.learning": ("--seeds", "1", "--policy-tokens", "1", "--methods", "grpo", "rapo"),
    "benchmarks.diversity": (
        "--by",
        "mode",
        "--embedder",
        "hash",
        "--least-turns",
        "1",
        "--eps",
        "0.3",
        "--draws",
        "2",
    ),
    "benchmarks.compare_by_task": (),
    "benchmarks.by_task": (
        "--smoke",
        "--tasks",
        "find-animal",
        "--methods",
        "naive",
        "empo2",
        "--seeds",
        "1",
        "--transfers",
        "find-animal:find-plant",
    ),
}
MAKERS = {
    made: command for command in COMMANDS for made in re.findall(r"--(?:run|out) (\S+)", command)
}  # fmt: skip


class Page:
    """The commands that have run. One that reads what another one makes has it run first."""

    def __init__(self) -> None:
        self.played: set[str] = set()

    def play(self, command: str) -> None:
        if command in self.played:
            return
        self.played.add(command)
        words = set(re.findall(r"runs/[\w-]+|data/[\w.]+|[\w-]+\.safetensors", command))
        for named in sorted(words & MAKERS.keys()):
            self.play(MAKERS[named])
        program, *arguments = shlex.split(command)
        if program == "python":
            module = arguments[1]
            assert importlib.import_module(module).main([*arguments[2:], *SMALL[module]]) == 0
        else:
            smoke = ["--smoke"] if arguments[0] in SHRINKS else []
            assert cli.main([*arguments, *smoke]) == 0


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("papers")
        patch.chdir(place)
        patch.setenv("OUTRIDER_CACHE", str(place / "cache"))
        # a simulator lives for seconds here: its second compiler costs more than it brings
        patch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        (place / "recipes").symlink_to(ROOT / "recipes")
        (place / "data").mkdir()
        yield Page()


def kind(command: str) -> str:
    """The subcommand or benchmark, and the recipe: commands of one kind differ in settings alone."""
    words = shlex.split(command)
    recipe = next((word for word in words if word.startswith("recipes/")), "")
    return f"{words[2] if words[0] == 'python' else words[1]} {recipe}"


# The first command of every kind is long, the others slow, and so is the table over many trainings.
FIRST = {kind(command): command for command in reversed(COMMANDS) if "benchmarks.by_task" not in command}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, id=one[:90], marks=[] if one in FIRST.values() else [pytest.mark.slow])
        for one in COMMANDS
    ],
)
def test_every_command_runs_with_smoke(command: str, page: Page) -> None:
    if "scienceworld" in command and not (find_spec("scienceworld") and shutil.which("java")):
        pytest.skip("ScienceWorld needs its extra and Java")
    page.play(command)
    for folder in re.findall(r"benchmarks.by_task .*?--out (\S+)", command):
        assert {one.name for one in Path(folder).glob("*.md")} == {"table.md", "adaptation.md"}
    for run in re.findall(r"outrider train .*?--run (\S+)", command):
        assert_trained(Path(run))
    for run in re.findall(r"outrider eval .*?--run (\S+)", command):
        assert Run.from_path(Path(run)).evaluations().num_rows >= 1


def assert_trained(run: Path) -> None:
    """One step, or the cold start that was asked for, of the tiny model."""
    settings = Run.from_path(run).settings
    assert "smoke-" in settings.model.name
    assert os.listdir(run / "checkpoints")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [one for one in steps if "reward/mean" in one]
    assert len(trained) == settings.train.num_steps <= max(1, len(settings.train.stages))
