"""A turn of an agent behind an endpoint: for its environment, for the next request, and as text."""

from dataclasses import dataclass, replace

from outrider.engines.chat.engine import ChatReply
from outrider.environments.base import Environment, NativeTools, prompt_tools, turn_message
from outrider.environments.conversing import OwnConversations, ServedTurn, before_stop
from outrider.tokens.calls import CallFormat, get_call_format, read_turn, read_turn_unchecked
from outrider.tokens.parsed import split_thinking
from outrider.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTurn:
    """``response`` is for the environment, ``history_message`` stands in later requests, and ``text`` is the turn in the
    environment's own form, as a trajectory keeps it.
    """

    response: Message
    history_message: Message
    text: str


def _report_served_turn(environment: Environment, reply: ChatReply) -> None:
    if isinstance(environment, OwnConversations):
        turn = ServedTurn(
            finish=reply.finish,
            num_tokens=reply.num_tokens or None,
            num_context_tokens=reply.num_context_tokens or None,
        )
        environment.sampled(turn)


def endpoint_turn(reply: ChatReply, environment: Environment) -> EndpointTurn:
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
