"""The trainer's side of the processes that run episodes of programs.

Requests and reports are JSON lines on the process's file descriptor 0, which is a socket.
"""

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
from typing import Any, Final

from outrider.environments.agent.launcher import ENDPOINT_VARIABLES
from outrider.errors import EnvironmentFault, ToolUnavailable
from outrider.plugins.imports import search_folders
from outrider.types import Task

ONE_THREAD: Final = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables, so that programs do not disturb the trainer's OpenMP team."""
_NUMBERS: Final = itertools.count(1)  # of episodes; unique, because a process may be replaced by another one
_MAX_PROCESSES: Final = 8  # per run; an agent that kills its own launcher would restart it forever
_DRAIN_S: Final = 1.0  # for the last output of a process that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The end of a program: its exit status (negative: a signal), its result as JSON text, and the end of its
    output.
    """

    status: int
    result: str
    tail: str


OnEnd = Callable[[Report], None]


class WorkerProcess:
    """A process that runs episodes. Its first line reports that it is ready, or why not."""

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
        """Start the process and wait until it is ready.

        Args:
            command: the command and its arguments.
            environment: its environment variables.
            description: its name in messages.
            start_s: time limit in seconds.
            first: a request to send at the start.
            is_quiet: whether its standard error is hidden; only the last line is then reported if it dies.

        Raises ToolUnavailable.
        """
        self._description = description
        self._last_stderr_line = b""
        self._lock = threading.Lock()  # not held while sending: the reader would wait, and a deadlock follow
        self._sending = threading.Lock()
        self._callbacks: dict[int, OnEnd] = {}
        self._sock, child_end = socket.socketpair()
        with child_end:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE if is_quiet else None,
                    env=dict(environment),
                    start_new_session=True,  # Ctrl-C is for the trainer, which then stops the programs
                )
            except OSError as error:
                self._sock.close()
                raise ToolUnavailable(f"{description} cannot be started: {error}") from error
        self._lines = self._sock.makefile("rb")
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True, name=f"outrider {description}")
        self._drain.start()
        self.ready_message = self._read_ready_message(start_s, first)
        if "failed" in self.ready_message:
            self.close()
            raise ToolUnavailable(f"{description} cannot be loaded: {self.ready_message['failed']}")
        self._sock.settimeout(None)
        self.is_over = False
        """Whether the process is gone and has reported all episodes."""
        threading.Thread(target=self._read_reports, daemon=True, name=f"outrider {description}").start()

    @property
    def is_alive(self) -> bool:
        """Whether it can start episodes."""
        return not self.is_over and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read_ready_message(self, start_s: float, first: Mapping[str, Any] | None) -> Mapping[str, Any]:
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
        """Start an episode.

        Args:
            request: what the process needs.
            on_end: is called once, in another thread.

        Returns:
            The episode's number.

        Raises:
            EnvironmentFault: if the process is gone.
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
        """Kill an episode's processes, unless it has ended."""
        with self._lock:
            if number not in self._callbacks:
                return
        with contextlib.suppress(EnvironmentFault):  # gone with its process
            self._send({"kill": number})

    def close(self) -> None:
        """End the process with all episodes; may be called twice."""
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
        stderr = self._process.stderr
        with contextlib.suppress(OSError, ValueError):
            for line in iter(lambda: stderr.readline(1 << 12), b"") if stderr is not None else ():
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


class ProgramRunner:
    """Runs episodes of programs in a worker process, which is replaced if it is gone. Thread-safe."""

    def __init__(
        self,
        launch: Callable[[], WorkerProcess],
        make_request: Callable[[Task, Mapping[str, str]], Mapping[str, Any]],
    ) -> None:
        """Start the process. ``make_request`` has the arguments of :meth:`start`. Raises ToolUnavailable."""
        self._launch, self._make_request = launch, make_request
        self._lock = threading.Lock()
        self._num_processes = 1
        self._is_closed = False
        self._process = launch()

    def start(self, task: Task, environment: Mapping[str, str], on_end: OnEnd) -> int:
        """Start a program and return the episode's number, as :meth:`WorkerProcess.begin` does.

        ``environment`` contains the URL and the key of the policy, in OpenAI's variables.
        """
        with self._lock:
            if not (self._process.is_alive or self._is_closed or self._num_processes == _MAX_PROCESSES):
                self._process.close()
                self._num_processes += 1
                try:
                    self._process = self._launch()
                except ToolUnavailable as error:
                    raise EnvironmentFault(str(error)) from error
            process = self._process
        return process.begin(self._make_request(task, environment), on_end)

    @property
    def pid(self) -> int:
        """Process id of the current process."""
        return self._process.pid

    def kill(self, number: int) -> None:
        """Kill an episode's processes, unless it has ended."""
        self._process.kill(number)

    def close(self) -> None:
        """End the process with all episodes; may be called twice."""
        with self._lock:
            self._is_closed = True
            self._process.close()


_START_S: Final = 120.0  # a cold disk and a large framework
_BOOT: Final = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[2])
from outrider.environments.agent.launcher import main
main(sys.argv[1])
os._exit(0)  # without waiting for threads that the agent has started
"""
_HIDDEN: Final = (*ENDPOINT_VARIABLES, "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")


def run_agent(*, function: str | None, command: Sequence[str], reward: str | None) -> ProgramRunner:
    """Run an agent in children of a launcher (:mod:`outrider.environments.agent.launcher`), which imports the
    agent. Raises ToolUnavailable.
    """
    settings = {"function": function, "command": list(command), "reward": reward}

    def launch() -> WorkerProcess:
        path = [entry or os.getcwd() for entry in sys.path]
        path += [folder for folder in recipe_folders() if folder not in path]
        environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
        return WorkerProcess(
            [sys.executable, "-c", _BOOT, json.dumps(settings), json.dumps(path)],
            environment | ONE_THREAD,
            description="the agent program",
            start_s=_START_S,
        )

    return ProgramRunner(
        launch, lambda task, environment: {"task": asdict(task), "environment": dict(environment)}
    )


def recipe_folders() -> list[str]:
    """Folders of a recipe's own modules: that of the recipe, and the current one."""
    return [str(folder) for folder in (*search_folders(), Path.cwd())]
