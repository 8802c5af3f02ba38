"""Processes and calls between them: errors, deaths, and the limits of progress."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.distributed import processes
from outrider.distributed.processes import (
    Cluster,
    Process,
    SharedRolloutStatus,
    _remove_stale,
)
from outrider.errors import ClusterFault, ConfigError, ProcessLost
from outrider.training.settings import ClusterSettings
from tests.distributed.processes import command_of, send_signal, wait_until_ended
from tests.distributed.served import Worker

HEARTBEAT_S = 1.5


@pytest.fixture
def start(cluster: Cluster) -> Callable[..., Process]:
    """Start a worker of the shared cluster, whose limits are small."""
    cluster.settings = ClusterSettings(heartbeat_s=HEARTBEAT_S)
    for watch in list(cluster._watches.values()):
        cluster.kill(watch.process)

    def started(name: str = "engine 0", has_begun: bool = True, **options: Any) -> Process:
        options = {"busy_s": 60.0, "place": ("engine", 0)} | options
        process = cluster.start(name, Worker, str(cluster.folder), name, **options)
        if has_begun:  # its imports do not count
            process.call("echo", 1).result(60)
        return process

    return started


def result(cluster: Cluster, call: Any) -> Any:
    """The result of a call, or its ProcessLost, within 30 s."""
    until = time.monotonic() + 30
    while not call.done():
        assert time.monotonic() < until, "the call does not end"
        cluster.check()
        time.sleep(0.02)
    [answer] = cluster.wait({"any name": call}).values()
    return answer


def test_calls_return_results_and_errors(cluster: Cluster, start: Callable[..., Process]) -> None:
    process = start()
    assert Path(f"/proc/{process.pid}/comm").read_text().strip() == "engine 0"
    assert process.call("coroutine", 3).result(30) == 3
    large = b"x" * 3_000_000
    assert process.call("echo", large).result(30) == large
    with pytest.raises(ConfigError, match=r"^wrong setting$"):
        process.call("fail", ConfigError("wrong setting")).result(30)
    with pytest.raises(ClusterFault, match=r"engine 0 broke in fail: KeyError: 'x'.*--resume") as raised:
        process.call("fail", KeyError("x")).result(30)
    assert "\n" not in str(raised.value)
    with pytest.raises(ClusterFault, match="SystemExit: 3"):  # of a user's reward
        process.call("fail", SystemExit(3)).result(30)
    calls = {"slow": process.call("sleep", 0.2), "fast": process.call("echo", 1)}
    assert list(cluster.wait(calls).items()) == [("slow", "slept"), ("fast", 1)]
    with pytest.raises(ClusterFault, match="echo2"):
        process.call("echo2").result(30)


def test_a_result_that_cannot_be_read_fails_its_call_alone(start: Callable[..., Process]) -> None:
    process = start()
    other = process.call("sleep", 0.3)
    with pytest.raises(
        ClusterFault, match="engine 0 returned from unreadable what cannot be read: TypeError"
    ):
        process.call("unreadable").result(30)
    assert other.result(30) == "slept"


def test_a_silent_client_does_not_block_others(start: Callable[..., Process]) -> None:
    process = start(has_begun=False)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(process.address))
        assert process.call("echo", 1).result(30) == 1


def test_a_signal_to_end_all_processes_is_left_to_the_run(
    cluster: Cluster, start: Callable[..., Process]
) -> None:
    process = start()
    for pid in (cluster._fork_server.pid, process.pid):
        os.kill(pid, signal.SIGTERM)
    assert process.call("sleep", 0.1).result(30) == "slept"
    draws = [each.call("random").result(30) for each in (process, start("engine 1"))]
    assert draws[0] != draws[1]  # no fork repeats the numbers of another


def test_a_fork_server_that_is_lost_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(ClusterSettings()) as own:
        arguments = Worker, str(own.folder), "engine 0"
        first = own.start("engine 0", *arguments, busy_s=60.0, place=("engine", 0))
        os.kill(own._fork_server.pid, signal.SIGKILL)
        own._fork_server.wait()
        wait_until_ended([first.pid])
        second = own.start("engine 0", *arguments, busy_s=60.0, place=("engine", 0))
        assert second.call("echo", 1).result(60) == 1
        send_signal(own._fork_server.pid, signal.SIGSTOP)
        monkeypatch.setattr(processes, "_START_S", 0.2)
        with pytest.raises(ClusterFault, match="engine 1 could not start"):
            own.start("engine 1", *arguments, busy_s=60.0, place=("engine", 1))


def test_answers_that_arrived_while_this_process_was_stopped_count(
    cluster: Cluster, start: Callable[..., Process]
) -> None:
    start()
    [watch] = cluster._watches.values()
    while watch.beat is None:
        cluster.check()
    for name in ("sent", "cpu_at"):
        setattr(watch, name, getattr(watch, name) - 60)
    cluster._checked -= 60
    assert cluster.check() == {}


def test_folders_of_runs_that_live_are_not_removed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as root:  # a long path would not hold sockets
        monkeypatch.setattr(tempfile, "tempdir", root)
        for name in ("outrider-1-stale", "outrider-1-made"):
            Path(root, name).mkdir()
        Path(root, "outrider-1-stale", "lock").touch()
        _remove_stale()
        with Cluster(ClusterSettings()) as other:
            _remove_stale()
            assert set(os.listdir(root)) == {"outrider-1-made", other.folder.name}
        assert os.listdir(root) == ["outrider-1-made"]
    assert cluster.folder.exists()


def test_a_cancelled_call_does_not_break_later_ones(start: Callable[..., Process]) -> None:
    """A rollout that its group's time limit cancels waits for an engine."""
    process = start()

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(process.call("sleep", 0.3)), 0.05)

    asyncio.run(cancel())
    assert process.call("sleep", 0.4).result(30) == "slept"


def test_a_death_fails_pending_and_later_calls_at_once(
    cluster: Cluster, start: Callable[..., Process]
) -> None:
    process = start()
    call = process.call("sleep", 600.0)
    began = time.monotonic()
    send_signal(process.pid, signal.SIGKILL)
    fault = result(cluster, call)
    assert time.monotonic() - began < HEARTBEAT_S
    assert isinstance(fault, ProcessLost) and not fault.is_silent and "engine 0 died in " in str(fault)
    with pytest.raises(ProcessLost):
        process.call("echo", 1).result(30)
    assert "engine 0" in cluster.check()


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_stopped_process_blocks_no_caller_and_is_ended(
    cluster: Cluster, start: Callable[..., Process], has_begun: bool
) -> None:
    """Neither its first connection nor a request that fills its socket may block."""
    process = start(has_begun=has_begun)
    send_signal(process.pid, signal.SIGSTOP)
    fault = result(cluster, process.call("echo", b"x" * 3_000_000))
    assert isinstance(fault, ProcessLost) and fault.is_silent
    assert "engine 0 has not responded for" in str(fault) and "cluster.heartbeat_s" in str(fault)
    wait_until_ended([process.pid])


def test_a_slow_process_with_progress_is_not_ended(cluster: Cluster, start: Callable[..., Process]) -> None:
    process = start(busy_s=1.0)
    assert result(cluster, process.call("sleep_in_steps", 15, 0.1)) == "slept"
    assert result(cluster, start("rollout worker 0", busy_s=1.0, has_progress=False).call("sleep", 1.6)) == (
        "slept"
    )
    time.sleep(1.2)  # neither calls nor checks: its time without work does not count
    assert result(cluster, process.call("sleep", 0.3)) == "slept"


def test_a_process_without_progress_is_ended(cluster: Cluster, start: Callable[..., Process]) -> None:
    process = start(busy_s=1.0)
    fault = result(cluster, process.call("sleep", 600.0))
    assert isinstance(fault, ProcessLost) and fault.is_silent
    assert "made no progress for 1 s (cluster.stall_s)" in str(fault)


def test_a_step_that_holds_the_lock_only_delays(cluster: Cluster, start: Callable[..., Process]) -> None:
    notes: list[str] = []
    cluster.note = notes.append
    process = start("rollout worker 0", busy_s=60.0, has_progress=False)
    assert result(cluster, process.call("compute", 2.5 * HEARTBEAT_S)) == "computed"
    assert cluster.check() == {}


def test_a_step_that_never_releases_the_lock_is_ended_and_located(
    cluster: Cluster, start: Callable[..., Process]
) -> None:
    notes: list[str] = []
    cluster.note = notes.append
    process = start("rollout worker 0", busy_s=1.0, has_progress=False)
    fault = result(cluster, process.call("hold_lock"))
    assert isinstance(fault, ProcessLost) and fault.is_silent
    assert "last seen at task/3: an environment's step; " in str(fault)
    [note] = notes
    assert "works but has not responded for 1.5 s" in note and "task/3: an environment's step" in note
    wait_until_ended([process.pid])


def test_a_location_that_is_too_long_is_cut(tmp_path: Path) -> None:
    SharedRolloutStatus(tmp_path / "location").set("\ud800" + "x" * 2000, "a step")
    assert (tmp_path / "location").read_bytes() == b"?" + b"x" * 511


KILLED = """
import sys
from outrider.distributed.processes import Cluster
from outrider.training.settings import ClusterSettings
from tests.distributed.served import Worker
cluster = Cluster(ClusterSettings())
process = cluster.start("engine 0", Worker, str(cluster.folder), "engine 0", busy_s=9.0, place=("engine", 0))
print(cluster.folder, cluster._fork_server.pid, process.pid, flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_run_that_was_killed() -> None:
    code = [sys.executable, "-c", KILLED]
    process = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    assert Path(folder).exists() and "engine" not in command_of(int(pids[1]))
    process.kill()
    process.communicate()
    wait_until_ended(map(int, pids))
    with Cluster(ClusterSettings()) as cluster:  # the next run removes the rest
        assert cluster.folder.exists() and not Path(folder).exists()
    assert not cluster.folder.exists()
