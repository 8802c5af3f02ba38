"""The messages of a rollout out of its recorded nodes, native calls and their results told apart."""

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.evals.inspect_log.logged import LoggedMessage, MessageRole
from outrider.tokens.calls import get_call_format
from outrider.tokens.parsed import split_thinking
from outrider.types import Origin
from outrider.watch.traces import TraceRow, parse_metadata

AFTER_POLICY = (Origin.POLICY, Origin.DEMONSTRATION)


def node_messages(row: TraceRow, form: str | None) -> list[LoggedMessage]:
    """The messages of a node; ``form`` is that of the policy's native calls."""
    metadata = parse_metadata(row)
    tools = tuple(str(name) for name in metadata.get("tools", ()))
    role: MessageRole
    match row.role:
        case "assistant":
            return [turn(row.text, form, tools)]
        case "system" | "user" | "tool":
            role = row.role
        case "inline":  # a result, or what a memory brought
            role = "tool" if row.origin is Origin.ENVIRONMENT else "user"
        case _:  # an earlier version of the records
            role = "assistant" if row.origin in AFTER_POLICY else "user"
    return list(_parts(row.text, metadata)) or [LoggedMessage(role=role, text=row.text, tools=tools)]


def turn(text: str, form: str | None, tools: tuple[str, ...] = ()) -> LoggedMessage:
    """A turn of the policy. ``tools`` ran for it. Types of arguments that only a tool's schema tells stay
    text, and what the schema refused is a call like others.
    """
    if form is None:
        return LoggedMessage(role="assistant", text=text, tools=tools)
    call_format = get_call_format(form)
    thinking, words, _ = split_thinking(text, call_format)
    parsed_turn = call_format.read(words, ())
    return LoggedMessage(
        role="assistant",
        text=parsed_turn.content,
        thinking=thinking,
        calls=parsed_turn.calls,
        problems=parsed_turn.problems,
    )


def _parts(text: str, metadata: Mapping[str, Any]) -> Iterator[LoggedMessage]:
    """The messages of an observation that has several, or ids of calls."""
    position = 0
    for part in metadata.get("messages", ()):
        end = position + part["num_chars"]
        role: MessageRole = part["role"] if part["role"] in ("system", "user", "tool") else "user"
        yield LoggedMessage(role=role, text=text[position:end], call_id=part["call_id"])
        position = end + 1
