"""The messages of a rollout out of its recorded nodes, native calls and their results told apart."""

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.evals.inspect_log.logged import Said, SaidBy
from outrider.tokens.calls import form_named
from outrider.tokens.parsed import split_thinking
from outrider.types import Origin
from outrider.watch.traces import TraceRow, metadata_of

AFTER_POLICY = (Origin.POLICY, Origin.DEMONSTRATION)


def said_in(row: TraceRow, form: str | None) -> list[Said]:
    """The messages of a node; ``form`` is that of the policy's native calls."""
    metadata = metadata_of(row)
    tools = tuple(str(name) for name in metadata.get("tools", ()))
    role: SaidBy
    match row.role:
        case "assistant":
            return [turn(row.text, form, tools)]
        case "system" | "user" | "tool":
            role = row.role
        case "inline":  # a result, or what a memory brought
            role = "tool" if row.origin is Origin.ENVIRONMENT else "user"
        case _:  # an earlier version of the records
            role = "assistant" if row.origin in AFTER_POLICY else "user"
    return list(_parts(row.text, metadata)) or [Said(role=role, text=row.text, tools=tools)]


def turn(text: str, form: str | None, tools: tuple[str, ...] = ()) -> Said:
    """A turn of the policy. ``tools`` ran for it. Types of arguments that only a tool's schema tells stay
    text, and what the schema refused is a call like others.
    """
    if form is None:
        return Said(role="assistant", text=text, tools=tools)
    call_format = form_named(form)
    thinking, words, _ = split_thinking(text, call_format)
    found = call_format.read(words, ())
    return Said(
        role="assistant", text=found.content, thinking=thinking, calls=found.calls, problems=found.problems
    )


def _parts(text: str, metadata: Mapping[str, Any]) -> Iterator[Said]:
    """The messages of an observation that has several, or ids of calls."""
    position = 0
    for part in metadata.get("messages", ()):
        end = position + part["num_chars"]
        role: SaidBy = part["role"] if part["role"] in ("system", "user", "tool") else "user"
        yield Said(role=role, text=text[position:end], call_id=part["call_id"])
        position = end + 1
