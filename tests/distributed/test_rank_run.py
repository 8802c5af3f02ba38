"""A run with two trainer ranks from the command line: continued to the same bits, exported, and nothing left
behind.
"""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.training.policy import read_tensors
from tests.distributed.command_runs import CommandRuns
from tests.distributed.processes import send_signal
from tests.training.forked import forked_outrider
from tests.training.tool_run import write_tool_run
from tests.training.whole_runs import metrics

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(600)]
STEPS = 3


def command(root: Path, run: Path) -> list[str | Path]:
    return [
        "train", root / "plain.toml", "--run", run, "--progress", "plain", "cluster.num_trainers=2",
        "algorithm.type=grpo", "algorithm.kl_weight=0.1", f"train.num_steps={STEPS}",
        "train.checkpoint_every=1", "train.keep_checkpoints=5", "evaluation.every=0",
        "evaluation.num_tasks=1", "num_threads=1",
    ]  # fmt: skip


def shards(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every rank's part of every tensor."""
    files = sorted((checkpoint / "weights").glob("*.safetensors"))
    assert len(files) == 2
    return {f"{file.name} {name}": one for file in files for name, one in load_file(file).items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    recipe = write_tool_run(folder)
    (folder / "plain.toml").write_text(recipe.read_text().replace("num_hybrid = 2", ""))
    return folder


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    CommandRuns().run(*command(root, root / "whole"), timeout=300)
    return root / "whole"


def assert_same_run(whole: Path, run: Path) -> None:
    last = Path("checkpoints") / f"step-{STEPS:06d}"
    one, other = (shards(folder / last) for folder in (whole, run))
    assert one.keys() == other.keys() and len(one) > 20
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    # the writer's headers have no order, so the files have other checksums
    unlike = {"checksums", "own_checksum"}
    states = [json.loads((folder / last / "state.json").read_text()) for folder in (whole, run)]
    assert {name for name in states[0] if states[0][name] != states[1].get(name)} <= unlike
    assert metrics(whole) == metrics(run)
    assert (whole / "evaluations.jsonl").read_bytes() == (run / "evaluations.jsonl").read_bytes()


def test_a_run_that_goes_back_two_steps_ends_in_the_same_bits(root: Path, whole: Path) -> None:
    """As a kill leaves it: the newest checkpoint is older than all other files."""
    run = Path(shutil.copytree(whole, root / "back"))
    for step in range(2, STEPS + 1):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    CommandRuns().run("train", "--resume", run, "--progress", "plain", timeout=300)
    assert_same_run(whole, run)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(root: Path, whole: Path) -> None:
    run, runs = root / "killed", CommandRuns()
    process = runs.start_until(run / "checkpoints" / "step-000001" / "state.json", *command(root, run))
    assert len(rank_pids(runs)) == 2
    runs.kill(process)
    runs.run("train", "--resume", run, "--progress", "plain", timeout=300)
    assert_same_run(whole, run)


def rank_pids(runs: CommandRuns) -> list[int]:
    """Find the ranks by the files of their output."""
    return [pid for pid in runs.processes() if "trainer-rank-" in os.readlink(f"/proc/{pid}/fd/1")]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_restarts_after_a_lost_rank_and_ends_in_the_same_bits(
    root: Path, whole: Path, how: signal.Signals
) -> None:
    run, runs = root / f"broken-{how.name}", CommandRuns()
    process = runs.start_until(
        run / "checkpoints" / "step-000001" / "state.json", *command(root, run), "cluster.heartbeat_s=5"
    )
    send_signal(rank_pids(runs)[0], how)
    stdout = runs.end(process, timeout=300)
    assert "restart from the newest checkpoint, repair 1 of 3 within an hour" in stdout
    last = Path("checkpoints") / f"step-{STEPS:06d}"
    one, other = (shards(folder / last) for folder in (whole, run))
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    recorded = metrics(run)
    restarts = [record.pop("cluster/trainer_restarts", 0.0) for record in recorded]
    assert sum(restarts) == 1.0 and recorded == metrics(whole)


def test_the_export_is_the_newest_checkpoint(root: Path, whole: Path) -> None:
    out = root / "exported"
    ended = forked_outrider("export", whole, "--out", out)
    assert ended.returncode == 0, ended.stderr
    written = read_tensors(whole / "checkpoints" / f"step-{STEPS:06d}", with_optimizer=False)
    exported = load_file(out / "model.safetensors")
    shared = written.keys() & exported.keys()
    assert len(shared) >= len(written) - 1
    assert all(torch.equal(exported[name].float(), written[name]) for name in shared)
    assert (out / "tokenizer.json").exists() and json.loads((out / "config.json").read_text())
    description = json.loads((out / "outrider.json").read_text())
    assert description == {
        "template_kwargs": {},
        "history_thinking": "keep",
        "call_format": None,
        "stop": ["</search>", "</answer>"],
    }
    again = forked_outrider("export", whole, "--out", out)
    assert again.returncode == 2 and "is not empty" in again.stderr


def test_the_run_is_that_of_one_process_within_the_promise(root: Path, whole: Path) -> None:
    single = root / "single"
    given = [one for one in command(root, single) if one != "cluster.num_trainers=2"]
    ended = forked_outrider(*given)
    assert ended.returncode == 0, ended.stderr
    first, other = (next(one for one in metrics(run) if one["kind"] == "train") for run in (whole, single))
    for name, value in other.items():
        if isinstance(value, float):
            assert first[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
