"""A turn's text read as a whole: thinking, calls, and whether the tools take them."""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import Any, Final

from outrider.tokens.calls.format import CallFormat
from outrider.tokens.calls.schemas import Arguments
from outrider.tokens.parsed import ParsedTurn, split_thinking
from outrider.types import ToolCall, ToolSchema, is_text

_MAX_DEPTH: Final = 32


def read_turn(text: str, call_format: CallFormat | None, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """What a turn says. Without a form, or without tools, all behind the thinking is words."""
    reasoning, rest, problems = split_thinking(text, call_format)
    if call_format is None or not tools:
        return ParsedTurn(content=rest, reasoning=reasoning, problems=problems)
    found = call_format.read(rest, tools)
    wrong = {number: told for number, call in enumerate(found.calls) if (told := fault_of(call, tools))}
    return ParsedTurn(
        content=found.content,
        reasoning=reasoning,
        tool_calls=tuple(call for number, call in enumerate(found.calls) if number not in wrong),
        problems=(*problems, *found.problems, *wrong.values()),
    )


def fault_of(call: ToolCall, tools: Sequence[ToolSchema]) -> str:
    """Why no tool takes the call, in words for the policy; empty where one does.

    Checked are the names of tool and arguments, what is required, the types at the top level, and that
    everything is text and numbers that JSON has, nested no deeper than anybody means it. What a schema says
    otherwise, and what in it is no schema, is not looked at.
    """
    schema = next((tool for tool in tools if tool.get("name") == call.name), None)
    if schema is None:
        names = ", ".join(str(tool.get("name")) for tool in tools)
        return f"There is no tool {call.name!r}. Tools: {names}."
    if told := _unusable(call.arguments):
        return f"The arguments of {call.name} hold {told}."
    taken = Arguments.of(schema)
    if missing := [name for name in taken.required if name not in call.arguments]:
        return f"{call.name} needs the argument {missing[0]!r}."
    if taken.is_closed and (unknown := [name for name in call.arguments if name not in taken.properties]):
        known = ", ".join(taken.properties) or "none"
        return f"{call.name} has no argument {unknown[0]!r}. Arguments: {known}."
    for name, value in call.arguments.items():
        accepted = taken.accepted(name)
        if accepted is not None and not accepted.fits(value):
            return f"The argument {name!r} of {call.name} must be {accepted.told()}."
    return ""


def _unusable(arguments: Mapping[str, Any]) -> str:
    """What of the arguments no tool and no tokenizer can be given; empty where there is nothing."""
    waiting: list[tuple[Any, int]] = [(arguments, 0)]  # no recursion: how deep it goes, the policy decides
    while waiting:
        value, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            return f"more than {_MAX_DEPTH} levels"
        if isinstance(value, str) and not is_text(value):
            return "half of a surrogate pair"
        if isinstance(value, float) and not isfinite(value):
            return "a number that is not finite"
        inner = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        if isinstance(value, Mapping | list):
            waiting += [(one, depth + 1) for one in inner]
    return ""
