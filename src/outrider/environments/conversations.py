"""Environments whose conversation an external program keeps. It calls the policy as it would call a server,
with a whole conversation in each request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outrider import deprecated
from outrider.errors import EnvironmentFault
from outrider.types import Message, ToolSchema

if TYPE_CHECKING:
    from outrider.environments.base import EpisodeResult, StepResult


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


def token_text(piece: bytes) -> str:
    r"""A token's text as OpenAI's server writes it: parts of characters as ``\xf0\x9f``."""
    return piece.decode("utf-8", "backslashreplace")


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


class ExternalAgent:
    """Base class of environments whose conversation an external program keeps: each request to the policy is
    a whole conversation, as a server gets it.

    The rollout determines which part of each conversation the policy has seen before and reuses its token
    ids.
    """

    if TYPE_CHECKING:  # attributes or properties of subclasses

        @property
        def request(self) -> Conversation:
            """The pending request; valid after ``reset``, and after a step until the episode is done."""
            ...

        @property
        def call_format(self) -> str | None:
            """The form of the policy's native tool calls; None without tool calls."""
            ...

        def reset(self, seed: int) -> Sequence[Message]: ...
        def step(self, message: Message) -> StepResult: ...
        def result(self) -> EpisodeResult: ...
        def close(self) -> None: ...

    def read(self, text: str) -> Message:
        """Parse a turn into the message that the program receives and keeps in its history."""
        return Message(role="assistant", content=text)

    def sampled(self, turn: SampledTurn | ServedTurn) -> None:
        """Called before ``read`` and ``step`` with data about the turn: how the policy sampled it, also when
        it is replayed, or what the endpoint reported. Not called for an expert's turn.
        """

    def refuse(self, refusal: Refusal) -> "StepResult | None":
        """Respond that the pending request cannot be answered, as a server does with status 400, and wait for
        the next request or the program's end, as ``step`` does.

        Returns None if the program ends without a result because its conversation is too long: the rollout is
        truncated then. Raises EnvironmentFault for other such ends. A program that cannot be refused ends
        here.
        """
        if refusal.is_too_long:
            return None
        raise EnvironmentFault(f"the program asks what cannot be answered: {refusal.reason}")


deprecated.keep_old_names(__name__)
