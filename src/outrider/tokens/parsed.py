"""What the policy wrote in one turn, read: thinking, words for the reader, and tool calls."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from outrider.types import ToolCall

if TYPE_CHECKING:
    from outrider.tokens.calls.format import CallFormat

_OPEN: Final = "<think>"
THINKING_END: Final = "</think>"
_PYTHON_TAG: Final = "<|python_tag|>"
_CALL: Final = re.compile(rf"<tool_call>|<function=|<\|tool_call_start\|>|{re.escape(_PYTHON_TAG)}")
_CALL_END: Final = re.compile(r"</tool_call>|</function>|<\|tool_call_end\|>")
_BARE_CALL: Final = re.compile(
    r"\A\s*(?:\[\s*)?\{\s*\"name\"|\{\s*\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"(?:parameters|arguments)\""
    r"|\A\s*\[\s*[A-Za-z_][\w.]*\s*\("
)
"""Of the forms that need no tag, which are those that know Llama's."""
UNCLOSED: Final = f"The thinking was not closed with {THINKING_END}."


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """One turn. ``problems`` say what was wrong with a call that could not be read; nobody raises for it."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


def split_thinking(text: str, form: "CallFormat | None" = None) -> tuple[str, str, tuple[str, ...]]:
    """Thinking, the rest, and problems. A block that the template opened may lack its first tag; one that is
    not closed takes the whole text. Text without thinking is as it was written.

    Behind the beginning of a call, in a form that is built in or in ``form``, the tags are part of its
    arguments.
    """
    before, closed, behind = text.partition(THINKING_END)
    if closed and not _is_in_call(before.partition(_OPEN)[0], form):
        return before.replace(_OPEN, "", 1).strip(), behind.lstrip("\n"), ()
    head, opened, thinking = text.partition(_OPEN)
    if opened and not head.strip():
        return thinking.strip(), "", (UNCLOSED,)
    return "", text, ()


def _is_in_call(words: str, form: "CallFormat | None") -> bool:
    """Whether a call has begun in these words and is still open at their end: thinking may rehearse one."""
    ends = [match.end() for match in _CALL_END.finditer(words)]
    words = words[ends[-1] :] if ends else words
    if _CALL.search(words) or form is None:
        return _CALL.search(words) is not None
    own = [marker for marker in form.markers if not _CALL_END.fullmatch(marker)]
    is_bare = _PYTHON_TAG in form.markers and _BARE_CALL.search(words) is not None
    return is_bare or any(marker in words for marker in own)


def opened_thinking(text: str) -> str:
    """The block of thinking that ``text`` (what a template writes before a turn) opens and leaves open."""
    match = re.search(rf"{_OPEN}\s*\Z", text)
    return match[0] if match else ""
