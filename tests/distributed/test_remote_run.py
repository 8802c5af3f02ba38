"""Runs with engines and rollout workers from the command line: the same bits for any number of processes,
after engines, workers and the run itself were killed or stopped, and nothing is left behind.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.command_runs import CommandRuns
from tests.distributed.processes import send_signal
from tests.training.whole_runs import command, differences, metrics, write_data

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(600)]
STEPS = 3
# counts of transfers and repairs, which differ between the runs
COUNTS = (
    "weights/", "cluster/", "rollout/num_groups_replayed", "staleness/num_", "rollout/loop_lag",
)  # fmt: skip
# hooks that count, branch, remember and reflect, and a buffer that grows
CASE = ("combined", "buffer.evolve=true")
TWO = ("cluster.num_engines=2", "cluster.num_rollout_workers=2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def whole_runs(root: Path) -> dict[int, Path]:
    """The unbroken runs by ``max_staleness``."""
    return {staleness: whole(root, f"whole-{staleness}", staleness, *TWO) for staleness in (0, 1)}


def arguments(root: Path, run: Path, staleness: int, *overrides: str) -> list[str | Path]:
    case, more = CASE
    return [*command(root, run, case), more, f"train.num_steps={STEPS}", "train.checkpoint_every=1",
            "evaluation.every=0", "evaluation.num_tasks=2", f"cluster.max_staleness={staleness}",
            "cluster.heartbeat_s=10", *overrides]  # fmt: skip


def whole(root: Path, name: str, staleness: int, *overrides: str) -> Path:
    CommandRuns().run(*arguments(root, root / name, staleness, *overrides))
    assert not list((root / name).rglob("weights-*.safetensors"))
    return root / name


def check_same_bits(run: Path, other: Path) -> None:
    """Trace, metrics, checkpoint and buffer are equal, except for counts of repairs."""
    state = f"checkpoints/step-{STEPS:06d}/state.json"
    assert set(differences(run, other, num_steps=STEPS)) <= {"metrics.jsonl", state}
    assert without_counts(run) == without_counts(other)
    assert plain_state(run / state) == plain_state(other / state)


def without_counts(run: Path) -> list[dict[str, object]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(COUNTS)}
        for record in metrics(run)
    ]


def plain_state(path: Path) -> dict[str, Any]:
    """Without checksums of files with counts, and without the settings of the cluster."""
    state: dict[str, Any] = json.loads(path.read_text())
    state["settings"] = {k: v for k, v in state["settings"].items() if not k.startswith("cluster.")}
    return {name: value for name, value in state.items() if name not in ("own_checksum", "records")}


def test_one_engine_and_one_worker_have_the_bits_of_two_of_each(
    root: Path, whole_runs: dict[int, Path]
) -> None:
    one = whole(root, "one", 0, "cluster.num_rollout_workers=1", "cluster.num_engines=1",
                "cluster.weights=files")  # fmt: skip
    check_same_bits(whole_runs[0], one)
    steps = [record for record in metrics(one) if record["kind"] == "train"]
    assert len(steps) == STEPS and all(step["weights/rpcs"] == 1 for step in steps)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("names", "how"),
    [
        (("engine 1", "worker 0"), signal.SIGKILL),
        pytest.param(("engine 0",), signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(("worker 1",), signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_lost_engines_and_workers_change_no_bit(
    root: Path, whole_runs: dict[int, Path], staleness: int, names: tuple[str, ...], how: signal.Signals
) -> None:
    run, runs = root / f"lost-{staleness}-{'-'.join(names)}-{how}", CommandRuns()
    first = run / "checkpoints" / "step-000001" / "state.json"
    process = runs.start_until(first, *arguments(root, run, staleness, *TWO))
    pids = {name: pid for pid, name in runs.processes().items()}
    for name in names:
        send_signal(pids[name], how)
    output = runs.end(process)
    check_same_bits(whole_runs[staleness], run)
    for name in names:
        assert f"{name} died in" in output or f"{name} has not responded" in output


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_was_killed_and_stopped_resumes_to_the_same_bits(
    root: Path, whole_runs: dict[int, Path], staleness: int
) -> None:
    run, runs = root / f"killed-{staleness}", CommandRuns()
    checkpoint = run / "checkpoints" / "step-000001" / "state.json"
    runs.kill(runs.start_until(checkpoint, *arguments(root, run, staleness, *TWO)))
    resume = ["train", "--resume", run, "--progress", "plain"]
    process = runs.start(*resume)
    while "engine 1" not in runs.processes().values():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode in (0, 143) and "Traceback" not in stderr
    runs.run(*resume)  # which also removes the folders of the run that was killed
    check_same_bits(whole_runs[staleness], run)


WORLD = """
import re

import own_environment


class World(own_environment.WordChain):
    def step(self, action):
        if self.words == ["tree"]:
            re.match(r"(a+)+$", "a" * {num} + "b")
        return super().step(action)
"""


@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_that_holds_the_lock_delays_or_masks_its_group(root: Path, ends: bool) -> None:
    """A regular expression of seconds in a run with a short ``heartbeat_s``, and one that never ends."""
    place = root / f"lock-{ends}"
    place.mkdir()
    # 25: one or two seconds of processor time, which show that the process is not stuck
    (place / "lock_world.py").write_text(WORLD.format(num=25 if ends else 60))
    examples = Path(__file__).parents[2] / "examples" / "own_environment.py"
    (place / "own_environment.py").write_text(examples.read_text())
    (place / "recipe.toml").write_text(
        f'seed = 3\nnum_threads = 1\n[model]\nname = "{root}/model"\nprecision = "float32"\n'
        '[environment]\ntype = "lock_world:World"\n[algorithm]\ntype = "grpo"\ngroup_size = 2\n'
        "[rollout]\nmax_turns = 3\nmax_turn_tokens = 8\nmax_response_tokens = 200\nstep_timeout_s = 8\n"
        "[train]\nnum_steps = 1\ntasks_per_step = 6\n"
        "[evaluation]\nat_start = false\nevery = 0\nnum_tasks = 1\n"
        "[cluster]\nnum_rollout_workers = 2\nheartbeat_s = 1\n"
    )
    CommandRuns().run("train", place / "recipe.toml", "--run", place / "run", "--progress", "plain")
    [step] = [record for record in metrics(place / "run") if record["kind"] == "train"]
    assert step["rollout/num"] == 12
    masked = step.get("faults/environment_fault", 0.0)
    if ends:
        assert (step["cluster/worker_deaths"], masked) == (0.0, 0.0)
    else:
        assert step["cluster/worker_deaths"] >= 1.0
