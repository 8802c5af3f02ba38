"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3 and many more.

Source: the function-calling documentation of Nous Research's Hermes and of Qwen.
"""

import json
from collections.abc import Sequence

from outrider.tokens.calls.format import FoundCalls, call_of, decode_json, listed
from outrider.types import ToolCall, ToolSchema

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """One JSON object a call, each between tags of its own."""

    markers = (_OPEN, _CLOSE)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> FoundCalls:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        words: list[str] = []
        calls: list[ToolCall] = []
        problems: list[str] = []
        position = 0
        while (start := text.find(_OPEN, position)) >= 0:
            words.append(text[position:start])
            found, position = _block(text, start + len(_OPEN), len(calls))
            if isinstance(found, str):
                problems.append(found)
            else:
                calls.append(found)
        if not position:
            return FoundCalls(content=text)
        words.append(text[position:])
        return FoundCalls(content="".join(words).strip(), calls=tuple(calls), problems=tuple(problems))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        said = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        return "\n".join(f"{_OPEN}\n{json.dumps(one, ensure_ascii=False)}\n{_CLOSE}" for one in said)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return (
            f"You may call these functions:\n<tools>\n{listed(tools)}\n</tools>\n"
            f"To call one, write a JSON object between {_OPEN} and {_CLOSE}:\n"
            f'{_OPEN}\n{{"name": <function name>, "arguments": <object of arguments>}}\n{_CLOSE}'
        )


def _block(text: str, start: int, number: int) -> tuple[ToolCall | str, int]:
    """The call behind an opening tag, or what is wrong with it, and where the reading goes on."""
    end = text.find(_CLOSE, start)
    behind = len(text) if end < 0 else end + len(_CLOSE)
    decoded = decode_json(text, start)
    if isinstance(decoded, str):
        what = "is not closed" if end < 0 else f"does not hold JSON: {decoded}"
        return f"{_OPEN} {what}.", behind
    value, after = decoded
    if not text[after:].lstrip().startswith(_CLOSE):
        what = "is not closed" if end < 0 else "must hold one JSON object and nothing else"
        return f"{_OPEN} {what}.", behind
    call = call_of(value, number, keys=("arguments",))
    after = text.index(_CLOSE, after) + len(_CLOSE)
    return (f"{_OPEN}: {call}." if isinstance(call, str) else call), after
