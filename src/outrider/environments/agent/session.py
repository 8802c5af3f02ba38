"""The requests and rewards of one episode, or the requests of all clients of ``outrider serve``.

The server's thread adds them as events, and the thread of the episode takes them and answers.
"""

import asyncio
import contextlib
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from outrider.environments.agent.requests import PolicyRequest, RequestError, RequestPath
from outrider.environments.agent.responses import Answer
from outrider.environments.base import as_bool, as_float, as_metrics
from outrider.errors import EnvironmentFault, InvalidResult

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
