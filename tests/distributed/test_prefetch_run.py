"""Rollouts of the next step beside an update, from the command line and over real Ray: tokens are one version
old and no older, the same bits come again, after a kill and after a stop too, and nothing is left behind.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.command_runs import CommandRuns
from tests.training.whole_runs import command, differences, metrics, write_data

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("ray", reason="several processes need the extra 'cluster'")
STEPS = 4
ASIDE = ("cluster.weights=store", "cluster.max_staleness=1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    CommandRuns().run(*given(root, root / "whole"))
    return root / "whole"


def given(root: Path, run: Path) -> list[str | Path]:
    """Hooks that count, branch, remember and reflect, and a buffer that grows."""
    return [*command(root, run, "combined"), "buffer.evolve=true", f"train.num_steps={STEPS}",
            "train.checkpoint_every=1", "train.keep_checkpoints=9", "evaluation.every=2",
            "evaluation.num_tasks=2", *ASIDE]  # fmt: skip


def steps_of(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [one for one in records if one["kind"] == "train"]


def test_tokens_are_one_version_old_and_no_older(whole: Path) -> None:
    steps = steps_of(whole)
    assert [one["staleness/max"] for one in steps] == [0.0, 1.0, 1.0, 1.0]
    assert [one["staleness/mean"] for one in steps] == [0.0, 1.0, 1.0, 1.0]
    # the probes: of the newest weights in every step
    assert all(one["gap/logprob_max"] < 1e-3 for one in steps)
    # the policy has moved meanwhile, which is no disagreement
    assert "staleness/logprob_shift" not in steps[0]
    assert all(one["staleness/logprob_shift"] > 1e-3 for one in steps[1:] if one["grad/norm"])
    for one in steps:
        assert 0.0 <= one["time/idle_trainers"] <= 1.0 and 0.0 <= one["time/idle_engines"] <= 1.0


def test_the_last_checkpoint_has_no_prefetched_rollouts(whole: Path) -> None:
    queues = [(whole / "checkpoints" / f"step-{n:06d}" / "queue.jsonl").exists() for n in range(STEPS + 1)]
    assert queues == [False, True, True, True, False]


def test_a_run_killed_during_an_update_ends_in_the_same_bits(root: Path, whole: Path) -> None:
    run = root / "killed"
    runs = CommandRuns()
    process = runs.start_until(run / "checkpoints" / "step-000002" / "state.json", *given(root, run))
    runs.kill(process)
    runs.run("train", "--resume", run, "--progress", "plain")
    assert differences(whole, run, num_steps=STEPS) == []
    assert metrics(whole) == metrics(run)


@pytest.mark.slow
def test_a_stop_waits_for_prefetched_rollouts(root: Path, whole: Path) -> None:
    run = root / "stopped"
    runs = CommandRuns()
    process = runs.start_until(run / "checkpoints" / "step-000001" / "state.json", *given(root, run))
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=240)
    assert "stopped on request" in stdout, stdout + stderr
    assert runs.left_behind() == set()
    runs.run("train", "--resume", run, "--progress", "plain")
    assert differences(whole, run, num_steps=STEPS) == []
