"""A session with an OpenEnv server over its WebSocket (``/ws``): JSON messages of a type and data, one answer
each.

OpenEnv's own client is not used. It imports the server with a web interface (3 s), tells of an action that
the server refuses only that it was refused, changes a variable of the process while it connects, and cannot
be closed from another thread. The messages are those of ``openenv-core`` 0.3.0.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from outrider.environments.openenv.asking import is_local
from outrider.errors import EnvironmentFault

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
