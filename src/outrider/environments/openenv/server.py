"""Settings, processes and sessions of OpenEnv servers.

OpenEnv's own client is not used: it imports the server with a web interface (3 s), does not report why the
server rejected an action, changes an environment variable of the process while it connects, and cannot be
closed from another thread. The messages are those of ``openenv-core`` 0.3.0.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

import httpx2
from pydantic import Field, model_validator
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from outrider.engines.chat import HttpAnswer, HttpClient
from outrider.environments.process_supervisor import drain_output, supervised_command
from outrider.environments.seeded import SeedSettings
from outrider.errors import EnvironmentFault
from outrider.plugins.imports import search_folders

_LOCAL_CLIENT: Final = HttpClient(is_bare=True)
_REMOTE_CLIENT: Final = HttpClient()
_MAX_BYTES: Final = 64 << 20  # of a message; a page with pictures has millions
_CLOSE_S: Final = 1.0
_LONGEST: Final = 300  # characters of the server's messages
CAPACITY: Final = "CAPACITY_REACHED"
NOT_VALID: Final = "VALIDATION_ERROR"
_PAUSE_S: Final = 0.05  # between checks whether the server is ready
_END_S: Final = 5.0
_HEALTH_S: Final = 2.0


class OpenEnvConfig(SeedSettings):
    """An environment behind an OpenEnv server; every episode is a session. An ``expert`` is a generator
    function: it is called with the prompt, yields the texts of turns and is sent the observations.
    """

    starts_quickly: ClassVar[bool] = False

    type: Literal["openenv"] = "openenv"
    server_url: str | None = None
    """Address of a running server (``http://127.0.0.1:8000``)."""
    command: tuple[str, ...] = ()
    """A command that starts the server instead: ``{port}`` is replaced by a free port and ``{python}`` by the
    interpreter of Outrider, and modules next to the recipe can be imported. It is killed with its children.
    """
    observation: tuple[str, ...] = ()
    """Fields of the observation that the policy sees, in this order; if empty, all of them, as JSON if there
    are several.
    """
    action_field: str | None = None
    """The field of the action that gets the text of a turn. None: the only field; an action of several fields
    is written as JSON.
    """
    reset_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of ``reset`` in addition to the seed."""
    takes_seeds: bool = True
    """Whether the seed of ``reset`` determines the game, which is checked before the run. False: no seed is
    sent, the rollouts of a group may play different games, and forks are not possible.
    """
    num_sessions: Annotated[int, Field(ge=1)] = 1
    """Number of concurrent sessions of all rollout workers together; at most the server's own limit
    (``max_concurrent_envs``).
    """
    start_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds within which the server must be ready and accept a connection."""
    borrow_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that an episode waits for a free session."""
    load_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """Time limit of ``reset`` in seconds."""
    step_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """Time limit of a step in seconds."""

    @model_validator(mode="after")
    def _validate_server(self) -> "OpenEnvConfig":
        if (self.server_url is None) == (not self.command):
            raise ValueError("name a server: server_url of a running one, or the command that starts one")
        if self.server_url is not None:
            _require_address(self.server_url)
        if "seed" in self.reset_options:
            raise ValueError("reset_options contains a seed, but the task's seed is sent (takes_seeds)")
        return self

    @property
    def max_concurrent(self) -> int:
        """Every episode needs a session."""
        return self.num_sessions

    def waiting_s(self, num_concurrent: int) -> float:
        """A new episode may wait for a session, and for a server that is restarted."""
        return self.borrow_limit_s + (self.start_limit_s if self.command else 0.0)

    def replayed_differently(self) -> list[str]:
        """All tasks of a server without seeds."""
        return [] if self.takes_seeds else ["all of them (environment.takes_seeds = false)"]


def _require_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise ValueError(f"server_url is an address such as http://127.0.0.1:8000, not {url!r}")
    if parts.username or parts.password:
        raise ValueError("server_url contains a user name or a password, which would be written into the run")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDescription:
    """Name and version of a server, and the JSON schemas of its actions and observations."""

    name: str
    version: str
    action: Mapping[str, Any]
    observation: Mapping[str, Any]


def is_local(url: str) -> bool:
    """Whether this is an address of this machine, for which no proxy is used."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def is_healthy(url: str, limit_s: float) -> bool:
    """Whether the server's health check succeeds."""
    try:
        return not _get(f"{url}/health", limit_s).is_error
    except EnvironmentFault:
        return False


def fetch_description(url: str, limit_s: float) -> ServerDescription:
    """Request a server's description. Raises EnvironmentFault if this is no OpenEnv server."""
    about, schemas = _fetch_json(f"{url}/metadata", limit_s), _fetch_json(f"{url}/schema", limit_s)
    match about, schemas:
        case {"name": str(name)}, {"action": dict(action), "observation": dict(observation)} if name:
            version = str(about.get("version") or "without a version")
            return ServerDescription(name=name, version=version, action=action, observation=observation)
    raise EnvironmentFault(f"{url} is no OpenEnv server: it reports no name and no schemas")


def _fetch_json(url: str, limit_s: float) -> Any:
    answer = _get(url, limit_s)
    if answer.is_error:
        raise EnvironmentFault(f"{url}: {answer.status} {answer.reason}")
    try:
        return json.loads(answer.content)
    except (ValueError, RecursionError) as error:
        raise EnvironmentFault(f"{url} is answered by what is no JSON") from error


def _get(url: str, limit_s: float) -> HttpAnswer:
    client = _LOCAL_CLIENT if is_local(url) else _REMOTE_CLIENT
    try:
        return client.request(url, None, {"Accept": "application/json"}, timeout_s=limit_s)
    except TimeoutError as error:
        raise EnvironmentFault(f"{url}: no answer within {limit_s:g} s") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        reason = str(error).partition(": bytearray(")[0] or type(error).__name__
        raise EnvironmentFault(f"{url}: no connection: {reason}") from error


class ServerSilent(EnvironmentFault):
    """The server did not accept a connection in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A server's response. ``code`` is the error code, or empty."""

    data: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""

    @property
    def error_text(self) -> str:
        """The server's error message with the code."""
        words = " ".join(str(self.data.get("message", "no reason given")).split())
        return f"{words[:_LONGEST]} ({self.code})"


class Session:
    """A WebSocket connection (``/ws``) with an environment of its own on the server.

    Requests and responses are JSON messages, one request at a time. ``close`` may come from another thread,
    and ends a pending request.
    """

    def __init__(self, url: str, *, limit_s: float) -> None:
        """Raises ServerSilent if no connection is possible in time."""
        self._url = url
        self._is_ready = True  # False while a request is pending, and after a failed one
        parts = urlsplit(url)
        self._ending = ExitStack()
        try:
            socket = connect(
                f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{parts.path.rstrip('/')}/ws",
                open_timeout=limit_s,
                close_timeout=_CLOSE_S,
                ping_interval=None,  # a server that is busy with a step cannot answer
                max_size=_MAX_BYTES,
                proxy=None if is_local(url) else True,
            )
            self._socket: Connection = self._ending.enter_context(socket)
        except TimeoutError as error:
            raise ServerSilent(f"{url} accepts no connection within {limit_s:g} s") from error
        except (OSError, EOFError, WebSocketException) as error:
            raise ServerSilent(f"{url} accepts no session: {_short(error)}") from error

    def request(self, kind: str, data: Mapping[str, Any] | None = None, *, limit_s: float) -> Answer:
        """Send a message and wait for the response.

        Raises EnvironmentFault if the server dies, is too slow or sends no valid response; the session can
        then only be closed.
        """
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        self._is_ready = False
        try:
            with suppress(ConnectionClosed):  # the server rejected the session; the reason can be received
                self._socket.send(json.dumps(message))
            raw = self._socket.recv(limit_s)
        except TimeoutError as error:
            raise EnvironmentFault(f"{self._url}: no answer to {kind} within {limit_s:g} s") from error
        except (ConnectionClosed, OSError, EOFError, WebSocketException) as error:
            raise EnvironmentFault(f"{self._url}: lost in {kind}: {_short(error)}") from error
        answer = _read(raw, f"{self._url}: {kind}")
        self._is_ready = True
        return answer

    def close(self) -> None:
        """End the session, and wait until the server has closed it; may be called twice."""
        if self._is_ready:
            self._is_ready = False
            try:
                self._socket.send(json.dumps({"type": "close"}))
                for _ in range(2):  # the server closes its environment before the connection
                    self._socket.recv(_CLOSE_S)
            except (ConnectionClosed, TimeoutError, OSError, EOFError, WebSocketException):
                pass  # closed as requested, or no response; the connection ends below
        self._ending.close()


def _read(raw: str | bytes, source: str) -> Answer:
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EnvironmentFault(f"{source} is answered by what is no JSON") from error
    match answer:
        case {"type": "error", "data": dict(data)}:
            return Answer(data=data, code=str(data.get("code") or "UNKNOWN"))
        case {"type": "observation" | "state", "data": dict(data)}:
            return Answer(data=data)
    raise EnvironmentFault(f"{source} is answered by what is no answer: {_short(raw)}")


def _short(value: object) -> str:
    words = " ".join(str(value).split())
    return words[:_LONGEST] or type(value).__name__


class Server:
    """The server on which sessions are opened: a running one, or a process of ours that is started when it is
    first needed, and again if it dies or hangs. Thread-safe.
    """

    def __init__(
        self, command: Sequence[str] = (), *, url: str | None = None, start_limit_s: float = 60.0
    ) -> None:
        """``url`` is that of a running server. Nothing is started yet."""
        self._command = tuple(command)
        self._url = None if url is None else url.rstrip("/")
        self._start_limit_s = start_limit_s
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False
        self.num_starts = 0

    def address(self) -> tuple[str, bool]:
        """The URL, and whether the server had to be restarted. A start takes seconds.

        Raises EnvironmentFault if the server does not start.
        """
        if self._url is not None:
            return self._url, False
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
        """Report that no connection was possible at ``url``: our process is ended if it is not healthy.

        Returns:
            Whether the next call of :meth:`address` starts another server.
        """
        with self._lock:
            process = self._process
            if process is not None and process.url == url:
                if is_healthy(url, _HEALTH_S):
                    return False
                self._end(patience_s=0.0)
            return self._url is None and not self._is_closed

    def close(self) -> None:
        """Kill our process and its children; may be called twice."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _end(self, patience_s: float = _END_S) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(patience_s)


class _Process:
    """The command under a supervisor, which ends it together with this process."""

    def __init__(self, command: Sequence[str]) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)).replace("{python}", sys.executable) for word in command]
        paths = [*map(str, search_folders()), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = os.environ | {"PORT": str(port), "PYTHONPATH": os.pathsep.join(paths)}
        self._last_lines: deque[bytes] = deque(maxlen=20)
        try:
            self._process = subprocess.Popen(
                supervised_command(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,  # an interrupt at the terminal must reach only the trainer
            )
        except OSError as error:
            raise EnvironmentFault(f"the OpenEnv server cannot be started: {error}") from error
        self._output = drain_output(self._process.stdout, self._last_lines)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, limit_s: float) -> None:
        """Raises EnvironmentFault with the last output if the server is not ready in time."""
        deadline = time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            if is_healthy(self.url, min(left, _HEALTH_S)):
                return
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PAUSE_S)
                raise EnvironmentFault(f"the OpenEnv server did not start: {self._output_tail()}")
        raise EnvironmentFault(f"the OpenEnv server is not ready after {limit_s:g} s: {self._output_tail()}")

    def end(self, patience_s: float) -> None:
        """End the whole process group, at the latest after ``patience_s``, and wait for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # the supervisor then terminates the command
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _output_tail(self) -> str:
        self._output.join(timeout=1.0 if self.is_alive() else _END_S)
        words = b"".join(self._last_lines).decode("utf-8", "replace")
        return " ".join(words.split())[-500:] or "no output"
