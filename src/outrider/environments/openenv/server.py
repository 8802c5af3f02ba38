"""Which OpenEnv server is played with, and how its actions and observations are written."""

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
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol
from urllib.parse import urlsplit

import httpx2
from pydantic import Field, model_validator
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from outrider.engines.chat import HttpAnswer, HttpClient
from outrider.environments.process_supervisor import supervised_command
from outrider.environments.seeded import SeedSettings
from outrider.environments.simulator_process import drain_output
from outrider.errors import EnvironmentFault
from outrider.plugins.imports import search_folders


class OpenEnvConfig(SeedSettings):
    """An environment behind an OpenEnv server, of which every episode has a session. An ``expert`` is a
    generator function: called with the prompt, it yields the texts of turns and is sent the answers.
    """

    starts_quickly: ClassVar[bool] = False

    type: Literal["openenv"] = "openenv"
    server_url: str | None = None
    """Address of a server that runs (``http://127.0.0.1:8000``)."""
    command: tuple[str, ...] = ()
    """A command that starts the server, in its place: ``{port}`` stands for a free port, ``{python}`` for the
    interpreter of Outrider, and a module beside the recipe is found. It is killed with its children.
    """
    observation: tuple[str, ...] = ()
    """Fields of the observation that the policy reads, in this order; empty: all of them, as JSON where there
    are several.
    """
    action_field: str | None = None
    """The field of the action that takes the text of a turn. None: the only one; an action of several fields
    is written as JSON.
    """
    reset_options: dict[str, Any] = Field(default_factory=dict)
    """What ``reset`` is told besides the seed."""
    takes_seeds: bool = True
    """Whether the seed that ``reset`` is given decides the game, which is tried before the run. False: no
    seed is sent, the rollouts of a group may play different games, and nothing can be forked.
    """
    num_sessions: Annotated[int, Field(ge=1)] = 1
    """Sessions at a time, of all rollout workers together; the server's own limit (``max_concurrent_envs``)
    must be at least this.
    """
    start_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds in which the server has to be ready, and to accept a connection."""
    borrow_limit_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that an episode waits for a session where the server has no free one."""
    load_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for ``reset``."""
    step_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for a step."""

    @model_validator(mode="after")
    def _validate_server(self) -> "OpenEnvConfig":
        if (self.server_url is None) == (not self.command):
            raise ValueError("name a server: server_url of one that runs, or the command that starts one")
        if self.server_url is not None:
            _require_address(self.server_url)
        if "seed" in self.reset_options:
            raise ValueError("reset_options holds a seed: the task's is sent (takes_seeds)")
        return self

    @property
    def max_concurrent(self) -> int:
        """Every episode has a session."""
        return self.num_sessions

    def waiting_s(self, num_concurrent: int) -> float:
        """A new episode may wait for a session, and for a server that is started again."""
        return self.borrow_limit_s + (self.start_limit_s if self.command else 0.0)

    def replayed_differently(self) -> list[str]:
        """All tasks of a server that takes no seeds."""
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
        raise ValueError("server_url holds a user name or a password, which would be written into the run")


# What a server says of itself over HTTP: whether it is there, its name and version, its schemas.


_LOCAL_CLIENT: Final = HttpClient(is_bare=True)
_REMOTE_CLIENT: Final = HttpClient()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDescription:
    """A server's name with its version, and the JSON schemas of its actions and observations."""

    name: str
    version: str
    action: Mapping[str, Any]
    observation: Mapping[str, Any]


def is_local(url: str) -> bool:
    """Whether it is an address of this machine, before which no proxy stands."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def is_healthy(url: str, limit_s: float) -> bool:
    """Whether it answers that it is."""
    try:
        answer = _get(f"{url}/health", limit_s)
    except EnvironmentFault:
        return False
    return not answer.is_error


def fetch_description(url: str, limit_s: float) -> ServerDescription:
    """Raises :class:`EnvironmentFault` where nothing answers, or what answers is no OpenEnv server."""
    about, schemas = _fetch_json(f"{url}/metadata", limit_s), _fetch_json(f"{url}/schema", limit_s)
    match about, schemas:
        case {"name": str(name)}, {"action": dict(action), "observation": dict(observation)} if name:
            version = str(about.get("version") or "without a version")
            return ServerDescription(name=name, version=version, action=action, observation=observation)
    raise EnvironmentFault(f"{url} is no OpenEnv server: it tells no name and no schemas")


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


# A session with an OpenEnv server over its WebSocket (``/ws``): JSON messages of a type and data, one answer
# each.
#
# OpenEnv's own client is not used. It imports the server with a web interface (3 s), tells of an action that
# the server refuses only that it was refused, changes a variable of the process while it connects, and cannot
# be closed from another thread. The messages are those of ``openenv-core`` 0.3.0.


_MAX_BYTES: Final = 64 << 20  # of a message; a page with pictures has millions
_CLOSE_S: Final = 1.0
_LONGEST: Final = 300  # characters of the server's own words
CAPACITY: Final = "CAPACITY_REACHED"
NOT_VALID: Final = "VALIDATION_ERROR"
FAILED: Final = "EXECUTION_ERROR"


class ServerSilent(EnvironmentFault):
    """The server did not take a connection in time, or at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The data of an answer; ``code`` is that of an error, and empty without one."""

    data: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""

    @property
    def error_text(self) -> str:
        """The server's words for an error."""
        words = " ".join(str(self.data.get("message", "no reason given")).split())
        return f"{words[:_LONGEST]} ({self.code})"


class Session:
    """One connection, which has an environment of its own on the server. One question at a time; ``close``
    may come from another thread, and ends a question that waits.
    """

    def __init__(self, url: str, *, limit_s: float) -> None:
        """Raises :class:`ServerSilent` where nothing answers in time."""
        self._url = url
        self._is_ready = True  # False while a question waits, and once one broke
        parts = urlsplit(url)
        self._ending = ExitStack()
        try:
            socket = connect(
                f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}{parts.path.rstrip('/')}/ws",
                open_timeout=limit_s,
                close_timeout=_CLOSE_S,
                ping_interval=None,  # a server that is busy with a step answers no ping; steps have a limit
                max_size=_MAX_BYTES,
                proxy=None if is_local(url) else True,
            )
            self._socket: Connection = self._ending.enter_context(socket)
        except TimeoutError as error:
            raise ServerSilent(f"{url} takes no connection within {limit_s:g} s") from error
        except (OSError, EOFError, WebSocketException) as error:
            raise ServerSilent(f"{url} takes no session: {_short(error)}") from error

    def request(self, kind: str, data: Mapping[str, Any] | None = None, *, limit_s: float) -> Answer:
        """Send a message and wait for its answer. Raises :class:`EnvironmentFault` for a server that dies,
        is too slow or answers what is no answer; the session can then only be closed.
        """
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        self._is_ready = False
        try:
            with suppress(ConnectionClosed):  # the server refused the session, and why is still to be read
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
        """End the session, and wait until the server has given it up; may be called twice."""
        if self._is_ready:
            self._is_ready = False
            try:
                self._socket.send(json.dumps({"type": "close"}))
                for _ in range(2):  # the server gives its environment up before it closes
                    self._socket.recv(_CLOSE_S)
            except (ConnectionClosed, TimeoutError, OSError, EOFError, WebSocketException):
                pass  # closed, as asked; or it does not answer, and the connection ends below
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


# The server that sessions are opened on: one that runs somewhere, or one that is started here.


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
