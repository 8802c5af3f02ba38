"""Runs hostile programs in the Python tool and checks from outside whether an attack succeeded."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.attack_programs import PROGRAMS
from outrider.errors import ToolFault
from outrider.tools.python.tool import PythonTool, PythonToolConfig

_WALL = 1.5
_CANARY = "import os\nprint(os.listdir('.'), 6 * 7)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A tool and the resources that programs must not reach. ``attack`` describes a successful attack."""

    tool: PythonTool
    scratch: Path
    secret: Path
    listener: socket.socket

    def attack(self, name: str) -> str:
        """Run the program, then look at the secret, the port, the scratch folder and the next call."""
        names = {
            "@SECRET@": self.secret,
            "@FOLDER@": self.scratch,
            "@PORT@": self.listener.getsockname()[1],
            "@PID@": os.getpid(),
        }
        code = PROGRAMS[name]
        for mark, value in names.items():
            code = code.replace(mark, str(value))
        start = time.monotonic()
        try:
            result = self.tool.run(code)
            after = self.tool.run(_CANARY)
        except ToolFault as fault:
            return f"a fault of the infrastructure: {fault}"
        found = {
            "it says so": any(line.startswith("PWNED") for line in result.output.splitlines()),
            "the secret changed": self.secret.read_text() != "secret" or self.secret.stat().st_mtime_ns != 0,
            "a connection": self._was_reached(),
            "files are left": any(path.parent != self.scratch for path in self.scratch.rglob("*")),
            "the next call": (after.status, after.output) != ("ok", "[] 42"),
            "a server was lost": self.tool.num_restarts > 0,
            "no locks": not result.sandboxed,
            "past its time": time.monotonic() - start > _WALL + 60,
        }
        return ", ".join(what for what, so in found.items() if so)

    def _was_reached(self) -> bool:
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@contextmanager
def sandbox() -> Iterator[Sandbox]:
    """Raise ToolUnavailable if this machine does not support the locks."""
    with TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        scratch, secret = Path(folder) / "scratch", Path(folder) / "secret.txt"
        scratch.mkdir()
        secret.write_text("secret")
        os.utime(secret, ns=(0, 0))
        config = PythonToolConfig(
            wall_seconds=_WALL,
            cpu_seconds=1,
            memory_bytes=256 << 20,
            disk_bytes=4 << 20,
            scratch_folder=str(scratch),
        )
        with PythonTool(config) as tool:
            yield Sandbox(tool=tool, scratch=scratch, secret=secret, listener=listener)
