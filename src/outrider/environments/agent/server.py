"""The endpoint for agent programs: a server on loopback with a key and a session per episode. ``outrider
serve`` uses the same server with one session for all clients.

The server's thread adds requests and rewards to a session as events, and the thread of the episode takes them
and answers.
"""

import asyncio
import contextlib
import logging
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.environments.agent.requests import (
    CHAT,
    RESPONSES,
    PolicyRequest,
    RequestError,
    RequestPath,
    read_json,
)
from outrider.environments.agent.responses import MODEL, Answer, write_response
from outrider.environments.base import as_bool, as_float, as_metrics
from outrider.errors import EnvironmentFault, InvalidResult, NonFiniteResult
from outrider.printing import one_line

MAX_WAITING: Final = 64
"""Limit of requests of one program that wait for an answer."""
COUNTED: Final = frozenset(
    {
        "num_requests",
        "num_refused_requests",
        "num_ignored_fields",
        "num_ignored_formats",
        "num_unfit_calls",
        "num_failed",
    }
)
"""Metrics that are counted here; a program's reward cannot contain them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of an episode. If ``success`` is None, the settings decide. ``grade`` has the fields of
    :class:`~outrider.environments.base.EpisodeResult` that explain it.
    """

    value: float
    success: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    grade: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFailure:
    """The end of a program without a reward.

    Attributes:
        problem: the reason.
        cause: the reason for the records, without text of the program, which may contain paths.
        is_fault: whether the program did not cause it.
        unusable: the error for a result that is no reward. Such an episode never has a ``failed_return``.
    """

    problem: str
    cause: str = ""
    is_fault: bool = False
    unusable: EnvironmentFault | None = None


class PendingRequest:
    """A request that has arrived. In training it will be a turn of the rollout, even if the program
    disconnects. The episode adds its answers one by one.
    """

    def __init__(self, request: PolicyRequest) -> None:
        self.request = request
        self._is_refused = False
        self._answers: list[Answer] = []
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[list[Answer]] = self._loop.create_future()

    @property
    def is_waiting(self) -> bool:
        return not self._is_refused and len(self._answers) < self.request.num_answers

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has disconnected before the answer."""
        return self._future.cancelled()

    async def answers(self) -> list[Answer]:
        """Wait for all answers. Raises RequestError if the request is refused."""
        return await self._future

    def add_answer(self, answer: Answer) -> bool:
        """Add the next answer. Returns whether it was the last one."""
        self._answers.append(answer)
        if len(self._answers) < self.request.num_answers:
            return False
        self._resolve(lambda: self._future.set_result(self._answers))
        return True

    def refuse(self, error: RequestError) -> None:
        self._is_refused = True
        self._resolve(lambda: self._future.set_exception(error))

    def _resolve(self, set_outcome: Callable[[], None]) -> None:
        def resolve() -> None:
            if not self._future.done():
                set_outcome()

        with contextlib.suppress(RuntimeError):  # the server has stopped, and the program's request with it
            self._loop.call_soon_threadsafe(resolve)


Event: TypeAlias = PendingRequest | Reward | ProgramFailure


class Session:
    """One episode's requests and rewards.

    Attributes:
        read: parses the body of a request.
        key: the program's API key.
        is_training: whether abandoned requests count, because the number of turns must not depend on speed.
        num_requests: number of requests that could be parsed.
        num_unanswerable: number of these that were refused.
        num_refused: number of all refused requests.
        last_refusal: why the last request that could not be parsed was refused.
    """

    def __init__(
        self,
        read: Callable[[RequestPath, Any], PolicyRequest],
        *,
        key: str | None = None,
        is_training: bool = True,
    ) -> None:
        self.read = read
        self.key = key or secrets.token_urlsafe(24)
        self.is_training = is_training
        self.num_requests = 0
        self.num_unanswerable = 0
        self.num_refused = 0
        self.last_refusal = ""
        self.num_ignored_fields = 0
        self.num_ignored_formats = 0
        self._arriving: set[asyncio.Future[None]] = set()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._pending: deque[PendingRequest] = deque()
        self._is_open = True
        self._lock = threading.Lock()

    def add_request(self, request: PolicyRequest) -> PendingRequest:
        """Add a request as an event. Raises RequestError."""
        with self._lock:
            if not self._is_open:
                raise self._closed_error()
            self._pending = deque(
                entry
                for entry in self._pending
                if entry.is_waiting and (self.is_training or not entry.is_abandoned)
            )
            if len(self._pending) >= MAX_WAITING:
                raise RequestError(
                    f"{MAX_WAITING} requests are waiting already", code="too_many_requests", status=429
                )
            self.num_requests += 1
            self.num_ignored_fields += len(request.ignored)
            self.num_ignored_formats += request.ignores_format
            pending = PendingRequest(request)
            self._pending.append(pending)
        self._events.put(pending)
        return pending

    def add_reward(self, reward: Reward) -> None:
        """Add a posted reward as an event. Raises RequestError after the end of the episode."""
        if not self._is_open:
            raise self._closed_error()
        self._events.put(reward)

    def end(self, event: Reward | ProgramFailure) -> None:
        """Add the end of the program, after everything that it sent."""
        self._events.put(event)

    def next(self, timeout_s: float | None) -> Event:
        """Wait for the next event, without a limit if ``timeout_s`` is None. Raises queue.Empty."""
        return self._events.get(timeout=timeout_s)

    def refuse(self, pending: PendingRequest, error: RequestError) -> None:
        """Refuse a request that was parsed but cannot be answered."""
        with self._lock:
            self.num_unanswerable += 1
            self.num_refused += 1
        pending.refuse(error)

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Context in which the server reads and parses a request."""
        arrived = asyncio.get_running_loop().create_future()
        self._arriving.add(arrived)
        try:
            yield
        finally:
            self._arriving.discard(arrived)
            arrived.set_result(None)

    async def wait_for_arriving(self) -> None:
        while self._arriving:
            await asyncio.wait(self._arriving)

    def close(self) -> None:
        """Refuse waiting and later requests; may be called twice."""
        with self._lock:
            self._is_open = False
            pending, self._pending = self._pending, deque()
        for request in pending:
            request.refuse(self._closed_error())
        self._events.put(ProgramFailure(problem="the episode was closed", is_fault=True))

    def _closed_error(self) -> RequestError:
        if self.is_training:
            return RequestError("the episode has ended", code="episode_ended", status=410)
        return RequestError("the server is stopping", code="service_unavailable", status=503)


def read_reward(value: Any) -> Reward:
    """Read a reward: a number, or an object with ``reward``, ``success`` and ``metrics``, and for the records
    ``targets``, ``answer``, ``reward_parts`` and ``reason``.

    Raises InvalidResult for any other value, NonFiniteResult for NaN and infinity.
    """
    if not isinstance(value, Mapping):
        return Reward(value=as_float(value, "the reward"))
    if "reward" not in value:
        raise InvalidResult("a reward must be a number or an object with the key reward")
    success = value.get("success")
    metrics = as_metrics(value.get("metrics"))
    if reserved := sorted(COUNTED & metrics.keys()):
        raise InvalidResult(f"the metric {reserved[0]} is counted by Outrider: use another name for yours")
    return Reward(
        value=as_float(value["reward"], "the reward"),
        success=None if success is None else as_bool(success, "success"),
        metrics=metrics,
        grade={name: value[name] for name in _GRADE if name in value},
    )


_GRADE: Final = ("targets", "answer", "reward_parts", "reason")


MAX_BYTES: Final = 16 << 20
"""Size limit of a request."""
_MAX_LOGGED: Final = 200  # names of ignored fields, which programs may make up
_START_S: Final = 30.0
_CATCH_UP_S: Final = 10.0  # for requests that a program sent before it ended
_KEEP_ALIVE_S: Final = 24 * 3600  # if the server closed connections earlier, a request could be lost
_PATHS: Final = (
    "POST /v1/chat/completions or /v1/responses calls the policy; there are also GET /v1/models and "
    "POST /v1/reward"
)

_log = logging.getLogger(__name__)


class Gateway:
    """The server, in a thread of its own until it is closed. ``url`` is the clients' base URL."""

    def __init__(self, bound: socket.socket | None = None) -> None:
        """Serve on a bound socket, by default on a free port of 127.0.0.1.

        Raises EnvironmentFault if the server does not start.
        """
        self._public: Session | None = None
        self._public_hosts: tuple[str, ...] = ()
        self._sessions: dict[str, Session] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._logged: set[str] = set()
        if bound is None:
            bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            bound.bind(("127.0.0.1", 0))
        self._socket = bound
        host, port = bound.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", partial(self._answer, path=CHAT), methods=["POST"]),
                Route("/v1/responses", partial(self._answer, path=RESPONSES), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/reward", self._reward, methods=["POST"]),
            ],
            exception_handlers={
                HTTPException: self._no_such_path,
                RequestError: _error_response,
                ClientDisconnect: _disconnected,
            },
        )
        config = uvicorn.Config(
            app, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=1,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), daemon=True, name="outrider agent gateway"
        )
        self._thread.start()
        if not self._started.wait(_START_S) or not self._thread.is_alive():
            raise EnvironmentFault("the server for agent programs did not start")

    def open(
        self,
        read: Callable[[RequestPath, Any], PolicyRequest],
        *,
        key: str | None = None,
        is_training: bool = True,
    ) -> Session:
        """Open a session, whose requests ``read`` parses, with the given or a new key."""
        session = Session(read, key=key, is_training=is_training)
        self._sessions[session.key] = session
        return session

    def open_without_key(
        self, read: Callable[[RequestPath, Any], PolicyRequest], *, hosts: Sequence[str]
    ) -> Session:
        """Open a session for all requests, whatever their key, outside training.

        Web pages of other origins must not use the server. Therefore the Host header must be one of ``hosts``
        (DNS rebinding), an Origin header must be the server's, and a POST must be declared as JSON, which a
        browser sends to another origin only after a preflight request (CORS), which fails here.
        """
        self._public, self._public_hosts = self.open(read, is_training=False), tuple(hosts)
        return self._public

    def close_session(self, session: Session) -> None:
        """Close a session and its key; may be called twice."""
        session.close()
        self._sessions.pop(session.key, None)

    def end(self, session: Session, event: Reward | ProgramFailure) -> None:
        """Report the end of a program to its session, after everything that the program sent, which may not
        have been read yet. Thread-safe.
        """

        def begin() -> None:
            ending = asyncio.ensure_future(self._end(session, event))
            self._endings.add(ending)  # the loop itself keeps no reference to a task
            ending.add_done_callback(self._endings.discard)

        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(begin)

    async def _end(self, session: Session, event: Reward | ProgramFailure) -> None:
        if session.key in self._sessions:
            with contextlib.suppress(TimeoutError):  # half a request may never be completed
                async with asyncio.timeout(_CATCH_UP_S):
                    await self._catch_up()
                    await session.wait_for_arriving()
            session.end(event)

    async def _catch_up(self) -> None:
        """Send a request of our own and wait for its answer: earlier ones have then been accepted, too."""
        with contextlib.suppress(OSError):  # closing
            reader, writer = await asyncio.open_connection(*self._socket.getsockname())
            with contextlib.closing(writer):
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                await reader.read()

    def close(self) -> None:
        """Stop the server; may be called twice."""
        for session in list(self._sessions.values()):
            self.close_session(session)
        self._server.should_exit = True
        self._thread.join(_START_S)
        self._socket.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(asyncio.CancelledError):
            serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            self._started.set()
            await serving

    async def _answer(self, request: Request, path: RequestPath) -> Response:
        with self._arriving(request) as session:
            policy_request = session.read(path, await _read_body(request))
            self._log_ignored(policy_request)
            pending = session.add_request(policy_request)
            number = session.num_requests
        disconnected = asyncio.ensure_future(request.receive())
        answered = asyncio.ensure_future(pending.answers())
        await asyncio.wait({disconnected, answered}, return_when=asyncio.FIRST_COMPLETED)
        disconnected.cancel()
        if not answered.done():
            answered.cancel()
            raise ClientDisconnect
        response = write_response(path, policy_request, answered.result(), f"turn-{number}")
        if isinstance(response, Iterator):
            return StreamingResponse(response, media_type="text/event-stream")
        return JSONResponse(response)

    async def _reward(self, request: Request) -> Response:
        with self._arriving(request) as session:
            try:
                session.add_reward(read_reward(await _read_body(request)))
            except (InvalidResult, NonFiniteResult) as error:
                raise RequestError(str(error)) from error
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        self._find_session(request)
        return JSONResponse({"object": "list", "data": [_model_entry(MODEL)]})

    async def _model(self, request: Request) -> Response:
        self._find_session(request)
        return JSONResponse(_model_entry(request.path_params["name"]))

    async def _no_such_path(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        code, problem = (
            ("method_not_allowed", "has the wrong method")
            if status == 405
            else ("not_found", "does not exist")
        )
        with contextlib.suppress(RequestError):
            self._find_session(request).num_refused += 1
        words = f"{request.method} {request.url.path} {problem}: {_PATHS}"
        return await _error_response(request, RequestError(words, code=code, status=status))

    @contextlib.contextmanager
    def _arriving(self, request: Request) -> Iterator[Session]:
        """The session of a request while it is read; counts a RequestError."""
        session = self._find_session(request)
        try:
            with session.arriving():
                yield session
        except RequestError as error:
            session.num_refused += 1
            session.last_refusal = one_line(str(error))
            raise

    def _log_ignored(self, policy_request: PolicyRequest) -> None:
        for name in policy_request.ignored:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(name)
                _log.warning(
                    "requests contain %s, which is ignored and counted (num_ignored_fields)",
                    one_line(name)[:80],
                )

    def _find_session(self, request: Request) -> Session:
        if self._public is not None:
            if request.url.hostname not in self._public_hosts:
                raise RequestError("the Host header is not a name of this server", status=403)
            host, origin = request.headers.get("host"), request.headers.get("origin")
            if origin not in (None, f"http://{host}", f"https://{host}"):
                raise RequestError("a request of another page", status=403)
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and media_type != "application/json":
                raise RequestError("the Content-Type header must be application/json", status=415)
            return self._public
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key.strip())
        if scheme.lower() != "bearer" or session is None:
            raise RequestError("no session has this API key", code="invalid_api_key", status=401)
        return session


async def _read_body(request: Request) -> Any:
    """The JSON of a request. Raises RequestError or ClientDisconnect."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BYTES:
            raise RequestError(
                f"a request has at most {MAX_BYTES} bytes", code="request_too_large", status=413
            )
    try:
        return read_json(bytes(data))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error


def _model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "outrider"}


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return JSONResponse({"error": body}, status_code=error.status)


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
