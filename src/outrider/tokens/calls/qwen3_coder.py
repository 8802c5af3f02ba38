"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder.

Source: the model cards and the chat template's documented form of Qwen3-Coder.
"""

import ast
import json
import re
from collections.abc import Sequence
from functools import partial
from math import isfinite

from outrider.tokens.calls.format import (
    ParsedCalls,
    call_id,
    find_invalid_name,
    list_schemas,
    read_between_words,
)
from outrider.tokens.calls.schemas import TYPES, Accepted, Arguments
from outrider.types import Json, ToolCall, ToolSchema

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_START = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\s]*)>|<tool_call>")
_END = re.compile(r"</function>\s*(?:</tool_call>)?")
_PARAMETER, _PARAMETER_END = re.compile(r"<parameter=([^<>\s]+)>"), "</parameter>"
_NAME = re.compile(r"[^<>\s]+")
_ANY = Accepted(types=tuple(TYPES))


class Qwen3Coder:
    """Every argument between tags of its own, as text; its type follows from the tool's schema."""

    markers = (_OPEN, _CLOSE)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return read_between_words(text, _START, partial(_block, tools=tools))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return "\n".join(_written(call) for call in calls)

    def unwritable(self, tool: ToolSchema) -> str:
        """See :class:`outrider.tokens.calls.format.LimitedForm`."""
        return find_invalid_name(tool, tools=_NAME.fullmatch, arguments=_NAME.fullmatch)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        example = _written(ToolCall(name="NAME", arguments={"PARAMETER": "value"}))
        return (
            f"You may call these functions:\n<tools>\n{list_schemas(tools)}\n</tools>\n"
            f"To call one, write:\n{example}"
        )


def _block(opened: re.Match[str], number: int, *, tools: Sequence[ToolSchema]) -> tuple[ToolCall | str, int]:
    """The call behind an opening tag, or what is wrong with it, and where the reading goes on."""
    text = opened.string
    end = _END.search(text, opened.end())
    if end is None:
        return f"{_OPEN}: a call is not closed.", len(text)
    call = _call(opened[1], text[opened.end() : end.start()], number, tools)
    return (f"{_OPEN}: {call}." if isinstance(call, str) else call), end.end()


def _parameters(inside: str) -> tuple[list[tuple[str, str]], str]:
    """Keys with their texts, and what stands beside them. Without a closing tag there are no more: a search
    from every opening one would take the square of their number.
    """
    parameters: list[tuple[str, str]] = []
    left: list[str] = []
    position = 0
    while (opened := _PARAMETER.search(inside, position)) is not None:
        end = inside.find(_PARAMETER_END, opened.end())
        if end < 0:
            break
        left.append(inside[position : opened.start()])
        parameters.append((opened[1], inside[opened.end() : end]))
        position = end + len(_PARAMETER_END)
    return parameters, "".join([*left, inside[position:]])


def _call(name: str | None, inside: str, number: int, tools: Sequence[ToolSchema]) -> ToolCall | str:
    if not name:
        return "a call needs <function=NAME>"
    parameters, left = _parameters(inside)
    if left.strip():
        return f"{name} holds something else than <parameter=KEY>value</parameter>"
    tool = next((tool for tool in tools if tool.get("name") == name), None)
    known, is_known = Arguments.from_schema(tool or {}), tool is not None
    arguments: dict[str, Json] = {}
    for key, text in parameters:
        # An argument that a schema neither declares nor leaves open stays text, as in Qwen's reader.
        accepted = _ANY if is_known and known.accepts_any(key) else known.accepted(key)
        arguments[key] = _value(text.removeprefix("\n").removesuffix("\n"), accepted)
    return ToolCall(name=name, arguments=arguments, call_id=call_id(number))


def _value(text: str, accepted: Accepted | None) -> Json:
    """The text as a value that its parameter takes; as it is where it cannot be one.

    Where text is taken beside others, JSON of these others is what it says, as it is written.
    """
    if accepted is None:
        return text
    value = _json(text)
    if not isinstance(value, str) and accepted.fits(value):
        return value
    if accepted.fits(text):
        return text
    return _literal(text) if isinstance(value, str) else value


def _json(text: str) -> Json:
    """The JSON value that a text is; the text itself where it is none."""
    try:
        value: Json = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text} is no number to JSON")
    return number


def _literal(text: str) -> Json:
    """The same of Python, which models write too: ``True``, or quotation marks of the other kind."""
    try:
        value: Json = json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value


def _written(call: ToolCall) -> str:
    parts = (
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
        "</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"{_OPEN}\n<function={call.name}>\n{''.join(parts)}</function>\n{_CLOSE}"
