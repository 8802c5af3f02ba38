"""One episode's end of the server: what its program asks and hands in, and how it ends, as it arrives."""

import asyncio
import contextlib
import logging
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.environments.agent.requests import (
    MODEL,
    Answer,
    BadRequest,
    PolicyRequest,
    read_chat,
    read_json,
)
from outrider.environments.agent.responses import completion, events, read_response, response, response_events
from outrider.environments.base import as_bool, as_float, as_metrics
from outrider.errors import EnvironmentFault, InvalidResult, NonFiniteResult
from outrider.printing import one_line

MAX_WAITING: Final = 64
"""Requests of one program that wait for an answer at a time."""
OVER: Final = "the episode has ended"
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
"""Metrics of an episode that are counted here, and that no program hands in."""


class Refused(Exception):
    """A request that is not answered: ``status`` and ``code`` are what HTTP and the client are told, and
    ``param`` is the field that is to blame.
    """

    def __init__(self, status: int, code: str, text: str, *, param: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What an episode was worth. ``success`` None: the recipe's rule decides."""

    value: float
    success: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramExit:
    """The program is over. ``reward`` is what it came back with; ``problem`` why it has none, which
    ``is_fault`` where that is nothing of the program's own. ``unusable`` is the error of a reward that is no
    number: never a failed episode, whatever ``failed_return`` is.
    """

    reward: Reward | None
    problem: str = ""
    is_fault: bool = False
    unusable: EnvironmentFault | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """Nobody wants the episode any more."""


class PendingRequest:
    """A request that has arrived, and so is a turn: answers come one by one, from another thread than the
    server's, whether or not the program still waits for them. How long it waits depends on the machine.
    """

    def __init__(self, request: PolicyRequest) -> None:
        self.request = request
        self._is_refused = False
        self._answers: list[Answer] = []
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[list[Answer]] = self._loop.create_future()

    @property
    def is_waiting(self) -> bool:
        """Whether it is still to be answered."""
        return not self._is_refused and len(self._answers) < self.request.num_answers

    async def answers(self) -> list[Answer]:
        """All answers. Raises Refused."""
        return await self._future

    def add_answer(self, answer: Answer) -> bool:
        """Give the next answer; whether it was the last one."""
        self._answers.append(answer)
        if len(self._answers) < self.request.num_answers:
            return False
        self._resolve(lambda: self._future.set_result(self._answers))
        return True

    def refuse(self, refused: Refused) -> None:
        """There will be no answer."""
        self._is_refused = True
        self._resolve(lambda: self._future.set_exception(refused))

    def _resolve(self, set_outcome: Any) -> None:
        def resolve() -> None:
            if not self._future.done():
                set_outcome()

        try:
            self._loop.call_soon_threadsafe(resolve)
        except RuntimeError:  # the server has stopped, and the program's request with it
            return


Event = PendingRequest | Reward | ProgramExit | Closed


class Session:
    """A key and what comes under it. Requests are put in by the server, events taken out by the episode."""

    def __init__(
        self, *, takes_tools: bool, ignores_formats: bool = False, ignores: Collection[str] = ()
    ) -> None:
        self.key = secrets.token_urlsafe(24)
        self.takes_tools = takes_tools
        self.ignores_formats = ignores_formats
        self.ignores = frozenset(ignores)
        self.num_requests = 0
        self.num_unanswerable = 0
        """Of ``num_requests``, those that were refused after they had been read."""
        self.num_refused = 0
        self.last_refusal = ""
        """Why the last request that could not be read was refused."""
        self.num_ignored_fields = 0
        self.num_ignored_formats = 0
        self._reading: set[asyncio.Future[None]] = set()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._pending: deque[PendingRequest] = deque()
        self._is_open = True
        self._lock = Lock()

    def add_request(self, request: PolicyRequest) -> PendingRequest:
        """A request has come. Raises Refused."""
        with self._lock:
            if not self._is_open:
                raise Refused(410, "episode_ended", OVER)
            self._pending = deque(entry for entry in self._pending if entry.is_waiting)
            if len(self._pending) >= MAX_WAITING:
                raise Refused(400, "too_many_requests", f"{MAX_WAITING} requests are waiting already")
            self.num_requests += 1
            self.num_ignored_fields += len(request.ignored)
            self.num_ignored_formats += request.ignores_format
            pending = PendingRequest(request)
            self._pending.append(pending)
        self._events.put(pending)
        return pending

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While a request is on its way in; on the server's thread."""
        read = asyncio.get_running_loop().create_future()
        self._reading.add(read)
        try:
            yield
        finally:
            self._reading.discard(read)
            read.set_result(None)

    async def all_read(self) -> None:
        """Wait for the requests that are on their way in."""
        while self._reading:
            await asyncio.wait(self._reading)

    def refuse(self, pending: PendingRequest, refused: Refused) -> None:
        """Refuse a request that is well formed and cannot be answered all the same."""
        with self._lock:
            self.num_unanswerable += 1
            self.num_refused += 1
        pending.refuse(refused)

    def submit_reward(self, reward: Reward) -> None:
        """The program says what its episode was worth. Raises Refused once that is over."""
        if not self._is_open:
            raise Refused(410, "episode_ended", OVER)
        self._events.put(reward)

    def end(self, program_exit: ProgramExit) -> None:
        """The program is over; what it asked before is in front of that."""
        self._events.put(program_exit)

    def next(self, timeout_s: float) -> Event:
        """What comes next. Raises queue.Empty when nothing comes in time."""
        return self._events.get(timeout=timeout_s)

    def close(self) -> None:
        """Refuse what waits and what comes. May be called twice."""
        with self._lock:
            self._is_open = False
            pending, self._pending = self._pending, deque()
        for request in pending:
            request.refuse(Refused(410, "episode_ended", OVER))
        self._events.put(Closed())


def read_reward(value: Any) -> Reward:
    """A number, or an object with ``reward``, ``success`` and ``metrics``.

    Raises InvalidResult for any other value, NonFiniteResult for NaN and infinity.
    """
    if not isinstance(value, Mapping):
        return Reward(value=as_float(value, "the reward"))
    if "reward" not in value:
        raise InvalidResult("a reward is a number, or an object with the key reward")
    success = value.get("success")
    metrics = as_metrics(value.get("metrics"))
    if reserved := sorted(COUNTED & metrics.keys()):
        raise InvalidResult(f"the metric {reserved[0]} is counted here: give yours another name")
    return Reward(
        value=as_float(value["reward"], "the reward"),
        success=None if success is None else as_bool(success, "success"),
        metrics=metrics,
    )


# The server that agent programs take for OpenAI's: on loopback, a key for every episode.


MAX_BYTES: Final = 16 << 20
"""Of one request."""
_MAX_LOGGED: Final = 200
_START_S: Final = 30.0
_CAUGHT_UP_S: Final = 10.0  # for what a program that has ended had sent
_KEEP_ALIVE_S: Final = 24 * 3600  # a program's connections end with it: closed earlier, a request may be lost
_PATHS: Final = (
    "the policy is asked by POST /v1/chat/completions or /v1/responses; there are GET /v1/models and "
    "POST /v1/reward beside them"
)

_log = logging.getLogger(__name__)

Read = Callable[..., PolicyRequest]
Write = Callable[[PolicyRequest, list[Answer], str], Response]


class Gateway:
    """Serves in a thread of its own until it is closed. ``url`` is what clients call their base URL."""

    def __init__(self) -> None:
        """Binds a free port of 127.0.0.1. Raises EnvironmentFault where the server does not start."""
        self._sessions: dict[str, Session] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._logged: set[str] = set()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        config = uvicorn.Config(
            self._app(), log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=1,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="outrider agent gateway")
        self._thread.start()
        if not self._started.wait(_START_S) or not self._thread.is_alive():
            raise EnvironmentFault("the server for agent programs did not start")

    def open(
        self, *, takes_tools: bool, ignores_formats: bool = False, ignores: Collection[str] = ()
    ) -> Session:
        """A session with a key that nobody else has."""
        session = Session(takes_tools=takes_tools, ignores_formats=ignores_formats, ignores=ignores)
        self._sessions[session.key] = session
        return session

    def close_session(self, session: Session) -> None:
        """Close a session; its key opens nothing any more. May be called twice."""
        session.close()
        self._sessions.pop(session.key, None)

    def end(self, session: Session, program_exit: ProgramExit) -> None:
        """A program is over: its session is told behind all that the program has sent, which may not have
        been read yet. From any thread.
        """

        def begin() -> None:
            ending = asyncio.ensure_future(self._end(session, program_exit))
            self._endings.add(ending)  # the loop itself keeps no task alive
            ending.add_done_callback(self._endings.discard)

        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(begin)

    async def _end(self, session: Session, program_exit: ProgramExit) -> None:
        if session.key in self._sessions:
            with contextlib.suppress(TimeoutError):  # half a request may stay that for ever
                async with asyncio.timeout(_CAUGHT_UP_S):
                    await self._caught_up()
                    await session.all_read()
            session.end(program_exit)

    async def _caught_up(self) -> None:
        """Answer a request of our own: those that were sent before it have come so far, too."""
        with contextlib.suppress(OSError):  # closing
            reader, writer = await asyncio.open_connection(*self._socket.getsockname())
            try:
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                await reader.read()
            finally:
                writer.close()

    def close(self) -> None:
        """Stop serving. May be called twice."""
        for session in list(self._sessions.values()):
            self.close_session(session)
        self._server.should_exit = True
        self._thread.join(_START_S)
        self._socket.close()

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            with contextlib.suppress(asyncio.CancelledError):
                serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
                while not self._server.started and not serving.done():
                    await asyncio.sleep(0.005)
                self._started.set()
                await serving

        asyncio.run(serve())

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/reward", self._reward, methods=["POST"]),
            ],
            exception_handlers={HTTPException: self._unknown_path},
        )

    async def _chat(self, request: Request) -> Response:
        def write(policy_request: PolicyRequest, answers: list[Answer], name: str) -> Response:
            if policy_request.streams:
                return _stream(events(policy_request, answers, name))
            return JSONResponse(completion(policy_request, answers, name))

        return await self._answer(request, read_chat, write)

    async def _responses(self, request: Request) -> Response:
        def write(policy_request: PolicyRequest, answers: list[Answer], name: str) -> Response:
            if policy_request.streams:
                return _stream(response_events(policy_request, answers[0], name))
            return JSONResponse(response(policy_request, answers[0], name))

        return await self._answer(request, read_response, write)

    async def _models(self, request: Request) -> Response:
        try:
            self._session(request)
        except Refused as refused:
            return _error(refused)
        return JSONResponse({"object": "list", "data": [_model_entry(MODEL)]})

    async def _model(self, request: Request) -> Response:
        """Requests may name any, so each of them is one."""
        try:
            self._session(request)
        except Refused as refused:
            return _error(refused)
        return JSONResponse(_model_entry(request.path_params["name"]))

    async def _unknown_path(self, request: Request, error: Exception) -> Response:
        """Respond to an unknown path, or to a method that the path does not support."""
        status = error.status_code if isinstance(error, HTTPException) else 404
        code, problem = ("method_not_allowed", "is not what this path takes") if status == 405 else (
            "not_found", "is not here"
        )  # fmt: skip
        with contextlib.suppress(Refused):
            self._session(request).num_refused += 1
        words = f"{request.method} {request.url.path} {problem}: {_PATHS}"
        return _error(Refused(status, code, words))

    async def _reward(self, request: Request) -> Response:
        try:
            with self._counted(request) as session, session.reading():
                session.submit_reward(_parse_reward(await _body(request)))
        except Refused as refused:
            return _error(refused)
        except ClientDisconnect:  # a program that is killed while it writes
            return Response(status_code=499)
        return JSONResponse({"status": "ok"})

    @contextlib.contextmanager
    def _counted(self, request: Request) -> Iterator[Session]:
        """The session of a request; raises Refused, which it counts."""
        session = self._session(request)
        try:
            yield session
        except BadRequest as error:
            session.num_refused += 1
            session.last_refusal = one_line(str(error))
            raise Refused(400, error.code, str(error), param=error.param) from error
        except Refused as refused:
            session.num_refused += 1
            session.last_refusal = one_line(str(refused))
            raise

    async def _answer(self, request: Request, read: Read, write: Write) -> Response:
        try:
            with self._counted(request) as session, session.reading():
                policy_request = read(
                    await _body(request),
                    takes_tools=session.takes_tools,
                    ignores_formats=session.ignores_formats,
                    ignores=session.ignores,
                )
                self._log_ignored(policy_request)
                pending = session.add_request(policy_request)
                number = session.num_requests
            disconnected = asyncio.ensure_future(request.receive())
            answered = asyncio.ensure_future(pending.answers())
            await asyncio.wait({disconnected, answered}, return_when=asyncio.FIRST_COMPLETED)
            disconnected.cancel()
            if not answered.done():
                answered.cancel()
                return Response(status_code=499)
            return write(policy_request, answered.result(), f"turn-{number}")
        except Refused as refused:
            return _error(refused)
        except ClientDisconnect:
            return Response(status_code=499)

    def _log_ignored(self, policy_request: PolicyRequest) -> None:
        """One line for every field that changes nothing, when it comes for the first time."""
        for name in policy_request.ignored:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED:  # programs may invent names
                self._logged.add(name)
                _log.warning(
                    "the agent program sends %s, which is ignored and counted (num_ignored_fields)",
                    one_line(name)[:80],
                )

    def _session(self, request: Request) -> Session:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key.strip())
        if scheme.lower() != "bearer" or session is None:
            raise Refused(401, "invalid_api_key", "no episode has this key")
        return session


async def _body(request: Request) -> Any:
    """The JSON of a request. Raises BadRequest, Refused where it is too long, ClientDisconnect."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BYTES:
            raise Refused(413, "request_too_large", f"a request has at most {MAX_BYTES} bytes")
    try:
        return read_json(bytes(data))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


def _parse_reward(value: Any) -> Reward:
    try:
        return read_reward(value)
    except (InvalidResult, NonFiniteResult) as error:
        raise BadRequest(str(error)) from error


def _model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "outrider"}


def _error(refused: Refused) -> Response:
    body = {
        "message": str(refused),
        "type": "invalid_request_error",
        "param": refused.param,
        "code": refused.code,
    }
    return JSONResponse({"error": body}, status_code=refused.status)


def _stream(lines: Iterator[str]) -> Response:
    return StreamingResponse(lines, media_type="text/event-stream")
