"""One episode's end of the server: what its program asks and hands in, and how it ends, as it arrives."""

import asyncio
import queue
import secrets
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from outrider.environments.agent.wire import Answer, PolicyRequest
from outrider.environments.values import as_bool, as_float, as_metrics
from outrider.errors import EnvironmentFault, InvalidResult

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
