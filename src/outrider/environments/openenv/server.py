"""The server that sessions are opened on: one that runs somewhere, or one that is started here."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from outrider.environments.keeper import supervised_command
from outrider.environments.openenv.asking import is_healthy
from outrider.environments.openenv.settings import OpenEnvConfig
from outrider.environments.process_output import drain_output
from outrider.errors import EnvironmentFault
from outrider.plugins.imports import search_folders

_PAUSE_S: Final = 0.05  # between looks at whether the server is ready
_END_S: Final = 5.0
_HEALTH_S: Final = 2.0


class Server(Protocol):
    """Where sessions are opened. Thread-safe."""

    def address(self) -> tuple[str, bool]:
        """Its URL, and whether it had to be started again for this. Raises :class:`EnvironmentFault`."""
        ...

    def suspect(self, url: str) -> bool:
        """It took no connection at ``url``. Whether the next caller of :meth:`address` gets another one,
        because it died or hangs.
        """
        ...

    def close(self) -> None:
        """End what was started here; may be called twice."""
        ...


class RunningServer:
    """Somebody else's: nothing is started or ended."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def address(self) -> tuple[str, bool]:
        """The URL that the recipe names."""
        return self._url, False

    def suspect(self, url: str) -> bool:
        """Nothing can be done about it here."""
        return False

    def close(self) -> None:
        """It runs on."""


class StartedServer:
    """A process of ours, started when it is first asked for, and again where it died or hangs."""

    def __init__(self, command: Sequence[str], *, start_limit_s: float) -> None:
        """Start nothing yet."""
        self._command = tuple(command)
        self._start_limit_s = start_limit_s
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False
        self.num_starts = 0

    def address(self) -> tuple[str, bool]:
        """The URL of a server that was ready; a start takes seconds."""
        with self._lock:
            if self._is_closed:
                raise EnvironmentFault("the OpenEnv server was closed")
            process = self._process
            if process is not None and process.is_alive():
                return process.url, False
            self._end()
            self.num_starts += 1
            self._process = started = _Process(self._command)
            try:
                started.wait_until_ready(self._start_limit_s)
            except EnvironmentFault:
                self._end()
                raise
            return started.url, self.num_starts > 1

    def suspect(self, url: str) -> bool:
        """End it where it is not healthy either."""
        with self._lock:
            process = self._process
            if process is not None and process.url == url:
                if is_healthy(url, _HEALTH_S):
                    return False
                self._end(patience_s=0.0)
            return not self._is_closed

    def close(self) -> None:
        """Kill the process and its children."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _end(self, patience_s: float = _END_S) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(patience_s)


class _Process:
    """The command under a keeper, which ends it together with us; its last words are kept."""

    def __init__(self, command: Sequence[str]) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)).replace("{python}", sys.executable) for word in command]
        self._last_lines: deque[bytes] = deque(maxlen=20)
        try:
            self._process = subprocess.Popen(
                supervised_command(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(port),
                start_new_session=True,  # an interrupt at the terminal is for us; its group is ours to end
            )
        except OSError as error:
            raise EnvironmentFault(f"the OpenEnv server cannot be started: {error}") from error
        self._output = drain_output(self._process.stdout, self._last_lines)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, limit_s: float) -> None:
        """Raises :class:`EnvironmentFault`, with its last words, where it is not ready in time."""
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            if is_healthy(self.url, min(left, _HEALTH_S)):
                return
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PAUSE_S)
                raise EnvironmentFault(f"the OpenEnv server did not start: {self._output_tail()}")
        raise EnvironmentFault(f"the OpenEnv server is not ready after {limit_s:g} s: {self._output_tail()}")

    def end(self, patience_s: float) -> None:
        """End the whole group, which may say good-bye for so long, and wait."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # the keeper asks the command to end
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _output_tail(self) -> str:
        self._output.join(timeout=1.0 if self.is_alive() else _END_S)
        words = b"".join(self._last_lines).decode("utf-8", "replace")
        return " ".join(words.split())[-500:] or "it said nothing"


def make_server(config: OpenEnvConfig) -> Server:
    """The server of a config; nothing is started or asked yet."""
    if config.server_url is not None:
        return RunningServer(config.server_url)
    return StartedServer(config.command, start_limit_s=config.start_limit_s)


def _environment(port: int) -> Mapping[str, str]:
    variables: dict[str, Any] = dict(os.environ)
    folders = [str(folder) for folder in search_folders()]
    python_path = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
    return {**variables, "PORT": str(port), "PYTHONPATH": os.pathsep.join([*folders, *python_path])}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
