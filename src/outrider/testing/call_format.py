"""The contract of a form of native tool calls (:mod:`outrider.tokens.calls`)."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from outrider.testing.common import GARBAGE, require
from outrider.tokens.calls import CallFormat, ParsedCalls, call_id, find_call_error
from outrider.types import ToolCall, ToolSchema

_TYPES: Final = ("string", "integer", "number", "boolean", "array", "object")
_TOOL: Final[ToolSchema] = {
    "name": "look_up",
    "description": "Look something up.",
    "parameters": {
        "type": "object",
        "properties": {f"a_{kind}": {"type": kind} for kind in _TYPES},
        "required": [],
    },
}
_PLAIN: Final[ToolSchema] = {
    "name": "clock", "description": "Tell the time.", "parameters": {"type": "object", "properties": {}}
}  # fmt: skip
_ARGUMENTS: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {"a_string": "Rome"},
    {"a_string": 'two\nlines, "quoted" and \\ ß 𝔘 {"a": [1]}'},
    {"a_string": "1"},
    {"a_integer": -3, "a_number": 0.5, "a_boolean": True},
    {"a_array": [1, "b", None, [2]], "a_object": {"key": {"inner": "ü"}}},
)


def check_call_format(form: CallFormat) -> None:
    """Let a form write calls and read them again, one and several, and read garbage and what is cut off.

    Checked: markers that are texts; nothing that was written raises; what it writes it reads, of every type
    that the tool's schema names; what is cut off is no call of other arguments; a description that names the
    tools.
    """
    require(all(isinstance(marker, str) and marker for marker in form.markers), f"markers: {form.markers!r}")
    tools = (_TOOL, _PLAIN)
    for text in GARBAGE:
        parsed = _read(form, text, tools)
        require(not parsed.calls, f"{text[:40]!r} is read as calls: {parsed.calls!r}")
    single = [[_call(0, "look_up", arguments)] for arguments in _ARGUMENTS]
    several = [_call(0, "look_up", _ARGUMENTS[1]), _call(1, "clock", {}), _call(2, "look_up", _ARGUMENTS[5])]
    for calls in (*single, several):
        _require_read_back(form, calls, tools)
    description = form.describe(tools)
    for tool in tools:
        require(
            str(tool["name"]) in description, f"describe does not name {tool['name']}: {description[:200]!r}"
        )


def _call(number: int, name: str, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(name=name, arguments=dict(arguments), call_id=call_id(number))


def _read(form: CallFormat, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
    try:
        return form.read(text, tools)
    except Exception as error:
        raise AssertionError(f"read raises for {text[:60]!r}: {type(error).__name__}: {error}") from error


def _require_read_back(form: CallFormat, calls: Sequence[ToolCall], tools: Sequence[ToolSchema]) -> None:
    text = form.write(calls)
    parsed = _read(form, text, tools)
    require(
        parsed.calls == tuple(calls) and not parsed.problems and not parsed.content.strip(),
        f"{text[:200]!r} is read as {parsed!r}",
    )
    for end in range(0, len(text), 7):
        whole = _read(form, text[:end], tools).calls
        good = [call for call in whole if not find_call_error(call, tools)]
        require(
            good == list(calls[: len(good)]), f"{text[:end][-80:]!r}, which is cut off, is read as {good!r}"
        )
