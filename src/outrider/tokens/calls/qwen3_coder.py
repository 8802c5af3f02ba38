"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder.

Source: the model cards and the chat template's documented form of Qwen3-Coder.
"""

import ast
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from outrider.tokens.calls.format import TYPES, FoundCalls, call_id, is_of, listed, read_between_words
from outrider.types import Json, ToolCall, ToolSchema

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_START = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\s]*)>|<tool_call>")
_END = re.compile(r"</function>\s*(?:</tool_call>)?")
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>(.*?)</parameter>", re.DOTALL)


class Qwen3Coder:
    """Every argument between tags of its own, as text; its type follows from the tool's schema."""

    markers = (_OPEN, _CLOSE)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> FoundCalls:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return read_between_words(text, _START, partial(_block, tools=tools))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return "\n".join(_written(call) for call in calls)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        example = _written(ToolCall(name="NAME", arguments={"PARAMETER": "value"}))
        return (
            f"You may call these functions:\n<tools>\n{listed(tools)}\n</tools>\n"
            f"To call one, write:\n{example}"
        )


def _block(opened: re.Match[str], number: int, *, tools: Sequence[ToolSchema]) -> tuple[ToolCall | str, int]:
    """The call behind an opening tag, or what is wrong with it, and where the reading goes on."""
    text = opened.string
    end = _END.search(text, opened.end())
    if end is None:
        return f"{_OPEN}: a call is not closed.", len(text)
    found = _call(opened[1], text[opened.end() : end.start()], number, tools)
    return (f"{_OPEN}: {found}." if isinstance(found, str) else found), end.end()


def _call(name: str | None, inside: str, number: int, tools: Sequence[ToolSchema]) -> ToolCall | str:
    if not name:
        return "a call needs <function=NAME>"
    left = _PARAMETER.sub("", inside).strip()
    if left:
        return f"{name} holds something else than <parameter=KEY>value</parameter>"
    known = next((tool for tool in tools if tool.get("name") == name), {})
    properties = known.get("parameters", {}).get("properties", {})
    arguments = {key: _value(text, properties.get(key, {})) for key, text in _PARAMETER.findall(inside)}
    return ToolCall(name=name, arguments=arguments, call_id=call_id(number))


def _value(text: str, schema: Any) -> Json:
    """The text as a value of its parameter's type; as it is where it cannot be one."""
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type", "string") if isinstance(schema, dict) else "string"
    others = [name for name in kind if name in TYPES and name != "string"] if isinstance(kind, list) else []
    if kind == "string":
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(kind, list) and "string" in kind and not is_of(value, others):
            break  # it reads as something that the tool does not take, so it was meant as text
        return value  # type: ignore[no-any-return]
    return text


def _written(call: ToolCall) -> str:
    said = (
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
        "</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"{_OPEN}\n<function={call.name}>\n{''.join(said)}</function>\n{_CLOSE}"
