"""A wheel with an environment, a tool, an algorithm and an engine of its own: trains, is killed, resumes to
the same bits, evaluates and compares, without a line of Outrider changed. (A token loss of its own comes with
the protocol for it.)"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.packages import FOREIGN, install
from tests.tiny import save_tiny_model
from tests.training.forked import ForkedOutrider
from tests.training.whole_runs import differences

pytestmark = pytest.mark.long

RECIPE = """
seed = 3
num_threads = 1
[model]
name = "{root}/model"
precision = "float32"
[engine]
type = "counting"
rows = 32
[environment]
type = "numbers"
num_train = 4
[algorithm]
type = "remembered"
group_size = 4
forgetting = 0.25
[rollout]
max_turns = 2
max_turn_tokens = 6
max_response_tokens = 64
[train]
num_steps = 3
tasks_per_step = 2
checkpoint_every = 1
keep_checkpoints = 9
[optimizer]
learning_rate = 1e-3
[evaluation]
num_tasks = 3
"""
# Several commands in one process of its own: the import of torch is what takes long.
COMMANDS = """
import json, sys
from outrider.cli import main
for command in json.loads(sys.argv[1]):
    print(f"== {' '.join(command[:2])}", flush=True)
    status = main(command)
    print(f"== {status}", flush=True)
"""


class Bench:
    """A folder with the installed package, a model and a recipe; commands run where only the wheel is on the
    path beside us."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = install(FOREIGN, target=root / "target")
        save_tiny_model(root / "model")
        self.recipe = root / "recipe.toml"
        self.recipe.write_text(RECIPE.format(root=root))

    def forked(self, *command: str | Path) -> ForkedOutrider:
        """One command where the imports are done, running."""
        return ForkedOutrider(*command, prepare=functools.partial(_beside, self.target, self.root))

    def run_forked(self, *command: str | Path) -> tuple[str, int | None]:
        """What it output, and its status."""
        process = self.forked(*command)
        return "".join(process.communicate()), process.returncode

    def start(self, *commands: list[str]) -> "subprocess.Popen[str]":
        path = os.pathsep.join([str(self.target), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.Popen(
            [sys.executable, "-c", COMMANDS, json.dumps([[*map(str, one)] for one in commands])],
            cwd=self.root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def run(self, *commands: list[str]) -> str:
        process = self.start(*commands)
        output, _ = process.communicate(timeout=600)
        return output


def _beside(target: Path, root: Path, _: Path) -> None:
    """In the child: the package is on the path, as :meth:`Bench.start` has it."""
    sys.path.insert(0, str(target))
    os.chdir(root)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Path:
    """A run that nothing disturbs, and an evaluation of its weights."""
    run = bench.root / "whole"
    last = run / "checkpoints" / "step-000003"
    output = bench.run(
        ["train", bench.recipe, "--run", run, "--progress", "plain"],
        ["eval", bench.recipe, "--run", bench.root / "evaluated", "--checkpoint", last, "--progress", "none"],
        ["compare", run, bench.root / "evaluated"],
        ["list", "environments"],
        ["eval", "--tasks", "numbers", "--model", bench.root / "model", "--run", bench.root / "panel",
         "--limit", "2", "environment.max_moves=1", "rollout.max_turn_tokens=4", "--progress", "none"],
    )  # fmt: skip
    assert output.count("== 0") == 5, output
    assert "foreign-pack 0.3.0" in output and "Digits that should be near another one." in output
    return run


def test_it_trains_evaluates_and_compares(whole: Path) -> None:
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    trained = [one for one in records if one["kind"] == "train"]
    assert [one["step"] for one in trained] == [1, 2, 3] and all("remembered/mean" in one for one in trained)
    evaluations = [json.loads(line) for line in (whole / "evaluations.jsonl").read_text().splitlines()]
    assert [one["label"] for one in evaluations] == ["before training", "after REMEMBERED"]
    own = json.loads((whole / "plugins.json").read_text())
    assert {key: (one["package"], one["version"]) for key, one in own.items()} == dict.fromkeys(
        ("engine", "environment", "algorithm"), ("foreign-pack", "0.3.0")
    )
    inputs = json.loads((whole / "checkpoints" / "step-000003" / "state.json").read_text())["inputs"]
    assert {name for name in inputs if name.startswith("plug-in ")} == {
        "plug-in engine",
        "plug-in environment",
        "plug-in algorithm",
    }


@pytest.mark.slow
def test_it_is_killed_and_resumes_to_the_same_bits(bench: Bench, whole: Path) -> None:
    run = bench.root / "killed"
    process = bench.forked("train", bench.recipe, "--run", run, "--progress", "none")
    while not (run / "checkpoints" / "step-000001" / "state.json").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)  # for what another process writes
    process.send_signal(signal.SIGKILL)
    process.communicate()
    output, _ = bench.run_forked("train", "--resume", run, "--progress", "plain")
    assert "continuing from step" in output or "this run is finished" in output, output
    assert differences(whole, run, num_steps=3) == []


def test_other_code_is_refused_unless_it_is_wanted(bench: Bench, whole: Path) -> None:
    run = bench.root / "changed"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-000003")
    code = bench.target / "foreign_pack" / "remembered.py"
    before = code.read_text()
    code.write_text(before + "\n# another line\n")
    try:
        refused, first = bench.run_forked("train", "--resume", run)
        accepted, then = bench.run_forked(
            "train", "--resume", run, "--changed-plugins", "--progress", "plain"
        )
    finally:
        code.write_text(before)
    wanted = "not what this run began with: plug-in engine, plug-in environment, plug-in algorithm"
    assert first == 1 and wanted in refused and "--changed-plugins" in refused, refused
    assert then == 0 and "OTHER CODE of the plug-in algorithm" in accepted, accepted


def test_a_missing_package_is_one_line(bench: Bench, whole: Path) -> None:
    """The package is not installed any more."""
    done = subprocess.run(
        [sys.executable, "-m", "outrider", "train", "--resume", str(whole)],
        capture_output=True, text=True, cwd=bench.root, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert (
        "engine.type: there is no 'counting'" in done.stderr
        and "environment.type: there is no 'numbers'" in done.stderr
    )
