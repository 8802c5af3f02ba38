"""Servers of the Python tool: restarts, interrupts, killed parents, privileges, the queue for a server."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.errors import ToolFault
from outrider.tools.base import FairPool
from outrider.tools.python import sandbox
from outrider.tools.python.sandbox import Limits
from outrider.tools.python.server import REPLY, REQUEST, ServerSettings
from outrider.tools.python.tool import _COMMAND, SOURCE, PythonTool, PythonToolConfig
from tests.tools.python.processes import needs_locks, server_pids

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[3])}


def run_program(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def wait_for_pids(folder: Path, num: int) -> list[int]:
    """The processes of a tool once there are so many."""
    end = time.monotonic() + 30
    while len(pids := server_pids(folder)) != num and time.monotonic() < end:
        time.sleep(0.005)
    assert len(pids) == num
    return pids


@needs_locks
def test_a_server_outlives_the_thread_that_started_it_and_a_lost_one_is_started_again(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        tool = threads.submit(PythonTool, PythonToolConfig(scratch_folder=str(tmp_path))).result()
    with tool:
        (first,) = server_pids(tmp_path)
        assert tool.run("6 * 7").output == "42"
        assert wait_for_pids(tmp_path, 1) == [first] and tool.num_restarts == 0
        os.kill(first, signal.SIGKILL)
        assert tool.run("6 * 7").output == "42"
        assert tool.num_restarts == 1
        assert len(list(tmp_path.iterdir())) == 1  # the lost server's folder is gone
    tool.close()
    assert list(tmp_path.iterdir()) == [] and server_pids(tmp_path) == []
    with pytest.raises(ToolFault, match="closed"):
        tool.run("1")


@needs_locks
def test_a_server_lost_twice_is_a_fault_and_the_tool_recovers(tmp_path: Path) -> None:
    with PythonTool(PythonToolConfig(scratch_folder=str(tmp_path))) as tool, ThreadPoolExecutor(1) as threads:
        call = threads.submit(tool.run, "import time\ntime.sleep(9)")
        for _ in range(2):
            pids = wait_for_pids(tmp_path, 3)
            os.kill(min(pids), signal.SIGKILL)
            while set(pids) & set(server_pids(tmp_path)):
                time.sleep(0.005)
        with pytest.raises(ToolFault, match="lost twice"):
            call.result(timeout=60)
        assert tool.run("6 * 7").output == "42"


@needs_locks
def test_a_worker_that_is_killed_from_outside_is_a_fault(tmp_path: Path) -> None:
    """For example by the kernel, if the machine is out of memory: it says nothing about the code."""
    with PythonTool(PythonToolConfig(scratch_folder=str(tmp_path))) as tool, ThreadPoolExecutor(1) as threads:
        call = threads.submit(tool.run, "import time\nprint('begun', flush=True)\ntime.sleep(9)")
        worker = max(wait_for_pids(tmp_path, 3))
        while "Seccomp:\t2" not in Path(f"/proc/{worker}/status").read_text():  # not locked yet
            time.sleep(0.005)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(ToolFault, match="python tool: something outside killed the worker"):
            call.result(timeout=60)
        assert tool.run("6 * 7").output == "42"


@needs_locks
def test_an_interrupted_call_does_not_answer_the_next_one() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with PythonTool(PythonToolConfig()) as tool:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                tool.run("import time\ntime.sleep(.3)\nprint('late')")
            time.sleep(0.3)
            assert tool.run("6 * 7").output == "42"
    finally:
        signal.signal(signal.SIGALRM, before)


PARENT = """
import os, sys, threading, time
from outrider.tools.python.tool import PythonTool, PythonToolConfig
tool = PythonTool(PythonToolConfig(scratch_folder=sys.argv[1], wall_seconds=60))
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(8)  # a worker of a data loader, which has a copy of the socket
    os._exit(0)
if sys.argv[2] == "busy":
    threading.Thread(target=tool.run, args=("import time; time.sleep(50)",)).start()
else:
    tool.run("1")
print("up", flush=True)
time.sleep(60)
"""


@needs_locks
@pytest.mark.parametrize("state", ["idle", "busy", "fork"])
def test_no_process_remains_after_the_parent_was_killed(tmp_path: Path, state: str) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"up\n"
            wait_for_pids(tmp_path, 3 if state == "busy" else 1)
        finally:
            parent.kill()
        wait_for_pids(tmp_path, 0)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "request_start", [None, REQUEST.pack(100) + b"print(1)"], ids=["while it starts", "inside a request"]
)
def test_a_server_whose_parent_was_killed_leaves_neither_traceback_nor_folder(
    request_start: bytes | None, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    limits = Limits(wall_seconds=5.0, cpu_seconds=5, memory_bytes=2**28, disk_bytes=2**20, output_bytes=2**16)
    settings = ServerSettings(
        root=str(root), parent=os.getpid(), packages=(), landlock=False, seccomp=False, mounts=False,
        limits=limits,
    )  # fmt: skip
    ours, theirs = socket.socketpair()
    command = [*_COMMAND, json.dumps(dataclasses.asdict(settings)), SOURCE]
    with theirs:
        server = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    with ours:
        if request_start is not None:
            ours.settimeout(60)
            assert ours.recv(REPLY.size)
            ours.sendall(request_start)
    _, stderr = server.communicate(timeout=60)
    assert stderr.decode() == "" and not root.exists()


PARKED = """
import os, signal
from outrider.tools.python.server import wall_limit
reader, writer = os.pipe()
worker = os.fork()
if worker == 0:
    while True: signal.pause()
os.close(writer)
with wall_limit(worker, 0.05):
    print(os.read(reader, 1))  # blocked for as long as the worker lives
print(os.WTERMSIG(os.waitpid(worker, 0)[1]))
"""


def test_a_blocked_supervisor_still_ends_its_worker() -> None:
    assert run_program(PARKED).split() == ["b''", "9"]


CAPABILITIES = """
from outrider.tools.python.sandbox import drop_capabilities
drop_capabilities()
for line in open('/proc/self/status'):
    if line.startswith(('CapInh', 'CapPrm', 'CapEff', 'CapAmb')): print(int(line.split()[1], 16))
"""


@needs_locks
def test_a_worker_has_no_capabilities(tmp_path: Path) -> None:
    assert run_program(CAPABILITIES).split() == ["0"] * 4
    with (
        PythonTool(PythonToolConfig(scratch_folder=str(tmp_path), wall_seconds=60)) as tool,
        ThreadPoolExecutor(1) as threads,
    ):
        call = threads.submit(tool.run, "import time\nwhile True: time.sleep(0.01)")
        worker = max(wait_for_pids(tmp_path, 3))  # the youngest of server, supervisor and worker
        try:
            status = ""
            while "\nSeccomp:\t2\n" not in status:  # until its filter is installed
                status = Path(f"/proc/{worker}/status").read_text(encoding="ascii")
            assert "\nCapEff:\t0000000000000000\n" in status and "\nCapPrm:\t0000000000000000\n" in status
        finally:
            os.kill(worker, 9)
            assert isinstance(call.exception(60), ToolFault)


def serve(pool: FairPool[str], served: list[int], number: int) -> None:
    item = pool.acquire()
    served.append(number)
    pool.release(item)


def test_calls_wait_for_a_server_in_the_order_of_their_arrival() -> None:
    """A thread that returns the only item and requests it again is served after all waiting threads."""
    pool = FairPool(["server"])
    served: list[int] = []
    item = pool.acquire()
    threads = []
    for number in range(8):
        threads.append(threading.Thread(target=serve, args=(pool, served, number)))
        threads[-1].start()
        while len(pool._waiting) <= number:
            os.sched_yield()
    pool.release(item)
    serve(pool, served, 8)
    for thread in threads:
        thread.join(60)
    assert served == list(range(9))


def test_an_interrupted_wait_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FairPool(["server"])
    item = pool.acquire()

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(threading.Event, "wait", interrupt)
        pool.acquire()
    pool.release(item)
    assert pool.acquire() == "server"
