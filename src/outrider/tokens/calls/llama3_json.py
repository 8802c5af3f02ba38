"""``{"name": ..., "parameters": {...}}`` as the whole turn: Llama 3.1 and later.

Source: Meta's documentation of Llama 3.1's JSON-based tool calling.
"""

import json
import re
from collections.abc import Sequence

from outrider.tokens.calls.format import FoundCalls, call_of, decode_json, listed
from outrider.types import ToolCall, ToolSchema

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"[\s;,]*")


class Llama3Json:
    """JSON objects alone, several one behind the other. An object without a name is an answer."""

    markers = (_TAG,)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> FoundCalls:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        before, tagged, rest = text.partition(_TAG)
        words, said = (before.strip(), rest.strip()) if tagged else ("", text.strip())
        is_call = tagged or re.match(r'\{\s*"(?:name|type|parameters|arguments)"', said)
        if not is_call:
            return FoundCalls(content=text)
        calls: list[ToolCall] = []
        position = 0
        while position < len(said):
            decoded = decode_json(said, position)
            if isinstance(decoded, str):
                return FoundCalls(
                    content=words, calls=tuple(calls), problems=(f"The call is not JSON: {decoded}.",)
                )
            value, position = decoded
            call = call_of(value, len(calls), keys=("parameters", "arguments"))
            if isinstance(call, str):
                return FoundCalls(content=words, calls=tuple(calls), problems=(f"The call: {call}.",))
            calls.append(call)
            between = _BETWEEN.match(said, position)
            position = between.end() if between else position
        return FoundCalls(content=words, calls=tuple(calls))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        said = ({"name": call.name, "parameters": dict(call.arguments)} for call in calls)
        return "; ".join(json.dumps(one, ensure_ascii=False) for one in said)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return (
            f"You may call these functions:\n{listed(tools)}\n"
            "To call one, reply with this JSON object alone:\n"
            '{"name": <function name>, "parameters": <object of arguments>}'
        )
