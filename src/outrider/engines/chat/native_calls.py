"""Tools and native calls in a chat server's form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.engines.chat.wire import REASONING, Transient
from outrider.tokens.calls.format import call_id, parse_call
from outrider.tokens.calls.reading import find_call_error, sanitize_call
from outrider.types import ToolCall, ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCalls:
    """The calls that a server has read out of a turn: those that the tools take, what was wrong with the
    others, and those as they were written. ``forwarded`` are all of them, as a program that asked the server
    itself would get them.
    """

    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    forwarded: tuple[ToolCall, ...] = ()


NO_CALLS: Final = ServedCalls()


def wire_tools(tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
    """What a request tells of the tools."""
    return [{"type": "function", "function": dict(tool)} for tool in tools]


def served_calls(message: Mapping[str, Any], tools: Sequence[ToolSchema]) -> ServedCalls:
    """The calls of an answer's message, with the server's ids where it gives each its own.

    What the model wrote is a problem in words; raises Transient for what only a server writes.
    """
    entries = message.get("tool_calls") or []
    calls: dict[str, ToolCall] = {}
    problems: list[str] = []
    unread: list[str] = []
    forwarded: list[ToolCall] = []
    for number, entry in enumerate(entries if isinstance(entries, list) else [None]):
        match entry:
            case {"function": {"name": str(name)} as function}:
                written = function.get("arguments")
            case _:
                raise Transient("garbage", "the answer holds no tool call where one should be")
        call = parse_call({"name": name, "arguments": written}, number, keys=("arguments",))
        if not isinstance(call, str) and isinstance(whole := sanitize_call(call), ToolCall):
            forwarded.append(whole)
        problem = f"The call: {call}." if isinstance(call, str) else find_call_error(call, tools)
        if isinstance(call, str) or problem:
            problems.append(problem)
            unread.append(f"{name} {written if isinstance(written, str) else json.dumps(written)}")
            continue
        ids = (entry.get("id"), *(call_id(free) for free in range(number, len(entries) + number)))
        own = next(name for name in ids if isinstance(name, str) and name and name not in calls)
        calls[own] = replace(call, call_id=own)
    return ServedCalls(
        calls=tuple(calls.values()),
        problems=tuple(problems),
        unread=tuple(unread),
        forwarded=tuple(forwarded),
    )


def served_reasoning(message: Mapping[str, Any]) -> str:
    """Thinking that the server took out of a turn, under either of the names that servers give it."""
    return next((text for key in REASONING if isinstance(text := message.get(key), str) and text), "")
