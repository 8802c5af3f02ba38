"""A run that is killed or stopped at any instant continues to the same bits.

The reference is the same run without an interruption, in this process; kills and signals meet commands in
processes of their own, whose seed for hashes is another one. What may differ is only what the clock or the
machine decides.
"""

import functools
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider import cli
from tests.training.forked import ForkedOutrider
from tests.training.short_runs import begin, interrupted, labels, records, resume
from tests.training.whole_runs import command, differences, write_inputs

STEPS = 4
SHORT = (f"train.num_steps={STEPS}", "evaluation.every=2", "train.keep_checkpoints=9")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_inputs(folder)
    return folder


def whole_run(root: Path, case: str, *overrides: str) -> Path:
    """The uninterrupted run of a case."""
    run = root / f"whole-{case}"
    assert cli.main([*map(str, command(root, run, case)), *SHORT, *overrides]) == 0
    return run


def kill_while_a_checkpoint_is_written(step: int, _: Path) -> None:
    """In the child: its weights are on disk under a temporary name."""
    from outrider.training import checkpoint

    write = checkpoint.write_checksummed

    def killed(path: Path, content: dict[str, object]) -> None:
        if path.parent.name == f".step-{step:06d}.partial":
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)

    checkpoint.write_checksummed = killed  # type: ignore[assignment]


def kill_while_a_step_is_recorded(step: int, _: Path) -> None:
    """In the child: weights, memories and the buffer have changed, and a part of the records is written."""
    from outrider.viewer.records import SCHEMA, StepFiles, step_file

    write = StepFiles.write_rows

    def killed(self: StepFiles, name: str, rows: object, schema: object) -> None:
        if schema is SCHEMA and name == step_file(step):
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, name, rows, schema)  # type: ignore[arg-type]

    StepFiles.write_rows = killed  # type: ignore[method-assign, assignment]


def test_a_killed_run_ends_in_the_same_bits(root: Path) -> None:
    """With a buffer that grows: killed while a checkpoint is written, and while a step is recorded."""
    more = "train.tasks_per_step=4"  # else no rollout that solves its task enters the buffer
    whole, run = whole_run(root, "evolve", more), root / "killed"
    again = ["train", "--resume", run, "--progress", "plain"]
    for arguments, kill in (
        (
            [*command(root, run, "evolve"), *SHORT, more],
            functools.partial(kill_while_a_checkpoint_is_written, 2),
        ),
        (again, functools.partial(kill_while_a_step_is_recorded, 3)),
    ):
        process = ForkedOutrider(*arguments, prepare=kill)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    finished = ForkedOutrider(*again)
    _, stderr = finished.communicate()
    assert finished.returncode == 0, stderr
    assert differences(whole, run, num_steps=STEPS) == []
    steps = records(whole)
    # otherwise the comparison says little
    for name in ("retrieval/num_inserted", "rollout/num_tool_calls", "buffer/num_added"):
        assert sum(record[name] for record in steps) >= 1, name
    assert sum(record["group/fraction_without_signal"] < 1 for record in steps) >= 2
    assert len(labels(whole)) == 3


# Metrics that must be positive behind the checkpoint from which the run continues.
OF_ITS_STATE = {
    "combined": ("retrieval/num_inserted", "branch/num_forks", "tips/num_shown"),
    "rollout_replay": ("replay/num_groups",),
    "rnd": ("tips/novelty_error", "tips/intrinsic_mean"),
    "agent": ("branch/num_forks", "rollout/num_restarts"),
    "empo2": ("tips/num_shown",),
    "combined_house": ("retrieval/num_inserted", "tips/num_shown"),
    "grpo": (),
    "prefix": ("prefix/num_groups", "prefix/length_mean"),
    "luffy": ("luffy/num_tokens",),
    "tree_grpo": (),
    "lamer": ("lamer/reflection_advantage_abs", "rollout/num_restarts"),
}
FAST, LONG = ("combined", "rollout_replay", "rnd"), ("agent",)


@pytest.mark.parametrize(
    "case",
    [
        case
        if case in FAST
        else pytest.param(case, marks=pytest.mark.long if case in LONG else pytest.mark.slow)
        for case in OF_ITS_STATE
    ],
)
def test_a_run_that_goes_back_two_steps_ends_in_the_same_bits(case: str, root: Path) -> None:
    """As a kill leaves it: the newest checkpoint is older than all other files."""
    whole = whole_run(root, case)
    run = Path(shutil.copytree(whole, root / f"back-{case}"))
    for step in range(STEPS - 1, STEPS + 1):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    resume(run)
    assert differences(whole, run, num_steps=STEPS) == []
    for name in OF_ITS_STATE[case]:
        assert sum(record.get(name, 0.0) for record in records(whole)[STEPS - 2 :]) > 0, name


def test_stops_by_sigterm_lose_nothing(root: Path) -> None:
    """One in the first evaluation, where nothing was trained yet, and one behind the second step."""
    every = ("train.checkpoint_every=100", "evaluation.every=1")
    whole, run = whole_run(root, "rapo", *every), root / "stopped"
    process = ForkedOutrider(*command(root, run, "rapo"), *SHORT, *every)
    wait_until(lambda: "evaluation before training" in process.stdout_so_far())
    process.send_signal(signal.SIGTERM)
    shown = "".join(process.communicate())
    assert process.returncode == 0, shown
    assert "nothing was trained yet" in shown or "the checkpoint of step" in shown
    process = ForkedOutrider("train", "--resume", run, "--progress", "plain")
    wait_until((run / "traces" / "step-000002.parquet").exists)
    process.send_signal(signal.SIGTERM)
    shown = "".join(process.communicate())
    assert process.returncode == 0, shown
    [line] = [line for line in shown.splitlines() if "stopped on request" in line]
    assert f"--resume {run}" in line
    newest = max(int(path.name.split("-")[1]) for path in (run / "checkpoints").iterdir())
    assert 2 <= newest < STEPS  # no multiple of checkpoint_every: the stop wrote it
    resume(run)
    assert differences(whole, run, num_steps=STEPS) == []
    assert [label for label, _ in labels(run)] == [
        "before training", "step 1", "step 2", "step 3", "after RAPO"
    ]  # fmt: skip


def wait_until(happened: Callable[[], bool]) -> None:
    patience = time.monotonic() + 240
    while not happened() and time.monotonic() < patience:
        time.sleep(0.002)


def limit_files(limit: int, _: Path) -> None:
    """In the child."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def test_a_full_disk_leaves_the_last_checkpoint_readable(root: Path) -> None:
    """A limit on the size of files stands for the disk: the small files still fit, the weights do not."""
    whole = begin(root / "recipe.toml", root / "full")
    run = interrupted(whole)
    weights = run / "checkpoints" / "step-000001" / "masters.safetensors"
    before, limit = weights.read_bytes(), weights.stat().st_size - 1
    assert max(path.stat().st_size for path in [run / "metrics.jsonl", *(run / "traces").iterdir()]) < limit
    process = ForkedOutrider(
        "train", "--resume", run, "--progress", "none", prepare=functools.partial(limit_files, limit)
    )
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert len(stderr.splitlines()) == 1 and "cannot write checkpoint" in stderr
    assert weights.read_bytes() == before and not list((run / "checkpoints").glob(".*"))
    resume(run)
    assert differences(whole, run, num_steps=2) == []
