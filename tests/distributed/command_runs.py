"""Runs from the command line, and the processes and folders of their Ray that are left on this machine."""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.distributed.processes import command_of
from tests.training.tool_run import start_outrider


class CommandRuns:
    """Every process and folder of Ray carries the number of the process that started it: folders in their
    names, processes in their command line or in the path of their log.
    """

    def __init__(self) -> None:
        self._prefixes: list[str] = []

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start the command line in a process of its own."""
        process = start_outrider(*arguments)
        self._prefixes.append(f"outrider-ray-{process.pid}-")
        return process

    def start_until(self, path: Path, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start the command line and wait until a file exists."""
        process, until = self.start(*arguments), time.monotonic() + 240
        while not path.exists():
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.05)
        return process

    def run(self, *arguments: str | Path, timeout: float = 400.0) -> str:
        """Run the command line, check that it succeeds and leaves nothing, and return its output."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=timeout)
        assert process.returncode == 0, stderr + stdout
        assert self.left_behind() == set()
        return stdout

    def kill(self, process: "subprocess.Popen[str]") -> None:
        """Kill a run and wait until Ray has ended its actors.

        Ray's agents have nothing of the run; they wait another minute for the server, which was killed too.
        """
        process.send_signal(signal.SIGKILL)
        process.communicate()
        until = time.monotonic() + 60
        while left := {one for one in self.processes() if not one.endswith("Agent")}:
            assert time.monotonic() < until, f"Ray did not end its processes: {left}"
            time.sleep(0.2)

    def processes(self) -> set[str]:
        """Return number and name of Ray's running processes."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and any(one in _command_and_files(entry) for one in self._prefixes):
                found.add(f"{entry.name} {command_of(int(entry.name)).strip()[:80]}")
        return found

    def folders(self) -> set[str]:
        """Return Ray's temporary folders."""
        temporary = Path(tempfile.gettempdir())
        return {str(path) for prefix in self._prefixes for path in temporary.glob(f"{prefix}*")}

    def left_behind(self, *, limit_s: float = 60.0) -> set[str]:
        """Return processes and folders that are left after a time limit."""
        until = time.monotonic() + limit_s
        while (left := self.processes() | self.folders()) and time.monotonic() < until:
            time.sleep(0.2)
        return left


def _command_and_files(entry: Path) -> str:
    """The command line, which Ray's workers replace by a title, and the names of the open files."""
    lines = [command_of(int(entry.name))]
    with suppress(OSError):  # it ended meanwhile
        for descriptor in (entry / "fd").iterdir():
            lines.append(os.readlink(descriptor))
    return "\n".join(lines)
