"""What a policy that writes as its template does would write in a turn, and a whole conversation made of it.

Only checks need this: a policy's own ids are what they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.errors import ModelError
from outrider.tokens.calls import CALL_FORMATS, CallFormat
from outrider.tokens.chat import ChatRenderer
from outrider.types import Message, ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """A conversation as appended ids, and its messages as they are read back from them.

    A turn whose calls the form of calls does not read stays as it was given.
    """

    token_ids: tuple[int, ...]
    messages: tuple[Message, ...]


def append(renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Appended:
    """Prompt, turns and observations one after the other. The last message is an observation.

    Raises ModelError where the template refuses one of them.
    """
    first = next(number for number, item in enumerate(messages) if item.role == "assistant")
    history: list[Message] = list(messages[:first])
    ids = list(renderer.prompt(history, tools))
    rest = list(messages[first:])
    while rest:
        message = rest.pop(0)
        is_opened = bool(renderer.opened(ids))
        text = turn_text(renderer, history, message, tools, is_opened=is_opened)
        turn = renderer.template.encode_behind(ids, text)
        read = renderer.parse(turn, context=ids, tools=tools)
        as_read = replace(message, content=read.content, reasoning=read.reasoning, tool_calls=read.tool_calls)
        if [item.name for item in read.tool_calls] != [item.name for item in message.tool_calls]:
            as_read = message
        ids += turn
        history.append(as_read)
        num_answers = next((n for n, item in enumerate(rest) if item.role == "assistant"), len(rest))
        answers, rest = rest[:num_answers], rest[num_answers:]
        ids += renderer.with_tools(bool(tools)).bridge(ids, answers)
        history += answers
    return Appended(token_ids=tuple(ids), messages=tuple(history))


def turn_text(
    renderer: ChatRenderer,
    before: Sequence[Message],
    message: Message,
    tools: Sequence[ToolSchema],
    *,
    is_opened: bool,
) -> str:
    """The text of a turn as the template writes it last; put together where it writes something else than
    it has begun, or refuses it. ``is_opened``: a block of thinking is open.
    """
    try:
        opened = renderer.whole_text(before, tools)
        closed = renderer.whole_text([*before, message], tools, opened=False)
    except ModelError:
        return _compose(renderer, message, is_opened=is_opened)
    written = closed[len(opened) :] if closed.startswith(opened) else None
    if written is None or not _is_complete(written, message):
        return _compose(renderer, message, is_opened=is_opened)
    return _without_closing(renderer, written)


def _is_complete(written: str, message: Message) -> bool:
    """Whether nothing of the turn was dropped."""
    return all(part in written for part in (message.content.strip(), message.reasoning.strip())) and all(
        call.name in written for call in message.tool_calls
    )


def _without_closing(renderer: ChatRenderer, written: str) -> str:
    end = renderer.turn_end_text
    if not end:
        return written
    head, marker, behind = written.rpartition(end)
    if marker and not renderer.template.markers.sub("", behind).strip():
        return head
    markers = list(renderer.template.markers.finditer(written))
    return written[: markers[-1].start()] if markers else written


def _compose(renderer: ChatRenderer, message: Message, *, is_opened: bool) -> str:
    call_format: CallFormat = renderer.call_format or CALL_FORMATS["hermes"]
    thinking = f"{message.reasoning}\n</think>\n\n" if message.reasoning or is_opened else ""
    begun = renderer.lead if not is_opened else ""
    begun += "<think>\n" if thinking and not is_opened else ""
    calls = call_format.write(message.tool_calls) if message.tool_calls else ""
    return begun + thinking + "\n".join(part for part in (message.content, calls) if part)
