"""The trainer's end of the launcher: starts programs, hears how they ended, kills them."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from outrider.errors import EnvironmentFault, ToolUnavailable
from outrider.plugins.imports import searched
from outrider.types import Task

_START_S: Final = 120.0  # a cold disk and a large framework
_MAX_LAUNCHERS: Final = 8  # of a run; an agent that kills its own launcher would do so for ever
_BOOT: Final = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[2])
from outrider.environments.agent.launcher import main
main(sys.argv[1])
os._exit(0)  # without waiting for threads that the agent has started
"""
# One thread: programs must not disturb the trainer's OpenMP team.
_FIXED: Final = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_HIDDEN: Final = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a program ended: its exit status (negative: a signal), what it came back with as JSON text, and the
    end of what it printed.
    """

    status: int
    result: str
    tail: str


class Launcher:
    """One launcher process and the programs that it runs."""

    def __init__(self, given: str) -> None:
        """Start it; it imports the agent. Raises ToolUnavailable where that fails."""
        self._lock = threading.Lock()  # never held while something is sent, or nobody would read meanwhile
        self._sending = threading.Lock()
        self._waiting: dict[int, Callable[[Report], None]] = {}
        self._sock, theirs = socket.socketpair()
        path = [one or os.getcwd() for one in sys.path]
        path += [str(folder) for folder in (*searched(), Path.cwd()) if str(folder) not in path]
        environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, given, json.dumps(path)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment | _FIXED,
                start_new_session=True,  # Ctrl-C is for the trainer, which then stops the programs
            )
        self._lines = self._sock.makefile("rb")
        self._sock.settimeout(_START_S)
        try:
            said = json.loads(self._lines.readline() or b'{"failed": "the launcher ended"}')
        except (OSError, ValueError) as error:
            said = {"failed": str(error)}
        if "failed" in said:
            self.close()
            raise ToolUnavailable(f"the agent program cannot be loaded: {said['failed']}")
        self._sock.settimeout(None)
        threading.Thread(target=self._hear, daemon=True, name="outrider agent programs").start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can start programs."""
        return self._process.poll() is None

    def start(self, number: int, request: Mapping[str, Any], on_end: Callable[[Report], None]) -> None:
        """Start a program. Raises OSError where the process is gone."""
        with self._lock:
            self._waiting[number] = on_end
        try:
            self._send({"name": number, **request})
        except OSError:
            with self._lock:
                self._waiting.pop(number, None)
            raise

    def kill(self, number: int) -> None:
        """End a program and what it started; one that has ended is none."""
        with self._lock:
            is_running = number in self._waiting
        if is_running:
            with contextlib.suppress(OSError):  # else it is gone with the launcher
                self._send({"kill": number})

    def close(self) -> None:
        """End all of it. May be called twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the launcher then kills every program
        self._sock.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, request: Mapping[str, Any]) -> None:
        with self._sending:
            self._sock.sendall(json.dumps(request).encode() + b"\n")

    def _hear(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                said = json.loads(line)
                with self._lock:
                    on_end = self._waiting.pop(said.pop("name"), None)
                if on_end is not None:
                    on_end(Report(**said))
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for on_end in waiting.values():
            on_end(Report(status=-9, result="", tail="the process that runs agent programs is gone"))


class Programs:
    """Starts programs by a launcher, and another launcher where one is gone. Called from several threads."""

    def __init__(self, *, function: str | None, command: Sequence[str], reward: str | None) -> None:
        """Raises ToolUnavailable where the agent cannot be imported."""
        self._given = json.dumps({"function": function, "command": list(command), "reward": reward})
        self._lock = threading.Lock()
        self._number = 0
        self._num_launchers = 1
        self._launcher = Launcher(self._given)

    @property
    def pid(self) -> int:
        """Of the process that runs them."""
        return self._launcher.pid

    def start(self, task: Task, environment: Mapping[str, str], on_end: Callable[[Report], None]) -> int:
        """Start a program; its number. ``on_end`` is called once. Raises EnvironmentFault where that cannot
        be.
        """
        with self._lock:
            self._number += 1
            number = self._number
            if not self._launcher.is_alive and self._num_launchers < _MAX_LAUNCHERS:
                self._launcher.close()
                self._num_launchers += 1
                self._launcher = Launcher(self._given)
            launcher = self._launcher
        try:
            launcher.start(number, {"task": asdict(task), "environment": dict(environment)}, on_end)
        except OSError as error:
            raise EnvironmentFault(f"the process that runs agent programs is gone: {error}") from error
        return number

    def kill(self, number: int) -> None:
        """End a program and what it started; one that has ended is none."""
        self._launcher.kill(number)

    def close(self) -> None:
        """End all of it. May be called twice."""
        self._launcher.close()
