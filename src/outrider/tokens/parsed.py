"""What the policy wrote in one turn, read: thinking, words for the reader, and tool calls."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from outrider.types import ToolCall

if TYPE_CHECKING:
    from outrider.tokens.calls.format import CallFormat

_OPEN: Final = "<think>"
THINKING_END: Final = "</think>"
_CALL: Final = re.compile(
    r"<tool_call>|<function=|<\|tool_call_start\|>|<\|python_tag\|>"
    r"|\A\s*\[?\s*\{\s*\"name\"|\{\s*\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"(?:parameters|arguments)\""
    r"|\A\s*\[\s*[A-Za-z_][\w.]*\s*\("
)
"""What calls begin with: anywhere, or at the beginning of a turn."""
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
    words = before.partition(_OPEN)[0]
    is_in_call = _CALL.search(words) or (form is not None and any(one in words for one in form.markers))
    if closed and not is_in_call:
        return before.replace(_OPEN, "", 1).strip(), behind.lstrip("\n"), ()
    head, opened, thinking = text.partition(_OPEN)
    if opened and not head.strip():
        return thinking.strip(), "", (UNCLOSED,)
    return "", text, ()


def opened_thinking(text: str) -> str:
    """The block of thinking that ``text`` (what a template writes before a turn) opens and leaves open."""
    found = re.search(rf"{_OPEN}\s*\Z", text)
    return found[0] if found else ""
