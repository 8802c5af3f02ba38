"""Checks a chat template before the first rollout, for every role and order of messages that episodes have.

A role that the template refuses is an error. If a conversation that is rendered at once, as by a server, has
other ids than the appended ones, a note describes the difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from outrider.errors import ModelError
from outrider.plugins.registry import known_names
from outrider.tokens.call_formats import CALL_FORMATS, convert_calls
from outrider.tokens.renderer import ChatRenderer
from outrider.tokens.template import PLACEHOLDER_TOOL, REFUSAL, decode_text, named_templates
from outrider.types import Message, Role, ToolCall, ToolSchema

_CONTEXT_CHARS = 24  # on each side of a difference
TOOLS: Final[tuple[ToolSchema, ...]] = (PLACEHOLDER_TOOL,)


def _assistant_message(content: str = "", *, thinks: bool = False, num_calls: int = 0) -> Message:
    calls = tuple(
        ToolCall(name="lookup", arguments={"key": "c"}, call_id=f"call{number:05d}")
        for number in range(num_calls)
    )
    return Message(role="assistant", content=content, reasoning="because" if thinks else "", tool_calls=calls)


def _result(number: int = 0) -> Message:
    return Message(role="tool", content="found", tool_call_id=f"call{number:05d}", tool_name="lookup")


_QUESTION: Final = Message(role="user", content="Question")
_OBSERVATION: Final = Message(role="user", content="Observation")
_ANSWER: Final = _assistant_message("Answer")
_CALL: Final = _assistant_message(num_calls=1)
_CALL_WITH_TEXT: Final = _assistant_message("Answer", num_calls=1)
_THINKING_ANSWER: Final = _assistant_message("Answer", thinks=True)
_THINKING_CALL: Final = _assistant_message(thinks=True, num_calls=1)
_TEXT_AND_CALL: Final = "text and a call, then its result"

ORDERS: Final[Mapping[str, tuple[Message, ...]]] = MappingProxyType(
    {
        "an answer, then a user message": (_ANSWER, _OBSERVATION),
        "blanks around an answer": (_assistant_message(" \nAnswer\n "), _OBSERVATION),
        "two user messages in a row": (_ANSWER, _OBSERVATION, _OBSERVATION),
        "thinking, then a user message": (_THINKING_ANSWER, _OBSERVATION),
        "thinking, a user message, an answer, then a user message": (
            _THINKING_ANSWER, _OBSERVATION, _ANSWER, _OBSERVATION,
        ),
        "a call, then its result": (_CALL, _result()),
        _TEXT_AND_CALL: (_CALL_WITH_TEXT, _result()),
        "several calls, then their results": (_assistant_message(num_calls=2), _result(0), _result(1)),
        "a result, another call, then its result": (_CALL, _result(), _CALL, _result()),
        "an invalid call, then the problem": (_ANSWER, _result()),
        "thinking and a call, then its result": (_THINKING_CALL, _result()),
        "thinking, a result, another call, then its result": (
            _THINKING_CALL, _result(), _CALL, _result(),
        ),
        "a result, thinking, then another result": (_CALL, _result(), _THINKING_CALL, _result()),
        "a call, its result, an answer, then a user message": (_CALL, _result(), _ANSWER, _OBSERVATION),
        "thinking, a result, an answer, then a user message": (
            _THINKING_CALL, _result(), _ANSWER, _OBSERVATION,
        ),
    }
)  # fmt: skip
"""The orders to check, each after a system message and a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheck:
    """What a template cannot do.

    Attributes:
        name: name of the template
        differs: order -> how the conversation rendered at once differs from the appended ids
        unread: a call as the template writes it, if the call format cannot read it
        readers: call formats that can read it
        writes_date: the template writes the current date
        hides_tools: the template does not render tools
        demonstrated: how an answer rendered at once differs from one that a cold start trains on
        demonstrated_call: the same for text and a call
        templates: names of the tokenizer's templates if it has several
        end: the model's end token if the template writes no end of a turn
    """

    name: str
    differs: Mapping[str, str]
    unread: str = ""
    readers: tuple[str, ...] = ()
    writes_date: bool = False
    hides_tools: bool = False
    demonstrated: str = ""
    demonstrated_call: str = ""
    templates: tuple[str, ...] = ()
    end: str = ""

    def notes(self) -> list[str]:
        """Describe every finding in one line, with what to do."""
        template = f"the chat template of {self.name}"
        lines = [
            f"{template} renders {order} differently at once than appended ({detail}): a server that renders "
            "it uses other ids than training"
            for order, detail in self.differs.items()
        ]
        if self.templates:
            tools_template = "tool_use" if "tool_use" in self.templates else "default"
            others = "default" if "default" in self.templates else "tool_use"
            lines.append(
                f"the tokenizer of {self.name} has the chat templates {', '.join(self.templates)}: "
                f"{tools_template} renders conversations with tools, {others} renders others"
            )
        for label, detail in (
            ("an answer without thinking", self.demonstrated),
            ("text and a call", self.demonstrated_call),
        ):
            if detail:
                lines.append(
                    f"{template} renders {label} differently at once than a cold start trains on ({detail})"
                )
        if self.end:
            lines.append(
                f"{template} writes nothing that ends a turn: turns end with {self.end}, which a server that "
                "renders a conversation leaves out"
            )
        if self.unread:
            advice = f": set environment.protocol = {self.readers[0]}" if self.readers else ""
            lines.append(
                f"{template} writes calls as {self.unread!r}, which the chosen call format does not read"
                f"{advice}"
            )
        if self.writes_date:
            lines.append(
                f"{template} writes the current date: set one in model.template_kwargs (such as "
                "date_string), so that prompts do not change from day to day"
            )
        if self.hides_tools:
            lines.append(f"{template} does not render tools: the system message describes them")
        return lines


def check_template(renderer: ChatRenderer, observations: Sequence[Role]) -> LoadCheck:
    """Check every order of messages whose turns are answered by the roles ``observations``.

    Raises ModelError, with the name of the template and the role, if it cannot render one.
    """
    uses_tools = "tool" in observations
    tools = TOOLS if uses_tools else ()
    differs: dict[str, str] = {}
    for order, messages in ORDERS.items():
        if not {message.role for message in messages} - {"assistant"} <= set(observations):
            continue
        token_ids, as_read = _append_order(renderer, order, messages, tools)
        if renderer.history_thinking == "strip":
            try:
                renderer.whole_text(as_read, tools)
            except ModelError as error:
                raise ModelError(
                    f"the chat template of {renderer.template.name} refuses {order} at once, as "
                    f"model.history_thinking = strip renders it: {_reason(error)}: use keep"
                ) from error
        if detail := find_difference(renderer, token_ids, as_read, tools):
            differs[order] = detail
    written = written_call(renderer) if uses_tools and renderer.call_format is not None else ""
    unread = "" if not written or _reads(renderer, written) else written.strip()
    names = tuple(sorted(named_templates(renderer.tokenizer)))
    source = str(getattr(renderer.tokenizer, "chat_template", ""))
    end, eos = "", renderer.tokenizer.eos_token_id
    if eos is not None and not (renderer.closing.token_ids or renderer.closing.stop):
        end = decode_text(renderer.tokenizer, [eos], skip_special_tokens=False)
    is_read = uses_tools and not unread and renderer.call_format is not None and _TEXT_AND_CALL not in differs
    return LoadCheck(
        name=renderer.template.name,
        differs=differs,
        unread=unread,
        readers=tuple(matching_formats(renderer)) if unread else (),
        writes_date="strftime_now" in source and "date_string" not in renderer.template.variables,
        hides_tools=uses_tools and not renderer.template.shows_tools,
        demonstrated=_demonstration_difference(renderer, _ANSWER, tools),
        demonstrated_call=_demonstration_difference(renderer, _CALL_WITH_TEXT, tools) if is_read else "",
        templates=names if len(names) > 1 and not renderer.template.is_chosen else (),
        end=end,
    )


def _demonstration_difference(renderer: ChatRenderer, message: Message, tools: Sequence[ToolSchema]) -> str:
    """How the ids of a demonstrated turn differ from those of the conversation rendered at once."""
    messages = _conversation([])
    prompt = renderer.prompt(messages, tools)
    text = message.content
    if message.tool_calls and renderer.call_format is not None:
        text += f"\n{CALL_FORMATS['hermes'].write(message.tool_calls)}"
        text = convert_calls(text, renderer.call_format, tools)
    text = renderer.demonstration(text, prompt)
    turn = renderer.turn_ids(text, prompt, is_closed=False)
    return find_difference(renderer, [*prompt, *turn], [*messages, message], tools, is_whole=False)


def _append_order(
    renderer: ChatRenderer, order: str, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> tuple[list[int], list[Message]]:
    role = messages[-1].role
    problem = f"the chat template of {renderer.template.name} refuses a {role} message ({order})"
    try:
        token_ids, as_read = append(renderer, _conversation(messages), tools)
    except ModelError as error:
        raise ModelError(f"{problem}: {_reason(error)}") from error
    text = decode_text(renderer.tokenizer, token_ids, skip_special_tokens=False)
    # the text as this tokenizer decodes it
    ids = renderer.template.encode(messages[-1].content)
    expected = decode_text(renderer.tokenizer, ids, skip_special_tokens=False).strip()
    if text.count(expected) < sum(message.content == messages[-1].content for message in messages):
        raise ModelError(f"{problem}: it drops its text")
    return token_ids, as_read


def written_call(renderer: ChatRenderer) -> str:
    """A call as the template itself writes it, or "" if it does not render calls."""
    shape = renderer.template.call_shape
    if shape is None:
        return ""
    question = {"role": "user", "content": "q"}
    written = renderer.template.render([question, shape.message(_CALL.tool_calls, "")], opened=False)
    before = renderer.template.render([question], opened=True)
    return written[len(before) :] if written.startswith(before) else written


def matching_formats(renderer: ChatRenderer) -> list[str]:
    """The call formats that read the template's own calls; empty if there are none."""
    written = written_call(renderer)
    known = known_names("call_formats") if written else []
    tokenizer, variables = renderer.tokenizer, renderer.template.variables
    renderers = {
        form: ChatRenderer(tokenizer, template_kwargs=variables, call_format=form, observations=("tool",))
        for form in known
    }
    return [form for form in known if _reads(renderers[form], written)]


def _reads(renderer: ChatRenderer, written: str) -> bool:
    turn = renderer.parse(renderer.template.encode(written), tools=TOOLS)
    # content that is not part of the message is a marker of another format
    return turn.tool_calls == _CALL.tool_calls and not turn.content and not turn.problems


def _conversation(messages: Sequence[Message]) -> list[Message]:
    return [Message(role="system", content="Rules"), _QUESTION, *messages]


def _reason(error: ModelError) -> str:
    return str(error).removeprefix(REFUSAL)


def find_difference(
    renderer: ChatRenderer,
    token_ids: Sequence[int],
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    *,
    is_whole: bool = True,
) -> str:
    """Describe how the appended ids differ from those of the whole conversation, or return "". Unless
    ``is_whole``, they lack the end of its last turn.
    """
    try:
        whole = renderer.template.encode(renderer.whole_text(messages, tools, opened=is_whole))
    except ModelError as error:
        return f"at once it is refused: {_reason(error)}"
    if list(token_ids) == whole[: None if is_whole else len(token_ids)]:
        return ""
    ours, theirs = (
        decode_text(renderer.tokenizer, list(ids), skip_special_tokens=False) for ids in (token_ids, whole)
    )
    # Equal texts differ in a token across the seam of two pieces; the policy's tokens stay as sampled.
    if ours == theirs or (not is_whole and theirs.startswith(ours)):
        return ""
    index = next(
        (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    window = slice(max(0, index - _CONTEXT_CHARS), index + _CONTEXT_CHARS)
    return f"appended {ours[window]!r}, at once {theirs[window]!r}"


# --- Turns of a policy that writes as its template does, and whole conversations of them ---


def append(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> tuple[list[int], list[Message]]:
    """Append prompt, turns and observations; the last message is an observation.

    Returns the ids, and the messages as they are parsed from them; a turn whose calls cannot be parsed stays
    unchanged. Raises ModelError if the template refuses a message.
    """
    first = next(number for number, item in enumerate(messages) if item.role == "assistant")
    history: list[Message] = list(messages[:first])
    ids = list(renderer.prompt(history, tools))
    rest = list(messages[first:])
    while rest:
        message = rest.pop(0)
        is_opened = bool(renderer.opened(ids))
        text = turn_text(renderer, history, message, tools, is_opened=is_opened)
        turn = renderer.template.continuation.encode(text, ids)
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
    return ids, history


def turn_text(
    renderer: ChatRenderer,
    history: Sequence[Message],
    message: Message,
    tools: Sequence[ToolSchema],
    *,
    is_opened: bool,
) -> str:
    """The text of a turn as the template writes it after ``history``.

    It is composed of its parts if the template refuses the conversation, drops a part, or changes the text
    before it. ``is_opened``: a block of thinking is open.
    """
    try:
        opened = renderer.whole_text(history, tools)
        closed = renderer.whole_text([*history, message], tools, opened=False)
    except ModelError:
        opened, closed = "", ""
    written = closed[len(opened) :] if closed.startswith(opened) else ""
    names = [call.name for call in message.tool_calls]
    parts = (message.content.strip(), message.reasoning.strip(), *names)
    if not opened or not closed.startswith(opened) or not all(part in written for part in parts):
        return _compose(renderer, message, is_opened=is_opened)
    end = renderer.turn_end_text
    if not end:
        return written
    head, marker, after = written.rpartition(end)
    if marker and not renderer.template.markers.sub("", after).strip():
        return head
    markers = list(renderer.template.markers.finditer(written))
    return written[: markers[-1].start()] if markers else written


def _compose(renderer: ChatRenderer, message: Message, *, is_opened: bool) -> str:
    call_format = renderer.call_format or CALL_FORMATS["hermes"]
    thinking = f"{message.reasoning}\n</think>\n\n" if message.reasoning or is_opened else ""
    start = renderer.lead if not is_opened else ""
    start += "<think>\n" if thinking and not is_opened else ""
    calls = call_format.write(message.tool_calls) if message.tool_calls else ""
    return start + thinking + "\n".join(part for part in (message.content, calls) if part)
