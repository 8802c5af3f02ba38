"""One episode in a session of an OpenEnv server."""

import importlib.util
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from outrider.environments.base import Episode, EpisodeResult, StepResult
from outrider.environments.openenv.server import (
    CAPACITY,
    NOT_VALID,
    Answer,
    OpenEnvConfig,
    Server,
    ServerDescription,
    ServerSilent,
    Session,
    fetch_description,
)
from outrider.environments.openenv.spaces import (
    FieldAction,
    JsonAction,
    describe_errors,
    make_action,
    observation_text,
    require_fields,
)
from outrider.environments.seeded import MAX_EXPERT_TURNS, ExpertTurns, MoveRecord, opening_message, task_seed
from outrider.environments.text_games import STOP
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Message, Step, Task

Solve = Callable[[str], Generator[str, str, Any]]
"""An expert: called with the prompt, it yields the text of a turn and is sent the answer."""
_PAUSE_S: Final = 0.2  # between looks at whether the server has a free session


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """How a server is spoken to, which :func:`outrider.environments.openenv.environment.check_server` has
    found out.
    """

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
                steps += Episode(self).play([text])
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
                    f"{self._contact.name} has no free session: {answer.error_text}; "
                    "environment.num_sessions is "
                    ""
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


# Trying a server before the first rollout: what it is, how it is spoken to, how many sessions it takes, and
# whether its seeds decide its games.


_NUM_STEPS = 2
_NUM_SEEDS = 2


def describe_server(server: Server, config: OpenEnvConfig) -> ServerDescription:
    """What the server says of itself. Raises :class:`ToolUnavailable` where it does not."""
    try:
        return fetch_description(server.address()[0], config.step_limit_s)
    except EnvironmentFault as error:
        raise ToolUnavailable(f"no OpenEnv server: {error}") from error


def check_server(server: Server, config: OpenEnvConfig) -> Contact:
    """How the server is spoken to. Raises :class:`ToolUnavailable` where it fails, :class:`ConfigError` where
    it is not what the settings say.
    """
    description = describe_server(server, config)
    fields = [*config.observation, *([config.success_key] if config.success_key else [])]
    require_fields(description.observation, fields)
    action = make_action(description.action, config.action_field)
    contact = Contact(name=description.name, server=server, action=action, config=config)
    try:
        _require_sessions(contact)
        if config.takes_seeds:
            _require_seeds(contact)
    except EnvironmentFault as error:
        raise ToolUnavailable(f"the OpenEnv server {description.name} does not play: {error}") from error
    return contact


def _require_sessions(contact: Contact) -> None:
    """As many at a time as the settings say. Somebody else's sessions, which end, are no reason to refuse."""
    config, url = contact.config, contact.server.address()[0]
    with ExitStack() as opened:
        sessions: list[Session] = []
        for _ in range(config.num_sessions):
            sessions.append(Session(url, limit_s=config.step_limit_s))
            opened.callback(sessions[-1].close)
        for session in sessions:
            answer = session.request("state", limit_s=config.load_limit_s)
            most = answer.data.get("max_sessions")
            if answer.code == CAPACITY and isinstance(most, int) and most < config.num_sessions:
                raise ConfigError(
                    f"{contact.name} takes {most} sessions at a time (max_concurrent_envs): "
                    f"environment.num_sessions = {most}"
                )


def _require_seeds(contact: Contact) -> None:
    config = contact.config
    for seed in range(config.first_seed, config.first_seed + _NUM_SEEDS):
        first, again = (_play(contact, seed) for _ in range(2))
        if first != again:
            raise ConfigError(
                f"{contact.name} plays another game when it is reset to the seed {seed} again: "
                "environment.takes_seeds = false (methods that fork by replay are then refused)"
            )


def _play(contact: Contact, seed: int) -> list[object]:
    """What the policy would read, and the rewards, of a few steps. A step may fail, which tells as much of a
    game as another answer; a reset may not.
    """
    environment = OpenEnvEnvironment(contact=contact, seed=seed)
    try:
        seen: list[object] = [environment.reset(0)]
        for _ in range(_NUM_STEPS):
            try:
                result = environment.step(Message(role="assistant", content=contact.action.probe))
            except EnvironmentFault as fault:
                return [*seen, str(fault)]
            seen.append(result)
            if result.done:
                break
        return seen
    finally:
        environment.close()


# Environments behind OpenEnv servers: ``environment.type = "openenv"``.


class OpenEnvFactory:
    """Makes environments, and owns the server where it was started here."""

    def __init__(self, contact: "Contact") -> None:
        self._contact = contact

    def __call__(self, task: Task) -> "OpenEnvEnvironment":
        """A fresh episode of the task. Raises :class:`ConfigError` for a task of another environment."""
        return OpenEnvEnvironment(contact=self._contact, seed=task_seed(task, self._contact.name))

    def close(self) -> None:
        """Kill the server that was started here; may be called twice."""
        self._contact.server.close()


class OpenEnvTaskSet:
    """The seeds of one server."""

    Settings = OpenEnvConfig
    name = "openenv"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True
    stop = (STOP,)

    def __init__(self, config: OpenEnvConfig) -> None:
        """Start and ask nothing."""
        self.config = config
        self._described: ServerDescription | None = None
        self._server: Server | None = None  # started to ask it; the next factory takes it over
        self._expert: ExpertTurns[OpenEnvEnvironment] = ExpertTurns(
            config.expert, self.make, lambda environment, solve, seed: environment.solved(solve)
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed of ``train``, ``valid`` or ``test``. They name the server and its version, which
        may play other games: a resumed run refuses another one. Raises :class:`ToolUnavailable` where the
        server does not answer.
        """
        if self._described is None:
            self._described = self._describe_server()
        description = self._described
        return self.config.seed_tasks(split, description.name, {"server_version": description.version})

    def make(self) -> OpenEnvFactory:
        """Try the server. Raises :class:`ToolUnavailable` or :class:`ConfigError`."""
        from outrider.environments.openenv.server import make_server

        _require_package()
        server, self._server = self._server or make_server(self.config), None
        try:
            return OpenEnvFactory(check_server(server, self.config))
        except BaseException:
            server.close()
            raise

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The turns of ``expert``, played on a server of their own where one is started. See
        :class:`outrider.environments.seeded.ExpertTurns`.
        """
        return self._expert.steps(task, seed)

    def close(self) -> None:
        """Kill the servers that were started to ask them and for experts; may be called twice."""
        self._expert.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _describe_server(self) -> "ServerDescription":
        from outrider.environments.openenv.server import make_server

        _require_package()
        if self._server is None:
            self._server = make_server(self.config)
        return describe_server(self._server, self.config)


def _require_package() -> None:
    if importlib.util.find_spec("websockets") is None:
        raise ToolUnavailable("OpenEnv servers are spoken to by websockets: pip install 'outrider[openenv]'")
