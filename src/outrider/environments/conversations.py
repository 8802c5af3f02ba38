"""Environments whose conversation an external program manages.

The program calls the policy like a server, with a whole conversation in each request.
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
class PromptLimit:
    """The limit of a prompt that is built anew for every turn, so that every turn has a context of its own.

    Attributes:
        max_tokens: maximum number of tokens of the rendered prompt.
        overflow: what happens to a longer prompt. ``left`` and ``right`` cut tokens at this side, ``error``
            stops the run, and anything else refuses the request, so that the environment sends a shorter one.
    """

    max_tokens: int
    overflow: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request to the policy.

    Attributes:
        messages: the whole conversation.
        tools: the tools that this request describes.
        max_tokens: maximum number of tokens of the turn; None: the rollout's own limit.
        stop: stop strings of the turn.
        single_call: whether the program accepts at most one tool call per turn.
        prompt_limit: the limit of this prompt, if it is built anew for every turn. The rollout's budget of
            tokens then applies to every context of its own.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    single_call: bool = False
    prompt_limit: PromptLimit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The reason why the policy cannot respond: its chat template cannot render the conversation, or
    (``is_too_long``) it exceeds the context length.
    """

    reason: str
    is_too_long: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Data about a turn that the policy sampled.

    Attributes:
        token_bytes: the bytes of every token.
        logprobs: the log-prob of every token (natural log, at the sampling temperature).
        finish: why the turn ended.
        num_context_tokens: number of tokens of the context.
        opened: text such as ``<think>`` that the template opened for the turn. The turn's text begins with
            it, but the policy did not write it.
    """

    token_bytes: tuple[bytes, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "eos", "length"]
    num_context_tokens: int
    opened: str = ""
    kind: Literal["drawn"] = "drawn"

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return len(self.token_bytes)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of every token; parts of characters are escaped."""
        return tuple(map(token_text, self.token_bytes))


def token_text(piece: bytes) -> str:
    r"""Format a token's bytes like OpenAI's server: parts of characters as ``\xf0\x9f``."""
    return piece.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTurn:
    """Data that a server reported about a turn; None for values that it did not report.

    Attributes:
        finish: the finish reason in OpenAI's terms.
        num_tokens: number of tokens of the turn.
        num_context_tokens: number of tokens of the context.
    """

    finish: str | None = None
    num_tokens: int | None = None
    num_context_tokens: int | None = None
    kind: Literal["served"] = "served"


def before_stop(text: str, stop: Sequence[str], *, opened: int = 0) -> str:
    """Truncate a turn before its first stop string, as servers do.

    Stop strings also apply to thinking, but not to the first ``opened`` characters, which the model did not
    write.
    """
    ends = [end for stop_string in stop if (end := text.find(stop_string, opened)) >= 0]
    return text[: min(ends)] if ends else text


class ExternalAgent:
    """Base class of environments whose conversation an external program manages.

    Each request to the policy contains a whole conversation, as a request to a server does. The rollout
    determines which part of it an earlier context contains and reuses those token ids.

    Attributes:
        opening: text of the first observation, which the trace stores for the first request. Empty: the
            messages of that request.
    """

    opening: str = ""
    if TYPE_CHECKING:  # attributes or properties of subclasses

        @property
        def request(self) -> Conversation:
            """The pending request; valid after ``reset``, and after a step until the episode is done."""
            ...

        @property
        def call_format(self) -> str | None:
            """The format of the policy's native tool calls; None without tool calls."""
            ...

        def reset(self, seed: int) -> Sequence[Message]: ...
        def step(self, message: Message) -> StepResult: ...
        def result(self) -> EpisodeResult: ...
        def close(self) -> None: ...

    def read(self, text: str) -> Message:
        """Parse a turn into the message that the program receives and adds to its history."""
        return Message(role="assistant", content=text)

    def convert(self, text: str) -> str:
        """Convert a turn of an expert or a recorded one to the form that this program expects."""
        return text

    def sampled(self, turn: SampledTurn | ServedTurn) -> None:
        """Called before ``read`` and ``step`` with data about the turn from the policy or the endpoint.

        Also called when a turn is replayed, but not for turns of an expert.
        """

    def refuse(self, refusal: Refusal) -> "StepResult | None":
        """Reject the pending request, as a server does with status 400, and wait for the next request or the
        program's end, like ``step``.

        The default implementation ends the program.

        Returns:
            The result, or None if the program ends without a result because its conversation is too long. The
            rollout is then truncated.

        Raises:
            EnvironmentFault: if the program ends without a result for another reason.
        """
        if refusal.is_too_long:
            return None
        raise EnvironmentFault(f"the program sent a request that cannot be answered: {refusal.reason}")


deprecated.keep_old_names(__name__)
