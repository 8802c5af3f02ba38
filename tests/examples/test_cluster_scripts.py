"""The scripts for SLURM and KubeRay: their syntax, their fields, and the order in which they call what."""

import os
import signal
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")])
LIMIT_S = 120
# What a stand-in does beside writing its call down.
STAND_INS: Mapping[str, str] = {
    "scontrol": 'if [ "$1" = show ]; then printf "one\\ntwo\\nthree\\n"; fi',
    # as a step does: it lasts until it is ended
    "srun": "exec sleep 600",
    # written down when it answers, so that its line is behind that of the head
    "ray": '[ "$1" = status ] && grep -q "start --head" "$CALLS" && echo "ray $*" >> "$CALLS"',
    "hostname": "echo 10.0.0.1 10.0.0.2",
    # as a run does: it waits for what has to join
    "outrider": 'until [ "$(grep -c "^srun" "$CALLS")" -ge "${STEPS:-2}" ]; do /bin/sleep 0.05; done\n'
    "exit ${OUTRIDER_STATUS:-0}",
    "sleep": "exec /bin/sleep $1",
}


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Programs that write down how they are called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, does in STAND_INS.items():
        program = programs / name
        writes = "" if name in ("sleep", "ray") else f'echo "{name} $*" >> "$CALLS"\n'
        program.write_text(f"#!/bin/bash\n{writes}{does}\n", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


def environment(calls: Path, **more: str) -> dict[str, str]:
    programs = calls.parent / "bin"
    own = {
        "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7",
        "OUTRIDER_EXAMPLES": str(FOLDER),
    }  # fmt: skip
    return {**os.environ, **own, **more}


def run(calls: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """The SLURM script on three nodes."""
    return subprocess.run(
        [str(FOLDER / "slurm.sbatch"), *arguments], env=environment(calls, **more), capture_output=True,
        text=True, timeout=LIMIT_S, cwd=calls.parent, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) and script.read_text(encoding="utf-8").startswith("#!/bin/bash\n")


def test_slurm_starts_the_head_then_the_workers_then_the_run(calls: Path) -> None:
    done = run(calls, "runs/mine", "recipe.toml", "cluster.num_trainers=24")
    assert done.returncode == 0, done.stderr
    told = calls.read_text(encoding="utf-8").splitlines()
    head, others = (line for line in told if line.startswith("srun"))
    assert "--nodelist=one" in head and "ray start --head --node-ip-address=10.0.0.1 --port=6379" in head
    assert "--nodes=2 --ntasks=2 --exclude=one" in others and "ray start --address=10.0.0.1:6379" in others
    assert head.endswith("--block") and others.endswith("--block") and "--cpus-per-task=8" in head
    begun = "outrider train recipe.toml cluster.num_trainers=24 --ray-address auto"
    trained = f"{begun} --run runs/mine --progress plain"
    answered = told.index("ray status --address=10.0.0.1:6379")
    assert told.index(head) < answered < min(told.index(others), told.index(trained))
    assert "scontrol requeue" not in calls.read_text(encoding="utf-8")


def test_slurm_resumes_a_run(calls: Path) -> None:
    (calls.parent / "runs" / "mine").mkdir(parents=True)
    (calls.parent / "runs" / "mine" / "config.toml").touch()
    assert run(calls, "runs/mine", "recipe.toml").returncode == 0
    assert "outrider train --resume runs/mine --progress plain\n" in calls.read_text(encoding="utf-8")


def test_one_node_has_no_workers_and_a_failed_run_is_not_requeued(calls: Path) -> None:
    done = run(calls, "runs/mine", "recipe.toml", SLURM_JOB_NUM_NODES="1", STEPS="1", OUTRIDER_STATUS="3")
    told = calls.read_text(encoding="utf-8")
    assert done.returncode == 3 and told.count("srun") == 1 and "requeue" not in told


def test_the_signal_of_the_time_limit_stops_the_run_and_requeues_the_job(calls: Path) -> None:
    (calls.parent / "bin" / "outrider").write_text(
        '#!/bin/bash\ntrap \'echo "stopped" >> "$CALLS"; exit 130\' TERM\necho "outrider $*" >> "$CALLS"\n'
        "echo training\nwhile :; do /bin/sleep 0.1; done\n",
        encoding="utf-8",
    )
    script = subprocess.Popen(
        [str(FOLDER / "slurm.sbatch"), "runs/mine", "recipe.toml"], env=environment(calls),
        stdout=subprocess.PIPE, text=True, cwd=calls.parent,
    )  # fmt: skip
    assert script.stdout is not None
    for line in script.stdout:
        if line == "training\n":
            break
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=LIMIT_S) == 130
    told = calls.read_text(encoding="utf-8")
    assert told.index("stopped") < told.index("scontrol requeue 7")


def test_the_rayjob_has_the_fields_of_kuberay() -> None:
    job: dict[str, Any] = yaml.safe_load((FOLDER / "rayjob.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert set(spec) == {
        "entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec",
    }  # fmt: skip
    assert spec["backoffLimit"] > 0 and spec["shutdownAfterJobFinishes"] is True
    assert spec["entrypoint"].split()[:2] == ["bash", "/opt/outrider/examples/cluster/train_or_resume.sh"]
    cluster = spec["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    pinned = (FOLDER.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    assert f"ray=={cluster['rayVersion']}\n" in pinned
    [workers] = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] == workers["replicas"] == workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    words = [word.partition("=") for word in spec["entrypoint"].split()]
    asked = sum(
        int(value) for name, _, value in words if name in ("cluster.num_trainers", "cluster.num_engines")
    )
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert asked == gpus * workers["replicas"]
