"""Carriers that every layer shares: messages, tasks, outcomes. No torch, no numpy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from outrider.errors import InvalidResult

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

Role = Literal["system", "user", "assistant", "tool", "inline"]
"""``inline`` continues the open assistant message with text that the policy did not write (the papers' tag
protocol).
"""


class Origin(StrEnum):
    """Who wrote the tokens of a node. Trainable means exactly ``origin == POLICY``."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"
    BUFFER = "buffer"  # a retrieved step of another agent (RAPO)
    MEMORY = "memory"  # a tip (EMPO²)
    DEMONSTRATION = "demonstration"  # a demonstrator's turn that the policy is trained on (LUFFY)


class Outcome(StrEnum):
    """How a rollout ended; every owed rollout ends in exactly one."""

    FINISHED = "finished"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TURNS = "truncated_turns"
    INVALID = "invalid"
    TOOL_FAULT = "tool_fault"
    ENVIRONMENT_FAULT = "environment_fault"
    ENGINE_FAULT = "engine_fault"
    CANCELLED = "cancelled"  # its group took longer than train.group_timeout_s

    @property
    def is_fault(self) -> bool:
        """Whether infrastructure, not the policy, ended the rollout; such a rollout has no reward."""
        return self in _FAULTS


_FAULTS = frozenset({Outcome.TOOL_FAULT, Outcome.ENVIRONMENT_FAULT, Outcome.ENGINE_FAULT, Outcome.CANCELLED})


ToolSchema: TypeAlias = Mapping[str, Any]
"""What a model is told of a tool: ``name``, ``description``, ``parameters`` (a JSON schema of an object)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool that the policy asks for by a native call: a name and JSON. ``call_id`` is unique within its
    turn. ``raw`` is the text of arguments that are no JSON object; ``arguments`` is empty then, and
    ``problem`` says in words what is wrong with them. A call that was read although its closing tag is
    missing has a ``problem`` too.
    """

    name: str
    # not Json: what reads the nodes of a checkpoint cannot follow an alias that holds itself
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str = ""
    raw: str = ""
    problem: str = field(default="", compare=False)

    @property
    def arguments_text(self) -> str:
        """The arguments as text, as OpenAI's format has them."""
        return self.raw or json.dumps(dict(self.arguments), ensure_ascii=False)


def is_text(text: str) -> bool:
    """Whether all of it are characters: JSON may spell half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message. The text is for people and for rendering once; ids are never made from it twice.

    Of an assistant's message ``reasoning`` is the thinking apart from the answer, ``tool_calls`` are its
    native calls, and ``problems`` say what of it could not be read as one. A tool's message has the id of
    the call that it answers, and the tool's name. Half of a surrogate pair is no text to a tokenizer: a
    question mark stands for it in ``content``.
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
        if type(self.content) is not str:  # a text of NumPy's, a member of an enumeration
            object.__setattr__(self, "content", str(self.content))
        if not is_text(self.content):
            object.__setattr__(self, "content", self.content.encode("utf-8", "replace").decode("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem that rollouts try to solve. Frozen data; behaviour lives in the environment.

    ``key`` is unique within a task set and stable across machines; it keys random streams and resume.
    """

    key: str
    question: str
    answers: tuple[str, ...] = ()
    metadata: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a trajectory in plain text: what the agent thought and did, and what came back.

    ``text`` is the agent's output verbatim (thought and action), ``observation`` what the environment
    answered, ``is_terminal`` whether the step holds the final answer or ended the episode.
    """

    text: str
    observation: str
    is_terminal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A finished episode of any agent: where off-policy steps come from (RAPO section 3.1).

    ``prompt`` are the messages before step 0; ``reward`` is the outcome on the environment's own scale;
    ``num_tokens`` counts the agent's tokens where known (ties in reward are broken by fewer tokens).
    """

    trajectory_id: str
    task_key: str
    agent: str
    prompt: tuple[Message, ...]
    steps: tuple[Step, ...]
    reward: float
    num_tokens: int = 0
