"""A turn's text read as a whole: thinking, calls, and whether the tools take them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import Any, Final

from outrider.tokens.calls.format import CallFormat
from outrider.tokens.calls.schemas import Arguments
from outrider.tokens.parsed import ParsedTurn, split_thinking
from outrider.types import ToolCall, ToolSchema, is_text

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_DEPTH: Final = 32
_TOO_DEEP: Final = f"more than {_MAX_DEPTH} levels"
_NOT_FINITE: Final = "a number that is not finite"


def read_turn(text: str, call_format: CallFormat | None, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """What a turn says. Without a form, or without tools, all behind the thinking is words. Calls that no
    tool takes are problems.
    """
    reasoning, rest, problems = split_thinking(text, call_format)
    if call_format is None or not tools:
        return ParsedTurn(content=rest, reasoning=reasoning, problems=problems)
    parsed = call_format.read(rest, tools)
    wrong = {
        number: problem
        for number, call in enumerate(parsed.calls)
        if (problem := find_call_error(call, tools))
    }
    return ParsedTurn(
        content=parsed.content,
        reasoning=reasoning,
        tool_calls=tuple(call for number, call in enumerate(parsed.calls) if number not in wrong),
        problems=(*problems, *parsed.problems, *wrong.values()),
    )


def read_turn_unchecked(text: str, call_format: CallFormat | None, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """A turn as a chat server passes it on: every call that can be read is a call, whether or not a tool
    takes it, and so is a last one whose closing tag is missing (its ``problem`` says so).
    """
    reasoning, rest, problems = split_thinking(text, call_format)
    if call_format is None or not tools:
        return ParsedTurn(content=rest, reasoning=reasoning, problems=problems)
    parsed = call_format.read(rest, tools)
    if (
        parsed.problems
        and rest.count(_OPEN) > rest.count(_CLOSE)
        and {_OPEN, _CLOSE} <= {*call_format.markers}
    ):
        closed = call_format.read(rest + _CLOSE, tools)
        if closed.calls and not closed.problems:
            last = replace(closed.calls[-1], problem=f"{_OPEN} is not closed.")
            parsed = replace(closed, calls=(*closed.calls[:-1], last))
    calls = [sanitize_call(call) for call in parsed.calls]
    return ParsedTurn(
        content=parsed.content,
        reasoning=reasoning,
        tool_calls=tuple(call for call in calls if not isinstance(call, str)),
        problems=(*problems, *parsed.problems, *(call for call in calls if isinstance(call, str))),
    )


def sanitize_call(call: ToolCall) -> ToolCall | str:
    """A call as a request can hold it: numbers that JSON lacks as text, question marks for halves of
    surrogate pairs. Words for arguments that are nested too deep.
    """
    problem = _find_unusable(call.arguments)
    if not problem and is_text(call.name) and is_text(call.raw):
        return call
    try:
        if problem == _TOO_DEEP:
            raise RecursionError
        name, raw, text = (
            value.encode("utf-8", "replace").decode() for value in (call.name, call.raw, call.arguments_text)
        )
        if problem == _NOT_FINITE:
            return replace(call, name=name, arguments={}, raw=text)
        return sanitize_call(replace(call, name=name, arguments={} if raw else json.loads(text), raw=raw))
    except RecursionError:
        return f"The arguments of {call.name} hold {_TOO_DEEP}."


def find_call_error(call: ToolCall, tools: Sequence[ToolSchema]) -> str:
    """Why no tool takes the call, in words for the policy; empty where one does.

    Checked are the names of tool and arguments, what is required, the types at the top level, and that
    everything is text and numbers that JSON has, nested no deeper than anybody means it. What a schema says
    otherwise, and what in it is no schema, is not looked at.
    """
    schema = next((tool for tool in tools if tool.get("name") == call.name), None)
    if schema is None:
        names = ", ".join(str(tool.get("name")) for tool in tools)
        return f"There is no tool {call.name!r}. Tools: {names}."
    if problem := _find_unusable(call.arguments):
        return f"The arguments of {call.name} hold {problem}."
    if call.raw:
        return call.problem or f"The arguments of {call.name} must be a JSON object."
    spec = Arguments.from_schema(schema)
    if missing := [name for name in spec.required if name not in call.arguments]:
        return f"{call.name} needs the argument {missing[0]!r}."
    if spec.is_closed and (unknown := [name for name in call.arguments if name not in spec.properties]):
        known = ", ".join(spec.properties) or "none"
        return f"{call.name} has no argument {unknown[0]!r}. Arguments: {known}."
    for name, value in call.arguments.items():
        accepted = spec.accepted(name)
        if accepted is not None and not accepted.fits(value):
            return f"The argument {name!r} of {call.name} must be {accepted.describe()}."
    return ""


def _find_unusable(arguments: Mapping[str, Any]) -> str:
    """What of the arguments no tool and no tokenizer can be given; empty where there is nothing."""
    queue: list[tuple[Any, int]] = [(arguments, 0)]  # no recursion: how deep it goes, the policy decides
    while queue:
        value, depth = queue.pop()
        if depth > _MAX_DEPTH:
            return _TOO_DEEP
        if isinstance(value, str) and not is_text(value):
            return "half of a surrogate pair"
        if isinstance(value, float) and not isfinite(value):
            return _NOT_FINITE
        inner = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        if isinstance(value, Mapping | list):
            queue += [(item, depth + 1) for item in inner]
    return ""
