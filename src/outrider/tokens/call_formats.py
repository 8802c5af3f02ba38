"""Call formats: notations of native tool calls, built in and from plug-ins, and parsing of whole turns."""

import ast
import contextlib
import json
import keyword
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import Annotated, Any, Final, TypeAlias

from outrider.errors import ConfigError
from outrider.plugins.registry import Name, resolve
from outrider.tokens.tool_calls import (
    TYPES,
    Accepted,
    Arguments,
    CallFormat,
    ParsedCalls,
    ParsedTurn,
    call_id,
    decode_json,
    find_invalid_name,
    list_schemas,
    parse_call,
    read_calls,
    read_tagged_calls,
    split_thinking,
)
from outrider.types import Json, ToolCall, ToolSchema, is_text

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"

# --- Hermes, Qwen2.5, Qwen3 and many more: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
# Source: the function-calling documentation of Nous Research's Hermes and of Qwen. ---


class Hermes:
    """One JSON object per call, each between its own tags."""

    markers = (_OPEN, _CLOSE)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        return read_tagged_calls(text, re.compile(_OPEN), self._read_call)

    @staticmethod
    def _read_call(opened: re.Match[str], number: int) -> tuple[ToolCall | str, int]:
        text, start = opened.string, opened.end()
        end = text.find(_CLOSE, start)
        after_tag = len(text) if end < 0 else end + len(_CLOSE)
        decoded = decode_json(text, start)
        if isinstance(decoded, str):
            problem = "is not closed" if end < 0 else f"does not hold JSON: {decoded}"
            return f"{_OPEN} {problem}.", after_tag
        value, after = decoded
        if not text[after:].lstrip().startswith(_CLOSE):
            problem = "is not closed" if end < 0 else "must hold one JSON object and nothing else"
            return f"{_OPEN} {problem}.", after_tag
        call = parse_call(value, number, keys=("arguments", "parameters"))
        after = text.index(_CLOSE, after) + len(_CLOSE)
        return (f"{_OPEN}: {call}." if isinstance(call, str) else call), after

    def write(self, calls: Sequence[ToolCall]) -> str:
        payloads = [{"name": call.name, "arguments": call.raw or dict(call.arguments)} for call in calls]
        return "\n".join(
            f"{_OPEN}\n{json.dumps(payload, ensure_ascii=False)}\n{_CLOSE}" for payload in payloads
        )

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        return (
            f"You may call these functions:\n<tools>\n{list_schemas(tools)}\n</tools>\n"
            f"To call one, write a JSON object between {_OPEN} and {_CLOSE}:\n"
            f'{_OPEN}\n{{"name": <function name>, "arguments": <object of arguments>}}\n{_CLOSE}'
        )


# --- Llama 3.1 and later: ``{"name": ..., "parameters": {...}}`` as the whole turn. Source: Meta's
# documentation of Llama 3.1's JSON-based tool calling. ---

_BETWEEN = re.compile(rf"(?:[\s;,]|{re.escape(_PYTHON_TAG)})*")
_KEYS = ("parameters", "arguments")
_CALL_KEYS = frozenset({"name", "type", "id", *_KEYS})
_LLAMA_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
_CALL_START = re.compile(
    r'(?:\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*(?:,\s*"([^"\\]*)"?)?'
)
_NAMED_CALL = re.compile(r'(?:\[\s*)?\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:parameters|arguments)"')


class Llama3Json:
    """JSON objects without tags, several in a row or in a list.

    Models also answer in JSON. An object is a call if it names one of the tools, or if it has a name and an
    object of arguments and nothing else. For example, ``{"name": "Marie Curie", "born": 1867}`` is an answer.
    After other text, only an object that names a tool and has arguments is a call, as in vLLM.
    """

    markers = (_PYTHON_TAG,)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        start = _start(text, tools)
        if start is None:
            return ParsedCalls(content=text)
        content, body = text[:start].strip().removesuffix(_PYTHON_TAG).rstrip(), text[start:].strip()
        calls: list[ToolCall] = []

        def result(*problems: str) -> ParsedCalls:
            return ParsedCalls(content=content, calls=tuple(calls), problems=problems)

        position = 0
        while position < len(body):
            decoded = decode_json(body, position)
            if isinstance(decoded, str):
                follows_text = bool(calls and content) and _PYTHON_TAG not in text
                return result() if follows_text else result(f"The call is not JSON: {decoded}.")
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
        payloads = ({"name": call.name, "parameters": call.raw or dict(call.arguments)} for call in calls)
        return "; ".join(json.dumps(payload, ensure_ascii=False) for payload in payloads)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        return (
            f"You may call these functions:\n{list_schemas(tools)}\n"
            "To call one, reply with this JSON object alone:\n"
            '{"name": <function name>, "parameters": <object of arguments>}'
        )


def _start(text: str, tools: Sequence[ToolSchema]) -> int | None:
    """Index of the first call: at the start of the turn, after the tag, or after text; None without calls."""
    names = {name for tool in tools if isinstance(name := tool.get("name"), str)}
    blanks = len(text) - len(text.lstrip())
    if text[blanks : blanks + 1] in ("{", "[") and _begins_with_call(text, blanks, names):
        return blanks
    decoded = decode_json(text, blanks)
    if not isinstance(decoded, str) and not text[decoded[1] :].strip():  # an answer in JSON
        return None
    if _PYTHON_TAG in text:
        return text.index(_PYTHON_TAG) + len(_PYTHON_TAG)
    return next((match.start() for match in _NAMED_CALL.finditer(text) if match[1] in names), None)


def _begins_with_call(text: str, start: int, names: Set[str]) -> bool:
    decoded = decode_json(text, start)
    if isinstance(decoded, str):  # a call that is cut off, or no JSON at all
        match = _CALL_START.match(text, start)
        if match is None:
            return False
        return match[1] in names or (_LLAMA_NAME.fullmatch(match[1]) is not None and match[2] in _KEYS)
    value = decoded[0]
    return any(_is_call(item, names) for item in (value if isinstance(value, list) else [value]))


def _is_call(value: Any, names: Set[str]) -> bool:
    """Whether an object has the form of a call. Its arguments may still be invalid."""
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
    if not is_bare or key is None or _LLAMA_NAME.fullmatch(name) is None:
        return False
    call = parse_call(value, 0, keys=_KEYS)
    return not isinstance(call, str) and not call.raw


# --- Llama 3.2 and 4, LFM2: ``[name(key=value), other(key=value)]`` as the whole turn or between LFM2's
# tokens. Source: Meta's documentation of zero-shot function calling, Liquid AI's of LFM2. ---

_PYTHONIC_OPEN, _PYTHONIC_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_OPENING = re.compile(f"{re.escape(_PYTHONIC_OPEN)}|{re.escape(_PYTHON_TAG)}")
_PIECE = re.compile(
    rf"""{re.escape(_PYTHONIC_CLOSE)}|'(?:\\.|[^'\\\n])*+'|"(?:\\.|[^"\\\n])*+"|\\?.""",  # strings as a whole
    re.DOTALL,
)
_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_PYTHONIC_NAME = re.compile(r"[A-Za-z_][\w.]*")
_JSON_CONSTANTS: dict[str, Json] = {"true": True, "false": False, "null": None}


class Pythonic:
    """A Python list of calls with literal arguments. The text is parsed, never executed."""

    markers = (_PYTHONIC_OPEN, _PYTHONIC_CLOSE, _PYTHON_TAG)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        content, blocks = _split_blocks(text)
        if not blocks:
            # A call of a tool whose name is invalid in Python is an unreadable call, not an answer.
            body = content.removeprefix("[").lstrip()
            calls_tool = content.startswith("[") and any(
                body.startswith(f"{tool.get('name')}(") for tool in tools
            )
            if not (calls_tool or _is_list_of_calls(content, tools)):
                return ParsedCalls(content=text)
            blocks, content = [content], ""
        calls: list[ToolCall] = []
        problems: list[str] = []
        for block in blocks:
            result = _parse_list(block.strip(), len(calls))
            if isinstance(result, str):
                problems.append(f"The call cannot be read: {result}.")
            else:
                calls.extend(result)
        return ParsedCalls(content=content, calls=tuple(calls), problems=tuple(problems))

    def write(self, calls: Sequence[ToolCall]) -> str:
        parts = (
            f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
            for call in calls
        )
        return f"[{', '.join(parts)}]"

    def unwritable(self, tool: ToolSchema) -> str:
        return find_invalid_name(tool, tools=_is_tool_name, arguments=_is_name)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        return (
            f"You may call these functions:\n{list_schemas(tools)}\n"
            "To call one or more, reply with this list alone:\n"
            "[function_name(parameter=value), other_function(parameter=value)]"
        )


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _is_tool_name(name: str) -> bool:
    """Whether it is a name or a dotted name (``calendar.add``)."""
    return bool(_PYTHONIC_NAME.fullmatch(name)) and all(map(_is_name, name.split(".")))


def _is_list_of_calls(text: str, tools: Sequence[ToolSchema]) -> bool:
    """Whether a list without tags calls one of the tools, or only has calls with named arguments.

    Other lists are answers, for example ``[sin(x), cos(x)]``.
    """
    if not _LIST.match(text):
        return False
    names = {tool.get("name") for tool in tools}
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return False
        calls = [node for node in tree.elts if isinstance(node, ast.Call)]
        if any(ast.unparse(node.func) in names for node in calls):
            return True
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return len(calls) == len(tree.elts) and all(node.keywords and not node.args for node in calls)


def _split_blocks(text: str) -> tuple[str, list[str]]:
    """Split a text into the part outside of tagged blocks and the insides of the blocks."""
    parts: list[str] = []
    blocks: list[str] = []
    position = 0
    while (opened := _OPENING.search(text, position)) is not None:
        parts.append(text[position : opened.start()])
        end = len(text) if opened[0] == _PYTHON_TAG else _find_end(text, opened.end())
        blocks.append(text[opened.end() : end])
        position = min(len(text), end + len(_PYTHONIC_CLOSE))
    return "".join([*parts, text[position:]]).strip(), blocks


def _find_end(text: str, start: int) -> int:
    """A block ends at the first tag outside of a string, else at the first tag, else with the text."""
    pieces = _PIECE.finditer(text, start)
    outside = next((piece.start() for piece in pieces if piece[0] == _PYTHONIC_CLOSE), -1)
    end = outside if outside >= 0 else text.find(_PYTHONIC_CLOSE, start)
    return end if end >= 0 else len(text)


def _parse_list(text: str, first: int) -> list[ToolCall] | str:
    try:
        tree = ast.parse(text, mode="eval").body
        written = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_pythonic_call(node, first + number) for number, node in enumerate(written)]
    except _InvalidCall as error:
        return str(error)
    except SyntaxError as error:
        return f"{error.msg} at character {error.offset or 1}"
    except (ValueError, RecursionError, MemoryError):  # null bytes, or too many nested brackets
        return "it is no Python list of calls"


class _InvalidCall(Exception):
    """Python code other than calls with literal arguments."""


def _pythonic_call(node: ast.expr, number: int) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise _InvalidCall("each element must be a call, name(key=value)")
    name = ast.unparse(node.func)
    if not _PYTHONIC_NAME.fullmatch(name):
        raise _InvalidCall("a call needs a name")
    if node.args or any(argument.arg is None for argument in node.keywords):
        raise _InvalidCall(f"every argument of {name} needs its name")
    arguments = {str(argument.arg): _pythonic_value(argument.value) for argument in node.keywords}
    return ToolCall(name=name, arguments=arguments, call_id=call_id(number))


def _pythonic_value(node: ast.expr) -> Json:
    if isinstance(node, ast.Name) and node.id in _JSON_CONSTANTS:
        return _JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_pythonic_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _pythonic_value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise _InvalidCall("keys must be strings")
        return {str(key): _pythonic_value(value) for key, value in zip(keys, node.values, strict=True)}
    try:
        value = ast.literal_eval(node)
        json.dumps(value)
    except (ValueError, TypeError) as error:
        raise _InvalidCall("arguments must be plain values") from error
    return value  # type: ignore[no-any-return]


# --- Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``.
# Source: the model cards and the documented notation of Qwen3-Coder's chat template. ---

_FUNCTION_START = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\s]*)>|<tool_call>")
_FUNCTION_END = re.compile(r"</function>\s*(?:</tool_call>)?")
_PARAMETER, _PARAMETER_END = re.compile(r"<parameter=([^<>\s]+)>"), "</parameter>"
_FUNCTION_NAME = re.compile(r"[^<>\s]+")
_ANY = Accepted(types=tuple(TYPES))


class Qwen3Coder:
    """Every argument is text between its own tags; its type follows from the tool's schema."""

    markers = (_OPEN, _CLOSE)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        def read_call(opened: re.Match[str], number: int) -> tuple[ToolCall | str, int]:
            end = _FUNCTION_END.search(text, opened.end())
            if end is None:
                return f"{_OPEN}: a call is not closed.", len(text)
            call = _function_call(opened[1], text[opened.end() : end.start()], number, tools)
            return (f"{_OPEN}: {call}." if isinstance(call, str) else call), end.end()

        return read_tagged_calls(text, _FUNCTION_START, read_call)

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(map(_write_function_call, calls))

    def unwritable(self, tool: ToolSchema) -> str:
        return find_invalid_name(tool, tools=_FUNCTION_NAME.fullmatch, arguments=_FUNCTION_NAME.fullmatch)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        example = _write_function_call(ToolCall(name="NAME", arguments={"PARAMETER": "value"}))
        return (
            f"You may call these functions:\n<tools>\n{list_schemas(tools)}\n</tools>\n"
            f"To call one, write:\n{example}"
        )


def _function_call(name: str | None, inside: str, number: int, tools: Sequence[ToolSchema]) -> ToolCall | str:
    if not name:
        return "a call needs <function=NAME>"
    tool = next((tool for tool in tools if tool.get("name") == name), None)
    known = Arguments.from_schema(tool or {})
    arguments: dict[str, Json] = {}
    others: list[str] = []  # text outside of parameters
    position = 0
    while (opened := _PARAMETER.search(inside, position)) is not None:
        end = inside.find(_PARAMETER_END, opened.end())
        if end < 0:  # no further closing tag: continuing at every opening one would take quadratic time
            break
        others.append(inside[position : opened.start()])
        key, text = opened[1], inside[opened.end() : end].removeprefix("\n").removesuffix("\n")
        # An argument that a schema neither declares nor leaves open stays text, as in Qwen's reader.
        accepted = _ANY if tool is not None and known.accepts_any(key) else known.accepted(key)
        arguments[key] = _parameter_value(text, accepted)
        position = end + len(_PARAMETER_END)
    if "".join([*others, inside[position:]]).strip():
        return f"{name} holds something else than <parameter=KEY>value</parameter>"
    return ToolCall(name=name, arguments=arguments, call_id=call_id(number))


def _parameter_value(text: str, accepted: Accepted | None) -> Json:
    """Convert the text of a parameter to an accepted value; if it fits none, it stays text.

    If text and other types are accepted, the text of a JSON value of another type becomes that value.
    """
    if accepted is None:
        return text
    value: Json = text
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    is_json = not isinstance(value, str)
    # "2.0" may be an integer, but a text that is also accepted stays one
    is_text = isinstance(value, float) and "string" in accepted.types and "number" not in accepted.types
    if is_json and accepted.fits(value) and not is_text:
        return value
    if accepted.fits(text):
        return text
    if is_json:
        return value
    try:  # models also write Python: ``True``, or single quotation marks
        value = json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text} is no number in JSON")
    return number


def _write_function_call(call: ToolCall) -> str:
    parts = (
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
        "</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"{_OPEN}\n<function={call.name}>\n{''.join(parts)}</function>\n{_CLOSE}"


# --- Call formats by name ---

CallFormatName: TypeAlias = Annotated[str, Name("call_formats")]
"""A call format: a built-in or registered name, or ``my_module:MyFormat``."""
ProtocolName: TypeAlias = Annotated[str, Name("call_formats", also=("tags",))]
"""``tags``, the papers' tags, or a call format."""

CALL_FORMATS: Final[Mapping[str, CallFormat]] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3Json(),
    "pythonic": Pythonic(),
}


def get_call_format(name: str) -> CallFormat:
    """Return the call format of a name. Raises ConfigError if there is none."""
    if name in CALL_FORMATS:
        return CALL_FORMATS[name]
    call_format: object = resolve("call_formats", name)()
    if not isinstance(call_format, CallFormat):
        raise ConfigError(
            f"{name} is no call format: it must have markers, read, write and describe (outrider.CallFormat)"
        )
    return call_format


def describe_unwritable(name: str, tools: Sequence[ToolSchema]) -> str:
    """Describe the first name that a call format cannot write and list the built-in formats that can, or
    return "".
    """

    def find_unwritable(form: CallFormat) -> str:
        unwritable = getattr(form, "unwritable", None)
        return "" if unwritable is None else next(filter(None, map(unwritable, tools)), "")

    problem = find_unwritable(get_call_format(name))
    if not problem:
        return ""
    others = [other for other, form in CALL_FORMATS.items() if not find_unwritable(form)]
    return f"the call format {name} cannot write {problem}: {', '.join(others)} can"


# --- Whole turns: thinking, calls, and whether the tools accept the calls ---

_MAX_DEPTH: Final = 32
_TOO_DEEP: Final = f"more than {_MAX_DEPTH} levels"
_NOT_FINITE: Final = "a number that is not finite"


def read_turn(text: str, call_format: CallFormat | None, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """Parse a turn. Without a call format or without tools, all text after the thinking is content. Calls
    that no tool accepts are problems.
    """
    reasoning, rest, problems = split_thinking(text, call_format)
    if call_format is None or not tools:
        return ParsedTurn(content=rest, reasoning=reasoning, problems=problems)
    parsed = read_calls(rest, call_format, tools)
    wrong = {
        number: problem
        for number, call in enumerate(parsed.calls)
        if (problem := find_call_error(call, tools))
    }
    return ParsedTurn(
        content=parsed.content,
        reasoning=reasoning,
        tool_calls=tuple(call for number, call in enumerate(parsed.calls) if number not in wrong),
        problems=(*problems, *parsed.problems, *wrong.values()),
    )


def read_turn_unchecked(text: str, call_format: CallFormat | None, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """Parse a turn as a chat server does: calls are not validated against the tools, and a last call without
    its closing tag is a call whose ``problem`` reports that.
    """
    reasoning, rest, problems = split_thinking(text, call_format)
    if call_format is None or not tools:
        return ParsedTurn(content=rest, reasoning=reasoning, problems=problems)
    parsed = read_calls(rest, call_format, tools)
    if (
        parsed.problems
        and rest.count(_OPEN) > rest.count(_CLOSE)
        and {_OPEN, _CLOSE} <= {*call_format.markers}
    ):
        closed = read_calls(rest + _CLOSE, call_format, tools)
        if closed.calls and not closed.problems:
            last = replace(closed.calls[-1], problem=f"{_OPEN} is not closed.")
            parsed = replace(closed, calls=(*closed.calls[:-1], last))
    calls = [sanitize_call(call) for call in parsed.calls]
    return ParsedTurn(
        content=parsed.content,
        reasoning=reasoning,
        tool_calls=tuple(call for call in calls if not isinstance(call, str)),
        problems=(*problems, *parsed.problems, *(call for call in calls if isinstance(call, str))),
    )


def sanitize_call(call: ToolCall) -> ToolCall | str:
    """Replace values that a request cannot contain: numbers that are not finite by text, halves of surrogate
    pairs by question marks. Returns a problem if the arguments are nested too deeply.
    """
    problem = _find_unusable(call.arguments)
    if not problem and is_text(call.name) and is_text(call.raw):
        return call
    try:
        if problem == _TOO_DEEP:
            raise RecursionError
        name, raw, text = (
            value.encode("utf-8", "replace").decode() for value in (call.name, call.raw, call.arguments_text)
        )
        if problem == _NOT_FINITE:
            return replace(call, name=name, arguments={}, raw=text)
        return sanitize_call(replace(call, name=name, arguments={} if raw else json.loads(text), raw=raw))
    except RecursionError:
        return f"The arguments of {call.name} hold {_TOO_DEEP}."


def find_call_error(call: ToolCall, tools: Sequence[ToolSchema]) -> str:
    """Describe for the policy why no tool accepts the call, or return "".

    Checks the names of the tool and its arguments, required arguments, the types at the top level, and that
    all values are JSON and not nested too deeply. Other parts of a schema are not checked.
    """
    schema = next((tool for tool in tools if tool.get("name") == call.name), None)
    if schema is None:
        names = ", ".join(str(tool.get("name")) for tool in tools)
        return f"There is no tool {call.name!r}. Tools: {names}."
    if problem := _find_unusable(call.arguments):
        return f"The arguments of {call.name} hold {problem}."
    if call.raw:
        return call.problem or f"The arguments of {call.name} must be a JSON object."
    spec = Arguments.from_schema(schema)
    if missing := [name for name in spec.required if name not in call.arguments]:
        return f"{call.name} needs the argument {missing[0]!r}."
    if spec.is_closed and (unknown := [name for name in call.arguments if name not in spec.properties]):
        known = ", ".join(spec.properties) or "none"
        return f"{call.name} has no argument {unknown[0]!r}. Arguments: {known}."
    for name, value in call.arguments.items():
        accepted = spec.accepted(name)
        if accepted is not None and not accepted.fits(value):
            return f"The argument {name!r} of {call.name} must be {accepted.describe()}."
    return ""


def _find_unusable(arguments: Mapping[str, Any]) -> str:
    """Describe a value that no tool or tokenizer can process, or return ""."""
    queue: list[tuple[Any, int]] = [(arguments, 0)]  # no recursion: the policy decides how deep it goes
    while queue:
        value, depth = queue.pop()
        if depth > _MAX_DEPTH:
            return _TOO_DEEP
        if isinstance(value, str) and not is_text(value):
            return "half of a surrogate pair"
        if isinstance(value, float) and not isfinite(value):
            return _NOT_FINITE
        inner = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        if isinstance(value, Mapping | list):
            queue += [(item, depth + 1) for item in inner]
    return ""


def convert_calls(text: str, form: CallFormat, tools: Sequence[ToolSchema]) -> str:
    """Rewrite a turn with calls in the format ``hermes``, for example of an imported chat, in ``form``.

    A turn that ``form`` can read, or that it cannot write, is returned unchanged.
    """
    hermes = CALL_FORMATS["hermes"]
    if _OPEN not in text:
        return text
    _, rest, _ = split_thinking(text, hermes)
    head = text[: len(text) - len(rest)]
    written = read_calls(rest, hermes, tools)
    if written.problems or not written.calls:
        return text
    if _is_same(read_calls(rest, form, tools), written):
        return text
    calls = form.write(written.calls)
    # Some formats accept text next to calls only if the calls are tagged.
    for tagged in (calls, f"{_PYTHONIC_OPEN}{calls}{_PYTHONIC_CLOSE}"):
        candidate = "\n".join(part for part in (written.content, tagged) if part)
        if _is_same(read_calls(candidate, form, tools), written):
            return head + candidate
    return text


def _is_same(parsed: ParsedCalls, written: ParsedCalls) -> bool:
    def key(result: ParsedCalls) -> tuple[object, ...]:
        return result.content, [(call.name, dict(call.arguments)) for call in result.calls], result.problems

    return key(parsed) == key(written)
