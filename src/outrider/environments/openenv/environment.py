"""Environments behind OpenEnv servers: ``environment.type = "openenv"``."""

import importlib.util
import json
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
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
from outrider.environments.seeded import (
    MAX_EXPERT_TURNS,
    ActionFormat,
    MoveRecord,
    opening_message,
    task_seed,
)
from outrider.environments.text_games import STOP, parse_action
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.plugins.imports import import_target
from outrider.tokens.tool_calls import Arguments
from outrider.types import Message, Step, Task

Solve = Callable[[str], Generator[str, str, Any]]
"""An expert: it is called with the prompt, yields the text of a turn and is sent the observation."""
_PAUSE_S: Final = 0.2  # between checks whether the server has a free session
_NUM_STEPS: Final = 2
_NUM_SEEDS: Final = 2


class OpenEnvEnvironment:
    """One episode in a session of its own. The observation is a user message, and the return the sum of the
    server's rewards.

    An action that the server's schema rejects is an invalid turn; every other error of the server is a fault.
    """

    def __init__(self, factory: "OpenEnvFactory", *, seed: int) -> None:
        """``seed`` is the task's. Nothing is opened before :meth:`reset`."""
        self._factory = factory
        self._config = factory.config
        self._seed = seed
        self._lock = threading.Lock()  # close() may come from another thread
        self._closed = threading.Event()
        self._session: Session | None = None
        self._num_restarts = 0
        self._record = MoveRecord(name=self._factory.name, settings=self._config)

    def reset(self, seed: int) -> Sequence[Message]:
        """Open a session and reset it to the task's seed; ``seed`` is not used."""
        self._leave()
        self._record = MoveRecord(name=self._factory.name, settings=self._config)
        reply = self._checked(self._opened(), "reset")
        if reply["done"]:
            self._leave()
            raise EnvironmentFault(f"{self._factory.name} ended the episode before its first turn")
        text = observation_text(reply["observation"], self._config.observation)
        return (opening_message(self._config, self._factory.action.instructions, text),)

    def step(self, message: Message) -> StepResult:
        """Execute the action of the turn."""
        record, session = self._record, self._session
        if record.done:
            raise RuntimeError("the episode has ended")
        if session is None:
            raise EnvironmentFault(f"{self._factory.name} was never reset, or its session is closed")
        record.num_turns += 1
        action, problem = self._factory.action.read(message.content)
        if problem:
            return record.record_invalid(problem)
        answer = self._request(session, "step", action, self._config.step_limit_s)
        if answer.code == NOT_VALID:
            return record.record_invalid(describe_errors(answer.data.get("errors")))
        reply = self._checked(answer, "step")
        key = self._config.success_key
        result = record.record_move(
            observation_text(reply["observation"], self._config.observation),
            reply["reward"],
            terminated=reply["done"],
            success=None if key is None else reply["observation"].get(key),
        )
        if result.done:
            self._leave()  # other episodes may wait for a session
        return result

    def result(self) -> EpisodeResult:
        """The record so far. ``num_restarts`` counts restarts of the server for this episode."""
        record = self._record.result()
        metrics = {**record.metrics, "num_restarts": float(self._num_restarts)}
        return replace(record, metrics=metrics)

    def solved(self, solve: Solve) -> tuple[Step, ...]:
        """Play an expert from the beginning. Raises EnvironmentFault if it raises an exception."""
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
                f"{self._factory.name}: expert raised {type(error).__name__}: {error}"
            ) from error
        return tuple(steps)

    def close(self) -> None:
        """End the session, for good; may be called twice. A pending call of another thread is a fault."""
        self._closed.set()
        self._leave()

    def _opened(self) -> Answer:
        """Reset a new session. Waits for a free one, and restarts a dead server."""
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
                    f"{self._factory.name} has no free session: {answer.error_text}; "
                    f"environment.num_sessions is {self._config.num_sessions}"
                )

    def _connected(self) -> Session:
        url, restarted = self._factory.server.address()
        self._num_restarts += restarted
        try:
            session = Session(url, limit_s=self._config.step_limit_s)
        except ServerSilent:
            if not self._factory.server.suspect(url):
                raise
            url, restarted = self._factory.server.address()
            self._num_restarts += restarted
            session = Session(url, limit_s=self._config.step_limit_s)
        with self._lock:
            self._session = session
        if self._closed.is_set():  # closed during the wait; nothing else would close the session
            self._leave()
            raise EnvironmentFault(f"{self._factory.name}: the episode was closed while it waited")
        return session

    def _request(self, session: Session, kind: str, data: Mapping[str, Any], limit_s: float) -> Answer:
        try:
            return session.request(kind, data, limit_s=limit_s)
        except EnvironmentFault:
            self._leave()
            raise

    def _checked(self, answer: Answer, kind: str) -> dict[str, Any]:
        """Observation, reward (0.0 if there is none) and ``done`` of an answer. Raises EnvironmentFault."""
        problem = f"failed: {answer.error_text}" if answer.code else "did not return an observation"
        match answer.data if not answer.code else {}:
            case {"observation": dict(observation), "reward": int() | float() | None as reward,
                  "done": bool(done)}:  # fmt: skip
                with suppress(OverflowError):  # an integer with hundreds of digits
                    return {"observation": observation, "reward": float(reward or 0.0), "done": done}
        self._leave()
        raise EnvironmentFault(f"{self._factory.name}: {kind} {problem}")

    def _leave(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()


class OpenEnvFactory:
    """Makes environments, and owns the server if it was started here."""

    def __init__(self, server: Server, config: OpenEnvConfig) -> None:
        """Check the server before the first rollout: its schemas, its number of sessions, and its seeds.

        Raises ToolUnavailable if it fails, and ConfigError if it does not match the settings.
        """
        description = describe_server(server, config)
        fields = [*config.observation, *([config.success_key] if config.success_key else [])]
        require_fields(description.observation, fields)
        self.name = description.name
        self.server = server
        self.config = config
        self.action = make_action(description.action, config.action_field)
        try:
            self._check_sessions()
            if config.takes_seeds:
                self._check_seeds()
        except EnvironmentFault as error:
            raise ToolUnavailable(f"the OpenEnv server {self.name} does not run: {error}") from error

    def __call__(self, task: Task) -> OpenEnvEnvironment:
        """A new episode. Raises ConfigError for a task of another environment."""
        return OpenEnvEnvironment(self, seed=task_seed(task, self.name))

    def close(self) -> None:
        self.server.close()

    def _check_sessions(self) -> None:
        """Open as many sessions as in the settings. Sessions of others, which end, are no reason to fail."""
        config, url = self.config, self.server.address()[0]
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
                        f"{self.name} allows {most} concurrent sessions (max_concurrent_envs): set "
                        f"environment.num_sessions = {most}"
                    )

    def _check_seeds(self) -> None:
        for seed in range(self.config.first_seed, self.config.first_seed + _NUM_SEEDS):
            if self._play(seed) != self._play(seed):
                raise ConfigError(
                    f"{self.name} plays another game when it is reset to the seed {seed} again: set "
                    "environment.takes_seeds = false (methods that fork by replay then reject it)"
                )

    def _play(self, seed: int) -> list[object]:
        """Observations and rewards of a few steps. A failed step is also a result; a failed reset is not."""
        with closing(OpenEnvEnvironment(self, seed=seed)) as environment:
            results: list[object] = [environment.reset(0)]
            for _ in range(_NUM_STEPS):
                try:
                    result = environment.step(Message(role="assistant", content=self.action.probes[0]))
                except EnvironmentFault as fault:
                    return [*results, str(fault)]
                results.append(result)
                if result.done:
                    break
            return results


def describe_server(server: Server, config: OpenEnvConfig) -> ServerDescription:
    """The server's description. Raises ToolUnavailable if there is none."""
    try:
        return fetch_description(server.address()[0], config.step_limit_s)
    except EnvironmentFault as error:
        raise ToolUnavailable(f"no OpenEnv server: {error}") from error


class OpenEnvTaskSet:
    """The seeds of one server."""

    Settings = OpenEnvConfig
    name = "openenv"
    stop = (STOP,)
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: OpenEnvConfig) -> None:
        self.config = config
        self._expert_factory: OpenEnvFactory | None = None
        self._description: ServerDescription | None = None
        self._server: Server | None = None  # started for its description; the next factory takes it over

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed. The metadata name the server's version: another one may have other games, so a
        resumed run rejects it. Raises ToolUnavailable if the server does not answer.
        """
        if self._description is None:
            self._server = self._open_server()
            self._description = describe_server(self._server, self.config)
        description = self._description
        return self.config.seed_tasks(split, description.name, {"server_version": description.version})

    def make(self) -> OpenEnvFactory:
        """Check the server. Raises ToolUnavailable or ConfigError."""
        server, self._server = self._open_server(), None
        try:
            return OpenEnvFactory(server, self.config)
        except BaseException:
            server.close()
            raise

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """Steps of the user's function; None without a function or without success."""
        if self.config.expert is None:
            return None
        solve = import_target(self.config.expert)
        if self._expert_factory is None:
            self._expert_factory = self.make()
        with closing(self._expert_factory(task)) as environment:
            steps = environment.solved(solve)
        return steps if environment.result().success else None

    def close(self) -> None:
        """Kill the servers that were started for descriptions and experts; may be called twice."""
        factory, self._expert_factory = self._expert_factory, None
        if factory is not None:
            factory.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _open_server(self) -> Server:
        if importlib.util.find_spec("websockets") is None:
            raise ToolUnavailable("OpenEnv servers need websockets: pip install 'outrider[openenv]'")
        config = self.config
        return self._server or Server(
            config.command, url=config.server_url, start_limit_s=config.start_limit_s
        )


# Actions and observations of an OpenEnv server's schemas as text.


_EXAMPLES: Final[Mapping[str, Any]] = {
    "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}, "string": "text"
}  # fmt: skip
_MAX_PROBLEMS: Final = 5  # problems of one action


def field_action(name: str, schema: Mapping[str, Any]) -> ActionFormat:
    """The text between the tags becomes one field of the action; the server checks it."""
    probe = f"<action>{_example(schema)}</action>"

    def read(text: str) -> tuple[Mapping[str, Any], str]:
        action, problem = parse_action(text, verbatim=True)
        return ({}, problem) if problem else ({name: _clean(action)}, "")

    return ActionFormat(
        instructions=f"Write one action a turn, for example {probe}.", probes=(probe,), read=read
    )


def json_action(properties: Mapping[str, Any], required: Sequence[str]) -> ActionFormat:
    """A JSON object between the tags with the fields of the action; NaN and infinity are rejected."""
    names = required or list(properties)
    example = {name: _example(properties.get(name, {})) for name in names}
    probe = f"<action>{json.dumps(example)}</action>"

    def read(text: str) -> tuple[Mapping[str, Any], str]:
        content, problem = parse_action(text, verbatim=True)
        if problem:
            return {}, problem
        try:
            action = json.loads(_clean(content), parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            return {}, f"The action is no JSON ({error}). Write for example {probe}."
        if not isinstance(action, dict):
            return {}, f"The action is no JSON object. Write for example {probe}."
        return action, ""

    instructions = f"Write one action a turn, a JSON object, for example {probe}."
    return ActionFormat(instructions=instructions, probes=(probe,), read=read)


def make_action(schema: Mapping[str, Any], chosen: str | None) -> ActionFormat:
    """The format of a schema's actions. Raises ConfigError if ``chosen`` is not a field of it."""
    fields = Arguments.from_schema({"parameters": schema})
    properties = {
        name: _resolved(value, schema) for name, value in fields.properties.items() if name != "metadata"
    }
    # With several kinds of actions the first one is the example.
    needed = dict.fromkeys((*fields.required, *(fields.alternatives[0] if fields.alternatives else ())))
    required = [name for name in needed if name in properties]
    if chosen is not None:
        if chosen not in properties:
            known = ", ".join(properties) or "none"
            raise ConfigError(f"the server's actions have no field {chosen!r} (their fields: {known})")
        if others := [name for name in required if name != chosen]:
            raise ConfigError(
                f"the server's actions need {', '.join(others)} besides {chosen}: remove action_field to "
                "write actions as JSON"
            )
        return field_action(chosen, properties[chosen])
    if len(properties) == 1:
        return field_action(*next(iter(properties.items())))
    return json_action(properties, required)


def describe_errors(errors: Any) -> str:
    """The errors of the server's own check of an action, in words for the policy."""
    problems = []
    for error in errors if isinstance(errors, list) else ():
        if isinstance(error, Mapping):
            location = ".".join(str(part) for part in error.get("loc") or ())
            problems.append(
                f"{location}: {error.get('msg', 'not valid')}" if location else str(error.get("msg"))
            )
    words = "; ".join(problems[:_MAX_PROBLEMS]) or "it does not fit"
    return f"The action was not accepted ({words})."


def _resolved(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a field after references (for example, to an enumeration); the first one of several."""
    if not isinstance(value, Mapping):
        return {}
    if isinstance(several := value.get("anyOf"), list) and several:
        return _resolved(several[0], schema)
    definitions, name = schema.get("$defs"), str(value.get("$ref", "")).rpartition("/")[2]
    definition = definitions.get(name) if isinstance(definitions, Mapping) else None
    return definition if isinstance(definition, Mapping) else value


def _example(schema: Mapping[str, Any]) -> Any:
    for key in ("examples", "enum"):
        if isinstance(values := schema.get(key), list) and values:
            return values[0]
    if "const" in schema:
        return schema["const"]
    value = _EXAMPLES.get(str(schema.get("type")), "text")
    lowest = schema.get("minimum")
    return lowest if isinstance(lowest, int) and schema.get("type") in ("integer", "number") else value


def _clean(text: str) -> str:
    """Replace lone surrogates, which cannot be sent."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no number that can be sent")
    return number


def observation_text(observation: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The text of an observation: one field as it is, several with their names, and all fields as JSON.

    Raises EnvironmentFault if a field is missing.
    """
    if missing := [name for name in fields if name not in observation]:
        raise EnvironmentFault(f"the server's observation lacks {', '.join(missing)}")
    if len(fields) == 1:
        return _text(observation[fields[0]])
    if fields:
        return "\n".join(f"{name}: {_text(observation[name])}" for name in fields)
    return _text(next(iter(observation.values()))) if len(observation) == 1 else _json(observation)


def require_fields(schema: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Raises ConfigError for a field that is not in the schema of observations."""
    properties = schema.get("properties")
    known = [name for name in properties if name not in ("done", "reward", "metadata")] if properties else []
    if missing := [name for name in fields if name not in known]:
        raise ConfigError(
            f"the server's observations have no field {missing[0]!r} (their fields: "
            f"{', '.join(known) or 'none'})"
        )


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
