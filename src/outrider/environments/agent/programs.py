"""The trainer's end of the launcher: starts programs, hears how they ended, kills them."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from outrider.errors import EnvironmentFault, ToolUnavailable
from outrider.plugins.imports import search_folders
from outrider.types import Task

# A process that plays episodes for the trainer: requests and reports are JSON lines on its descriptor 0.


_NUMBERS: Final = itertools.count(1)  # unique in the trainer: a process may take the place of another one
_MAX_PROCESSES: Final = 8  # of a run; an agent that kills its own launcher would do so for ever
_DRAIN_S: Final = 1.0  # for the last words of a process that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a program ended: its exit status (negative: a signal), what it came back with as JSON text, and the
    end of what it printed.
    """

    status: int
    result: str
    tail: str


OnEnd = Callable[[Report], None]


class ProgramRunner(Protocol):
    """Whoever starts the programs that ask the policy. Called from several threads."""

    def start(self, task: Task, environment: Mapping[str, str], on_end: OnEnd) -> int:
        """Start a program; its number. ``environment`` says where the policy is and under which key, in
        OpenAI's variables. ``on_end`` is called once. Raises EnvironmentFault where nothing can be started.
        """
        ...

    def kill(self, number: int) -> None:
        """End a program and what it started; one that has ended is none."""
        ...

    def close(self) -> None:
        """End all of it. May be called twice."""
        ...


class WorkerProcess:
    """The process, which first says that it is ready, or why not."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        description: str,
        start_s: float,
        first: Mapping[str, Any] | None = None,
        is_quiet: bool = False,
    ) -> None:
        """Start it, send it ``first``, and wait ``start_s`` seconds at most until it is ready.
        ``description`` names it in messages. Of what a quiet one writes to its standard error only the last
        line is told, and only when it dies. Raises ToolUnavailable.
        """
        self._description = description
        self._last_stderr_line = b""
        self._lock = threading.Lock()  # never held while something is sent, or nobody would read meanwhile
        self._sending = threading.Lock()
        self._callbacks: dict[int, OnEnd] = {}
        self._sock, child_end = socket.socketpair()
        with child_end:
            self._process = self._start_process(command, environment, child_end, is_quiet=is_quiet)
        self._lines = self._sock.makefile("rb")
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True, name=f"outrider {description}")
        self._drain.start()
        self.ready_message = self._read_ready_message(start_s, first)
        if "failed" in self.ready_message:
            self.close()
            raise ToolUnavailable(f"{description} cannot be loaded: {self.ready_message['failed']}")
        self._sock.settimeout(None)
        self.is_over = False
        """Whether it is gone; nothing can be started in it."""
        threading.Thread(target=self._read_reports, daemon=True, name=f"outrider {description}").start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can start programs."""
        return not self.is_over and self._process.poll() is None

    def _start_process(
        self, command: Sequence[str], environment: Mapping[str, str], end: socket.socket, *, is_quiet: bool
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                stdin=end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE if is_quiet else None,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the trainer, which then stops the programs
            )
        except OSError as error:
            self._sock.close()
            raise ToolUnavailable(f"{self._description} cannot be started: {error}") from error

    def _read_ready_message(self, start_s: float, first: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """What the process says first; ``failed`` where it is not ready."""
        self._sock.settimeout(start_s)
        try:
            if first is not None:
                self._send(first)
            ready_message: Mapping[str, Any] = json.loads(self._lines.readline() or b"{}")
        except TimeoutError:
            return {"failed": f"it was not ready after {start_s:g} s"}
        except (OSError, ValueError, EnvironmentFault) as error:
            return {"failed": str(error)}
        if not ready_message:
            self._drain.join(_DRAIN_S)
            return {"failed": f"its process ended{self._stderr_suffix()}"}
        return ready_message

    def begin(self, request: Mapping[str, Any], on_end: OnEnd) -> int:
        """Start an episode; its number. ``on_end`` is called once. Raises EnvironmentFault where the process
        is gone.
        """
        number = next(_NUMBERS)
        with self._lock:
            if self.is_over:
                raise EnvironmentFault(self._exit_message())
            self._callbacks[number] = on_end
        try:
            self._send({"name": number, **request})
        except EnvironmentFault:
            with self._lock:
                is_reported = self._callbacks.pop(number, None) is None
            if not is_reported:
                raise
        return number

    def kill(self, number: int) -> None:
        """End an episode and what it started; one that has ended is none."""
        with self._lock:
            if number not in self._callbacks:
                return
        with contextlib.suppress(EnvironmentFault):  # gone with its process
            self._send({"kill": number})

    def close(self) -> None:
        """End all of it. May be called twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the process then ends every episode
        self._sock.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._drain.join(_DRAIN_S)
            self._process.stderr.close()

    def _exit_message(self) -> str:
        return f"the process of {self._description} is gone{self._stderr_suffix()}"

    def _stderr_suffix(self) -> str:
        words = " ".join(self._last_stderr_line.decode("utf-8", "replace").split())[-200:]
        return f" ({words})" if words else ""

    def _drain_stderr(self) -> None:
        errors = self._process.stderr
        with contextlib.suppress(OSError, ValueError):
            for line in iter(lambda: errors.readline(1 << 12), b"") if errors is not None else ():
                self._last_stderr_line = line if line.strip() else self._last_stderr_line

    def _send(self, value: Mapping[str, Any]) -> None:
        try:
            with self._sending:
                self._sock.sendall(json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise EnvironmentFault(f"{self._exit_message()}: {error}") from error

    def _read_reports(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                message = json.loads(line)
                with self._lock:
                    on_end = self._callbacks.pop(message.pop("name"), None)
                if on_end is not None:
                    on_end(Report(**message))
        self._drain.join(_DRAIN_S)
        with self._lock:
            self.is_over = True
            callbacks, self._callbacks = self._callbacks, {}
        for on_end in callbacks.values():
            on_end(Report(status=-9, result=json.dumps({"fault": self._exit_message()}), tail=""))


class RestartingProcess:
    """Such a process, and another one where it is gone. Called from several threads."""

    def __init__(self, launch: Callable[[], WorkerProcess]) -> None:
        """Start it. Raises ToolUnavailable."""
        self._launch = launch
        self._lock = threading.Lock()
        self._num_processes = 1
        self._is_closed = False
        self._process = launch()

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    def begin(self, request: Mapping[str, Any], on_end: OnEnd) -> int:
        """Start an episode; its number. ``on_end`` is called once. Raises EnvironmentFault where that cannot
        be.
        """
        return self._live_process().begin(request, on_end)

    def kill(self, number: int) -> None:
        """End an episode and what it started; one that has ended is none."""
        self._process.kill(number)

    def close(self) -> None:
        """End all of it. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._process.close()

    def _live_process(self) -> WorkerProcess:
        with self._lock:
            if not (self._process.is_alive or self._is_closed or self._num_processes == _MAX_PROCESSES):
                self._process.close()
                self._num_processes += 1
                try:
                    self._process = self._launch()
                except ToolUnavailable as error:
                    raise EnvironmentFault(str(error)) from error
            return self._process


_START_S: Final = 120.0  # a cold disk and a large framework
_BOOT: Final = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[2])
from outrider.environments.agent.launcher import main
main(sys.argv[1])
os._exit(0)  # without waiting for threads that the agent has started
"""
# One thread: programs must not disturb the trainer's OpenMP team.
ONE_THREAD: Final = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_HIDDEN: Final = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")


class Programs(RestartingProcess):
    """Starts programs by a launcher, and another launcher where one is gone. Called from several threads."""

    def __init__(self, *, function: str | None, command: Sequence[str], reward: str | None) -> None:
        """Start the launcher, which imports the agent. Raises ToolUnavailable where that fails."""
        settings_json = json.dumps({"function": function, "command": list(command), "reward": reward})
        super().__init__(lambda: _launch(settings_json))

    def start(self, task: Task, environment: Mapping[str, str], on_end: OnEnd) -> int:
        return self.begin({"task": asdict(task), "environment": dict(environment)}, on_end)


def _launch(settings_json: str) -> WorkerProcess:
    path = [entry or os.getcwd() for entry in sys.path]
    path += [folder for folder in recipe_folders() if folder not in path]
    environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    return WorkerProcess(
        [sys.executable, "-c", _BOOT, settings_json, json.dumps(path)],
        environment | ONE_THREAD,
        description="the agent program",
        start_s=_START_S,
    )


def recipe_folders() -> list[str]:
    """Where a recipe's own modules may lie: beside it, and in the current folder."""
    return [str(folder) for folder in (*search_folders(), Path.cwd())]
