"""Environments whose conversation somebody else keeps: a program that asks the policy as it would ask a
server, with a whole conversation each time.
"""

from abc import ABCMeta
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

from outrider.tokens.tokenizer import token_text
from outrider.types import Message, ToolSchema

if TYPE_CHECKING:
    from outrider.environments.base import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the policy is asked. ``tools`` are those that this one question tells of. The turn ends after
    ``max_tokens`` (None: the rollout's own limit) or at one of the strings in ``stop``. ``single_call``: of
    the tool calls of a turn, more than one cannot be taken.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    single_call: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why the policy cannot be asked: its chat template refuses the conversation, or (``is_too_long``) the
    context does not hold it.
    """

    reason: str
    is_too_long: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """How a turn was drawn: the bytes and the log-prob of every token (natural log, at the sampling
    temperature), why it ended, and the tokens of its context. ``opened`` is what the template had opened for
    it (``<think>``): the turn's text begins with it, and the policy has not written it.
    """

    token_bytes: tuple[bytes, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "eos", "length"]
    num_context_tokens: int
    opened: str = ""
    kind: Literal["drawn"] = "drawn"

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return len(self.token_bytes)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of every token; parts of characters are escaped."""
        return tuple(map(token_text, self.token_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTurn:
    """What a server says of a turn that it gave, each None where it does not say so: ``finish`` in OpenAI's
    words, and the tokens of the turn and of its context.
    """

    finish: str | None = None
    num_tokens: int | None = None
    num_context_tokens: int | None = None
    kind: Literal["served"] = "served"


def before_stop(text: str, stop: Sequence[str], *, opened: int = 0) -> str:
    """A turn without the first stop string in it and what is behind, as servers give it. Stop strings end
    what the model writes, thinking included; the first ``opened`` characters it has not written.
    """
    ends = [end for stop_string in stop if (end := text.find(stop_string, opened)) >= 0]
    return text[: min(ends)] if ends else text


_MISSING: Final = object()

if TYPE_CHECKING:
    _ProtocolType = ABCMeta
else:
    _ProtocolType = type(Protocol)


class _StaticCheck(_ProtocolType):
    """Metaclass of a protocol whose ``isinstance`` looks attributes up without evaluating properties, as
    Python does from 3.12 on. In 3.11 the check would evaluate ``asked``, which raises after a program's end.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        if not vars(cls).get("_is_protocol"):  # a class that inherits from the protocol
            return super().__instancecheck__(instance)
        names = (name for name in vars(cls) if not name.startswith("_"))
        return all(getattr_static(instance, name, _MISSING) is not _MISSING for name in names)


@runtime_checkable
class OwnConversations(Protocol, metaclass=_StaticCheck):
    """An environment of this kind; beside the contract of
    :class:`~outrider.environments.base.Env`. The rollout finds out what of each conversation the
    policy has seen before, and takes the ids of that.
    """

    @property
    def request(self) -> Conversation:
        """What the policy is asked now; valid after ``reset``, and after a step until the episode is done."""
        ...

    @property
    def call_format(self) -> str | None:
        """The form of the policy's native tool calls; None where it has none."""
        ...

    def read(self, text: str) -> Message:
        """A turn as the program will be given it, and will keep it in its history."""
        ...

    def sampled(self, turn: SampledTurn | ServedTurn) -> None:
        """Called in front of ``read`` and ``step`` with what is known of the turn: how the policy has drawn
        it, also when it is played again, or what the endpoint said that plays the policy. Not called for an
        expert's.
        """
        ...


@runtime_checkable
class Refusing(Protocol):
    """Such an environment whose program can be told that its question cannot be answered. Of others such a
    question is a fault, or cuts the rollout if it is too long.
    """

    def refuse(self, refusal: Refusal) -> "StepResult | None":
        """Tell the program that what it asks cannot be answered, as a server does with status 400, and wait
        for what it asks next or for its end, as ``step`` does. None if it ends without a result because its
        conversation is too long: the rollout is cut then. Raises EnvironmentFault for other such ends.
        """
        ...
