"""``[name(key=value), other(key=value)]`` as the whole turn or between LFM2's tokens: Llama 3.2 and 4, LFM2.

Source: Meta's documentation of zero-shot function calling and Liquid AI's documentation of LFM2.
"""

import ast
import json
import keyword
import re
from collections.abc import Sequence

from outrider.tokens.calls.format import ParsedCalls, call_id, find_invalid_name, list_schemas
from outrider.types import Json, ToolCall, ToolSchema

_OPEN, _CLOSE, _TAG = "<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>"
_OPENING = re.compile(f"{re.escape(_OPEN)}|{re.escape(_TAG)}")
_PIECE = re.compile(
    rf"""{re.escape(_CLOSE)}|'(?:\\.|[^'\\\n])*+'|"(?:\\.|[^"\\\n])*+"|\\?.""",  # strings as a whole
    re.DOTALL,
)
_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None}


class Pythonic:
    """A Python list of calls with literal arguments. Nothing is executed: the text is parsed only."""

    markers = (_OPEN, _CLOSE, _TAG)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
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
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        parts = (
            f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
            for call in calls
        )
        return f"[{', '.join(parts)}]"

    def unwritable(self, tool: ToolSchema) -> str:
        """See :class:`outrider.tokens.calls.format.LimitedForm`."""
        return find_invalid_name(tool, tools=_is_tool_name, arguments=_is_name)

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return (
            f"You may call these functions:\n{list_schemas(tools)}\n"
            "To call one or more, reply with this list alone:\n"
            "[function_name(parameter=value), other_function(parameter=value)]"
        )


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _is_tool_name(name: str) -> bool:
    """Whether it is one, or several behind one another (``calendar.add``)."""
    return bool(_NAME.fullmatch(name)) and all(map(_is_name, name.split(".")))


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
        end = len(text) if opened[0] == _TAG else _find_end(text, opened.end())
        blocks.append(text[opened.end() : end])
        position = min(len(text), end + len(_CLOSE))
    return "".join([*words, text[position:]]).strip(), blocks


def _find_end(text: str, start: int) -> int:
    """Where a block ends: at the first tag outside of a string, else at the first one, else nowhere."""
    pieces = _PIECE.finditer(text, start)
    outside = next((piece.start() for piece in pieces if piece[0] == _CLOSE), -1)
    end = outside if outside >= 0 else text.find(_CLOSE, start)
    return end if end >= 0 else len(text)


def _calls(text: str, first: int) -> list[ToolCall] | str:
    try:
        tree = ast.parse(text, mode="eval").body
        written = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_call(node, first + number) for number, node in enumerate(written)]
    except _Unreadable as error:
        return str(error)
    except SyntaxError as error:
        return f"{error.msg} at character {error.offset or 1}"
    except (ValueError, RecursionError, MemoryError):  # null bytes, or nested without end
        return "it is no Python list of calls"


class _Unreadable(Exception):
    """Python that is no call with literal arguments."""


def _call(node: ast.expr, number: int) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise _Unreadable("each element must be a call, name(key=value)")
    name = ast.unparse(node.func)
    if not _NAME.fullmatch(name):
        raise _Unreadable("a call needs a name")
    if node.args or any(argument.arg is None for argument in node.keywords):
        raise _Unreadable(f"every argument of {name} needs its name")
    arguments = {str(argument.arg): _value(argument.value) for argument in node.keywords}
    return ToolCall(name=name, arguments=arguments, call_id=call_id(number))


def _value(node: ast.expr) -> Json:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise _Unreadable("keys must be strings")
        return {str(key): _value(value) for key, value in zip(keys, node.values, strict=True)}
    try:
        value = ast.literal_eval(node)
        json.dumps(value)
    except (ValueError, TypeError) as error:
        raise _Unreadable("arguments must be plain values") from error
    return value  # type: ignore[no-any-return]
