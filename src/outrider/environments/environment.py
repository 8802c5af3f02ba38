"""The base class of user environments, and its adapter to the protocol of the rollout loop.

The rest of the package sees an environment as a :class:`~outrider.environments.base.TaskSet` that makes
:class:`~outrider.environments.base.Env` objects. :meth:`Environment.build` returns such a task set.
"""

import copy
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

from outrider.environments.base import (
    EnvironmentSettings,
    Episode,
    EpisodeResult,
    StepResult,
    TaskSet,
    as_float,
    as_messages,
    describe,
)
from outrider.errors import ConfigError, DataError, InvalidResult
from outrider.tokens.tool_calls import call_id
from outrider.types import Message, Role, Step, Task, ToolCall, ToolSchema

Observation: TypeAlias = str | Message | Sequence[Message] | None
"""Text, one message, several messages (one per tool call, for example), or None if the episode has ended."""


class Environment(ABC):
    """Base class of environments. One instance is one episode.

    A subclass defines :meth:`tasks`, :meth:`reset` and :meth:`step`; everything else has a default. A recipe
    names the class by its import path, for example ``type = "guess:GuessNumber"``. The keys of the section
    ``environment`` are the fields of the inner class ``Settings``::

        class GuessNumber(outrider.Environment):
            class Settings(outrider.EnvironmentSettings):
                highest: int = 15

            @classmethod
            def tasks(cls, settings, split):
                first = 1 if split == "train" else 2
                return [outrider.Task(key=f"{split}/{n}", question=str(n)) for n in range(first, 16, 2)]

            def reset(self, task, seed):
                self.hidden = int(task.question)
                return f"Guess a number from 1 to {self.settings.highest}."

            def step(self, action):
                if action.strip() == str(self.hidden):
                    return "Correct.", 1.0, True
                return "Try again.", 0.0, False

    Methods may block: every call runs in a thread. Raise :class:`~outrider.errors.ToolFault` or
    :class:`~outrider.errors.EnvironmentFault` if infrastructure breaks (a server, a simulator); the rollout
    is then masked and has no reward. Malformed model output must never raise: return an observation that
    explains the problem, with ``invalid=True``.

    Class attributes:
        Settings: settings of the environment, a subclass of :class:`EnvironmentSettings`.
        name: name in messages and evaluations; by default made from the class name (``guess-number``).
        stop: strings that end a turn of the policy; they stay in the turn's text. If they depend on the
            settings, define :meth:`stop_strings`.
        protocol: ``chat`` appends an observation as a new user message, ``inline`` continues the open
            assistant message.
        stateful: whether an action changes hidden state. If False, RAPO may show a retrieved step without
            executing it (mode ``execute``).
        can_copy: whether :meth:`copy` works. If False, methods that branch replay the actions instead.

    Attributes:
        settings: the validated settings.
        shared: what :meth:`open_shared` returned.
        task: the task of this episode, set before :meth:`reset`.
        turn: the policy's last message: ``content``, ``reasoning``, ``tool_calls`` and ``problems``.
        episode_return: sum of the step rewards so far.
        metrics: named numbers of this episode. For example, ``self.metrics["num_moves"] = 3``; the means are
            recorded as ``environment/mean/num_moves``.
    """

    Settings: ClassVar[type[EnvironmentSettings]] = EnvironmentSettings
    name: ClassVar[str] = ""
    stop: ClassVar[tuple[str, ...]] = ()
    protocol: ClassVar[Literal["inline", "chat"]] = "chat"
    stateful: ClassVar[bool] = True
    can_copy: bool = True

    task: Task
    turn: Message

    def __init__(self, settings: Any = None, shared: Any = None) -> None:
        """``settings`` None means the defaults."""
        self.settings: Any = self.Settings() if settings is None else settings
        self.shared = shared
        self.episode_return = 0.0
        self.metrics: dict[str, float] = {}

    @classmethod
    @abstractmethod
    def tasks(cls, settings: Any, split: str) -> Sequence[Task]:
        """Return the tasks of a split (``train``, ``valid``, ``test``), always in the same order.

        Keys are unique within a split, and a task belongs to one split only.
        """

    @abstractmethod
    def reset(self, task: Task, seed: int) -> str | Message | Sequence[Message]:
        """Start the episode and return the prompt, as text or as messages.

        Draw random numbers from ``seed`` only. All rollouts of a group get the same task and seed.
        """

    @abstractmethod
    def step(self, action: str) -> StepResult | tuple[Observation, float, bool]:
        """Execute the text of one policy turn.

        Returns:
            A :class:`StepResult`, or a tuple of observation, reward and done.
        """

    def result(self) -> EpisodeResult:
        """Return the result of the episode so far.

        By default, the return is the sum of the step rewards, and a positive return is a success.
        """
        return EpisodeResult(
            episode_return=self.episode_return, success=self.episode_return > 0, metrics=dict(self.metrics)
        )

    def copy(self) -> Self:
        """Return a copy in the same state, with the same ``settings``, ``task`` and ``shared``."""
        not_copied = (self.settings, self.shared, getattr(self, "task", None))
        return copy.deepcopy(self, {id(value): value for value in not_copied})

    def close(self) -> None:  # noqa: B027 - a default that does nothing
        """Release the resources of this episode."""

    def expert(self) -> Sequence[str] | Sequence[Step] | None:
        """Return the turns of an expert that solves this episode, or None if there is none.

        Called after :meth:`reset`, on a separate instance. Texts are then executed in a new episode and are
        only used if it is a success.
        """
        return None

    def tools(self) -> Sequence[ToolSchema | Callable[..., Any]]:
        """Return the tools that the policy calls natively: JSON schemas, or functions with type hints and a
        docstring, from which the schema is made.

        The settings must define ``call_format`` (for example ``hermes``). Calls that match a schema are in
        ``self.turn.tool_calls``, and what was wrong with others is in ``self.turn.problems``; :meth:`step`
        executes them.
        """
        return ()

    @classmethod
    def stop_strings(cls, settings: Any) -> tuple[str, ...]:
        """Return the strings that end a turn; by default :attr:`stop`. Override it if settings decide."""
        return cls.stop

    @classmethod
    def open_shared(cls, settings: Any) -> Any:
        """Create an object that all episodes share as ``self.shared``, for example a simulator or an index.

        If it has a method ``close``, this is called at the end of the run. Raise
        :class:`~outrider.errors.ToolUnavailable` if something is missing; the run then stops before the first
        rollout.
        """
        return None

    @classmethod
    def build(cls, settings: Any, context: object = None) -> TaskSet:
        """Return the task set that the run uses."""
        return EnvironmentTaskSet(cls, settings)


class EnvironmentTaskSet:
    """The tasks of an :class:`Environment` class, and the factory of its episodes."""

    def __init__(self, environment: type[Environment], settings: Any) -> None:
        if environment.protocol not in ("inline", "chat"):
            raise ConfigError(
                f"{environment.__qualname__}.protocol is {environment.protocol!r}, must be 'inline' or 'chat'"
            )
        if isinstance(environment.stop, str):
            raise ConfigError(
                f"{environment.__qualname__}.stop is a text, no tuple of texts: "
                f"write stop = ({environment.stop!r},)"
            )
        self.plugin_class, self.settings = environment, settings
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", environment.__name__).lower()
        self.name = environment.name or words
        self.stop = environment.stop_strings(settings)
        self.stateful = environment.stateful
        self._expert_factory: EpisodeFactory | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        tasks: object = self.plugin_class.tasks(self.settings, split)
        if tasks is None:
            raise DataError(f"{self.plugin_class.__qualname__}.tasks returned None, no list of Task")
        # A generator would be empty when it is read for the second time.
        return tasks if isinstance(tasks, Sequence) else list(cast(Iterable[Task], tasks))

    def make(self) -> "EpisodeFactory":
        return EpisodeFactory(self.plugin_class, self.settings, self.plugin_class.open_shared(self.settings))

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        if self.plugin_class.expert is Environment.expert or not self.settings.has_experts:
            return None
        if self._expert_factory is None:
            self._expert_factory = self.make()
        env = self._expert_factory(task)
        try:
            Episode(env).start(seed)
            answer: object = env.environment.expert()
        finally:
            env.close()
        if answer is None:
            return None
        if isinstance(answer, str):
            raise InvalidResult("what expert returned is a text, no list of turns")
        turns = tuple(cast(Iterable[str | Step], answer))  # a generator has no length
        texts = [turn for turn in turns if isinstance(turn, str)]
        if len(texts) < len(turns):
            return [Step(text=turn, observation="") if isinstance(turn, str) else turn for turn in turns]
        # Use a new episode, because the expert may have stepped its own.
        env = self._expert_factory(task)
        try:
            episode = Episode(env)
            episode.start(seed)
            episode.play(texts)
            return episode.steps if episode.result().success else None
        finally:
            env.close()

    def close(self) -> None:
        factory, self._expert_factory = self._expert_factory, None
        if factory is not None:
            factory.close()


class EpisodeFactory:
    """Makes the episodes of an :class:`Environment` class, and owns their shared object."""

    def __init__(self, environment: type[Environment], settings: Any, shared: Any) -> None:
        self._environment, self._settings, self._shared = environment, settings, shared
        self.call_budget = getattr(shared, "call_budget", None)  # the scheduler reads it

    def __call__(self, task: Task) -> "EnvironmentEpisode":
        environment = self._environment(self._settings, self._shared)
        if not hasattr(environment, "settings"):
            raise InvalidResult(
                f"{self._environment.__qualname__}.__init__ must call super().__init__(settings, shared)"
            )
        return EnvironmentEpisode(environment, task)

    def close(self) -> None:
        shared, self._shared = self._shared, None
        if callable(close := getattr(shared, "close", None)):
            close()


class EnvironmentEpisode:
    """Adapts an :class:`Environment` and its task to :class:`~outrider.environments.base.Env`."""

    def __init__(self, environment: Environment, task: Task) -> None:
        self.environment, self._task = environment, task
        self._is_open = True
        self._role: Role = "inline" if environment.protocol == "inline" else "user"
        if environment.can_copy:  # the loop checks whether the method exists
            self.copy = self._copy
        self.call_format: str | None = environment.settings.call_format
        self.tool_schemas: tuple[ToolSchema, ...] = ()
        if self.call_format is not None:
            self._role = "tool"

    def reset(self, seed: int) -> Sequence[Message]:
        environment = self.environment
        environment.task, environment.episode_return, environment.metrics = self._task, 0.0, {}
        prompt = _finished(environment.reset(self._task, seed), "reset")
        if self._role == "tool":
            self.tool_schemas = tuple(map(_schema, environment.tools()))
        return _messages(prompt, "user", "what reset returned")

    def step(self, message: Message) -> StepResult:
        self.environment.turn = message
        answer = _finished(self.environment.step(message.content), "step")
        if isinstance(answer, tuple) and len(answer) == 3:
            observation, reward, done = answer
            messages = () if observation is None else self._observations(observation)
            answer = StepResult(messages=messages, reward=reward, done=done)
        elif isinstance(answer, StepResult):
            if isinstance(answer.message, str):
                answer = replace(answer, message=None, messages=self._observations(answer.message))
        else:
            is_gym = isinstance(answer, tuple) and len(answer) in (4, 5)
            raise InvalidResult(
                f"what step returned is {describe(answer)}, no StepResult and no (observation, reward, done)"
                f"{'; play environments of Gymnasium with type = gym' if is_gym else ''}"
            )
        self.environment.episode_return += as_float(answer.reward, "reward")
        return answer

    def _observations(self, observation: Any) -> tuple[Message, ...]:
        """Convert an observation to messages.

        With native calls, a text becomes one tool message per call of the turn, because some chat templates
        reject tool messages without a call id.
        """
        turn = self.environment.turn
        if self._role != "tool" or not isinstance(observation, str):
            return _messages(observation, self._role, "the observation")
        if not turn.tool_calls:
            call = ToolCall(name="", call_id=call_id(0))
            return (_result(call, observation),) if turn.problems else _messages(observation, "user", "")
        return tuple(_result(call, observation) for call in turn.tool_calls)

    def result(self) -> EpisodeResult:
        return self.environment.result()

    def _copy(self) -> "EnvironmentEpisode":
        twin = EnvironmentEpisode(self.environment.copy(), self._task)
        twin.tool_schemas = self.tool_schemas
        return twin

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.environment.close()


def _finished(value: Any, method: str) -> Any:
    """Return what a method returned. Raises InvalidResult for a coroutine: the loop awaits no environment."""
    if inspect.iscoroutine(value):
        value.close()
        raise InvalidResult(f"{method} is an async function; define it with def")
    return value


def _result(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.call_id, tool_name=call.name)


def _messages(value: Any, role: Role, name: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role=role, content=value),)
    return (value,) if isinstance(value, Message) else as_messages(value, name)


def _schema(tool: ToolSchema | Callable[..., Any]) -> ToolSchema:
    if not callable(tool):
        return tool
    from outrider.tools.functions import tool_class

    return tool_class(tool).schema
