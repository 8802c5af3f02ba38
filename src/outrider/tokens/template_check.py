"""A chat template tried out before the first rollout, on every role and order that a family's episodes have.

What it refuses is an error then, and where a conversation that is rendered at once (as a server does) has
other ids than the appended ones, a person is told which and where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from outrider.errors import ModelError
from outrider.plugins.registry import known_names
from outrider.tokens.call_formats import CALL_FORMATS, convert_calls
from outrider.tokens.renderer import ChatRenderer
from outrider.tokens.template import PLACEHOLDER_TOOL, decode_text, named_templates
from outrider.tokens.tool_calls import CallFormat
from outrider.types import Message, Role, ToolCall, ToolSchema

_CONTEXT_CHARS = 24  # characters on each side of a difference
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
_WORDS: Final = "words beside a call"

ORDERS: Final[Mapping[str, tuple[Message, ...]]] = MappingProxyType(
    {
        "an answer, then a user message": (_ANSWER, _OBSERVATION),
        "blanks around an answer": (_assistant_message(" \nAnswer\n "), _OBSERVATION),
        "two user messages in a row": (_ANSWER, _OBSERVATION, _OBSERVATION),
        "thinking, then a user message": (_assistant_message("Answer", thinks=True), _OBSERVATION),
        "a call, then its result": (_assistant_message(num_calls=1), _result()),
        _WORDS: (_CALL_WITH_TEXT, _result()),
        "several calls, then their results": (_assistant_message(num_calls=2), _result(0), _result(1)),
        "a result, another call, then its result": (
            _assistant_message(num_calls=1), _result(), _assistant_message(num_calls=1), _result(),
        ),
        "a call that cannot be read, then what was wrong": (_ANSWER, _result()),
        "thinking and a call, then its result": (_assistant_message(thinks=True, num_calls=1), _result()),
        "a result, thinking, then another result": (
            _assistant_message(num_calls=1), _result(), _assistant_message(thinks=True, num_calls=1),
            _result(),
        ),
        "a call, its result, an answer, then a user message": (
            _assistant_message(num_calls=1), _result(), _ANSWER, _OBSERVATION,
        ),
        "thinking, a result, an answer, then a user message": (
            _assistant_message(thinks=True, num_calls=1), _result(), _ANSWER, _OBSERVATION,
        ),
    }
)  # fmt: skip
"""What is tried, each behind a system message and a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheck:
    """What a template cannot do. ``differs``: order -> where a conversation rendered at once has other ids
    than the appended ones. ``demonstrated`` and ``demonstrated_call``: the same for an answer and for words
    beside a call that a cold start trains on. ``templates`` are the names of a tokenizer's templates, ``end``
    is the model's own end token if the template has none. ``unread``: an example of a call as the template
    writes it where the form of calls does not read it, and ``readers`` the forms that do.
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
        """Lines for a person, each with what to do."""
        lines = [
            f"the chat template of {self.name} renders {order} differently at once than appended "
            f"({detail}): a server that renders it sees other ids than training"
            for order, detail in self.differs.items()
        ]
        if self.templates:
            tools_template = "tool_use" if "tool_use" in self.templates else "default"
            others = "default" if "default" in self.templates else "tool_use"
            lines.append(
                f"the tokenizer of {self.name} has the chat templates {', '.join(self.templates)}: "
                f"{tools_template} renders conversations with tools, {others} renders others"
            )
        if self.demonstrated:
            lines.append(
                f"the chat template of {self.name} renders an answer without thinking differently at once "
                f"than a cold start trains on it ({self.demonstrated})"
            )
        if self.demonstrated_call:
            lines.append(
                f"the chat template of {self.name} renders words beside a call differently at once than a "
                f"cold start trains on them ({self.demonstrated_call})"
            )
        if self.end:
            lines.append(
                f"the chat template of {self.name} writes nothing that ends a turn: turns end with "
                f"{self.end}, which a server that renders a conversation leaves out"
            )
        if self.unread:
            advice = f": environment.protocol = {self.readers[0]} does" if self.readers else ""
            lines.append(
                f"the chat template of {self.name} writes calls as {self.unread!r}, which the form of calls "
                f"that was named does not read{advice}"
            )
        if self.writes_date:
            lines.append(
                f"the chat template of {self.name} writes the date of the day: name one in "
                "model.template_kwargs (such as date_string), or no two days have the same prompts"
            )
        if self.hides_tools:
            lines.append(
                f"the chat template of {self.name} does not show tools: the system message tells of them"
            )
        return lines


def check_template(renderer: ChatRenderer, observations: Sequence[Role]) -> LoadCheck:
    """Try every order of an episode whose turns are answered by these roles.

    Raises ModelError with the template's name and the role for what cannot be bridged.
    """
    uses_tools = "tool" in observations
    tools = TOOLS if uses_tools else ()
    differs: dict[str, str] = {}
    for order, messages in ORDERS.items():
        if not {message.role for message in messages} - {"assistant"} <= set(observations):
            continue
        appended = _appended(renderer, order, messages, tools)
        if renderer.history_thinking == "strip":
            _require_whole(renderer, order, appended.messages, tools)
        if detail := difference(renderer, appended.token_ids, appended.messages, tools):
            differs[order] = detail
    unread = _unread(renderer) if uses_tools else ""
    is_read = uses_tools and not unread and renderer.call_format is not None and _WORDS not in differs
    return LoadCheck(
        name=renderer.template.name,
        differs=differs,
        unread=unread,
        readers=tuple(matching_formats(renderer)) if unread else (),
        writes_date=_writes_date(renderer),
        hides_tools=uses_tools and not renderer.abilities.shows_tools,
        demonstrated=_demonstration_difference(renderer, _ANSWER, tools),
        demonstrated_call=_demonstration_difference(renderer, _CALL_WITH_TEXT, tools) if is_read else "",
        templates=_template_names(renderer),
        end=_own_end(renderer),
    )


def _demonstration_difference(renderer: ChatRenderer, message: Message, tools: Sequence[ToolSchema]) -> str:
    """Where the ids of a demonstrated turn part from those of the conversation rendered at once."""
    messages = _conversation([])
    prompt = renderer.prompt(messages, tools)
    text = message.content
    if message.tool_calls and renderer.call_format is not None:
        text += f"\n{CALL_FORMATS['hermes'].write(message.tool_calls)}"
        text = convert_calls(text, renderer.call_format, tools)
    text = renderer.demonstration(text, prompt)
    turn = renderer.turn_ids(text, prompt, is_closed=False)
    try:
        text = renderer.whole_text([*messages, message], tools, opened=False)
    except ModelError as error:
        return f"at once it is refused: {_reason(error)}"
    whole = renderer.template.encode(text)
    ours, theirs = (
        decode_text(renderer.tokenizer, list(ids), skip_special_tokens=False)
        for ids in ((*prompt, *turn), whole)
    )
    if whole[: len(prompt) + len(turn)] == [*prompt, *turn] or theirs.startswith(ours):
        return ""
    return _describe_difference(ours, theirs)


def _template_names(renderer: ChatRenderer) -> tuple[str, ...]:
    names = sorted(named_templates(renderer.tokenizer))
    return tuple(names) if len(names) > 1 and not renderer.template.is_chosen else ()


def _own_end(renderer: ChatRenderer) -> str:
    """The model's own end token, if the template has nothing that ends a turn."""
    token = renderer.tokenizer.eos_token_id
    if renderer.closing.token_ids or renderer.closing.stop or token is None:
        return ""
    return decode_text(renderer.tokenizer, [token], skip_special_tokens=False)


def _appended(
    renderer: ChatRenderer, order: str, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> "Appended":
    role = messages[-1].role
    problem = f"the chat template of {renderer.template.name} refuses a {role} message ({order})"
    try:
        appended = append(renderer, _conversation(messages), tools)
    except ModelError as error:
        raise ModelError(f"{problem}: {_reason(error)}") from error
    text = decode_text(renderer.tokenizer, appended.token_ids, skip_special_tokens=False)
    expected = _readable(renderer, messages[-1].content)
    if text.count(expected) < sum(message.content == messages[-1].content for message in messages):
        raise ModelError(f"{problem}: it drops its text")
    return appended


def _require_whole(
    renderer: ChatRenderer, order: str, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> None:
    """Raises ModelError where the conversation cannot be rendered again."""
    try:
        renderer.whole_text(messages, tools)
    except ModelError as error:
        raise ModelError(
            f"the chat template of {renderer.template.name} refuses {order} at once, as "
            f"model.history_thinking = strip renders it: {_reason(error)}: use keep"
        ) from error


def _readable(renderer: ChatRenderer, text: str) -> str:
    """The text as ids of this tokenizer show it."""
    return decode_text(renderer.tokenizer, renderer.template.encode(text), skip_special_tokens=False).strip()


def _writes_date(renderer: ChatRenderer) -> bool:
    """Whether the clock decides about a prompt."""
    source = str(getattr(renderer.tokenizer, "chat_template", ""))
    return "strftime_now" in source and "date_string" not in renderer.template.variables


def written_call(renderer: ChatRenderer) -> str:
    """A call as the template itself writes it; empty where it has no place for calls."""
    shape = renderer.abilities.call_shape
    if shape is None:
        return ""
    question = {"role": "user", "content": "q"}
    written = renderer.template.render([question, shape.message(_CALL.tool_calls, "")], opened=False)
    before = renderer.template.render([question], opened=True)
    return written[len(before) :] if written.startswith(before) else written


def matching_formats(renderer: ChatRenderer) -> list[str]:
    """The forms of calls that read the template's own; none where it has no place for calls, or writes them
    in a form of its own.
    """
    written = written_call(renderer)
    known = known_names("call_formats") if written else []
    return [form for form in known if _reads(_with(renderer, form), written)]


def _with(renderer: ChatRenderer, form: str) -> ChatRenderer:
    variables = renderer.template.variables
    return ChatRenderer(
        renderer.tokenizer, template_kwargs=variables, call_format=form, observations=("tool",)
    )


def _reads(renderer: ChatRenderer, written: str) -> bool:
    read = renderer.parse(renderer.template.encode(written), tools=TOOLS)
    # words that nobody said are markers of another form
    return read.tool_calls == _CALL.tool_calls and not read.content and not read.problems


def _unread(renderer: ChatRenderer) -> str:
    """A call as the template itself writes it, where the form of calls does not read it."""
    written = "" if renderer.call_format is None else written_call(renderer)
    return "" if not written or _reads(renderer, written) else written.strip()


def _conversation(messages: Sequence[Message]) -> list[Message]:
    return [Message(role="system", content="Rules"), _QUESTION, *messages]


def _reason(error: ModelError) -> str:
    return str(error).removeprefix("the tokenizer has no usable chat template: ")


def difference(
    renderer: ChatRenderer,
    token_ids: Sequence[int],
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
) -> str:
    """Where the appended ids part from those of the whole conversation; empty where they are the same."""
    try:
        whole = renderer.template.encode(renderer.whole_text(messages, tools))
    except ModelError as error:
        return f"at once it is refused: {_reason(error)}"
    if list(token_ids) == list(whole):
        return ""
    ours, theirs = (
        decode_text(renderer.tokenizer, list(ids), skip_special_tokens=False) for ids in (token_ids, whole)
    )
    if ours == theirs:  # a token over the seam of two pieces: the policy's own stay as they were sampled
        return ""
    return _describe_difference(ours, theirs)


def _describe_difference(ours: str, theirs: str) -> str:
    index = next(
        (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    window = slice(max(0, index - _CONTEXT_CHARS), index + _CONTEXT_CHARS)
    return f"appended {ours[window]!r}, at once {theirs[window]!r}"


# What a policy that writes as its template does would write in a turn, and a whole conversation made of it.


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
