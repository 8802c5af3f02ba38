"""Conversion of what the code of others returns (rewards, success flags, metrics) to Python's own types.

The one place where such values are checked: :class:`~outrider.environments.episode.Episode` uses these
functions, as do the adapters and the agent programs. Scalars of NumPy, PyTorch and other array libraries are
read by their ``item()``, so none of them is imported.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, runtime_checkable

from outrider import deprecated
from outrider.config import Settings
from outrider.errors import InvalidResult, NonFiniteResult
from outrider.types import Message, Step, Task

_MAX_CHARS: Final = 60
_TEXT: Final = (str, bytes, bytearray, complex)  # what float() would read, or what silently loses a part


def as_float(value: Any, name: str) -> float:
    """A number as a float: Python's, a scalar of an array library with one element, a Decimal or a Fraction.

    ``name`` is the field in messages. Raises InvalidResult for what is no number and NonFiniteResult for NaN
    and infinity.
    """
    if type(value) is float and math.isfinite(value):
        return value
    number = _number(value, name)
    if not math.isfinite(number):
        raise NonFiniteResult(f"{name} is {describe(value)}, no finite number")
    return number


def as_bool(value: Any, name: str) -> bool:
    """A flag: True and False, 1 and 0, and scalars with these values.

    Raises InvalidResult for anything else, NonFiniteResult for NaN and infinity.
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
    """A whole number of at least 0. Raises InvalidResult for anything else."""
    if type(value) is int and value >= 0:
        return value
    number = _number(value, name, expected="no whole number")
    if not (number >= 0 and number.is_integer()):
        raise InvalidResult(f"{name} is {describe(value)}, no whole number of at least 0")
    return int(number)


def as_metrics(value: Any, name: str = "metrics") -> dict[str, float]:
    """Named numbers. A metric that is None is not defined in this episode and is left out.

    Raises InvalidResult for what is no mapping or holds what is no number, NonFiniteResult for NaN and
    infinity.
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
    """A value and its type in a few words, for a message of one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an object of somebody else's class
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
    except Exception as error:  # a number type of somebody else's
        raise InvalidResult(f"{name} is {describe(value)}, {expected}") from error


def _is_masked(value: Any) -> bool:
    """Whether an element of NumPy's masked arrays is masked: ``item()`` returns the data below the mask."""
    if not (hasattr(value, "mask") and hasattr(value, "filled")):
        return False
    try:
        return bool(value.mask)
    except ValueError:  # several elements, which are no number anyway
        return False


def _is_date(value: Any) -> bool:
    """Whether a value is a date or duration of NumPy, which ``float()`` reads as a count of its unit."""
    return getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M")


# The environment contract: one task in, messages out, and the environment keeps the record of the return.


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
    """

    episode_return: float
    success: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


def as_messages(value: object, name: str) -> tuple[Message, ...]:
    """A sequence of messages as a tuple. Raises InvalidResult for anything else."""
    if isinstance(value, Message) or not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise InvalidResult(f"{name} is {describe(value)}, no sequence of Message")
    messages = tuple(value)
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidResult(f"{name} holds {describe(message)}, no Message")
    return messages


def as_names(value: object) -> tuple[str, ...]:
    """The names of the tools that ran, as a tuple. Raises InvalidResult for anything else."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidResult(f"tools is {describe(value)}, no sequence of names")
    names = tuple(value)
    if other := [name for name in names if not isinstance(name, str)]:
        raise InvalidResult(f"tools holds {describe(other[0])}, no name")
    return names


class EnvironmentSettings(Settings):
    """Base class of the settings of environments.

    Its class variables and properties answer what a run must know before it builds the environment. A
    subclass may override a property by a class variable.

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
        """Whether episodes are of the kind :class:`~outrider.environments.conversations.ExternalAgent`."""
        return False


class Env(Protocol):
    """One episode, as the rollout loop steps it. Users write an
    :class:`~outrider.environments.environment.Environment`.

    Methods may block, because the loop calls them in a thread. They raise
    :class:`~outrider.errors.ToolFault` or :class:`~outrider.errors.EnvironmentFault` if infrastructure
    breaks, and never for malformed model output.
    """

    def reset(self, seed: int) -> Sequence[Message]:
        """Start the episode; the messages are the prompt."""
        ...

    def step(self, message: Message) -> StepResult:
        """Act with one policy message (the text that the policy generated in this turn)."""
        ...

    def result(self) -> EpisodeResult:
        """The record of the episode so far; valid after any step, also when the rollout was cut."""
        ...

    def close(self) -> None:
        """Release processes and files; may be called twice."""
        ...


@runtime_checkable
class CopyableEnvironment(Env, Protocol):
    """An environment whose episode can be forked."""

    def copy(self) -> "CopyableEnvironment":
        """An environment in the same state, independent from then on; no action is done again."""
        ...


class TaskSet(Protocol):
    """Named tasks together with the environment that plays them, as the rest of the package sees them.

    ``stop`` and ``stateful`` are those of :class:`~outrider.environments.environment.Environment`.
    """

    name: str
    stop: tuple[str, ...]
    stateful: bool

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of a split (``train``, ``valid``, ``test``), in a fixed order."""
        ...

    def make(self) -> "EnvironmentFactory":
        """Check that everything the family needs can load and return a factory; raises before the first
        rollout.
        """
        ...

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """Steps of a scripted or gold-path expert for the task, or None where there is none. Called in a
        thread of its own, which is given up after ``train.expert_timeout_s`` seconds and :meth:`close`.
        """
        ...

    def close(self) -> None:
        """Release what :meth:`expert` started; a later call starts it again. May be called twice."""
        ...


class EnvironmentFactory(Protocol):
    """Makes environments for tasks and owns what they share (an index, a pool of simulators)."""

    def __call__(self, task: Task) -> Env:
        """A fresh environment for one episode of the task."""
        ...

    def close(self) -> None:
        """Release what the environments share; may be called twice."""
        ...


deprecated.keep_old_names(__name__)
