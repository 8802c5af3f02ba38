"""A run that joins a Ray of two nodes, both on this machine. If a node is lost, its processes move to another
one that has room, or the run ends in time.
"""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from outrider.config import validate
from outrider.distributed.processes import Place, Process
from outrider.errors import NoRepair, ProcessLost
from outrider.training.settings import RunSettings
from tests.distributed.processes import command_of, descendants, wait_until_ended
from tests.training.tool_run import start_outrider
from tests.training.whole_runs import command, write_data

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("ray", reason="several machines need the extra 'cluster'")
PLACE_S = 90
LIMIT_S = 300.0
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}


class Nodes:
    """Each with two processors; all end with :meth:`close`."""

    def __init__(self, folder: str, token: dict[str, str]) -> None:
        self._token = token
        self._folder, self._begun = folder, []  # type: tuple[str, list[subprocess.Popen[bytes]]]
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self.address = f"{socket.gethostbyname(socket.gethostname())}:{port}"
        self.begin("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}")
        until = time.monotonic() + LIMIT_S
        while True:  # until the head listens
            try:
                socket.create_connection((self.address.rpartition(":")[0], port), timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.1)

    def begin(self, *given: str) -> "subprocess.Popen[bytes]":
        """One more, the head first."""
        place = given or (f"--address={self.address}",)
        made = subprocess.Popen(
            [Path(sys.executable).parent / "ray", "start", "--block", "--num-cpus=2", *place,
             "--object-store-memory=150000000", "--min-worker-port=0", "--max-worker-port=0",
             "--dashboard-agent-listen-port=0", "--disable-usage-stats"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **self._token},
        )  # fmt: skip
        self._begun.append(made)
        return made

    def lose(self, node: "subprocess.Popen[bytes]") -> None:
        """All that runs there is gone at once, as with a machine."""
        for pid in [*descendants(node.pid), node.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def hosts(self) -> list[int]:
        """The processes of a run."""
        pids = [pid for node in self._begun for pid in descendants(node.pid)]
        return [pid for pid in pids if "ray::_Host" in command_of(pid)]

    def close(self) -> None:
        for one in reversed(self._begun):
            if one.poll() is None:
                self.lose(one)


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="two-nodes-", ignore_cleanup_errors=True) as folder:
        made = Nodes(
            folder, getattr(request, "param", TOKEN)
        )  # a short name: sockets inside have to fit into 107 characters
        try:
            yield made
        finally:
            made.close()


class Echo:
    """A process that needs no model."""

    def pid(self) -> int:
        return os.getpid()

    def sleep(self) -> None:
        time.sleep(LIMIT_S)


@pytest.mark.parametrize("nodes", [{"RAY_AUTH_MODE": "disabled"}], indirect=True)
def test_processes_are_placed_called_lost_and_placed_again(nodes: Nodes) -> None:
    from outrider.distributed.nodes import RayCluster

    second = nodes.begin()
    settings = validate(
        RunSettings,
        {
            "environment": {"type": "factbook"},
            "algorithm": {"type": "grpo"},
            "cluster": {
                "num_engines": 2, "num_rollout_workers": 2, "ray_address": nodes.address,
                "placement_timeout_s": PLACE_S,
            },
        },
    )  # fmt: skip
    places: dict[str, Place] = {
        f"{kind} {number}": (kind, number)  # type: ignore[misc]
        for kind in ("engine", "worker")
        for number in range(2)
    }
    with RayCluster(settings.cluster) as cluster:

        def start(name: str) -> Process:
            return cluster.start(name, Echo, busy_s=LIMIT_S, has_progress=False, place=places[name])

        cluster.reserve(settings, "rollouts")
        processes = {name: start(name) for name in places}
        pids = cluster.results({name: each.call("pid") for name, each in processes.items()})
        assert pids == [each.pid for each in processes.values()] and set(pids) == set(nodes.hosts())
        assert len(cluster.on_every_node(platform.node)) == 2
        there = set(descendants(second.pid))
        lost = [name for name, each in processes.items() if each.pid in there]
        assert len(lost) == 2
        calls = {name: processes[name].call("sleep") for name in lost}
        nodes.lose(second)
        faults = cluster.wait(calls)
        assert all(isinstance(fault, ProcessLost) for fault in faults.values())
        for name in lost:
            cluster.kill(processes[name])
        cluster.settings = settings.cluster.model_copy(update={"placement_timeout_s": 2.0})
        with pytest.raises(NoRepair, match=f"{lost[0]} found no place within 2 s"):
            start(lost[0])
        cluster.settings = settings.cluster
        nodes.begin()
        again = {name: start(name) for name in lost}
        pids = cluster.results({name: each.call("pid") for name, each in again.items()})
        assert set(pids) <= set(nodes.hosts())
    wait_until_ended(nodes.hosts())


def test_processes_of_a_lost_node_move_or_the_run_ends(nodes: Nodes, tmp_path: Path) -> None:
    write_data(tmp_path)
    run = tmp_path / "run"
    second = nodes.begin()
    arguments = [
        *command(tmp_path, run, "grpo"), "train.num_steps=50000", "evaluation.at_start=false",
        "evaluation.every=0", "train.checkpoint_every=1000", f"cluster.ray_address={nodes.address}",
        "cluster.num_engines=2", "cluster.num_rollout_workers=2", "cluster.max_restarts=9",
        f"cluster.placement_timeout_s={PLACE_S}",
    ]  # fmt: skip
    process = start_outrider(*arguments, environment=TOKEN)
    try:
        wait_for(process, lambda: len(steps_of(run)) >= 2)  # it has joined, and plays on both
        assert len(nodes.hosts()) == 4
        assert len(list((run / "engine").glob("weights-*"))) in (1, 2)  # the folder that all machines share
        nodes.lose(second)
        third = nodes.begin()
        num_before = len(steps_of(run))
        wait_for(process, lambda: len(steps_of(run)) >= num_before + 3)
        steps = steps_of(run)
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        deaths = sum(step["cluster/engine_deaths"] + step["cluster/worker_deaths"] for step in steps)
        assert deaths >= 2.0  # both places of the node, and not all anew
        nodes.lose(third)
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    assert process.returncode not in (0, -signal.SIGKILL)
    assert f"found no place within {PLACE_S} s (cluster.placement_timeout_s): " in stderr + stdout
    assert "Traceback" not in stderr + stdout
    wait_until_ended(nodes.hosts())
    assert not list((run / "engine").glob("weights-*"))


@pytest.mark.skipif("RAY_AUTH_MODE" in os.environ, reason="the environment has a token")
def test_a_missing_token_is_named_and_the_doctor_examines_both_nodes(nodes: Nodes, tmp_path: Path) -> None:
    nodes.begin()
    arguments = ["doctor", "--cluster", "--ray-address", nodes.address, "--folder", tmp_path / "runs"]
    stdout, _ = start_outrider(*arguments, environment={"COLUMNS": "400"}).communicate(timeout=LIMIT_S)
    assert "set RAY_AUTH_MODE=token" in stdout
    process = start_outrider(*arguments, environment={**TOKEN, "COLUMNS": "400"})
    stdout, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and "2 nodes" in stdout and "nats off" in stdout
    assert list((tmp_path / "runs").iterdir()) == [] and nodes.hosts() == []


def steps_of(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [one for one in map(json.loads, lines) if one["kind"] == "train"]


def wait_for(process: "subprocess.Popen[str]", there: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not there():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.1)
