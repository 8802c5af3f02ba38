"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3 and many more.

Source: the function-calling documentation of Nous Research's Hermes and of Qwen.
"""

import json
import re
from collections.abc import Sequence

from outrider.tokens.calls.format import (
    ParsedCalls,
    decode_json,
    list_schemas,
    parse_call,
    read_between_words,
)
from outrider.types import ToolCall, ToolSchema

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_START = re.compile(_OPEN)


class Hermes:
    """One JSON object a call, each between tags of its own."""

    markers = (_OPEN, _CLOSE)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return read_between_words(text, _START, _block)

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        payloads = [{"name": call.name, "arguments": call.raw or dict(call.arguments)} for call in calls]
        return "\n".join(
            f"{_OPEN}\n{json.dumps(payload, ensure_ascii=False)}\n{_CLOSE}" for payload in payloads
        )

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return (
            f"You may call these functions:\n<tools>\n{list_schemas(tools)}\n</tools>\n"
            f"To call one, write a JSON object between {_OPEN} and {_CLOSE}:\n"
            f'{_OPEN}\n{{"name": <function name>, "arguments": <object of arguments>}}\n{_CLOSE}'
        )


def _block(opened: re.Match[str], number: int) -> tuple[ToolCall | str, int]:
    """The call behind an opening tag, or what is wrong with it, and where the reading goes on."""
    text, start = opened.string, opened.end()
    end = text.find(_CLOSE, start)
    behind = len(text) if end < 0 else end + len(_CLOSE)
    decoded = decode_json(text, start)
    if isinstance(decoded, str):
        problem = "is not closed" if end < 0 else f"does not hold JSON: {decoded}"
        return f"{_OPEN} {problem}.", behind
    value, after = decoded
    if not text[after:].lstrip().startswith(_CLOSE):
        problem = "is not closed" if end < 0 else "must hold one JSON object and nothing else"
        return f"{_OPEN} {problem}.", behind
    call = parse_call(value, number, keys=("arguments", "parameters"))
    after = text.index(_CLOSE, after) + len(_CLOSE)
    return (f"{_OPEN}: {call}." if isinstance(call, str) else call), after
