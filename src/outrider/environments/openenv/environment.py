"""One episode in a session of an OpenEnv server."""

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from outrider.environments.base import EpisodeResult, StepResult, play_steps
from outrider.environments.moves import MAX_EXPERT_TURNS, MoveRecord, opening_message
from outrider.environments.openenv.actions import FieldAction, JsonAction, describe_errors
from outrider.environments.openenv.observations import observation_text
from outrider.environments.openenv.server import Server
from outrider.environments.openenv.session import CAPACITY, NOT_VALID, Answer, ServerSilent, Session
from outrider.environments.openenv.settings import OpenEnvConfig
from outrider.errors import EnvironmentFault
from outrider.types import Message, Step

Solve = Callable[[str], Generator[str, str, Any]]
"""An expert: called with the prompt, it yields the text of a turn and is sent the answer."""
_PAUSE_S: Final = 0.2  # between looks at whether the server has a free session


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """How a server is spoken to, which :func:`outrider.environments.openenv.trying.check_server` has found out."""

    name: str
    server: Server
    action: FieldAction | JsonAction
    config: OpenEnvConfig


class OpenEnvEnvironment:
    """Chat protocol: the policy's turn holds an action, the observation comes as a user message.

    The return is the sum of the server's rewards. An action that the server's schema refuses is answered in
    words; whatever else the server fails at is a fault.
    """

    def __init__(self, *, contact: Contact, seed: int) -> None:
        """Nothing is opened before :meth:`reset`. ``seed`` is the task's."""
        self._contact = contact
        self._config = contact.config
        self._seed = seed
        self._lock = threading.Lock()  # close() may come from another thread
        self._closed = threading.Event()
        self._session: Session | None = None
        self._num_restarts = 0
        self._record = self._new_record()

    def reset(self, seed: int) -> Sequence[Message]:
        """A session at the task's seed. ``seed`` changes nothing: a group plays one game."""
        self._leave()
        self._record = self._new_record()
        reply = self._checked(self._opened(), "reset")
        if reply["done"]:
            self._leave()
            raise EnvironmentFault(f"{self._contact.name} ended the episode before its first turn")
        text = self._written(reply)
        return (opening_message(self._config, self._contact.action.instructions, text),)

    def step(self, message: Message) -> StepResult:
        """Do the turn's action. Text that holds none changes nothing and is answered in words."""
        record, session = self._record, self._session
        if record.done:
            raise RuntimeError("the episode has ended")
        if session is None:
            raise EnvironmentFault(f"{self._contact.name} was never reset, or its session is closed")
        record.num_turns += 1
        read = self._contact.action.read(message.content)
        if read.problem:
            return record.record_invalid(read.problem)
        answer = self._request(session, "step", read.action, self._config.step_limit_s)
        if answer.code == NOT_VALID:
            return record.record_invalid(describe_errors(answer.data.get("errors")))
        reply = self._checked(answer, "step")
        key = self._config.success_key
        result = record.record_move(
            self._written(reply),
            reply["reward"],
            terminated=reply["done"],
            success=None if key is None else reply["observation"].get(key),
        )
        if result.done:
            self._leave()  # others may wait for a session
        return result

    def result(self) -> EpisodeResult:
        """The sum of rewards so far; ``num_restarts``: how often the server was started again for it."""
        record = self._record.result()
        metrics = {**record.metrics, "num_restarts": float(self._num_restarts)}
        return EpisodeResult(episode_return=record.episode_return, success=record.success, metrics=metrics)

    def solved(self, solve: Solve) -> tuple[Step, ...]:
        """The steps of an expert from the beginning. Raises :class:`EnvironmentFault` for what it raises."""
        opening = self.reset(0)[0].content
        steps: list[Step] = []
        try:
            turns = solve(opening)
            text = next(turns)
            for _ in range(MAX_EXPERT_TURNS):
                steps += play_steps(self, [text])
                if steps[-1].is_terminal:
                    break
                text = turns.send(steps[-1].observation)
        except StopIteration:
            pass
        except EnvironmentFault:
            raise
        except Exception as error:
            raise EnvironmentFault(
                f"{self._contact.name}: expert raised {type(error).__name__}: {error}"
            ) from error
        return tuple(steps)

    def close(self) -> None:
        """End the session, for good; may be called twice. Another thread that waits for it gets a fault."""
        self._closed.set()
        self._leave()

    def _opened(self) -> Answer:
        """The answer to ``reset`` in a new session: waits for a free one, and starts a dead server again."""
        seeded = {"seed": self._seed} if self._config.takes_seeds else {}
        deadline = time.monotonic() + self._config.borrow_limit_s
        while True:
            session = self._connected()
            answer = self._request(
                session, "reset", {**self._config.reset_options, **seeded}, self._config.load_limit_s
            )
            if answer.code != CAPACITY:
                return answer
            self._leave()
            if time.monotonic() >= deadline or self._closed.wait(_PAUSE_S):
                raise EnvironmentFault(
                    f"{self._contact.name} has no free session: {answer.error_text}; environment.num_sessions is "
                    f"{self._config.num_sessions}"
                )

    def _connected(self) -> Session:
        url, restarted = self._contact.server.address()
        self._num_restarts += restarted
        try:
            session = Session(url, limit_s=self._config.step_limit_s)
        except ServerSilent:
            if not self._contact.server.suspect(url):
                raise
            url, restarted = self._contact.server.address()
            self._num_restarts += restarted
            session = Session(url, limit_s=self._config.step_limit_s)
        with self._lock:
            self._session = session
        if self._closed.is_set():  # the loop gave this reset up: nobody else would close it
            self._leave()
            raise EnvironmentFault(f"{self._contact.name}: the episode was closed while it waited")
        return session

    def _request(self, session: Session, kind: str, data: Mapping[str, Any], limit_s: float) -> Answer:
        try:
            return session.request(kind, data, limit_s=limit_s)
        except EnvironmentFault:
            self._leave()
            raise

    def _checked(self, answer: Answer, kind: str) -> dict[str, Any]:
        """Observation, reward (0.0 for none) and whether the episode is over."""
        problem = f"failed: {answer.error_text}" if answer.code else "answered what is no observation"
        match answer.data if not answer.code else {}:
            case {"observation": dict(observation), "reward": int() | float() | None as reward,
                  "done": bool(done)}:  # fmt: skip
                with suppress(OverflowError):  # an integer of hundreds of digits is no reward
                    return {"observation": observation, "reward": float(reward or 0.0), "done": done}
        self._leave()
        raise EnvironmentFault(f"{self._contact.name}: {kind} {problem}")

    def _written(self, reply: Mapping[str, Any]) -> str:
        return observation_text(reply["observation"], self._config.observation)

    def _leave(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _new_record(self) -> MoveRecord:
        return MoveRecord(name=self._contact.name, settings=self._config)
