"""The contract of one written form of tool calls, and what its readers share."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from outrider.types import ToolCall, ToolSchema

TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""Of JSON schemas, and what has them in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCalls:
    """Calls of a turn in the order written, the words beside them, and what was wrong with the others."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


@runtime_checkable
class CallFormat(Protocol):
    """One form of calls, made without arguments. Holds nothing: it may be asked from several threads."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as special tokens, and that reading needs."""
        ...

    def read(self, text: str, tools: Sequence[ToolSchema]) -> FoundCalls:
        """The calls in a turn's words. Never raises for what was written."""
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as a model of the family writes them."""
        ...

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """What a system prompt says of the tools where the chat template does not."""
        ...


def read_between_words(
    text: str, opening: re.Pattern[str], call_at: Callable[[re.Match[str], int], tuple[ToolCall | str, int]]
) -> FoundCalls:
    """Calls among words, for the forms whose calls have tags of their own.

    ``call_at`` is given where one opens and how many calls are in front of it. It says which call that is, or
    what is wrong with it, and where the reading goes on.
    """
    words: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = 0
    while (start := opening.search(text, position)) is not None:
        words.append(text[position : start.start()])
        found, position = call_at(start, len(calls))
        if isinstance(found, str):
            problems.append(found)
        else:
            calls.append(found)
    if not position:
        return FoundCalls(content=text)
    words.append(text[position:])
    return FoundCalls(content="".join(words).strip(), calls=tuple(calls), problems=tuple(problems))


def call_id(number: int) -> str:
    """The id of a turn's call: nine letters and digits, which every template takes."""
    return f"call{number:05d}"


def decode_json(text: str, start: int) -> tuple[Any, int] | str:
    """The JSON value at ``start`` (blanks may be in front) and where it ends, or what is wrong with it."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, begin)
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos - begin + 1}"
    except (ValueError, RecursionError):  # an endless number, or nested without end
        return "it is too large"


def call_of(value: Any, number: int, *, keys: Sequence[str]) -> ToolCall | str:
    """A call of an object with ``name`` and its arguments under one of ``keys``, or what is wrong with it."""
    if not isinstance(value, Mapping):
        return "a call must be a JSON object"
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return 'a call needs a "name"'
    found: Any = next((value[key] for key in keys if key in value), {})
    if not isinstance(found, Mapping):
        return f'"{keys[0]}" of {name} must be a JSON object'
    return ToolCall(name=name, arguments=dict(found), call_id=call_id(number))


def is_of(value: Any, names: Sequence[str]) -> bool:
    """Whether the value has one of these types, which are among ``TYPES``."""
    # a bool is an int to Python, and none to JSON
    return any(
        isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        for name in names
    )


def listed(tools: Sequence[ToolSchema]) -> str:
    """The schemas, one a line."""
    return "\n".join(
        json.dumps({"type": "function", "function": dict(tool)}, ensure_ascii=False) for tool in tools
    )
