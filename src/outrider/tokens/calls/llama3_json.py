"""``{"name": ..., "parameters": {...}}`` as the whole turn: Llama 3.1 and later.

Source: Meta's documentation of Llama 3.1's JSON-based tool calling.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from outrider.tokens.calls.format import ParsedCalls, decode_json, list_schemas, parse_call
from outrider.types import ToolCall, ToolSchema

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(rf"(?:[\s;,]|{re.escape(_TAG)})*")
_KEYS = ("parameters", "arguments")
_CALL_KEYS = frozenset({"name", "type", "id", *_KEYS})
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_CALL_START = re.compile(
    r'(?:\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*(?:,\s*"([^"\\]*)"?)?'
)
_NAMED_CALL = re.compile(r'(?:\[\s*)?\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:parameters|arguments)"')


class Llama3Json:
    """JSON objects alone, several in a row or in a list.

    Models answer in JSON too. An object is a call if it names one of the tools, or if it has a name and an
    object of arguments and nothing else. For example, ``{"name": "Marie Curie", "born": 1867}`` is an answer.
    Behind words, only an object that names a tool and has arguments is a call, as in vLLM.
    """

    markers = (_TAG,)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        start = _start(text, tools)
        if start is None:
            return ParsedCalls(content=text)
        words, body = text[:start].strip().removesuffix(_TAG).rstrip(), text[start:].strip()
        calls: list[ToolCall] = []

        def result(*problems: str) -> ParsedCalls:
            return ParsedCalls(content=words, calls=tuple(calls), problems=problems)

        position = 0
        while position < len(body):
            decoded = decode_json(body, position)
            if isinstance(decoded, str):
                is_behind_words = bool(calls and words) and _TAG not in text
                return result() if is_behind_words else result(f"The call is not JSON: {decoded}.")
            value, position = decoded
            for item in value if isinstance(value, list) else [value]:
                call = parse_call(item, len(calls), keys=_KEYS)
                if isinstance(call, str):
                    return result(f"The call: {call}.")
                calls.append(call)
            between = _BETWEEN.match(body, position)
            position = between.end() if between else position
        return result()

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        payloads = ({"name": call.name, "parameters": call.raw or dict(call.arguments)} for call in calls)
        return "; ".join(json.dumps(payload, ensure_ascii=False) for payload in payloads)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return (
            f"You may call these functions:\n{list_schemas(tools)}\n"
            "To call one, reply with this JSON object alone:\n"
            '{"name": <function name>, "parameters": <object of arguments>}'
        )


def _start(text: str, tools: Sequence[ToolSchema]) -> int | None:
    """Index of the first call: at the start of the turn, behind the tag, or behind words. None if there are
    no calls.
    """
    names = {name for tool in tools if isinstance(name := tool.get("name"), str)}
    blanks = len(text) - len(text.lstrip())
    if text[blanks : blanks + 1] in ("{", "[") and _begins_with_call(text, blanks, names):
        return blanks
    if _is_json(text[blanks:]):  # an answer, whatever is inside
        return None
    if _TAG in text:
        return text.index(_TAG) + len(_TAG)
    return next((match.start() for match in _NAMED_CALL.finditer(text) if match[1] in names), None)


def _is_json(text: str) -> bool:
    """Whether the text is one JSON value."""
    decoded = decode_json(text, 0)
    return not isinstance(decoded, str) and not text[decoded[1] :].strip()


def _begins_with_call(text: str, start: int, names: Set[str]) -> bool:
    decoded = decode_json(text, start)
    if isinstance(decoded, str):  # a call that is cut off, or no JSON at all
        match = _CALL_START.match(text, start)
        if match is None:
            return False
        return match[1] in names or (_NAME.fullmatch(match[1]) is not None and match[2] in _KEYS)
    value = decoded[0]
    return any(_is_call(item, names) for item in (value if isinstance(value, list) else [value]))


def _is_call(value: Any, names: Set[str]) -> bool:
    """Whether an object has the form of a call. Its arguments may still be wrong."""
    if not isinstance(value, Mapping):
        return False
    if value.get("type") == "function" and ("name" in value or "function" in value):
        return True
    if "name" not in value:
        return False
    name, is_bare = value["name"], not set(value) - _CALL_KEYS
    key = next((key for key in _KEYS if key in value), None)
    if isinstance(name, str) and name in names:
        return is_bare or key is not None or any(isinstance(item, Mapping) for item in value.values())
    if not isinstance(name, str):
        return is_bare
    if not is_bare or key is None or _NAME.fullmatch(name) is None:
        return False
    call = parse_call(value, 0, keys=_KEYS)
    return not isinstance(call, str) and not call.raw
