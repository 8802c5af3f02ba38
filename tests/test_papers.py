"""docs/papers.md: every command is parsed by the real command line, and its recipe and overrides make a run;
nothing runs.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.by_task import make_parser as by_task_parser
from benchmarks.compare_by_task import make_parser as compare_by_task_parser
from benchmarks.diversity import make_parser as diversity_parser
from benchmarks.learning import make_parser as learning_parser

from outrider import api, cli
from outrider.commands import buffer as buffers
from outrider.commands import view as viewing
from outrider.environments.scienceworld.tasks import NUM_VARIATIONS
from outrider.evaluation import compare_report as compare_render
from outrider.evaluation import critic_training
from outrider.training import buffer_commands
from outrider.training.run_dir import RunDirectory
from outrider.viewer import report

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", TEXT)
COMMANDS = [one for one in CODE if one.startswith(("outrider ", "python ")) and one.count(" ") > 1]
PARSERS = {
    "benchmarks.learning": learning_parser, "benchmarks.diversity": diversity_parser,
    "benchmarks.by_task": by_task_parser, "benchmarks.compare_by_task": compare_by_task_parser,
}  # fmt: skip


class Parsed(Exception):
    """Raised where a command would begin to work."""


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any, **named: Any) -> Any:
        raise Parsed

    monkeypatch.chdir(ROOT)  # recipes are named from the root of the repository
    monkeypatch.setattr(RunDirectory, "create", stop)
    for reader in (api, buffers):  # the papers' data is not here
        monkeypatch.setattr(reader, "require_paths", lambda *given, **named: None)
    monkeypatch.setattr(viewing, "require_run", lambda folder: None)  # nor are runs
    for module, name in (
        (buffer_commands, "build_buffer"), (buffer_commands, "import_trajectories"),
        (compare_render, "compare_runs"),
        (critic_training, "train_critic"), (report, "write_report"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, stop)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_valid(command: str, nothing_runs: None) -> None:
    program, *arguments = shlex.split(command)
    if program == "python":
        module, name = arguments[:2]
        assert module == "-m"
        PARSERS[name]().parse_args(arguments[2:])
        return
    with pytest.raises(Parsed):
        cli.main(arguments)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("train recipes/gone.toml --run runs/x", 2),
        ("train recipes/demo.toml --run runs/x algorithm.num_hybrids=1", 2),
        (
            (
                "eval recipes/scienceworld-empo2.toml --run runs/x "
                "'environment.task_names=[\"lifespan-shortest\"]'"
            ),
            2,
        ),
    ],
)
def test_an_invalid_command_is_detected(command: str, status: int, nothing_runs: None) -> None:
    assert cli.main(shlex.split(command)) == status


def test_the_ablations_also_run_on_the_demo(nothing_runs: None) -> None:
    of_rapo = TEXT[TEXT.index("## RAPO") : TEXT.index("## ARPO")]
    first, last = (
        of_rapo.index(f"| {row} |") for row in ("without retrieval-aware optimisation", "sweep of N_hybrid")
    )
    commands = [one for one in COMMANDS if one in of_rapo[first:last]]
    assert len(commands) == 11
    for command in commands:
        with pytest.raises(Parsed):
            cli.main(shlex.split(command.replace("tool-reasoning", "demo"))[1:])


def test_run_directories_are_unique() -> None:
    named: Callable[[str], list[str]] = re.compile(r"--run (\S+)").findall
    runs = [run for command in COMMANDS for run in named(command)]
    assert len(set(runs)) == len(runs)


def test_the_tasks_of_the_empo2_table_are_those_of_the_simulator() -> None:
    named = re.search(r"the 18 tasks are ([^.]+)\.", TEXT)
    assert named is not None
    tasks = re.findall(r"`([^`]+)`", named[1])
    assert len(tasks) == 18 and set(tasks) <= set(NUM_VARIATIONS)
