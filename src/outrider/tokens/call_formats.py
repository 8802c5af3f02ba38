"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3 and many more.

Source: the function-calling documentation of Nous Research's Hermes and of Qwen.
"""

import ast
import json
import keyword
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
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
    LimitedForm,
    ParsedCalls,
    ParsedTurn,
    call_id,
    decode_json,
    find_invalid_name,
    list_schemas,
    parse_call,
    read_between_words,
    split_thinking,
)
from outrider.types import Json, ToolCall, ToolSchema, is_text

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_START = re.compile(_OPEN)


class Hermes:
    """One JSON object a call, each between tags of its own."""

    markers = (_OPEN, _CLOSE)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        return read_between_words(text, _START, _block)

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


# ``{"name": ..., "parameters": {...}}`` as the whole turn: Llama 3.1 and later.
#
# Source: Meta's documentation of Llama 3.1's JSON-based tool calling.


_LLAMA_TAG = "<|python_tag|>"
_BETWEEN = re.compile(rf"(?:[\s;,]|{re.escape(_LLAMA_TAG)})*")
_KEYS = ("parameters", "arguments")
_CALL_KEYS = frozenset({"name", "type", "id", *_KEYS})
_LLAMA_NAME = re.compile(r"[A-Za-z_][\w.-]{0,127}")
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

    markers = (_LLAMA_TAG,)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        start = _start(text, tools)
        if start is None:
            return ParsedCalls(content=text)
        words, body = text[:start].strip().removesuffix(_LLAMA_TAG).rstrip(), text[start:].strip()
        calls: list[ToolCall] = []

        def result(*problems: str) -> ParsedCalls:
            return ParsedCalls(content=words, calls=tuple(calls), problems=problems)

        position = 0
        while position < len(body):
            decoded = decode_json(body, position)
            if isinstance(decoded, str):
                is_behind_words = bool(calls and words) and _LLAMA_TAG not in text
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
        payloads = ({"name": call.name, "parameters": call.raw or dict(call.arguments)} for call in calls)
        return "; ".join(json.dumps(payload, ensure_ascii=False) for payload in payloads)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
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
    if _LLAMA_TAG in text:
        return text.index(_LLAMA_TAG) + len(_LLAMA_TAG)
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
        return match[1] in names or (_LLAMA_NAME.fullmatch(match[1]) is not None and match[2] in _KEYS)
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
    if not is_bare or key is None or _LLAMA_NAME.fullmatch(name) is None:
        return False
    call = parse_call(value, 0, keys=_KEYS)
    return not isinstance(call, str) and not call.raw


# ``[name(key=value), other(key=value)]`` as the whole turn or between LFM2's tokens: Llama 3.2 and 4, LFM2.
#
# Source: Meta's documentation of zero-shot function calling and Liquid AI's documentation of LFM2.


_PYTHONIC_OPEN, _PYTHONIC_CLOSE, _PYTHONIC_TAG = "<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>"
_OPENING = re.compile(f"{re.escape(_PYTHONIC_OPEN)}|{re.escape(_PYTHONIC_TAG)}")
_PIECE = re.compile(
    rf"""{re.escape(_PYTHONIC_CLOSE)}|'(?:\\.|[^'\\\n])*+'|"(?:\\.|[^"\\\n])*+"|\\?.""",  # strings as a whole
    re.DOTALL,
)
_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_PYTHONIC_NAME = re.compile(r"[A-Za-z_][\w.]*")
_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None}


class Pythonic:
    """A Python list of calls with literal arguments. Nothing is executed: the text is parsed only."""

    markers = (_PYTHONIC_OPEN, _PYTHONIC_CLOSE, _PYTHONIC_TAG)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        words, blocks = _blocks(text)
        if not blocks:
            # a tool's name may be none to Python: that is a call which cannot be read, and no words
            if not (_begins_with_tool_call(tools, words) or _is_list_of_calls(words, tools)):
                return ParsedCalls(content=text)
            blocks, words = [words], ""
        calls: list[ToolCall] = []
        problems: list[str] = []
        for block in blocks:
            result = _calls(block.strip(), len(calls))
            if isinstance(result, str):
                problems.append(f"The call cannot be read: {result}.")
            else:
                calls.extend(result)
        return ParsedCalls(content=words, calls=tuple(calls), problems=tuple(problems))

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
    """Whether it is one, or several behind one another (``calendar.add``)."""
    return bool(_PYTHONIC_NAME.fullmatch(name)) and all(map(_is_name, name.split(".")))


def _begins_with_tool_call(tools: Sequence[ToolSchema], text: str) -> bool:
    body = text.removeprefix("[").lstrip()
    return text.startswith("[") and any(body.startswith(f"{tool.get('name')}(") for tool in tools)


def _is_list_of_calls(text: str, tools: Sequence[ToolSchema]) -> bool:
    """Whether a list without tags is a list of calls. Answers may be lists too: ``[sin(x), cos(x)]``.

    It is one if it calls one of the tools, or if all its elements are calls with named arguments.
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


def _blocks(text: str) -> tuple[str, list[str]]:
    """The words outside of the blocks of calls, and the insides of these."""
    words: list[str] = []
    blocks: list[str] = []
    position = 0
    while (opened := _OPENING.search(text, position)) is not None:
        words.append(text[position : opened.start()])
        end = len(text) if opened[0] == _PYTHONIC_TAG else _find_end(text, opened.end())
        blocks.append(text[opened.end() : end])
        position = min(len(text), end + len(_PYTHONIC_CLOSE))
    return "".join([*words, text[position:]]).strip(), blocks


def _find_end(text: str, start: int) -> int:
    """Where a block ends: at the first tag outside of a string, else at the first one, else nowhere."""
    pieces = _PIECE.finditer(text, start)
    outside = next((piece.start() for piece in pieces if piece[0] == _PYTHONIC_CLOSE), -1)
    end = outside if outside >= 0 else text.find(_PYTHONIC_CLOSE, start)
    return end if end >= 0 else len(text)


def _calls(text: str, first: int) -> list[ToolCall] | str:
    try:
        tree = ast.parse(text, mode="eval").body
        written = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_pythonic_call(node, first + number) for number, node in enumerate(written)]
    except _Unreadable as error:
        return str(error)
    except SyntaxError as error:
        return f"{error.msg} at character {error.offset or 1}"
    except (ValueError, RecursionError, MemoryError):  # null bytes, or nested without end
        return "it is no Python list of calls"


class _Unreadable(Exception):
    """Python that is no call with literal arguments."""


def _pythonic_call(node: ast.expr, number: int) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise _Unreadable("each element must be a call, name(key=value)")
    name = ast.unparse(node.func)
    if not _PYTHONIC_NAME.fullmatch(name):
        raise _Unreadable("a call needs a name")
    if node.args or any(argument.arg is None for argument in node.keywords):
        raise _Unreadable(f"every argument of {name} needs its name")
    arguments = {str(argument.arg): _pythonic_value(argument.value) for argument in node.keywords}
    return ToolCall(name=name, arguments=arguments, call_id=call_id(number))


def _pythonic_value(node: ast.expr) -> Json:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_pythonic_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _pythonic_value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise _Unreadable("keys must be strings")
        return {str(key): _pythonic_value(value) for key, value in zip(keys, node.values, strict=True)}
    try:
        value = ast.literal_eval(node)
        json.dumps(value)
    except (ValueError, TypeError) as error:
        raise _Unreadable("arguments must be plain values") from error
    return value  # type: ignore[no-any-return]


# ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder.
#
# Source: the model cards and the chat template's documented form of Qwen3-Coder.


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_START = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\s]*)>|<tool_call>")
_END = re.compile(r"</function>\s*(?:</tool_call>)?")
_PARAMETER, _PARAMETER_END = re.compile(r"<parameter=([^<>\s]+)>"), "</parameter>"
_FUNCTION_NAME = re.compile(r"[^<>\s]+")
_ANY = Accepted(types=tuple(TYPES))


class Qwen3Coder:
    """Every argument between tags of its own, as text; its type follows from the tool's schema."""

    markers = (_OPEN, _CLOSE)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        return read_between_words(text, _FUNCTION_START, partial(_function_block, tools=tools))

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(_written(call) for call in calls)

    def unwritable(self, tool: ToolSchema) -> str:
        return find_invalid_name(tool, tools=_FUNCTION_NAME.fullmatch, arguments=_FUNCTION_NAME.fullmatch)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        example = _written(ToolCall(name="NAME", arguments={"PARAMETER": "value"}))
        return (
            f"You may call these functions:\n<tools>\n{list_schemas(tools)}\n</tools>\n"
            f"To call one, write:\n{example}"
        )


def _function_block(
    opened: re.Match[str], number: int, *, tools: Sequence[ToolSchema]
) -> tuple[ToolCall | str, int]:
    """The call behind an opening tag, or what is wrong with it, and where the reading goes on."""
    text = opened.string
    end = _END.search(text, opened.end())
    if end is None:
        return f"{_OPEN}: a call is not closed.", len(text)
    call = _function_call(opened[1], text[opened.end() : end.start()], number, tools)
    return (f"{_OPEN}: {call}." if isinstance(call, str) else call), end.end()


def _parameters(inside: str) -> tuple[list[tuple[str, str]], str]:
    """Keys with their texts, and what stands beside them. Without a closing tag there are no more: a search
    from every opening one would take the square of their number.
    """
    parameters: list[tuple[str, str]] = []
    left: list[str] = []
    position = 0
    while (opened := _PARAMETER.search(inside, position)) is not None:
        end = inside.find(_PARAMETER_END, opened.end())
        if end < 0:
            break
        left.append(inside[position : opened.start()])
        parameters.append((opened[1], inside[opened.end() : end]))
        position = end + len(_PARAMETER_END)
    return parameters, "".join([*left, inside[position:]])


def _function_call(name: str | None, inside: str, number: int, tools: Sequence[ToolSchema]) -> ToolCall | str:
    if not name:
        return "a call needs <function=NAME>"
    parameters, left = _parameters(inside)
    if left.strip():
        return f"{name} holds something else than <parameter=KEY>value</parameter>"
    tool = next((tool for tool in tools if tool.get("name") == name), None)
    known, is_known = Arguments.from_schema(tool or {}), tool is not None
    arguments: dict[str, Json] = {}
    for key, text in parameters:
        # An argument that a schema neither declares nor leaves open stays text, as in Qwen's reader.
        accepted = _ANY if is_known and known.accepts_any(key) else known.accepted(key)
        arguments[key] = _parameter_value(text.removeprefix("\n").removesuffix("\n"), accepted)
    return ToolCall(name=name, arguments=arguments, call_id=call_id(number))


def _parameter_value(text: str, accepted: Accepted | None) -> Json:
    """The text as a value that its parameter takes; as it is where it cannot be one.

    Where text is taken beside others, JSON of these others is what it says, as it is written.
    """
    if accepted is None:
        return text
    value = _json(text)
    if not isinstance(value, str) and accepted.fits(value):
        return value
    if accepted.fits(text):
        return text
    return _literal(text) if isinstance(value, str) else value


def _json(text: str) -> Json:
    """The JSON value that a text is; the text itself where it is none."""
    try:
        value: Json = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text} is no number to JSON")
    return number


def _literal(text: str) -> Json:
    """The same of Python, which models write too: ``True``, or quotation marks of the other kind."""
    try:
        value: Json = json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value


def _written(call: ToolCall) -> str:
    parts = (
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
        "</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"{_OPEN}\n<function={call.name}>\n{''.join(parts)}</function>\n{_CLOSE}"


# The forms of calls by name: those that are built in, and those of plug-ins.


CallFormatName: TypeAlias = Annotated[str, Name("call_formats")]
"""A form of calls: one that is built in, a registered one, or ``my_module:MyForm``."""
ProtocolName: TypeAlias = Annotated[str, Name("call_formats", also=("tags",))]
"""``tags``, the papers' tags, or a form of native calls."""

CALL_FORMATS: Final[Mapping[str, CallFormat]] = {
    "hermes": Hermes(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3Json(),
    "pythonic": Pythonic(),
}


def get_call_format(name: str) -> CallFormat:
    """The form of this name. Raises ConfigError for one that nobody has, or that is no form of calls."""
    if name in CALL_FORMATS:
        return CALL_FORMATS[name]
    call_format: object = resolve("call_formats", name)()
    if not isinstance(call_format, CallFormat):
        raise ConfigError(
            f"{name} is no form of calls: it has to have markers, read, write and describe "
            "(outrider.tokens.tool_calls.CallFormat)"
        )
    return call_format


def describe_unwritable(name: str, tools: Sequence[ToolSchema]) -> str:
    """Which of the tools a form cannot call, and the built-in forms that can call all; empty where it can
    itself.
    """
    problem = next((problem for tool in tools if (problem := _unwritable(get_call_format(name), tool))), "")
    if not problem:
        return ""
    others = [
        other for other, form in CALL_FORMATS.items() if not any(_unwritable(form, tool) for tool in tools)
    ]
    return f"calls in the form {name} cannot write {problem}: {', '.join(others)} can"


def _unwritable(form: CallFormat, tool: ToolSchema) -> str:
    return form.unwritable(tool) if isinstance(form, LimitedForm) else ""


# A turn's text read as a whole: thinking, calls, and whether the tools take them.


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_DEPTH: Final = 32
_TOO_DEEP: Final = f"more than {_MAX_DEPTH} levels"
_NOT_FINITE: Final = "a number that is not finite"


def read_turn(text: str, call_format: CallFormat | None, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """What a turn says. Without a form, or without tools, all behind the thinking is words. Calls that no
    tool takes are problems.
    """
    reasoning, rest, problems = split_thinking(text, call_format)
    if call_format is None or not tools:
        return ParsedTurn(content=rest, reasoning=reasoning, problems=problems)
    parsed = call_format.read(rest, tools)
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
    """A turn as a chat server passes it on: every call that can be read is a call, whether or not a tool
    takes it, and so is a last one whose closing tag is missing (its ``problem`` says so).
    """
    reasoning, rest, problems = split_thinking(text, call_format)
    if call_format is None or not tools:
        return ParsedTurn(content=rest, reasoning=reasoning, problems=problems)
    parsed = call_format.read(rest, tools)
    if (
        parsed.problems
        and rest.count(_OPEN) > rest.count(_CLOSE)
        and {_OPEN, _CLOSE} <= {*call_format.markers}
    ):
        closed = call_format.read(rest + _CLOSE, tools)
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
    """A call as a request can hold it: numbers that JSON lacks as text, question marks for halves of
    surrogate pairs. Words for arguments that are nested too deep.
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
    """Why no tool takes the call, in words for the policy; empty where one does.

    Checked are the names of tool and arguments, what is required, the types at the top level, and that
    everything is text and numbers that JSON has, nested no deeper than anybody means it. What a schema says
    otherwise, and what in it is no schema, is not looked at.
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
    """What of the arguments no tool and no tokenizer can be given; empty where there is nothing."""
    queue: list[tuple[Any, int]] = [(arguments, 0)]  # no recursion: how deep it goes, the policy decides
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


# Recorded turns in another form of calls than the one in which they were written.


_MARKS = (("", ""), ("<|tool_call_start|>", "<|tool_call_end|>"))


def convert_calls(text: str, form: CallFormat, tools: Sequence[ToolSchema]) -> str:
    """A turn whose calls are written as Hermes writes them, as imported chats are, in ``form``.

    A turn that ``form`` reads itself stays as it is, and so does one that it cannot write: reading it then
    says what is wrong.
    """
    hermes = CALL_FORMATS["hermes"]
    if "<tool_call>" not in text:
        return text
    _, rest, _ = split_thinking(text, hermes)
    head = text[: len(text) - len(rest)]
    written = hermes.read(rest, tools)
    if written.problems or not written.calls:
        return text
    if _is_same(form.read(rest, tools), written):
        return text
    calls = form.write(written.calls)
    for before, behind in _MARKS:  # some forms take words beside calls only if the calls have their tags
        parts = (written.content, before + calls + behind)
        candidate = "\n".join(part for part in parts if part)
        if _is_same(form.read(candidate, tools), written):
            return head + candidate
    return text


def _is_same(parsed: ParsedCalls, written: ParsedCalls) -> bool:
    def key(result: ParsedCalls) -> tuple[object, ...]:
        return result.content, [(call.name, dict(call.arguments)) for call in result.calls], result.problems

    return key(parsed) == key(written)
