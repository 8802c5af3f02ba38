"""Faults D2, D3 and D7 of the tool: pipes that the code reads back, files that nobody counts, a line with no
order.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.environments.tool_qa.environment import ToolEnvironment, ToolsConfig
from outrider.errors import ToolUnavailable
from outrider.tools.base import FairPool
from outrider.tools.python import sandbox
from outrider.tools.python.tool import PythonTool, PythonToolConfig

needs_locks = pytest.mark.skipif(bool(sandbox.problems()), reason="this kernel lacks Landlock or seccomp")
DISK = 4 << 20


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    with PythonTool(PythonToolConfig(wall_seconds=20, disk_bytes=DISK)) as made:
        yield made


@needs_locks
def test_d2_code_cannot_open_its_own_output_to_read_it(tool: PythonTool) -> None:
    """An end of a pipe can be opened again, and then read; an end of a socket cannot."""
    code = """import os
for number in range(3, 64):
    try:
        os.fstat(number)
    except OSError:
        continue
    print('open', number)
for path in ('/proc/self/fd/1', '/proc/self/fd/2', '/dev/stdout', '/dev/fd/1'):
    try:
        print('PWNED', os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        print(type(error).__name__)"""
    found = tool.run(code)
    assert found.status == "ok" and len(found.output.split()) == 4 and "Error" in found.output
    assert "PWNED" not in found.output and "open" not in found.output


@needs_locks
def test_d2_code_that_reads_its_own_output_is_no_fault_of_the_infrastructure(tool: PythonTool) -> None:
    """The handshake cannot be stolen: it went over a pipe that was closed before the code began."""
    steal = "import os\ntry: os.read(os.open('/proc/self/fd/1', 2048), 9)\nexcept OSError: pass\nos._exit(0)"
    for _ in range(20):
        assert tool.run(steal).status == "ok"
    assert tool.run("import os\nos.close(1)\nos.close(2)\nos._exit(0)").status == "ok"
    assert tool.num_restarts == 0


@needs_locks
def test_d2_reading_from_its_own_end_gets_nothing_and_ends_at_the_wall_limit() -> None:
    with PythonTool(PythonToolConfig(wall_seconds=0.3)) as tool:
        found = tool.run("import os\nprint('begun', flush=True)\nos.read(1, 9)")
    assert (found.status, found.output) == ("timeout", "begun\n[stopped: ran longer than 0.3 s]")


PARKED = """
import os, signal
from outrider.tools.python.server import wall_limit
hears, says = os.pipe()
worker = os.fork()
if worker == 0:
    while True: signal.pause()
os.close(says)
with wall_limit(worker, 0.05):
    print(os.read(hears, 1))  # parked for as long as the worker lives
print(os.WTERMSIG(os.waitpid(worker, 0)[1]))
"""


def test_d2_a_parked_supervisor_still_ends_its_worker() -> None:
    source = str(Path(sandbox.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", PARKED],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["b''", "9"], done.stderr


HOLD = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
for i in range(48):
    file = os.open('x', os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    for _ in range(3): os.write(file, bytes(1 << 20))
    assert libc.mmap(None, 4096, 1, 1, file, 0) != 2**64 - 1
    os.remove('x')
    os.close(file)
    print(3 * (i + 1), flush=True)
    PAUSE
print('PWNED')
"""


@needs_locks
def test_d3_files_that_were_removed_but_are_mapped_count(tool: PythonTool) -> None:
    found = tool.run(HOLD.replace("PAUSE", ""))
    assert "PWNED" not in found.output.splitlines() and found.status in ("error", "killed")
    if found.status == "error":  # the file system is of this size
        assert (
            found.output.endswith("OSError: [Errno 28] No space left on device")
            and found.output.split()[0] == "3"
        )
    assert tool.run("import os\nopen('y', 'wb').write(bytes(3 << 20))\nos.listdir()").output == "['y']"


@needs_locks
def test_d3_without_a_file_system_of_its_own_bytes_are_charged_as_they_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "may_mount", lambda: False)
    config = PythonToolConfig(wall_seconds=60, disk_bytes=DISK, scratch_folder=str(tmp_path))
    with PythonTool(config) as tool:
        found = tool.run(HOLD.replace("PAUSE", "__import__('time').sleep(0.05)"))
        assert (found.status, found.output.splitlines()[-1]) == (
            "killed",
            f"[stopped: wrote more than {DISK} bytes of files]",
        )
        assert tool.run("6 * 7").output == "42"


@needs_locks
def test_d3_a_call_finds_the_files_of_no_other_call_and_the_whole_size(tool: PythonTool) -> None:
    fill = (
        "with open('full', 'wb') as f:\n    for _ in range(4 * 1024): f.write(bytes(1000))\nimport os\n"
        "print(os.listdir())"
    )
    for _ in range(3):
        assert tool.run(fill).output == "['full']"


@needs_locks
def test_d3_a_relative_scratch_folder_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    with PythonTool(PythonToolConfig(scratch_folder="scratch")) as tool:
        assert tool.run("6 * 7").output == "42"
    assert list((tmp_path / "scratch").iterdir()) == []


def test_d7_who_asks_first_is_served_first() -> None:
    """One item and eight threads: whoever gives it back and asks again stands behind all who wait."""
    pool = FairPool(["server"])
    served: list[int] = []
    held = pool.acquire()
    threads = []
    for number in range(8):
        threads.append(threading.Thread(target=lambda number=number: _serve(pool, served, number)))
        threads[-1].start()
        while len(pool._waiting) <= number:  # it stands in line
            os.sched_yield()
    pool.release(held)
    _serve(pool, served, 8)
    for thread in threads:
        thread.join(60)
    assert served == list(range(9))


def _serve(pool: FairPool[str], served: list[int], number: int) -> None:
    item = pool.acquire()
    served.append(number)
    pool.release(item)


def test_d7_who_leaves_the_line_is_not_handed_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FairPool(["server"])
    held = pool.acquire()

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            pool.acquire()
    pool.release(held)
    assert pool.acquire() == "server"


CAPABILITIES = """
from outrider.tools.python.sandbox import drop_capabilities
drop_capabilities()
for line in open('/proc/self/status'):
    if line.startswith(('CapInh', 'CapPrm', 'CapEff', 'CapAmb')): print(int(line.split()[1], 16))
"""


@needs_locks
def test_d7_a_worker_has_no_capabilities_whoever_started_it(tmp_path: Path) -> None:
    source = str(Path(sandbox.__file__).parents[3])
    command = [sys.executable, "-c", CAPABILITIES]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["0"] * 4, done.stderr
    with PythonTool(PythonToolConfig(scratch_folder=str(tmp_path), wall_seconds=60)) as tool:
        caller = threading.Thread(
            target=tool.run, args=("import time\nopen('up', 'w').close()\nwhile True: time.sleep(0.01)",)
        )
        caller.start()
        try:
            worker = _locked_worker(tmp_path)
            status = Path(f"/proc/{worker}/status").read_text(encoding="ascii")
            assert "\nCapEff:\t0000000000000000\n" in status and "\nCapPrm:\t0000000000000000\n" in status
        finally:
            os.kill(worker, 9)
            caller.join(60)


def _locked_worker(scratch: Path) -> int:
    """The youngest of the three processes of a call, once its filter is on."""
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if (
                    str(scratch).encode() in (entry / "cmdline").read_bytes()
                    and int(entry.name) != os.getpid()
                ):
                    found.append(int(entry.name))
        with contextlib.suppress(OSError):
            if len(found) == 3 and "\nSeccomp:\t2\n" in Path(f"/proc/{max(found)}/status").read_text(
                encoding="ascii"
            ):
                return max(found)


@needs_locks
def test_d7_a_lock_that_does_not_hold_is_found_before_the_first_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "seccomp_works", lambda: False)
    monkeypatch.setattr(sandbox, "problems", tuple)
    with pytest.raises(ToolUnavailable, match="does not hold"):
        ToolEnvironment.build(ToolsConfig(tools=("python",))).make()
