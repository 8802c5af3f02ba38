"""Types shared by all layers: messages, tasks, outcomes. No torch, no numpy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias

from outrider.errors import InvalidResult

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

Role = Literal["system", "user", "assistant", "tool", "inline"]
"""``inline`` continues the open assistant message with text that the policy did not write (the tag protocol
of the papers).
"""


class Origin(StrEnum):
    """Who wrote the tokens of a node. Trainable means exactly ``origin == POLICY``."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"
    BUFFER = "buffer"  # a retrieved step of another agent (RAPO)
    MEMORY = "memory"  # a tip (EMPO²)
    DEMONSTRATION = "demonstration"  # a demonstrator's turn: trained on (LUFFY), or context (prefix)


class Outcome(StrEnum):
    """How a rollout ended; every rollout has exactly one outcome."""

    FINISHED = "finished"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TURNS = "truncated_turns"
    INVALID = "invalid"
    TOOL_FAULT = "tool_fault"
    ENVIRONMENT_FAULT = "environment_fault"
    ENGINE_FAULT = "engine_fault"
    CANCELLED = "cancelled"  # its group exceeded train.group_timeout_s

    @property
    def is_fault(self) -> bool:
        """Whether infrastructure, not the policy, ended the rollout; such a rollout has no reward."""
        return self in _FAULTS


_FAULTS = frozenset({Outcome.TOOL_FAULT, Outcome.ENVIRONMENT_FAULT, Outcome.ENGINE_FAULT, Outcome.CANCELLED})


ToolSchema: TypeAlias = Mapping[str, Any]
"""Description of a tool for a model: ``name``, ``description``, ``parameters`` (a JSON schema of an
object).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A native tool call. ``call_id`` is unique within its turn.

    If the arguments are no JSON object, ``raw`` is their text, ``arguments`` is empty and ``problem``
    describes the error. A call without its closing tag has a ``problem`` too.
    """

    name: str
    # not Json, because the reader of checkpoints does not support recursive aliases
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str = ""
    raw: str = ""
    problem: str = field(default="", compare=False)

    @property
    def arguments_text(self) -> str:
        """The arguments as text, as in OpenAI's format."""
        return self.raw or json.dumps(dict(self.arguments), ensure_ascii=False)


CallStatus: TypeAlias = Literal["ok", "empty", "refused", "error", "timeout"]
"""What became of a tool call. ``empty``: it was executed without an error and found or returned nothing;
``refused``: it was not executed, for example beyond a budget.
"""
_MAX_ARGUMENT_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """What happened to one tool call, for the records of a run.

    Attributes:
        name: name of the tool; empty if the call could not be parsed.
        arguments: the arguments as JSON, the text between the tags, or what was wrong with a call that could
            not be parsed. Long texts are cut.
        status: what became of the call.
        seconds: wall time, None if unknown. Records that differ only in it are equal, because a resumed run
            repeats everything but the clock.
    """

    name: str
    arguments: str = ""
    status: CallStatus = "ok"
    seconds: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("name", "arguments"):
            object.__setattr__(self, name, shorten(getattr(self, name), _MAX_ARGUMENT_CHARS))

    @property
    def is_failed(self) -> bool:
        """Whether the call was refused, or ended with an error or at a time limit."""
        return self.status not in ("ok", "empty")


def shorten(text: str, max_chars: int) -> str:
    """Cut a text to ``max_chars`` characters, with a mark at the end. Single surrogates, which files cannot
    contain, become escape sequences.
    """
    text = text[: max_chars + 1]
    if not is_text(text):  # before the cut, because an escape sequence is longer
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


def is_text(text: str) -> bool:
    """Whether the text has no single surrogates, which JSON can contain."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message, for people and for rendering; it is never tokenized twice.

    For an assistant, ``reasoning`` is the thinking separate from the answer, ``tool_calls`` are native calls,
    and ``problems`` describe text that could not be parsed as one. A tool's message has the id of its call
    and the tool's name. Single surrogates in ``content``, which no tokenizer accepts, are replaced by
    question marks.
    """

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    tool_call_id: str = ""
    tool_name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            kind = type(self.content).__name__
            raise InvalidResult(f"the content of a message is a value of type {kind}, no text")
        if type(self.content) is not str:  # for example a NumPy string or an enum member
            object.__setattr__(self, "content", str.__str__(self.content))
        if not is_text(self.content):
            object.__setattr__(self, "content", self.content.encode("utf-8", "replace").decode("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem that rollouts try to solve; the behaviour is in the environment.

    ``key`` is unique within a task set and the same on all machines; random streams and resume depend on it.
    """

    key: str
    question: str
    answers: tuple[str, ...] = ()
    metadata: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a trajectory as text.

    ``text`` is the agent's output verbatim (thought and action), ``observation`` the environment's response.
    ``is_terminal``: the step has the final answer or ended the episode.
    """

    text: str
    observation: str
    is_terminal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A finished episode of any agent, the source of off-policy steps (RAPO section 3.1).

    ``prompt`` are the messages before step 0. ``reward`` is on the environment's own scale. ``num_tokens``
    counts the agent's tokens if known (ties in reward are broken by fewer tokens).
    """

    trajectory_id: str
    task_key: str
    agent: str
    prompt: tuple[Message, ...]
    steps: tuple[Step, ...]
    reward: float
    num_tokens: int = 0
