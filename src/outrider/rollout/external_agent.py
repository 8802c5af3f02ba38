"""Contexts of a conversation that somebody else keeps (:mod:`outrider.environments.conversations`).

Each question comes as a whole conversation. What of it the policy was asked or has said before keeps the ids
of that time, tips left out; the rest is rendered behind it. A question that goes on where the last turn ended
is appended. Every other one (a history that was rewritten, another agent's conversation, a second answer to
one question) begins a context anew, and the rollout becomes one sample more.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq

from outrider.engines.base import Generation
from outrider.engines.chat import ChatReply
from outrider.environments.base import Env, NativeTools, prompt_tools, turn_message
from outrider.environments.conversations import (
    Conversation,
    OwnConversations,
    Refusal,
    SampledTurn,
    ServedTurn,
    before_stop,
)
from outrider.errors import ModelError
from outrider.tokens import ChatRenderer
from outrider.tokens.call_formats import get_call_format, read_turn, read_turn_unchecked
from outrider.tokens.tokenizer import token_bytes
from outrider.tokens.tool_calls import CallFormat, split_thinking
from outrider.trace import Node, Trace, split_contexts, without_memory
from outrider.types import Message, ToolSchema

_FOLLOW_UP_ROLES = ("user", "tool")  # roles that a template writes behind a turn whatever stands before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and its answer: ``context`` is the node in front of the turn, ``turn`` the turn's own.
    ``response`` is what the program was told; it ``is_whole`` unless a stop string of the program cut it.
    ``sampled`` is how it was drawn.
    """

    request: Conversation
    response: Message
    context: Node
    turn: Node
    is_whole: bool
    sampled: SampledTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the policy sees next. ``token_ids`` are added, or are all there is where ``restarts``. ``num_new``
    of them stood in no context of the rollout before.
    """

    token_ids: tuple[int, ...]
    restarts: bool
    num_new: int


class Unanswerable(Exception):
    """A question of a program that the policy cannot be asked."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


@contextmanager
def _refusals() -> Iterator[None]:
    """What a template refuses is an answer to the program. Raises Unanswerable."""
    try:
        yield
    except (ModelError, RecursionError) as error:
        reason = str(error).removeprefix("the tokenizer has no usable chat template: ")
        words = f"the policy's chat template cannot render these messages: {reason}"
        raise Unanswerable(Refusal(reason=words)) from error


def next_context(
    request: Conversation, exchanges: Sequence[Exchange], trace: Trace, renderer: ChatRenderer
) -> Seen:
    """The context of a question. Raises Unanswerable for one that the template refuses."""
    with _refusals():
        ids = _ids(request, exchanges, trace, renderer)
    before = trace.token_ids(exchanges[-1].turn.node_id)
    known = [before, *(_seen_ids(trace, item.turn) for item in exchanges)]
    num_new = len(ids) - max(sum(1 for _ in takewhile(bool, map(eq, ids, item))) for item in known)
    # a context that grew by nothing is the same question again
    extends = len(ids) > len(before) and ids[: len(before)] == before
    return Seen(token_ids=ids[len(before) :] if extends else ids, restarts=not extends, num_new=num_new)


def _ids(
    request: Conversation, exchanges: Sequence[Exchange], trace: Trace, renderer: ChatRenderer
) -> tuple[int, ...]:
    if renderer.history_thinking == "strip":
        return renderer.prompt(request.messages, request.tools)
    newest_first = exchanges[::-1]
    again = next((exchange for exchange in newest_first if _is_same_request(request, exchange)), None)
    if again is not None:
        return _seen_ids(trace, again.context)
    longest = max(
        (exchange for exchange in newest_first if _follows(request, exchange, renderer)),
        key=lambda exchange: len(exchange.request.messages),
        default=None,
    )
    if longest is None:
        return renderer.prompt(request.messages, request.tools)
    # with the tips of the newest context, which go on; of an older one without
    is_newest = longest is exchanges[-1]
    ids = trace.token_ids(longest.turn.node_id) if is_newest else _seen_ids(trace, longest.turn)
    rest = request.messages[len(longest.request.messages) + 1 :]
    has_tools = bool(request.tools) or any(message.role == "tool" for message in request.messages)
    return (*ids, *renderer.with_tools(has_tools).bridge(ids, rest))


def _seen_ids(trace: Trace, node: Node) -> tuple[int, ...]:
    """The context up to a node, as a rollout without tips has it."""
    sample = split_contexts(trace.path(node.node_id))[-1]
    return tuple(token for sample_node in without_memory(sample) for token in sample_node.token_ids)


def _is_same_request(request: Conversation, exchange: Exchange) -> bool:
    return request.messages == exchange.request.messages and request.tools == exchange.request.tools


def _follows(request: Conversation, exchange: Exchange, renderer: ChatRenderer) -> bool:
    """Whether the conversation goes on behind the answer, as the program was told it or in words that a
    server would write the same.
    """
    known = (*exchange.request.messages, exchange.response)
    prefix, rest = request.messages[: len(known)], request.messages[len(known) :]
    if not exchange.is_whole or request.tools != exchange.request.tools or not rest:
        return False
    if any(message.role not in _FOLLOW_UP_ROLES for message in rest):
        return False
    original = [replace(message, reasoning="", problems=()) for message in known]
    sent = [replace(message, reasoning="", problems=()) for message in prefix]
    return original == sent or _renders_identically(original, sent, request.tools, renderer)


def _renders_identically(
    original: Sequence[Message], sent: Sequence[Message], tools: Sequence[ToolSchema], renderer: ChatRenderer
) -> bool:
    """Whether a server would write both the same: templates trim what was said, and few write ids."""
    if [_bare(message) for message in original] != [_bare(message) for message in sent]:
        return False  # rendering is slow, and nothing else can come out of it
    try:
        written = [renderer.whole_text(messages, tools, opened=False) for messages in (original, sent)]
    except ModelError:
        return False
    return written[0] == written[1]


def _bare(message: Message) -> Message:
    """Without the blanks around it, and without ids of calls."""
    calls = tuple(replace(call, call_id="") for call in message.tool_calls)
    return replace(message, content=message.content.strip(), tool_calls=calls, tool_call_id="")


def pending_request(environment: Env) -> Conversation | None:
    """What a program asks now; None where the rollout keeps the conversation itself."""
    return environment.request if isinstance(environment, OwnConversations) else None


def opening_ids(environment: Env, messages: Sequence[Message], renderer: ChatRenderer) -> tuple[int, ...]:
    """The ids of a rollout's first context. Raises Unanswerable for what a program asks and the template
    refuses.
    """
    if not isinstance(environment, OwnConversations):
        return renderer.prompt(messages, prompt_tools(environment))
    with _refusals():
        return renderer.prompt(messages, prompt_tools(environment))


def require_room(num_tokens: int, context_length: int) -> None:
    """Raises Unanswerable where a context leaves the policy no room."""
    if num_tokens >= context_length:
        words = (
            f"This model's maximum context length is {context_length} tokens, and the messages have "
            f"{num_tokens} tokens: send a shorter conversation"
        )
        raise Unanswerable(Refusal(reason=words, is_too_long=True))


def report_sampled_turn(
    environment: Env, generation: Generation, context: Sequence[int], renderer: ChatRenderer
) -> SampledTurn | None:
    """Tell a program's environment how the turn was drawn, which its answer may have to say."""
    if not isinstance(environment, OwnConversations):
        return None
    opened = renderer.opened(context)
    text = renderer.turn_text(generation.token_ids, context=context, is_closed=False).removeprefix(opened)
    turn = SampledTurn(
        token_bytes=token_bytes(renderer.tokenizer, generation.token_ids, visible_text=text),
        logprobs=generation.logprobs,
        finish=generation.finish_reason.value,
        num_context_tokens=len(context),
        opened=opened,
    )
    environment.sampled(turn)
    return turn


# A turn of an agent behind an endpoint: for its environment, for the next request, and as text.


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTurn:
    """``response`` is for the environment, ``history_message`` stands in later requests, and ``text`` is the
    turn in the environment's own form, as a trajectory keeps it.
    """

    response: Message
    history_message: Message
    text: str


def _report_served_turn(environment: Env, reply: ChatReply) -> None:
    if isinstance(environment, OwnConversations):
        turn = ServedTurn(
            finish=reply.finish,
            num_tokens=reply.num_tokens or None,
            num_context_tokens=reply.num_context_tokens or None,
        )
        environment.sampled(turn)


def endpoint_turn(reply: ChatReply, environment: Env) -> EndpointTurn:
    """The turn that a reply is.

    A server that reads no calls leaves them in the text, and they are read there. A turn with a call that
    cannot be read is sent back in words, whole, so that the complaint has something to be about. A program's
    environment is told first what the server says of the turn.
    """
    _report_served_turn(environment, reply)
    name = environment.call_format if isinstance(environment, NativeTools | OwnConversations) else None
    if name is None:
        plain = Message(role="assistant", content=reply.text)
        response = turn_message(environment, reply.text)
        if isinstance(environment, OwnConversations):
            response = replace(response, reasoning=reply.reasoning or response.reasoning)
        return EndpointTurn(response=response, history_message=plain, text=reply.text)
    if isinstance(environment, OwnConversations):
        return _program_turn(reply, environment, get_call_format(name))
    form, tools, served = get_call_format(name), prompt_tools(environment), reply.served
    has_read = bool(served.calls or served.problems)
    turn = read_turn(reply.text, None if has_read else form, tools)
    calls = served.calls if has_read else turn.tool_calls
    problems = (*turn.problems, *served.problems)
    inside, written = _written_parts(reply, form)
    response = Message(
        role="assistant", content=turn.content, reasoning=reply.reasoning or turn.reasoning,
        tool_calls=calls, problems=problems,
    )  # fmt: skip
    sent = Message(
        role="assistant", content=inside + (written if problems else turn.content),
        reasoning=reply.reasoning, tool_calls=() if problems else calls,
    )  # fmt: skip
    return EndpointTurn(response=response, history_message=sent, text=_text(reply, inside + written))


def _program_turn(reply: ChatReply, environment: OwnConversations, form: CallFormat) -> EndpointTurn:
    """A turn for a program, which gets every call that the server has read, or else that can be read here. If
    one cannot, it gets the turn in words. Its own stop strings are not for it to read.
    """
    reply = replace(reply, text=before_stop(reply.text, environment.request.stop))
    served = reply.served
    has_read = bool(served.calls or served.problems)
    turn = read_turn_unchecked(reply.text, None if has_read else form, environment.request.tools)
    calls = served.forwarded if has_read else turn.tool_calls
    is_whole = len(served.forwarded) == len(served.calls) + len(served.problems)
    problems = turn.problems if not has_read else () if is_whole else served.problems
    inside, written = _written_parts(reply, form)
    response = Message(
        role="assistant", content=written if problems else turn.content,
        reasoning=reply.reasoning or turn.reasoning, tool_calls=() if problems else calls, problems=problems,
    )  # fmt: skip
    return EndpointTurn(response=response, history_message=response, text=_text(reply, inside + written))


def _written_parts(reply: ChatReply, form: CallFormat) -> tuple[str, str]:
    """The thinking in a reply's text, and the rest with the calls that the server has read."""
    served = reply.served
    has_read = bool(served.calls or served.problems)
    inside = reply.text.removesuffix(split_thinking(reply.text, None if has_read else form)[1])
    written = reply.text.removeprefix(inside)
    if has_read:
        parts = (written, form.write(served.calls) if served.calls else "", *served.unread)
        written = "\n".join(part for part in parts if part)
    return inside, written


def _text(reply: ChatReply, text: str) -> str:
    """The whole turn, without half surrogate pairs."""
    apart = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    return Message(role="assistant", content=apart + text).content
