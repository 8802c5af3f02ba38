"""Rollouts during updates (``cluster.max_staleness``) from the command line: the age of tokens, and kills and
stops.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.command_runs import CommandRuns
from tests.training.whole_runs import command, differences, metrics, write_data

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    CommandRuns().run(*arguments(root, root / "whole"))
    return root / "whole"


def arguments(root: Path, run: Path) -> list[str | Path]:
    """Hooks that count, branch, remember and reflect, and a buffer that grows."""
    return [*command(root, run, "combined"), "buffer.evolve=true", f"train.num_steps={STEPS}",
            "train.checkpoint_every=1", "train.keep_checkpoints=9", "evaluation.every=2",
            "evaluation.num_tasks=2", "cluster.max_staleness=1"]  # fmt: skip


def steps_of(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "train"]


def test_tokens_are_one_version_old_and_no_older(whole: Path) -> None:
    steps = steps_of(whole)
    for name in ("staleness/max", "staleness/mean"):
        assert [step[name] for step in steps] == [0.0, 1.0, 1.0, 1.0]
    # of the probes, which have the newest weights in every step
    assert all(step["gap/logprob_max"] < 1e-3 for step in steps)
    # the policy has moved meanwhile, which is no disagreement
    assert "staleness/logprob_shift" not in steps[0]
    assert all(step["staleness/logprob_shift"] > 1e-3 for step in steps[1:] if step["grad/norm"])
    for step in steps:
        assert 0.0 <= step["time/idle_trainers"] <= 1.0 and 0.0 <= step["time/idle_engines"] <= 1.0
    queues = [(whole / "checkpoints" / f"step-{n:06d}" / "queue.jsonl").exists() for n in range(STEPS + 1)]
    assert queues == [False, True, True, True, False]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_ended_during_a_step_ends_in_the_same_bits(
    root: Path, whole: Path, how: signal.Signals
) -> None:
    run, runs = root / how.name, CommandRuns()
    process = runs.start_until(run / "checkpoints" / "step-000001" / "state.json", *arguments(root, run))
    if how is signal.SIGKILL:
        runs.kill(process)
    else:
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=240)
        assert "stopped on request" in stdout, stdout + stderr
        assert runs.left_behind() == set()
    runs.run("train", "--resume", run, "--progress", "plain")
    assert differences(whole, run, num_steps=STEPS) == []
    assert metrics(whole) == metrics(run)


def test_a_killed_run_with_two_steps_ahead_resumes_with_its_finished_groups(tmp_path: Path) -> None:
    write_data(tmp_path)
    run, runs = tmp_path / "run", CommandRuns()
    process = runs.start_until(
        run / "checkpoints" / "step-000002" / "state.json", *command(tmp_path, run, "empo2"),
        "train.num_steps=5", "evaluation.num_tasks=2", "train.keep_checkpoints=9",
        "cluster.num_rollout_workers=2", "cluster.max_staleness=2",
    )  # fmt: skip
    runs.kill(process)
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    head, *groups = [json.loads(line) for line in (newest / "queue.jsonl").read_text().splitlines()]
    num_restarted = sum(len(step["tasks"]) for step in head["steps"]) - len(groups)
    output = runs.run("train", "--resume", run, "--progress", "plain")
    assert ("that had not ended at the checkpoint will start again" in output) == bool(num_restarted)
    steps = {step["step"]: step for step in steps_of(run)}
    assert sorted(steps) == list(range(1, 6))
    assert all(step["staleness/max"] <= 2.0 and step["gap/logprob_max"] < 1e-3 for step in steps.values())
    assert max(step["staleness/max"] for step in steps.values()) >= 1.0
    assert not (run / "checkpoints" / "step-000005" / "queue.jsonl").exists()
