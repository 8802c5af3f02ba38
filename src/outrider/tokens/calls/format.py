"""The contract of one written form of tool calls, and what its readers share."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from outrider.tokens.calls.schemas import Arguments
from outrider.types import ToolCall, ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCalls:
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

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """The calls in a turn's words. Never raises for what was written."""
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as a model of the family writes them."""
        ...

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """What a system prompt says of the tools where the chat template does not."""
        ...


@runtime_checkable
class LimitedForm(CallFormat, Protocol):
    """A form that has no way to write some names. Tools that have one are refused at load."""

    def unwritable(self, tool: ToolSchema) -> str:
        """Which name, of the tool or of an argument, in words; empty where all can be written."""
        ...


def read_between_words(
    text: str, opening: re.Pattern[str], read_call: Callable[[re.Match[str], int], tuple[ToolCall | str, int]]
) -> ParsedCalls:
    """Calls among words, for the forms whose calls have tags of their own.

    ``read_call`` is given where one opens and how many calls are in front of it. It says which call that is, or
    what is wrong with it, and where the reading goes on.
    """
    words: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = 0
    while (start := opening.search(text, position)) is not None:
        words.append(text[position : start.start()])
        call, position = read_call(start, len(calls))
        if isinstance(call, str):
            problems.append(call)
        else:
            calls.append(call)
    if not position:
        return ParsedCalls(content=text)
    words.append(text[position:])
    return ParsedCalls(content="".join(words).strip(), calls=tuple(calls), problems=tuple(problems))


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


def parse_call(value: Any, number: int, *, keys: Sequence[str]) -> ToolCall | str:
    """A call of an object with ``name`` and its arguments under one of ``keys``, or what is wrong with it.

    Of the arguments, see :func:`call_from_arguments`.
    """
    if not isinstance(value, Mapping):
        return "a call must be a JSON object"
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return 'a call needs a "name"'
    key = next((key for key in keys if key in value), None)
    if key is None and (others := [other for other, inside in value.items() if isinstance(inside, Mapping)]):
        return f'{name} has its arguments under "{others[0]}", not under "{keys[0]}"'
    return call_from_arguments(name, None if key is None else value[key], call_id(number), key=key or "")


def call_from_arguments(name: str, arguments: Any, number: str, *, key: str = "arguments") -> ToolCall:
    """A call with these arguments: an object, text that holds one, or null for none. What is neither is kept
    as text (``ToolCall.raw``), as chat servers pass it on; no tool takes it.
    """
    value, problem = arguments, ""
    if isinstance(value, str):
        decoded = decode_json(value, 0) if value.strip() else (None, len(value))
        if isinstance(decoded, str):
            problem = f'"{key}" of {name} are not JSON: {decoded}.'
        elif value[decoded[1] :].strip():
            problem = f'"{key}" of {name} are not JSON: something stands behind them.'
        else:
            value = decoded[0]
    if not isinstance(value, Mapping | None):
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        problem = problem or f'"{key}" of {name} must be a JSON object.'
        return ToolCall(name=name, call_id=number, raw=raw, problem=problem)
    return ToolCall(name=name, arguments=dict(value or {}), call_id=number)


def find_invalid_name(
    tool: ToolSchema, *, tools: Callable[[str], object], arguments: Callable[[str], object]
) -> str:
    """In words, the first name of a tool or of its arguments that is none to a form; empty where all are."""
    if not tools(name := str(tool.get("name"))):
        return f"a tool named {name!r}"
    wrong = next(
        (argument for argument in Arguments.from_schema(tool).properties if not arguments(argument)), None
    )
    return "" if wrong is None else f"the argument {wrong!r} of {name}"


def list_schemas(tools: Sequence[ToolSchema]) -> str:
    """The schemas, one a line."""
    return "\n".join(
        json.dumps({"type": "function", "function": dict(tool)}, ensure_ascii=False) for tool in tools
    )
