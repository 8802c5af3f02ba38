"""Recorded turns in another form of calls than the one in which they were written."""

from collections.abc import Sequence

from outrider.tokens.calls.format import CallFormat, ParsedCalls
from outrider.tokens.calls.formats import CALL_FORMATS
from outrider.tokens.parsed import split_thinking
from outrider.types import ToolSchema

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
