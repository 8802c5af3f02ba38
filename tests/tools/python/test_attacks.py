"""Model-written code that attacks the sandbox: the attack fails, the tool works afterwards, and no file or
process remains.

An attack prints PWNED only after it has succeeded; ``test_the_attacks_are_real`` runs several of them without
the locks and they succeed.
"""

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.tools.python import sandbox
from outrider.tools.python.tool import PythonResult, PythonTool, PythonToolConfig
from tests.tools.python.processes import needs_locks, server_pids

pytestmark = needs_locks

DISK = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cage:
    tool: PythonTool
    scratch: Path
    secret: Path
    port: int

    def fill(self, code: str) -> str:
        names = {
            "@SECRET@": str(self.secret),
            "@PORT@": str(self.port),
            "@PID@": str(os.getpid()),
            "@HERE@": str(self.scratch),
        }
        for name, value in names.items():
            code = code.replace(name, value)
        return code

    def attack(self, code: str) -> PythonResult:
        """Run the attack, then check that the tool works and that no file or process remains."""
        before = self.secret.read_text(), self.secret.stat().st_mode, self.secret.stat().st_mtime_ns
        result = self.tool.run(self.fill(code))
        assert (self.secret.read_text(), self.secret.stat().st_mode, self.secret.stat().st_mtime_ns) == before
        assert self.leftovers() == []
        self.server()
        after = self.tool.run("import os\nprint(os.listdir('.'), 6 * 7)")
        assert (after.status, after.output) == ("ok", "[] 42")
        assert self.tool.num_restarts == 0
        return result

    def leftovers(self) -> list[str]:
        """Everything in the scratch folder below the server's own, empty root."""
        return [str(path) for path in self.scratch.rglob("*") if path.parent != self.scratch]

    def server(self) -> int:
        """The server, once it is alone: the supervisor of a call ends just after its answer."""
        end = time.monotonic() + 30
        while len(pids := server_pids(self.scratch)) > 1 and time.monotonic() < end:
            time.sleep(0.002)
        assert len(pids) == 1
        return pids[0]


@pytest.fixture(scope="module")
def cage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cage]:
    scratch, outside = tmp_path_factory.mktemp("scratch"), tmp_path_factory.mktemp("outside")
    secret = outside / "secret.txt"
    secret.write_text("the answer")
    config = PythonToolConfig(
        wall_seconds=1.5, cpu_seconds=1, memory_bytes=256 << 20, disk_bytes=DISK, scratch_folder=str(scratch)
    )
    os.environ["OUTRIDER_TEST_TOKEN"] = "token-of-the-parent"
    with socket.create_server(("127.0.0.1", 0)) as server, PythonTool(config) as tool:
        yield Cage(tool=tool, scratch=scratch, secret=secret, port=server.getsockname()[1])
        tool.close()
        assert list(scratch.iterdir()) == []
    del os.environ["OUTRIDER_TEST_TOKEN"]


@pytest.fixture(scope="module")
def impatient_tool() -> Iterator[PythonTool]:
    with PythonTool(PythonToolConfig(wall_seconds=0.3)) as tool:
        yield tool


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    with PythonTool(PythonToolConfig(wall_seconds=20, disk_bytes=DISK)) as tool:
        yield tool


# Attack -> the error that the code must see.
REFUSED = {
    "fork": ("import os\nif os.fork() == 0:\n    os._exit(0)\nprint('PWNED')", "PermissionError"),
    "daemon": (
        "import os\nif os.fork() == 0:\n    os.setsid(); os.fork()\nprint('PWNED')",
        "PermissionError",
    ),
    "spawn": ("import os\nos.posix_spawn('/bin/true', ['true'], {})\nprint('PWNED')", "PermissionError"),
    "multiprocessing": (
        "import multiprocessing as m\nm.Process(target=print).start()\nprint('PWNED')",
        "Error",
    ),
    "exec": (
        "import subprocess\nprint('PWNED', subprocess.run(['id', '-u'], capture_output=True))",
        "PermissionError",
    ),
    "execve": ("import os\nos.execv('/bin/echo', ['echo', 'PW' 'NED'])", "PermissionError"),
    "read passwd": ("print('PWNED', open('/etc/passwd').read())", "PermissionError"),
    "read secret": ("print('PWNED', open('@SECRET@').read())", "PermissionError"),
    "list root": ("import os\nprint('PWNED', os.listdir('/'))", "PermissionError"),
    "list scratch parent": ("import os\nprint('PWNED', os.listdir('@HERE@'))", "PermissionError"),
    "relative escape": (
        "print('PWNED', open('../../../../../../../../etc/passwd').read())",
        "PermissionError",
    ),
    "chdir escape": ("import os\nos.chdir('/etc')\nprint('PWNED', open('passwd').read())", "PermissionError"),
    "symlink escape": (
        "import os\nos.symlink('@SECRET@', 'x')\nprint('PWNED', open('x').read())",
        "PermissionError",
    ),
    "hard link escape": (
        "import os\nos.link('@SECRET@', 'x')\nprint('PWNED', open('x').read())",
        "PermissionError",
    ),
    "rename in": (
        "import os\nos.rename('@SECRET@', 'x')\nprint('PWNED', open('x').read())",
        "OSError|PermissionError",
    ),
    "rename out": (
        "import os\nopen('x', 'w').close()\nos.rename('x', '../x')\nprint('PWNED')",
        "OSError|PermissionError",
    ),
    "write outside": ("open('@SECRET@', 'w').write('x')\nprint('PWNED')", "PermissionError"),
    "write above": ("open('../next-call', 'w').write('x')\nprint('PWNED')", "PermissionError"),
    "write shm": ("open('/dev/shm/outrider-x', 'w').write('x')\nprint('PWNED')", "PermissionError|OSError"),
    "delete": ("import os\nos.remove('@SECRET@')\nprint('PWNED')", "PermissionError"),
    "truncate": ("import os\nos.truncate('@SECRET@', 0)\nprint('PWNED')", "PermissionError"),
    "truncate library": (
        "import os\nos.open(os.__file__, os.O_RDONLY | os.O_TRUNC)\nprint('PWNED')",
        "PermissionError",
    ),
    "chmod": ("import os\nos.chmod('@SECRET@', 0)\nprint('PWNED')", "PermissionError"),
    "utime": ("import os\nos.utime('@SECRET@', (0, 0))\nprint('PWNED')", "PermissionError"),
    "mkdir": ("import os\nos.mkdir('../next-call')\nprint('PWNED')", "PermissionError"),
    "fifo": ("import os\nos.mkfifo('x')\nprint('PWNED')", "PermissionError"),
    "own environ": ("print('PWNED', open('/proc/self/environ').read())", "PermissionError"),
    "parent environ": (
        "import os\nprint('PWNED', open(f'/proc/{os.getppid()}/environ').read())",
        "PermissionError",
    ),
    "harness environ": ("print('PWNED', open('/proc/@PID@/environ').read())", "PermissionError"),
    "harness memory": ("open('/proc/@PID@/mem', 'rb')\nprint('PWNED')", "PermissionError"),
    "own memory": ("open('/proc/self/mem', 'r+b')\nprint('PWNED')", "PermissionError"),
    "tcp": (
        "import socket\nsocket.create_connection(('127.0.0.1', @PORT@), 2)\nprint('PWNED')",
        "PermissionError",
    ),
    "unix socket": ("import socket\nsocket.socketpair()\nprint('PWNED')", "PermissionError"),
    "kill harness": ("import os\nos.kill(@PID@, 0)\nprint('PWNED')", "PermissionError"),
    "kill server": ("import os\nos.kill(os.getppid(), 9)\nprint('PWNED')", "PermissionError"),
    "kill everyone": ("import os\nos.kill(-1, 9)\nprint('PWNED')", "PermissionError"),
    "signal by fcntl": (
        "import fcntl, os\nfcntl.fcntl(1, 10, 9)\nfcntl.fcntl(1, fcntl.F_SETOWN, @PID@)\nprint('PWNED')",
        "PermissionError",
    ),
    "raise limits": (
        "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))\nprint('PWNED')",
        "PermissionError|ValueError",
    ),
    "subclasses": (
        """w = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]
code = w.__init__.__globals__['system']('exit 7')
print('PWNED' if code == 7 << 8 else 1 / 0)""",
        "ZeroDivisionError",
    ),
    "threads bomb": (
        (
            "import threading, time\nfor _ in range(10000):\n"
            "    threading.Thread(target=time.sleep, args=(9,)).start()\nprint('PWNED')"
        ),
        "RuntimeError",
    ),
    "closed package": ("import pytest\nprint('PWNED')", "ModuleNotFoundError"),
    "closed package file": (f"print('PWNED', open({pytest.__file__!r}).read())", "PermissionError"),
    "recursion bomb": ("def f(n):\n    return f(n + 1)\nf(0)\nprint('PWNED')", "RecursionError"),
    "own module": ("import outrider\nprint('PWNED')", "ModuleNotFoundError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(cage: Cage, name: str) -> None:
    code, error = REFUSED[name]
    result = cage.attack(code)
    assert "PWNED" not in result.output.replace("print('PWNED'", "")
    assert result.status == "error"
    assert any(one in result.output.splitlines()[-1] for one in error.split("|")), result.output


# Raw system calls of x86_64 through ctypes: number and arguments; each must come back as -1 with EPERM.
RAW = {
    "fork": (57,), "vfork": (58,), "clone": (56, 17), "clone3": (435, 0, 0), "execve": (59, 0, 0, 0),
    "socket": (41, 2, 1, 0), "ptrace": (101, 16, 1), "process_vm_readv": (310, 1, 0, 0, 0, 0),
    "tgkill": (234, 1, 1, 9), "pidfd_open": (434, 1, 0), "prctl no death signal": (157, 1, 0),
    "memfd_create": (319, 0, 0), "shmget": (29, 0, 1 << 30, 512), "pipe2": (293, 0, 0),
    "io_uring_setup": (425, 1, 0), "unshare": (272, 1 << 28), "mount": (165, 0, 0, 0, 0, 0),
    "bpf": (321, 0, 0, 0), "keyctl": (250, 0), "prlimit64": (302, 0, 0, 0, 0), "setsid": (112,),
    "inotify_init": (253,), "mknod": (133, 0, 0, 0), "fallocate": (285, 0, 0, 0, 1),
    "setpriority": (141, 0, 0, -20), "chroot": (161, 0), "openat2": (437, 0, 0, 0, 0),
    "unknown to every kernel": (9999,), "fork of the x32 table": (0x40000000 + 57,),
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_raw_system_calls_through_ctypes(cage: Cage) -> None:
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, call in {RAW!r}.items():\n"
        "    result = libc.syscall(*call)\n    print(name, result, ctypes.get_errno(), sep=':')"
    )
    result = cage.attack(code)
    assert result.status == "ok"
    assert result.output.splitlines() == [f"{name}:-1:1" for name in RAW]


@pytest.mark.parametrize(
    ("code", "status", "word"),
    [
        (
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nprint('begun')\nwhile True: pass",
            "timeout",
            "stopped",
        ),
        ("print('begun')\nx = bytearray(10 * 2**30)", "memory", "limit"),
        ("print('begun')\nx = []\nwhile True: x.append(bytearray(2**20))", "memory", "limit"),
        (
            "import mmap\nprint('begun')\nx = [mmap.mmap(-1, 2**24) for _ in range(100)]",
            "error",
            "Cannot allocate memory",
        ),
        ("print('begun')\nwhile True: print('A' * 2**20)", "output_limit", "printed more than"),
        ("print('begun')\nprint('A' * 10**8)", "output_limit", "printed more than"),
        (
            "import sys\nprint('begun')\nwhile True: sys.stderr.write('A' * 2**16)",
            "output_limit",
            "printed more than",
        ),
        ("import ctypes\nprint('begun')\nctypes.string_at(0)", "killed", "SIGSEGV"),
        ("import os\nprint('begun')\nos.abort()", "killed", "ended by SIG"),
        (
            "import time\nprint('begun')\nfor i in range(10**6): open(str(i), 'w').close()\n",
            "error",
            "No space left on device",
        ),
    ],
)
def test_stopped_at_a_limit(cage: Cage, code: str, status: str, word: str) -> None:
    start = time.monotonic()
    result = cage.attack(code)
    assert (result.status, result.output[:5]) == (status, "begun")
    assert word in result.output[-200:]
    assert time.monotonic() - start < 20
    assert result.truncated == (status == "output_limit")


@pytest.mark.parametrize(
    "code",
    [
        "import time\nprint('begun')\ntime.sleep(60)",
        "import os\nprint('begun')\nos.close(1); os.close(2)\nwhile True: pass",
        "import os\nprint('begun', flush=True)\nos.read(1, 9)",  # its end of the socket has no data
    ],
)
def test_stopped_at_the_limit_of_wall_time(impatient_tool: PythonTool, code: str) -> None:
    result = impatient_tool.run(code)
    assert (result.status, result.output) == ("timeout", "begun\n[stopped: ran longer than 0.3 s]")
    assert 0.3 <= result.seconds < 20


def test_c_recursion_ends_only_its_own_process(cage: Cage) -> None:
    result = cage.attack(
        "import sys\nsys.setrecursionlimit(10**9)\nx = ()\nfor _ in range(10**6): x = (x,)\nprint(repr(x))"
    )
    assert result.status in ("killed", "error", "memory", "timeout")


@pytest.mark.parametrize(
    "code",
    [
        "f = open('big', 'wb')\nfor _ in range(200): f.write(bytes(2**20))\nprint('PWNED')",
        (
            "import os, time\nfor i in range(20):\n    open(str(i), 'wb').write(bytes(2**20))\n"
            "    time.sleep(.02)\nprint('PWNED')"
        ),
        """import os, time
kept = []
for i in range(20):
    kept.append(open('x', 'w+b', 0))
    kept[-1].write(bytes(2**20))
    os.remove('x')
    time.sleep(.02)
print('PWNED')""",
        "import os\nos.truncate(os.open('x', os.O_RDWR | os.O_CREAT), 2**40)\nprint('PWNED')",
    ],
    ids=["one file", "many files", "unlinked files", "sparse file"],
)
def test_the_disk_cannot_be_filled(cage: Cage, code: str) -> None:
    result = cage.attack(code)
    assert "PWNED" not in result.output.replace("print('PWNED'", "")
    assert result.status in ("error", "killed")
    words = ("File too large", "No space left on device")
    assert any(one in result.output for one in words) or f"more than {DISK} bytes of files" in result.output


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


def test_removed_files_that_are_still_mapped_count(tool: PythonTool) -> None:
    result = tool.run(HOLD.replace("PAUSE", ""))
    assert "PWNED" not in result.output.splitlines() and result.status in ("error", "killed")
    if result.status == "error":  # the file system is of this size
        assert (
            result.output.endswith("OSError: [Errno 28] No space left on device")
            and result.output.split()[0] == "3"
        )
    assert tool.run("import os\nopen('y', 'wb').write(bytes(3 << 20))\nos.listdir()").output == "['y']"


def test_without_a_mounted_file_system_all_written_bytes_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "may_mount", lambda: False)
    config = PythonToolConfig(wall_seconds=60, disk_bytes=DISK, scratch_folder=str(tmp_path))
    with PythonTool(config) as tool:
        result = tool.run(HOLD.replace("PAUSE", "__import__('time').sleep(0.05)"))
        assert (result.status, result.output.splitlines()[-1]) == (
            "killed",
            f"[stopped: wrote more than {DISK} bytes of files]",
        )
        assert tool.run("6 * 7").output == "42"


def test_each_call_has_the_whole_disk_and_no_files_of_another_call(tool: PythonTool) -> None:
    fill = (
        "with open('full', 'wb') as f:\n    for _ in range(4 * 1024): f.write(bytes(1000))\nimport os\n"
        "print(os.listdir())"
    )
    for _ in range(3):
        assert tool.run(fill).output == "['full']"


def test_code_cannot_read_its_own_output(tool: PythonTool) -> None:
    """The end of a pipe could be opened again and read; the end of a socket cannot."""
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
    result = tool.run(code)
    assert result.status == "ok" and len(result.output.split()) == 4 and "Error" in result.output
    assert "PWNED" not in result.output and "open" not in result.output


def test_code_that_reads_its_own_output_is_no_fault_of_the_tool(tool: PythonTool) -> None:
    """The handshake went over a pipe that is closed before the code starts."""
    steal = "import os\ntry: os.read(os.open('/proc/self/fd/1', 2048), 9)\nexcept OSError: pass\nos._exit(0)"
    for _ in range(5):
        assert tool.run(steal).status == "ok"
    assert tool.run("import os\nos.close(1)\nos.close(2)\nos._exit(0)").status == "ok"
    assert tool.num_restarts == 0


def test_a_call_finds_nothing_of_the_parent_in_its_process(cage: Cage) -> None:
    result = cage.attack(
        "import os, sys\nframe, seen = sys._getframe(), ''\n"
        "while frame.f_back:\n    frame = frame.f_back\n    seen += str(list(frame.f_locals.values()))\n"
        "print(sorted(os.environ), '-'.join(['token', 'of']) in seen)"
    )
    threads = "'MKL_NUM_THREADS', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'"
    assert result.output == f"['HOME', {threads}, 'TMPDIR'] False"


def test_the_server_keeps_nothing_of_a_call_in_its_memory(cage: Cage) -> None:
    """Workers inherit the server's memory, so what is not there cannot pass from one rollout to another."""
    needle = "needle-" * 5
    assert cage.attack(f"print('{needle}', 6 * 7)").output == f"{needle} 42"
    server = cage.server()
    memory = b""
    with open(f"/proc/{server}/mem", "rb", 0) as file:
        for line in Path(f"/proc/{server}/maps").read_text().splitlines():
            limits, permissions, *_ = line.split()
            if permissions.startswith("rw"):
                start, end = (int(limit, 16) for limit in limits.split("-"))
                file.seek(start)
                memory += file.read(end - start)
    assert str(cage.scratch).encode() in memory  # the search itself works
    assert needle.encode() not in memory


def test_code_cannot_pose_as_a_fault_of_the_infrastructure(cage: Cage) -> None:
    """A fault is masked out of training; a policy that could fake one would escape its punishment."""
    for status in (0, 1, 13, 76, 77, 78, 120, 255):
        assert cage.tool.run(f"import os\nos._exit({status})").status in ("ok", "error", "memory")
    assert cage.attack("import os\nos.close(1)\nos.close(2)\nos._exit(120)").status == "error"


@pytest.mark.parametrize(
    "name", ["read secret", "write above", "tcp", "kill harness", "exec", "subclasses", "own environ"]
)
def test_the_attacks_are_real(cage: Cage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 0)
    monkeypatch.setattr(sandbox, "seccomp_works", lambda: False)
    monkeypatch.setattr(sandbox, "problems", lambda: ("locks",))
    # As root the limit on processes does not hold; for other users it would stop "exec" even without the
    # other locks.
    if os.getuid() != 0 and name in ("exec", "subclasses"):
        pytest.skip("stopped by the limit on processes already")
    with pytest.warns(RuntimeWarning, match="NOT SANDBOXED"):
        tool = PythonTool(PythonToolConfig(allow_unsafe=True, scratch_folder=str(tmp_path)))
    with tool:
        result = tool.run(cage.fill(REFUSED[name][0]))
    assert "PWNED" in result.output
    assert not result.sandboxed
