"""Runs from the command line, and the processes and folders that are left of them on this machine."""

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
    """Folders of a run have its process id in their names, and its processes have their logs there."""

    def __init__(self) -> None:
        self._prefixes: list[str] = []

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start the command line in a process of its own."""
        process = start_outrider(*arguments)
        self._prefixes.append(f"outrider-{process.pid}-")
        return process

    def start_until(self, path: Path, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start the command line and wait until a file exists."""
        process, until = self.start(*arguments), time.monotonic() + 240
        while not path.exists():
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.02)
        return process

    def run(self, *arguments: str | Path, timeout: float = 400.0) -> str:
        """Run the command line, check that it succeeds and leaves nothing, and return its output."""
        return self.end(self.start(*arguments), timeout=timeout)

    def end(self, process: "subprocess.Popen[str]", *, timeout: float = 400.0) -> str:
        """Wait until a run has ended, check as :meth:`run` does, and return its output."""
        stdout, stderr = process.communicate(timeout=timeout)
        assert process.returncode == 0, stderr + stdout
        assert self.left_behind() == set()
        return stdout

    def kill(self, process: "subprocess.Popen[str]") -> None:
        """Kill a run and wait until its processes have ended."""
        process.send_signal(signal.SIGKILL)
        process.communicate()
        until = time.monotonic() + 60
        while left := self.processes():
            assert time.monotonic() < until, f"processes of a killed run live on: {left}"
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """Return the names of running processes by their id, for example ``engine 0``; that of any other
        program is its command.
        """
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and any(prefix in _files(entry) for prefix in self._prefixes):
                with suppress(OSError):  # it ended meanwhile
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
        return found

    def folders(self) -> set[str]:
        """Return temporary folders and those in shared memory."""
        roots = (Path(tempfile.gettempdir()), Path("/dev/shm"))
        return {str(path) for root in roots for prefix in self._prefixes for path in root.glob(f"{prefix}*")}

    def left_behind(self, *, limit_s: float = 30.0) -> set[str]:
        """Return processes and folders that are left after a time limit."""
        until = time.monotonic() + limit_s
        while (
            left := {f"{pid} {name} {command_of(pid)[:80]}" for pid, name in self.processes().items()}
            | self.folders()
        ) and time.monotonic() < until:
            time.sleep(0.1)
        return left


def _files(entry: Path) -> str:
    with suppress(OSError):  # it ended meanwhile, or belongs to another user
        return "\n".join(os.readlink(descriptor) for descriptor in (entry / "fd").iterdir())
    return ""
