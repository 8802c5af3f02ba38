"""``{"name": ..., "parameters": {...}}`` as the whole turn: Llama 3.1 and later.

Source: Meta's documentation of Llama 3.1's JSON-based tool calling.
"""

import json
import re
from collections.abc import Sequence

from outrider.tokens.calls.format import FoundCalls, call_of, decode_json, listed
from outrider.types import ToolCall, ToolSchema

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(rf"(?:[\s;,]|{re.escape(_TAG)})*")
_KEYS = ("parameters", "arguments")
_CALL = re.compile(r'\[?\s*\{\s*"(?:name|type|parameters|arguments)"')
_NAMED = re.compile(r'(?:\[\s*)?\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:parameters|arguments)"')


class Llama3Json:
    """JSON objects alone, several one behind the other or in a list. An object without a name is an answer,
    and so is one behind words, but where it names a tool and has arguments: vLLM reads a call in that too.
    """

    markers = (_TAG,)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> FoundCalls:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        start = _start(text, tools)
        if start is None:
            return FoundCalls(content=text)
        words, said = text[:start].strip().removesuffix(_TAG).rstrip(), text[start:].strip()
        calls: list[ToolCall] = []

        def found(*problems: str) -> FoundCalls:
            return FoundCalls(content=words, calls=tuple(calls), problems=problems)

        position = 0
        while position < len(said):
            decoded = decode_json(said, position)
            if isinstance(decoded, str):
                is_behind_words = bool(calls and words) and _TAG not in text
                return found() if is_behind_words else found(f"The call is not JSON: {decoded}.")
            value, position = decoded
            for one in value if isinstance(value, list) else [value]:
                call = call_of(one, len(calls), keys=_KEYS)
                if isinstance(call, str):
                    return found(f"The call: {call}.")
                calls.append(call)
            between = _BETWEEN.match(said, position)
            position = between.end() if between else position
        return found()

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        said = ({"name": call.name, "parameters": call.raw or dict(call.arguments)} for call in calls)
        return "; ".join(json.dumps(one, ensure_ascii=False) for one in said)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return (
            f"You may call these functions:\n{listed(tools)}\n"
            "To call one, reply with this JSON object alone:\n"
            '{"name": <function name>, "parameters": <object of arguments>}'
        )


def _start(text: str, tools: Sequence[ToolSchema]) -> int | None:
    """Where the calls begin: with the turn, behind the tag, or behind words; None where there are none."""
    blanks = len(text) - len(text.lstrip())
    if _CALL.match(text, blanks):
        return blanks
    if _TAG in text:
        return text.index(_TAG) + len(_TAG)
    names = {tool.get("name") for tool in tools}
    return next((named.start() for named in _NAMED.finditer(text) if named[1] in names), None)
