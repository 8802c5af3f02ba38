"""Engines and rollout workers in processes of their own, from the command line and over real Ray: one of each
is one process bit for bit, two of each are the same bits again when they were killed between, and nothing is
left behind.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.command_runs import CommandRuns
from tests.training.forked import forked_outrider
from tests.training.whole_runs import command, differences, metrics, write_data

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(600)]
pytest.importorskip("ray", reason="several processes need the extra 'cluster'")
STEPS = 2
SENT = (
    "weights/bytes", "weights/rpcs", "weights/num_failed", "cluster/worker_deaths", "cluster/engine_deaths",
    "cluster/engine_hangs", "rollout/num_groups_replayed",
)  # fmt: skip
# hooks that count, branch, remember and reflect, and a buffer that grows
CASE = ("combined", "buffer.evolve=true")
TWO = ("cluster.num_engines=2", "cluster.num_rollout_workers=2", "cluster.weights=disk")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    write_data(folder)
    return folder


def given(root: Path, run: Path, *overrides: str) -> list[str | Path]:
    case, more = CASE
    return [*command(root, run, case), more, f"train.num_steps={STEPS}", "evaluation.every=0",
            "evaluation.num_tasks=2", *overrides]  # fmt: skip


def played(root: Path, name: str, *overrides: str) -> Path:
    CommandRuns().run(*given(root, root / name, *overrides))
    assert not list((root / name).rglob("weights-*.safetensors"))
    return root / name


def test_one_engine_and_one_worker_are_one_process_bit_for_bit(root: Path) -> None:
    """Trace, metrics, checkpoint, buffer; but for what says how the weights went."""
    alone = root / "alone"
    ended = forked_outrider(*given(root, alone))
    assert ended.returncode == 0, ended.stderr
    remote = played(root, "remote", "cluster.weights=store")
    found = set(differences(alone, remote, num_steps=STEPS))
    state = f"checkpoints/step-{STEPS:06d}/state.json"
    assert found <= {"metrics.jsonl", state}
    assert without_transfer(alone) == without_transfer(remote)
    assert plain_state(alone / state) == plain_state(remote / state)
    steps = [one for one in metrics(remote) if one["kind"] == "train"]
    assert len(steps) == STEPS and all(one["weights/rpcs"] == 1 for one in steps)
    sizes = {one["weights/bytes"] for one in steps}
    assert len(sizes) == 1 and sizes.pop() > 10_000


@pytest.mark.slow
def test_two_of_each_are_the_same_bits_after_a_kill(root: Path) -> None:
    two = played(root, "two", *TWO)
    run = root / "killed"
    runs = CommandRuns()
    process = runs.start_until(run / "checkpoints" / "step-000001" / "state.json", *given(root, run, *TWO))
    assert any("ray::EngineActor" in one for one in runs.processes())
    runs.kill(process)
    runs.run("train", "--resume", run, "--progress", "plain")
    assert differences(two, run, num_steps=STEPS) == []


def without_transfer(run: Path) -> list[dict[str, object]]:
    return [{name: value for name, value in one.items() if name not in SENT} for one in metrics(run)]


def plain_state(path: Path) -> dict[str, Any]:
    """Without the checksums of files that say it differently, and the settings of the cluster."""
    state: dict[str, Any] = json.loads(path.read_text())
    state["settings"] = {k: v for k, v in state["settings"].items() if not k.startswith("cluster.")}
    return {name: value for name, value in state.items() if name not in ("own_checksum", "records")}
