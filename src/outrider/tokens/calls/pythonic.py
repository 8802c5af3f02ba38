"""``[name(key=value), other(key=value)]`` as the whole turn or between LFM2's tokens: Llama 3.2 and 4, LFM2.

Source: Meta's documentation of zero-shot function calling and Liquid AI's documentation of LFM2.
"""

import ast
import json
import re
from collections.abc import Sequence

from outrider.tokens.calls.format import FoundCalls, call_id, listed
from outrider.types import Json, ToolCall, ToolSchema

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_TAGGED = re.compile(rf"{re.escape(_OPEN)}(.*?)(?:{re.escape(_CLOSE)}|\Z)|<\|python_tag\|>(.*)\Z", re.DOTALL)
_LIST = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None}


class Pythonic:
    """A Python list of calls with literal arguments. Nothing is executed: the text is parsed only."""

    markers = (_OPEN, _CLOSE, "<|python_tag|>")

    def read(self, text: str, tools: Sequence[ToolSchema]) -> FoundCalls:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        blocks = [found[1] if found[1] is not None else found[2] for found in _TAGGED.finditer(text)]
        words = _TAGGED.sub("", text).strip()
        if not blocks:
            if not _LIST.match(words):
                return FoundCalls(content=text)
            blocks, words = [words], ""
        calls: list[ToolCall] = []
        problems: list[str] = []
        for block in blocks:
            found = _calls(block.strip(), len(calls))
            if isinstance(found, str):
                problems.append(f"The call cannot be read: {found}.")
            else:
                calls.extend(found)
        return FoundCalls(content=words, calls=tuple(calls), problems=tuple(problems))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        said = (
            f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
            for call in calls
        )
        return f"[{', '.join(said)}]"

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """See :class:`outrider.tokens.calls.format.CallFormat`."""
        return (
            f"You may call these functions:\n{listed(tools)}\n"
            "To call one or more, reply with this list alone:\n"
            "[function_name(parameter=value), other_function(parameter=value)]"
        )


def _calls(text: str, first: int) -> list[ToolCall] | str:
    try:
        tree = ast.parse(text, mode="eval").body
        written = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_call(one, first + number) for number, one in enumerate(written)]
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
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise _Unreadable("a call needs a name")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise _Unreadable(f"every argument of {name} needs its name")
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    return ToolCall(name=name, arguments=arguments, call_id=call_id(number))


def _value(node: ast.expr) -> Json:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(one) for one in node.elts]
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
