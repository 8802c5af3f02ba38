"""Environments: the base class that users derive from, the protocol that the rollout loop uses, the driver of
episodes, and the validation of their results.
"""

import inspect
import json
import math
import re
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import partial
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    runtime_checkable,
)

from pydantic import SerializerFunctionWrapHandler, model_serializer

from outrider import deprecated
from outrider.config import Settings
from outrider.environments.conversations import Conversation, ExternalAgent, Refusal, SampledTurn, ServedTurn
from outrider.errors import (
    ConfigError,
    DataError,
    EnvironmentFault,
    InvalidResult,
    NonFiniteResult,
    ToolFault,
    ToolUnavailable,
    unwrap_group,
)
from outrider.plugins.registry import Section, build, resolve
from outrider.suggestions import did_you_mean
from outrider.tokens.call_formats import convert_calls, get_call_format, read_turn
from outrider.tokens.tool_calls import call_id
from outrider.tools.base import CallBudget, is_timeout, plain_schema
from outrider.types import CallRecord, CallStatus, Message, Role, Step, Task, ToolCall, ToolSchema, shorten

# Validation of values that user code returns (rewards, success flags, metrics) and conversion to Python's
# types. Scalars of NumPy, PyTorch and other array libraries are read by their ``item()``, so that none is
# imported.


_MAX_CHARS: Final = 60
_TEXT: Final = (str, bytes, bytearray, complex)  # float() would parse text, and complex would lose a part


def as_float(value: Any, name: str) -> float:
    """Convert a number to a float.

    Args:
        value: a Python number, a Decimal, a Fraction, or an array with one element.
        name: name of the field in error messages.

    Raises:
        InvalidResult: if the value is not a number.
        NonFiniteResult: for NaN and infinity.
    """
    if type(value) is float and math.isfinite(value):
        return value
    number = _number(value, name)
    if not math.isfinite(number):
        raise NonFiniteResult(f"{name} is {describe(value)}, no finite number")
    return number


def as_bool(value: Any, name: str) -> bool:
    """Convert a flag to a bool: True, False, 1, 0 and scalars of array libraries with these values.

    Raises:
        InvalidResult: for any other value.
        NonFiniteResult: for NaN and infinity.
    """
    if isinstance(value, bool):
        return value
    number = _number(value, name, expected="neither true nor false")
    if not math.isfinite(number):
        raise NonFiniteResult(f"{name} is {describe(value)}, neither true nor false")
    if number not in (0.0, 1.0):
        raise InvalidResult(f"{name} is {describe(value)}, neither true nor false")
    return number == 1.0


def as_count(value: Any, name: str) -> int:
    """Convert a whole number of at least 0 to an int. Raises InvalidResult for any other value."""
    if type(value) is int and value >= 0:
        return value
    number = _number(value, name, expected="no whole number")
    if not (number >= 0 and number.is_integer()):
        raise InvalidResult(f"{name} is {describe(value)}, no whole number of at least 0")
    return int(number)


def as_metrics(value: Any, name: str = "metrics") -> dict[str, float]:
    """Convert a mapping of names to numbers.

    Metrics that are None, because they are not defined in this episode, are left out.

    Raises:
        InvalidResult: if the value is not a mapping, or contains an empty name or a value that is not a
            number.
        NonFiniteResult: for NaN and infinity.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidResult(f"{name} is {describe(value)}, no mapping of names to numbers")
    metrics: dict[str, float] = {}
    for key, number in value.items():
        if not str(key).strip():
            raise InvalidResult(f"{name} has a metric with an empty name")
        if number is not None:
            metrics[str(key)] = as_float(number, f"the metric {key}")
    return metrics


def describe(value: Any) -> str:
    """Format a value and its type for an error message of one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # user classes may fail in repr()
        text = "a value"
    shortened = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
    return shortened if value is None else f"{shortened} ({type(value).__name__})"


def _number(value: Any, name: str, *, expected: str = "no finite number") -> float:
    scalar = value
    if not isinstance(scalar, int | float):
        if _is_masked(value):
            raise InvalidResult(f"{name} is masked, {expected}")
        item = getattr(scalar, "item", None)
        if callable(item):
            try:
                scalar = item()
            except Exception:  # several elements, or an array that is not on any device
                scalar = None
        is_number = isinstance(scalar, Real | Decimal) or hasattr(type(scalar), "__float__")
        if isinstance(scalar, _TEXT) or not is_number or _is_date(value) or _is_date(scalar):
            raise InvalidResult(f"{name} is {describe(value)}, {expected}")
    try:
        return float(scalar)
    except OverflowError:
        return math.inf
    except Exception as error:  # user types may fail in __float__
        raise InvalidResult(f"{name} is {describe(value)}, {expected}") from error


def _is_masked(value: Any) -> bool:
    """Whether a value is a masked NumPy element, whose ``item()`` would return the data below the mask."""
    if not (hasattr(value, "mask") and hasattr(value, "filled")):
        return False
    try:
        return bool(value.mask)
    except ValueError:  # several elements, which are no number anyway
        return False


def _is_date(value: Any) -> bool:
    """Whether a value is a date or duration of NumPy, which ``float()`` reads as a count of its unit."""
    return getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M")


# The environment protocol.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome of one policy message.

    Numbers and flags may be of any numeric type, such as a scalar of NumPy or PyTorch; they are converted.

    Attributes:
        message: the observation, as text or as a message; None if the episode has ended without one.
        messages: the observations if there are several, for example one per tool call.
        reward: the step reward.
        done: whether the episode has ended.
        invalid: whether the turn contained no action that the environment could parse. The observation then
            explains what was wrong.
        refused: whether the action was parsed but not executed, for example a door that does not exist or a
            call beyond the budget.
        truncated: set together with ``done`` if the environment's own limit of moves ended the episode.
        num_tool_calls: number of tool calls that were executed.
        tools: names of the executed tools.
        tool_calls: what happened to each tool call of the turn, for the records. If it is empty, the calls of
            the turn are recorded with the status that the flags above imply.
    """

    message: Message | str | None = None
    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    invalid: bool = False
    refused: bool = False
    truncated: bool = False
    num_tool_calls: int = 0
    tools: tuple[str, ...] = ()
    tool_calls: tuple[CallRecord, ...] = ()

    def __post_init__(self) -> None:
        if self.message is not None and self.messages:
            raise ValueError("a step has either message or messages, not both")

    @property
    def observations(self) -> tuple[Message, ...]:
        """All observations, in order."""
        if isinstance(self.message, str):
            return (Message(role="user", content=self.message),)
        return self.messages or (() if self.message is None else (self.message,))

    @property
    def text(self) -> str:
        """Text of the observations, one per line; empty if the episode ended without one."""
        return "\n".join(message.content for message in self.observations)

    @property
    def carried_out(self) -> bool:
        """Whether the turn contained an action and the environment executed it."""
        return not (self.invalid or self.refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """The environment's own record of an episode.

    Attributes:
        episode_return: the return. The rollout loop does not add up step rewards itself.
        success: whether the task was solved.
        metrics: named numbers; None means that a metric is not defined in this episode.
        targets: the accepted answers; None: the ``answers`` of the task.
        answer: the answer that was graded, extracted from the policy's text.
        reward_parts: the numbers that the return consists of, by name, for example correctness and penalties.
        reason: why the return is what it is, in one line.

    The last four are only recorded; None means that the environment does not know them. Values of another
    type are converted or left out and never invalidate the episode.
    """

    episode_return: float
    success: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    targets: Sequence[str] | None = None
    answer: str | None = None
    reward_parts: Mapping[str, float] | None = None
    reason: str | None = None

    def to_grade(self) -> dict[str, str]:
        """Return the columns of the rollout's record that explain the return, without unknown ones. Long
        texts are cut.
        """
        columns = {
            name: shorten(" ".join(str(text).split()), _MAX_ANSWER_CHARS)
            for name, text in (("answer", self.answer), ("reason", self.reason))
            if text is not None
        }
        if self.targets is not None:
            columns["targets"] = targets_json(self.targets)
        if isinstance(self.reward_parts, Mapping):
            parts = list(finite_numbers(self.reward_parts).items())[:_MAX_PARTS]
            columns["reward_parts"] = json.dumps({shorten(name, _MAX_CHARS): part for name, part in parts})
        return columns


_MAX_ANSWER_CHARS: Final = 300
_MAX_TARGETS: Final = 20
_MAX_PARTS: Final = 20


def targets_json(targets: object) -> str:
    """Format accepted answers as a JSON list for the records: the first ones, each of them cut. A single
    value is one answer.
    """
    is_single = isinstance(targets, str | Mapping) or not isinstance(targets, Iterable)
    answers = [targets] if is_single else islice(cast(Iterable[object], targets), _MAX_TARGETS)
    return json.dumps([shorten(str(answer), _MAX_ANSWER_CHARS) for answer in answers], ensure_ascii=False)


def finite_numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Select the finite numbers of a mapping that is only recorded, so that no other value is an error."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        with suppress(InvalidResult, NonFiniteResult):
            numbers[str(name)] = as_float(value, "")
    return numbers


_T = TypeVar("_T")


def as_messages(value: object, name: str) -> tuple[Message, ...]:
    """Convert a sequence of messages to a tuple. Raises InvalidResult for any other value."""
    return _as_tuple(value, Message, name, "Message", "Message")


def _require_open(messages: Sequence[Message], name: str) -> None:
    """Raise InvalidResult for a last message of the assistant, which a template would close before the
    policy's turn.
    """
    chat = [message for message in messages if message.role != "inline"]
    if chat and chat[-1].role == "assistant":
        raise InvalidResult(
            f"{name} ends with an assistant message, but the policy writes the next one: to begin its turn, "
            "return the beginning with the role inline, after a user message"
        )


def _as_tuple(value: object, kind: type[_T], name: str, item: str, items: str) -> tuple[_T, ...]:
    if isinstance(value, kind | str | Mapping) or not isinstance(value, Iterable):
        raise InvalidResult(f"{name} is {describe(value)}, no sequence of {items}")
    values = tuple(value)
    for each in values:
        if not isinstance(each, kind):
            raise InvalidResult(f"{name} contains {describe(each)}, no {item}")
    return values


class TaskLists(Settings):
    """Files of task keys, one per line. A split with a file has only these tasks, in the order of the file;
    all must be tasks of that split.
    """

    input_paths: ClassVar[frozenset[str]] = frozenset({"train", "valid", "test"})

    train: Path | None = None
    """Keys of the training tasks."""
    valid: Path | None = None
    """Keys of the validation tasks."""
    test: Path | None = None
    """Keys of the test tasks."""


class EnvironmentSettings(Settings):
    """Base class of the settings of environments.

    Its class variables and properties describe the environment before a run builds it. A subclass may
    override a property by a class variable.

    Class attributes:
        is_closed_book: whether the tasks are questions that can also be answered without the environment.
        starts_quickly: whether ``--dry-run`` may list the tasks and start an episode: this takes seconds at
            most and starts no program.
        reports_metrics: whether the means of the episodes' metrics are recorded with every step and
            evaluation. The metrics of single rollouts are always recorded.
    """

    is_closed_book: ClassVar[bool] = False
    starts_quickly: ClassVar[bool] = True
    reports_metrics: ClassVar[bool] = True
    if TYPE_CHECKING:
        type: str = ""  # set to the plug-in's name if the class does not declare it

    task_list: TaskLists = TaskLists()
    """Files of task keys that select and order the tasks of a split, for example
    ``task_list = {test = "l0_test.txt"}``."""

    @model_serializer(mode="wrap")
    def _without_empty_list(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave ``task_list`` out of recorded settings unless it names a file."""
        values: dict[str, Any] = dump(self)
        if self.task_list == TaskLists():
            values.pop("task_list", None)
        return values

    @property
    def has_experts(self) -> bool:
        """Whether an expert may exist for some task."""
        return True

    @property
    def max_concurrent(self) -> int | None:
        """Maximum number of concurrent episodes, or None if there is no limit."""
        return None

    def waiting_s(self, num_concurrent: int) -> float:
        """Seconds that a step may wait for the steps of other episodes before its own time limit starts."""
        return 0.0

    def replayed_differently(self) -> list[str]:
        """Names of tasks in which the same actions may lead to different states. Methods that fork by replay
        reject them.
        """
        return []

    def tool_names(self) -> tuple[str, ...]:
        """Tag names of the tools that the policy can call."""
        return ()

    @property
    def calls_tools(self) -> bool:
        """Whether a step without any tool call is suspicious and worth a warning."""
        return False

    @property
    def call_format(self) -> str | None:
        """The format of native tool calls (``hermes``, for example), or None if turns are plain text."""
        return None

    @property
    def keeps_conversations(self) -> bool:
        """Whether environments are :class:`~outrider.environments.conversations.ExternalAgent` objects."""
        return False

    @property
    def score_mark(self) -> str:
        """A remark on the scores for reports, if success means something else than in the benchmark."""
        return ""

    @property
    def rebuilt_prompt_tokens(self) -> int | None:
        """Most tokens of a prompt, if every turn has a prompt of its own; None if conversations grow."""
        return None

    def input_files(self) -> Mapping[str, Path]:
        """Files whose contents influence the run, by name, beside those of fields of type Path."""
        return {}

    def adapt_task_set(self, task_set: "TaskSet") -> "TaskSet":
        """Return the task set that the run uses, for settings that change how an environment is played."""
        return task_set


class Env(Protocol):
    """One episode, as the rollout loop steps it. Users write an
    :class:`Environment`.

    Methods may block, because the loop calls them in a thread. They raise
    :class:`~outrider.errors.ToolFault` or :class:`~outrider.errors.EnvironmentFault` if infrastructure
    breaks, and never for malformed model output.
    """

    def reset(self, seed: int) -> Sequence[Message]:
        """Start the episode and return the messages of the prompt.

        Rollouts of a group use the same seed and should start in the same state.
        """
        ...

    def step(self, message: Message) -> StepResult:
        """Execute one policy message, which contains the text that the policy generated in this turn."""
        ...

    def result(self) -> EpisodeResult:
        """Return the result of the episode so far. May be called after any step of a truncated rollout."""
        ...

    def close(self) -> None:
        """Release processes and files; may be called twice."""
        ...


@runtime_checkable
class CopyableEnvironment(Env, Protocol):
    """An environment whose episode can be forked."""

    def copy(self) -> "CopyableEnvironment":
        """Return an independent environment in the same state, without executing actions again."""
        ...


class TaskSet(Protocol):
    """Named tasks together with the environment that plays them, as the rest of the package sees them.

    ``stop`` and ``stateful`` are those of :class:`Environment`.
    """

    name: str
    stop: tuple[str, ...]
    stateful: bool

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split (``train``, ``valid``, ``test``), always the same in the same order."""
        ...

    def make(self) -> "EnvironmentFactory":
        """Load the resources of the task set and return a factory.

        Raises an error if something is missing, so that a run fails before its first rollout.
        """
        ...

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """Return the steps of a scripted or gold-path expert, or None if there is none for the task.

        Called in a separate thread, which is abandoned after ``train.expert_timeout_s`` seconds, followed by
        :meth:`close`.
        """
        ...

    def close(self) -> None:
        """Release resources of :meth:`expert`; a later call starts them again. May be called twice."""
        ...


class EnvironmentFactory(Protocol):
    """Makes environments and owns their shared resources, for example an index or a pool of simulators."""

    def __call__(self, task: Task) -> Env:
        """Return a new environment for one episode of the task."""
        ...

    def close(self) -> None:
        """Release the shared resources; may be called twice."""
        ...


deprecated.keep_old_names(__name__)


# The driver of episodes.


class Episode:
    """One episode of an environment and its history.

    Checks every value that the environment returns and converts numbers and flags to Python's own types.
    Methods that call the environment raise InvalidResult for values of a wrong type and NonFiniteResult for
    NaN and infinity.

    Attributes:
        environment: the environment.
        prompt: the messages that ``reset`` returned.
        actions: the texts of the policy's turns.
        results: the environment's results of these turns.
        ends_with_answer: whether the whole last turn is an answer, without tool calls.
    """

    is_external = False
    """Whether an external program manages the conversation (:class:`ExternalEpisode`)."""

    def __init__(self, environment: Env) -> None:
        self.environment = environment
        self.prompt: tuple[Message, ...] = ()
        self.actions: list[str] = []
        self.results: list[StepResult] = []
        self.ends_with_answer = False

    @property
    def opening(self) -> str:
        """Text of the prompt, without the descriptions of tools."""
        return "\n".join(message.content for message in self.prompt)

    @property
    def tools(self) -> Sequence[ToolSchema]:
        """Tools that the prompt describes and that calls are checked against; empty if turns are text."""
        schemas: Sequence[ToolSchema] = getattr(self.environment, "tool_schemas", ())
        return schemas

    @property
    def call_format(self) -> str | None:
        """The format of native tool calls; None if turns are text."""
        form: str | None = getattr(self.environment, "call_format", None)
        return form

    @property
    def steps(self) -> tuple[Step, ...]:
        """The history as the steps of a trajectory."""
        return tuple(
            Step(text=text, observation=result.text, is_terminal=result.done)
            for text, result in zip(self.actions, self.results, strict=True)
        )

    def start(self, seed: int) -> tuple[Message, ...]:
        """Reset the environment and return the prompt."""
        self.prompt = as_messages(self.environment.reset(seed), "what reset returned")
        if not self.prompt:
            raise InvalidResult("reset returned no message: the policy would have no prompt")
        _require_open(self.prompt, "what reset returned")
        return self.prompt

    def read(self, text: str) -> Message:
        """Parse a turn of the policy into the message for the environment.

        Tool calls are parsed if the environment has native tool calls.

        Raises:
            EnvironmentFault: if the environment's own parsing code fails.
        """
        form = self.call_format
        if form is None:
            return Message(role="assistant", content=text)
        turn = self._guarded(lambda: read_turn(text, get_call_format(form), self.tools))
        return Message(
            role="assistant",
            content=turn.content,
            reasoning=turn.reasoning,
            tool_calls=turn.tool_calls,
            problems=turn.problems,
        )

    def convert(self, text: str) -> str:
        """Convert the tool calls of a recorded turn from the Hermes format, which imported chats have, to the
        format of this environment. Raises EnvironmentFault like :meth:`read`.
        """
        form = self.call_format
        if form is None:
            return text
        return self._guarded(lambda: convert_calls(text, get_call_format(form), self.tools))

    def _guarded(self, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except (Exception, SystemExit) as raised:  # errors of plug-in code must not end the run
            error = unwrap_group(raised, ToolFault, EnvironmentFault, InvalidResult)
            if isinstance(error, ToolFault | EnvironmentFault | InvalidResult):
                raise error from error.__cause__
            kind = type(self.environment).__name__
            raise EnvironmentFault(f"{kind} cannot read a turn: {type(error).__name__}: {error}") from error

    def act(self, text: str, turn: Message | None = None) -> StepResult:
        """Step the environment with one policy turn. ``turn`` is the parsed ``text``; None: parse it here."""
        turn = self.read(text) if turn is None else turn
        # A native turn without calls is an answer as a whole. If the token limit cuts it, it is not the
        # answer that the policy was writing. An external program decides itself what a turn is.
        has_calls = bool(turn.tool_calls or turn.problems)
        self.ends_with_answer = self.call_format is not None and not self.is_external and not has_calls
        start = time.perf_counter()
        result = _converted(self.environment.step(_copy_arguments(turn)), "step")
        if not result.done and not self.is_external:
            _require_open(result.observations, "what step returned")
        if not result.tool_calls and not self.is_external:
            seconds = round(time.perf_counter() - start, 3)
            result = replace(result, tool_calls=_implied_calls(turn, result, seconds))
        self.actions.append(text)
        self.results.append(result)
        return result

    def play(self, texts: Sequence[str]) -> tuple[Step, ...]:
        """Step with texts until they or the episode end, and return the executed steps."""
        num_before = len(self.actions)
        for text in texts:
            if self.act(text).done:
                break
        return self.steps[num_before:]

    def result(self) -> EpisodeResult:
        """Return the environment's result of the episode."""
        record: object = self.environment.result()
        if not isinstance(record, EpisodeResult):
            raise InvalidResult(f"what result returned is {describe(record)}, no EpisodeResult")
        return replace(
            record,
            episode_return=as_float(record.episode_return, "episode_return"),
            success=as_bool(record.success, "success"),
            metrics=as_metrics(record.metrics),
        )

    # Forks

    def history(self) -> Self:
        """Copy the history, for :meth:`replay` and :meth:`resume`."""
        twin = copy(self)
        twin.actions, twin.results = list(self.actions), list(self.results)
        return twin

    def resume(self, history: Self) -> None:
        """Continue in a copied environment whose episode so far is ``history``."""
        self.prompt, self.actions, self.results = history.prompt, list(history.actions), list(history.results)

    def replay(self, history: Self, seed: int) -> Iterator[Callable[[], object]]:
        """Yield the calls that replay ``history`` in a new environment. Execute them one after the other.

        Raises:
            EnvironmentFault: here or in a call, if the environment behaves differently.
        """
        yield partial(self.start, seed)
        self._require_prompt(history)
        for number in range(len(history.actions)):
            yield partial(self._repeat, history, number)

    def _require_prompt(self, history: Self) -> None:
        if self.prompt != history.prompt:
            raise EnvironmentFault("the environment opened differently: it cannot fork by replay")

    def _repeat(self, history: Self, number: int) -> None:
        answer, expected = self.act(history.actions[number]), history.results[number]
        names = (item.name for item in fields(StepResult))
        if differences := [name for name in names if getattr(answer, name) != getattr(expected, name)]:
            raise EnvironmentFault(
                f"a replayed prefix was answered differently ({', '.join(differences)}): "
                "this environment cannot fork by replay"
            )

    # External programs

    @property
    def request(self) -> Conversation | None:
        """The pending request of an external program; None for ordinary environments."""
        return None


class ExternalEpisode(Episode):
    """An episode whose conversation an external program manages. Records what a replay needs.

    Attributes:
        requests: the requests of the program, one per step.
        turns: the sampled turns, by number of the step.
        refusals: the refusals, with the number of the step before which they occurred.
        pending: the unanswered request at the end of a history.
    """

    is_external = True

    def __init__(self, environment: ExternalAgent) -> None:
        super().__init__(environment)
        self.environment: ExternalAgent
        self.requests: list[Conversation] = []
        self.turns: dict[int, SampledTurn] = {}
        self.refusals: list[tuple[int, Refusal]] = []
        self.pending: Conversation | None = None  # the last request of a history

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return self.request.tools

    @property
    def request(self) -> Conversation:
        return self.environment.request

    @property
    def opening(self) -> str:
        return self.environment.opening or super().opening

    def read(self, text: str) -> Message:
        return self._guarded(lambda: self.environment.read(text))

    def convert(self, text: str) -> str:
        return self._guarded(lambda: self.environment.convert(text))

    def set_sampled(self, turn: SampledTurn | ServedTurn) -> None:
        """Pass log-probs and token bytes of the next turn to the program; call this before :meth:`read`."""
        if isinstance(turn, SampledTurn):
            self.turns[len(self.actions)] = turn
        self.environment.sampled(turn)

    def act(self, text: str, turn: Message | None = None) -> StepResult:
        self.requests.append(self.request)
        return super().act(text, turn)

    def refuse(self, refusal: Refusal) -> StepResult | None:
        """Refuse the pending request.

        Returns the program's next request or its end, or None if the program ended because its conversation
        is too long.
        """
        self.refusals.append((len(self.actions), refusal))
        result: object = self.environment.refuse(refusal)
        converted = None if result is None else _converted(result, "refuse")
        if converted is not None and not converted.done and not self.actions:
            self.prompt = self.request.messages
        return converted

    def history(self) -> Self:
        twin = super().history()
        twin.requests, twin.turns, twin.refusals = list(self.requests), dict(self.turns), list(self.refusals)
        # If this is itself a history, its environment may have continued since.
        twin.pending = self.request if self.pending is None else self.pending
        return twin

    def resume(self, history: Self) -> None:
        super().resume(history)
        self.requests, self.turns = list(history.requests), dict(history.turns)
        self.refusals = list(history.refusals)

    def replay(self, history: Self, seed: int) -> Iterator[Callable[[], object]]:
        yield partial(self.start, seed)
        yield from self._refuse_again(history, 0)
        self._require_prompt(history)
        for number in range(len(history.actions)):
            self._require_request(history.requests[number])
            if number in history.turns:
                self.set_sampled(history.turns[number])
            yield partial(self._repeat, history, number)
            yield from self._refuse_again(history, number + 1)
        self._require_request(history.pending)

    def _refuse_again(self, history: Self, num_actions: int) -> Iterator[Callable[[], object]]:
        for number, refusal in history.refusals:
            if number == num_actions:
                yield partial(self._require_next, refusal)

    def _require_next(self, refusal: Refusal) -> None:
        result = self.refuse(refusal)
        if result is None or result.done:
            raise EnvironmentFault("a program ended earlier in a replay: it cannot fork by replay")

    def _require_request(self, expected: Conversation | None) -> None:
        if self.request != expected:
            raise EnvironmentFault("a program sent another request in a replay: it cannot fork by replay")


def open_episode(environment: Env) -> Episode:
    """Return the driver of an environment."""
    return ExternalEpisode(environment) if isinstance(environment, ExternalAgent) else Episode(environment)


def _converted(result: object, method: str) -> StepResult:
    """Validate and convert the result that ``method`` of an environment returned."""
    if not isinstance(result, StepResult):
        raise InvalidResult(f"what {method} returned is {describe(result)}, no StepResult")
    if result.message is not None and not isinstance(result.message, Message):
        raise InvalidResult(f"message is {describe(result.message)}, no Message")
    return replace(
        result,
        messages=as_messages(result.messages, "messages"),
        reward=as_float(result.reward, "reward"),
        done=as_bool(result.done, "done"),
        invalid=as_bool(result.invalid, "invalid"),
        refused=as_bool(result.refused, "refused"),
        truncated=as_bool(result.truncated, "truncated"),
        num_tool_calls=as_count(result.num_tool_calls, "num_tool_calls"),
        tools=_as_tuple(result.tools, str, "tools", "name", "names"),
        tool_calls=tuple(
            _as_record(call)
            for call in _as_tuple(result.tool_calls, CallRecord, "tool_calls", "CallRecord", "CallRecord")
        ),
    )


def _as_record(call: CallRecord) -> CallRecord:
    if call.status not in _STATUSES:
        raise InvalidResult(
            f"the status of a CallRecord is {describe(call.status)}, none of {', '.join(_STATUSES)}"
        )
    seconds = None
    if call.seconds is not None:
        with suppress(NonFiniteResult):
            seconds = as_float(call.seconds, "the field seconds of a CallRecord")
    return replace(call, seconds=seconds)


_STATUSES: Final = get_args(CallStatus)


def _copy_arguments(turn: Message) -> Message:
    """Return the turn with copies of the arguments, which an environment or a tool may change."""
    calls = [replace(call, arguments=deepcopy(dict(call.arguments))) for call in turn.tool_calls]
    return replace(turn, tool_calls=tuple(calls)) if calls else turn


def _implied_calls(turn: Message, result: StepResult, seconds: float) -> tuple[CallRecord, ...]:
    """Records of the calls of a turn whose environment reported only flags and names. ``seconds`` is the time
    of the whole step, which is that of a single call.
    """
    status: CallStatus = "ok" if result.done or result.text.strip() else "empty"
    if result.refused:
        status = "refused"
    elif result.invalid and not (turn.problems and result.tools):
        status = "error"
    calls = [(call.name, call.arguments_text) for call in turn.tool_calls]
    calls = calls or [(name, "") for name in result.tools]
    num_executed = len(result.tools) or len(calls)  # without names, the flags are for all calls
    time_s = seconds if len(calls) == 1 else None
    records = (
        CallRecord(
            name=name, arguments=text, status=status if number < num_executed else "refused", seconds=time_s
        )
        for number, (name, text) in enumerate(calls)
    )
    return (*records, *unparsed_calls(turn.problems))


def failed_calls(turn: Message, fault: ToolFault | EnvironmentFault) -> tuple[CallRecord, ...]:
    """Records of the native calls of a turn whose step ended with a fault."""
    status: CallStatus = "timeout" if is_timeout(fault) else "error"
    calls = (
        CallRecord(name=call.name, arguments=call.arguments_text, status=status) for call in turn.tool_calls
    )
    return (*calls, *unparsed_calls(turn.problems))


def unparsed_calls(problems: Sequence[str]) -> tuple[CallRecord, ...]:
    """Records of calls that could not be parsed."""
    return tuple(CallRecord(name="", arguments=problem, status="error") for problem in problems)


# Task sets and their splits.


EnvironmentConfig: TypeAlias = Annotated[EnvironmentSettings, Section("environments")]
"""The section ``environment``: settings of the environment that ``type`` names."""
Split: TypeAlias = Literal["train", "valid", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)


def known_split(split: str, environment: str) -> Split:
    """Return ``split`` if it is one of :data:`SPLITS`. Raises ConfigError otherwise."""
    for known in SPLITS:
        if known == split:
            return known
    raise ConfigError(f"unknown split {split!r}; {environment} has {', '.join(SPLITS)}")


def split_size(config: Any, split: Split) -> int | None:
    """Return ``config.num_train``, ``num_valid`` or ``num_test``."""
    size: int | None = getattr(config, f"num_{split}")
    return size


def require_tasks(config: Any) -> None:
    """Raise ValueError if no split of the settings has a task."""
    if not any(split_size(config, split) != 0 for split in SPLITS):
        raise ValueError("num_train, num_valid and num_test are all 0: there is nothing to play")


def make_task_set(config: EnvironmentSettings) -> TaskSet:
    """Build the task set that ``config.type`` names. Raises ConfigError for a ``task_list`` that the task set
    would not use.
    """
    task_set = cast(TaskSet, build("environments", config, None))
    if config.task_list != TaskLists() and _task_lists(task_set) != config.task_list:
        raise ConfigError(
            f"environment.task_list: {task_set.name} does not keep its settings in the attribute settings; "
            "use evaluation.panels = [{task_list = FILE, ...}] for evaluations"
        )
    return config.adapt_task_set(task_set)


def _task_lists(task_set: TaskSet) -> TaskLists:
    settings = getattr(task_set, "settings", None) or getattr(task_set, "config", None)
    lists = getattr(settings, "task_list", None)
    return lists if isinstance(lists, TaskLists) else TaskLists()


def split_tasks(task_set: TaskSet, split: str) -> list[Task]:
    """Return the tasks of a split.

    Raises:
        DataError: if a value is not a task, or if two tasks have the same key. Their groups would draw the
            same random numbers, and only one of them would be generated.
    """
    tasks = list(task_set.tasks(split))
    source = f"the split {split!r} of the environment {task_set.name}"
    first_numbers: dict[str, int] = {}
    for number, task in enumerate(tasks, start=1):
        if not isinstance(task, Task):
            raise DataError(f"{source}: task {number} is a value of type {type(task).__name__}, no Task")
        for name in ("key", "question"):
            if not isinstance(value := getattr(task, name), str):
                kind = type(value).__name__
                raise DataError(f"{source}: {name} of task {number} is {value!r} ({kind}), no text"[:300])
        if not task.key:
            raise DataError(f"{source}: task {number} has an empty key")
        if not isinstance(task.metadata, Mapping) or not all(isinstance(name, str) for name in task.metadata):
            raise DataError(
                f"{source}: metadata of task {task.key!r} must have texts as keys: {task.metadata!r}"[:300]
            )
        for name, value in task.metadata.items():
            try:
                json.dumps(value, sort_keys=True)
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(
                    f"{source}: metadata[{name!r}] of task {task.key!r} must be a value of JSON ({error}): "
                    f"convert it, for example with int() or list(): {value!r}"[:400]
                ) from error
        if (first := first_numbers.setdefault(task.key, number)) != number:
            raise DataError(
                f"{source}: tasks {first} and {number} have the same key {task.key!r}; keys are unique"
            )
    path = getattr(_task_lists(task_set), split, None)
    return tasks if path is None else listed_tasks(tasks, path, split=split)


def listed_tasks(tasks: Sequence[Task], path: Path, *, split: str) -> list[Task]:
    """Return the tasks whose keys a file lists, one per line, in its order.

    Raises:
        DataError: if the file cannot be read or does not end with a line break, and, with the line, for an
            unknown key, a key that occurs twice, and blanks around a key.
    """
    by_key = {task.key: task for task in tasks}
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.endswith("\n"):
        raise DataError(f"{path} is empty or its last line is cut: end every task key with a line break")
    chosen: dict[str, Task] = {}
    for number, key in enumerate(text.removesuffix("\n").split("\n"), start=1):
        if key not in by_key:
            near = did_you_mean(key, list(by_key)) if key.strip() else ""
            raise DataError(f"{path}:{number}: {key!r} is no task of the split {split!r}{near}"[:500])
        if key in chosen:
            raise DataError(f"{path}:{number}: {key!r} is listed twice")
        chosen[key] = by_key[key]
    return list(chosen.values())


def is_stateful(config: EnvironmentSettings) -> bool:
    """Whether an action changes hidden state."""
    return bool(getattr(resolve("environments", config.type), "stateful", True))


def is_inline(config: EnvironmentSettings) -> bool:
    """Whether an observation continues the open assistant message instead of being a message of its own."""
    if config.call_format is not None or config.keeps_conversations:
        return False
    return getattr(resolve("environments", config.type), "protocol", "chat") == "inline"


def observation_roles(config: EnvironmentSettings) -> tuple[Role, ...]:
    """Return the possible roles of observations."""
    if config.call_format is not None:
        return ("tool",)
    return ("inline",) if is_inline(config) else ("user",)


# The base class of environments, and its adapter to the protocol of the rollout loop. The rest of the package
# sees an environment as a task set that makes Env objects; Environment.build returns such a task set.


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
        """Return a copy in the same state, with the same ``settings`` and ``shared``."""
        return deepcopy(self, {id(value): value for value in (self.settings, self.shared)})

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


def settings_of(environment: Environment) -> Any:
    """Return the settings of an object, from which a run makes its own objects, one per episode.

    Warns of attributes that they will lack. Raises ConfigError if the class needs more than settings.
    """
    cls = type(environment)
    try:
        fresh = cls(environment.settings, environment.shared)
    except Exception as error:
        raise ConfigError(
            f"a run makes its environments as {cls.__qualname__}(settings, shared), which fails: {error}"
        ) from error
    others = dict(vars(fresh))
    with suppress(Exception):  # it may need what reset sets
        fresh.close()
    lost = []
    for name, value in vars(environment).items():
        other = others.get(name, getattr(cls, name, value))  # what only an episode sets is not compared
        is_changed = isinstance(value, str | int | float) and repr(value) != repr(other)
        if name != "episode_return" and (is_changed or type(value) is not type(other)):
            lost.append(name)
    if lost:
        warnings.warn(
            f"a run makes its environments from {cls.__qualname__} and the settings of this object: "
            f"what it has in {', '.join(lost)} is not passed on; add fields to {cls.__qualname__}.Settings",
            stacklevel=2,
        )
    return environment.settings


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
        for method in ("tasks", "open_shared", "stop_strings"):
            if inspect.isfunction(inspect.getattr_static(environment, method)):
                raise ConfigError(
                    f"{environment.__qualname__}.{method} is not a class method: write @classmethod above it"
                )
        self.plugin_class, self.settings = environment, settings
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", environment.__name__).lower()
        self.name = environment.name or words
        self.stop = _stop_strings(environment, settings)
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
            try:
                self._expert_factory = self.make()
            except ToolUnavailable as error:
                # A simulator that does not start now may start later: experts are tried again after a fault.
                if isinstance(error.__cause__, EnvironmentFault | ToolFault):
                    raise error.__cause__ from None
                raise
        with closing(self._expert_factory(task)) as env:
            Episode(env).start(seed)
            answer: object = env.environment.expert()
        if answer is None:
            return None
        if isinstance(answer, str):
            raise InvalidResult("what expert returned is a text, no list of turns")
        turns = tuple(cast(Iterable[str | Step], answer))  # a generator has no length
        for turn in turns:
            if not isinstance(turn, str | Step):
                raise InvalidResult(
                    f"expert returned the turn {describe(turn)}, no text and no Step: write str(...)"
                )
        texts = [turn for turn in turns if isinstance(turn, str)]
        if len(texts) < len(turns):
            return [Step(text=turn, observation="") if isinstance(turn, str) else turn for turn in turns]
        # Use a new episode, because the expert may have stepped its own.
        with closing(self._expert_factory(task)) as env:
            episode = Episode(env)
            episode.start(seed)
            episode.play(texts)
            return episode.steps if episode.result().success else None

    def close(self) -> None:
        factory, self._expert_factory = self._expert_factory, None
        if factory is not None:
            factory.close()


def _stop_strings(environment: type[Environment], settings: Any) -> tuple[str, ...]:
    """The strings that end a turn. Raises ConfigError for anything else."""
    stop: object = environment.stop_strings(settings)
    name = f"{environment.__qualname__}.stop_strings"
    if isinstance(stop, str):
        raise ConfigError(f"{name} returned a text, no tuple of texts: write return ({stop!r},)")
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise ConfigError(f"{name} returned {describe(stop)}, no tuple of texts")
    return tuple(stop)


class EpisodeFactory:
    """Makes the episodes of an :class:`Environment` class, and owns their shared object."""

    def __init__(self, environment: type[Environment], settings: Any, shared: Any) -> None:
        self._environment, self._settings, self._shared = environment, settings, shared
        # The scheduler reads it. Shared objects of users may have any attribute of this name.
        budget = getattr(shared, "call_budget", None)
        self.call_budget = budget if isinstance(budget, CallBudget) else None

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
    """Adapts an :class:`Environment` and its task to :class:`Env`."""

    def __init__(self, environment: Environment, task: Task) -> None:
        self.environment, self._task = environment, task
        environment.task = task
        self._is_open, self._is_over = True, False
        self._role: Role = "inline" if environment.protocol == "inline" else "user"
        if environment.can_copy:  # the loop checks whether the method exists
            self.copy = self._copy
        self.call_format: str | None = environment.settings.call_format
        self.tool_schemas: tuple[ToolSchema, ...] = ()
        if self.call_format is not None:
            self._role = "tool"

    def reset(self, seed: int) -> Sequence[Message]:
        environment = self.environment
        # All rollouts share the task, and an environment may change the lists that it finds there.
        environment.task = _own(self._task)
        environment.episode_return, environment.metrics = 0.0, {}
        self._is_over = False
        prompt = _finished(environment.reset(environment.task, seed), "reset")
        if self._role == "tool":
            self.tool_schemas = tuple(map(_schema, environment.tools()))
        return _messages(prompt, "user", "what reset returned")

    def step(self, message: Message) -> StepResult:
        return self._execute(self.environment.step, message)

    def act(self, command: str) -> StepResult:
        """Execute a command without markup (:class:`outrider.environments.window.CommandWorld`)."""
        environment: Any = self.environment
        return self._execute(environment.act, Message(role="assistant", content=command))

    def _execute(self, step: Callable[[str], object], message: Message) -> StepResult:
        if self._is_over:
            raise RuntimeError(f"the episode of {type(self.environment).__qualname__} has ended")
        self.environment.turn = message
        answer = _finished(step(message.content), "step")
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
        self._is_over = as_bool(answer.done, "done")
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
        environment = self.environment.copy()
        task = getattr(environment, "task", self.environment.task)
        twin = EnvironmentEpisode(environment, self._task)
        environment.task = _own(task) if task is self.environment.task else task
        twin.tool_schemas, twin._is_over = self.tool_schemas, self._is_over
        return twin

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.environment.close()


def _own(task: Task) -> Task:
    return replace(task, metadata=deepcopy(dict(task.metadata)))


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
        return plain_schema(tool)
    from outrider.tools.functions import tool_class

    return tool_class(tool).schema
