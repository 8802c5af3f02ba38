"""What a run from the command line and its Ray leave behind, whatever other tests do meanwhile."""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from tests.training.tool_run import start_outrider


class Traces:
    """All of it bears the number of the process that began it: folders in their names, processes in the
    folder that they were started with, or write their log to.
    """

    def __init__(self) -> None:
        self._prefixes: list[str] = []

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """The command line in a process of its own, running."""
        process = start_outrider(*arguments)
        self._prefixes.append(f"outrider-ray-{process.pid}-")
        return process

    def played(self, *arguments: str | Path, timeout: float = 400.0) -> str:
        """The command line to its good end, which leaves nothing; what it said."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=timeout)
        assert process.returncode == 0, stderr + stdout
        assert self.settled() == set()
        return stdout

    def processes(self) -> set[str]:
        """Those of Ray that live: number and name."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and any(one in _told(entry) for one in self._prefixes):
                found.add(f"{entry.name} {_command(entry)[:80]}")
        return found

    def folders(self) -> set[str]:
        """Temporary folders of Ray."""
        temporary = Path(tempfile.gettempdir())
        return {str(path) for prefix in self._prefixes for path in temporary.glob(f"{prefix}*")}

    def settled(self, *, limit_s: float = 60.0) -> set[str]:
        """What is left once it has had time to end."""
        until = time.monotonic() + limit_s
        while (left := self.processes() | self.folders()) and time.monotonic() < until:
            time.sleep(0.2)
        return left

    def wait_until_actors_ended(self, *, limit_s: float = 60.0) -> None:
        """After a kill: Ray ends what belonged to it by itself. Its agents hold nothing of the run; they
        ask for another minute after the server, which was killed too.
        """
        until = time.monotonic() + limit_s
        while left := {one for one in self.processes() if not one.endswith("Agent")}:
            assert time.monotonic() < until, f"Ray did not end its processes: {left}"
            time.sleep(0.2)


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # it ended meanwhile
        return ""


def _told(entry: Path) -> str:
    """Its command line, which Ray's workers replace by a title, and the files that it has open."""
    told = [_command(entry)]
    try:
        for descriptor in (entry / "fd").iterdir():
            told.append(os.readlink(descriptor))
    except OSError:
        pass
    return "\n".join(told)
