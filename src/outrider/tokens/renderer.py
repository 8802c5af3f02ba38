"""Rendering of messages to token ids and parsing of token ids, for generation, training and serving."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from outrider.errors import ModelError
from outrider.tokens.call_formats import get_call_format, read_turn
from outrider.tokens.template import (
    ASSISTANT_MESSAGE,
    MARK,
    PLACEHOLDER_TOOL,
    REFUSAL,
    USER_MESSAGE,
    Chat,
    Template,
    Tokenizer,
    TurnClosing,
    WrittenClosing,
    decode_text,
    load_templates,
)
from outrider.tokens.tool_calls import (
    THINKING_END,
    ParsedTurn,
    find_thinking_tokens,
    opened_thinking,
    split_thinking,
)
from outrider.types import Message, Role, ToolSchema

HistoryThinking = Literal["keep", "strip"]


class ChatRenderer:
    """Renders prompts, observations and inline text for one tokenizer. Raises ModelError if the template is
    unusable.

    Token ids are only appended; text of the policy is never tokenized again. To extend a conversation with
    any Hugging Face template, the renderer renders a placeholder conversation with and without the new
    messages and uses the difference. Text in messages that spells a special token gets a space after its
    first character, so that only the template writes markers.

    If a template does not support system messages, their text is put in front of the first user message. If
    roles must alternate, messages of one role in a row are joined. Both are joined by an empty line, as the
    makers of Mistral and Gemma do. If a template does not render tools, the call format describes them in the
    system message. If a tokenizer has several templates, ``tool_use`` renders conversations with tools and
    ``default`` others, as in transformers, unless ``template_kwargs`` name one (``chat_template``).

    Args:
        tokenizer: the tokenizer
        template_kwargs: variables of the template, for example ``enable_thinking``
        call_format: name of the call format
        observations: the roles that answer a turn
        history_thinking: whether a conversation that is rendered again contains the thinking of earlier turns
        template: use this template instead of the tokenizer's

    Attributes:
        end_of_turn: the ids that the template writes after an assistant message
        opening: the ids between the text of a user message and the assistant's answer
        closing: the tokens or text that end a turn
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        call_format: str | None = None,
        observations: Sequence[Role] = ("user",),
        history_thinking: HistoryThinking = "keep",
        template: Template | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        plain, with_tools = (
            load_templates(tokenizer, template_kwargs or {}) if template is None else (template,) * 2
        )
        self.template = with_tools if "tool" in observations else plain
        self._other_template = plain if self.template is with_tools else with_tools
        self._call_format_name = call_format
        self.call_format = None if call_format is None else get_call_format(call_format)
        self.history_thinking = history_thinking
        self._turn_end = self._plain_closing(is_answered="user" in observations)
        self.end_of_turn: tuple[int, ...] = self._turn_end.ids
        opening_text = self.template.text_after_mark(
            "user messages", [{"role": "user", "content": MARK}], opened=True
        )
        self.opening: tuple[int, ...] = tuple(self.template.continuation.encode(opening_text))
        self._opened = opened_thinking(opening_text)
        self.supports_system = self.template.supports_system
        self.closing = self._find_closing(opening_text)

    def with_tools(self, has_tools: bool) -> "ChatRenderer":
        """The renderer of conversations with or without tools, which may have two templates."""
        is_right = self._other_template is self.template or has_tools == self.template.with_tools
        return self if is_right else self._other

    @cached_property
    def _other(self) -> "ChatRenderer":
        return ChatRenderer(
            self.tokenizer,
            call_format=self._call_format_name,
            observations=(),
            history_thinking=self.history_thinking,
            template=self._other_template,
        )

    def _find_closing(self, opening_text: str) -> TurnClosing:
        """Find the tokens or text that end turns.

        Some templates write nothing after an answer (GLM). Then the token that begins the next message ends
        the turn, unless it also begins the assistant's messages.
        """
        closing = TurnClosing.from_ids(self.tokenizer, self.end_of_turn)
        if self._turn_end.text.strip():
            return closing
        opening = self.template.first_marker(opening_text)
        token_ids: list[int] = []
        result = {"role": "tool", "content": "a", "tool_call_id": "call00000", "name": "lookup"}
        for render in (self._text_after_answer, lambda: self._after_calls([result])[1]):
            try:
                marker = self.template.first_marker(render())
            except ModelError:
                continue
            if (
                marker is not None
                and (opening is None or marker[1] != opening[1])
                and marker[1] not in token_ids
            ):
                token_ids.append(marker[1])
        return replace(closing, token_id=token_ids[0], next_roles=tuple(token_ids)) if token_ids else closing

    def _text_after_answer(self) -> str:
        return self.template.text_after_mark(
            "an observation after an answer", [USER_MESSAGE, ASSISTANT_MESSAGE, USER_MESSAGE], opened=True
        )

    def _plain_closing(self, *, is_answered: bool) -> WrittenClosing:
        """The closing of a turn without calls. Raises ModelError if the template refuses a user message after
        it and ``is_answered``.
        """
        closed = self.template.text_after_mark("assistant messages", [USER_MESSAGE, ASSISTANT_MESSAGE])
        try:
            return self.template.closing(closed, self._text_after_answer())
        except ModelError as error:
            if is_answered:
                reason = str(error).removeprefix(REFUSAL)
                raise ModelError(
                    f"the chat template of {self.template.name} refuses a user message after an answer: "
                    f"{reason}"
                ) from error
            return self.template.written_closing(closed)

    @property
    def turn_end_text(self) -> str:
        """The text that the template writes after an answer."""
        return self._turn_end.text

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Render the first messages and ``tools`` to ids, including the start of the assistant's turn. Inline
        messages must come last.
        """
        inline = [m for m in messages if m.role == "inline"]
        text = self.whole_text(messages, tools)
        return tuple(self.template.encode(text + "".join(self.template.escape(m.content) for m in inline)))

    def whole_text(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, opened: bool = True
    ) -> str:
        """Render a whole conversation without its inline messages, as a server does."""
        renderer = self.with_tools(bool(tools) or any(message.role == "tool" for message in messages))
        chat, template_tools = renderer._to_chat(messages, tools)
        return renderer.template.render(chat, opened=opened, tools=template_tools)

    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text inside a message."""
        return len(self.bridge((), [Message(role="inline", content=text)]))

    def bridge(self, previous_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids that append ``messages`` to ``previous_ids``, which end with an assistant turn.

        Inline messages continue the open assistant turn. Chat messages first close it, with exactly those of
        the template's closing ids that the policy has not written itself, and then open the next assistant
        turn. If the policy has ended its turn with the tokenizer's end token, no second one is added.
        """
        if any(m.role == "tool" for m in messages) and (renderer := self.with_tools(True)) is not self:
            return renderer.bridge(previous_ids, messages)
        inline = "".join(self.template.escape(m.content) for m in messages if m.role == "inline")
        chat, _ = self._to_chat(messages)
        if not chat:
            return tuple(self.template.continuation.encode(inline, previous_ids))
        if inline:
            raise ValueError("inline and chat messages cannot answer the same turn")
        if chat[0]["role"] == "tool":
            closing, rest = self._after_calls(chat)
        else:
            closing = self._turn_end
            text = self.template.text_after_mark(
                "answers", [USER_MESSAGE, ASSISTANT_MESSAGE, *chat], opened=True
            )
            if not text.startswith(closing.text):
                raise ModelError(
                    "the chat template closes the last assistant message differently from an earlier one"
                )
            rest = text[len(closing.text) :]
        closing, rest = self._with_next_role(closing, rest)
        missing = closing.missing(previous_ids)
        if self._ends_with_eos(previous_ids) and closing.text.strip() and not self.closing.next_roles:
            missing = closing.after_marker
        return (*missing, *self.template.continuation.encode(rest, (*previous_ids, *missing)))

    def _with_next_role(self, closing: WrittenClosing, rest: str) -> tuple[WrittenClosing, str]:
        """Extend a closing of white space by the token that begins the next message, with which the policy
        may have ended its turn.
        """
        marker = None if closing.text.strip() else self.template.first_marker(rest)
        if marker is None:
            return closing, rest
        return self.template.written_closing(closing.text + marker[0]), rest[len(marker[0]) :]

    def _ends_with_eos(self, previous_ids: Sequence[int]) -> bool:
        """Whether the turn ends with the tokenizer's end token and the template uses another one."""
        if not previous_ids or self.closing.token_id is None:
            return False
        return previous_ids[-1] == self.tokenizer.eos_token_id not in self.closing.token_ids

    def _after_calls(self, chat: Chat) -> tuple[WrittenClosing, str]:
        """The closing of a turn that calls tools, and the text of their results."""
        placeholder, mark = self.template.calling_turn(
            [message for message in chat if message["role"] == "tool"]
        )
        closed = self.template.text_after_mark("tool calls", [USER_MESSAGE, placeholder], mark=mark)
        followed = self.template.text_after_mark(
            "tool results", [USER_MESSAGE, placeholder, *chat], opened=True, mark=mark
        )
        end = self._turn_end.text
        try:
            common = self.template.closing(closed, followed).text
        except ModelError:
            # Some templates write a call at the end of a conversation differently from an earlier one
            # (Nemotron Nano v2, Apriel 1.5). Both turns end like an answer.
            if not self.template.markers.search(end) or end not in followed:
                raise
            return self._turn_end, followed.split(end, 1)[1]
        if not common.endswith(end):  # turns with calls have another marker
            last = [match.start() for match in self.template.markers.finditer(common)][-1:]
            end = common[last[0] :] if last else common
        closing = self._turn_end if end == self._turn_end.text else self.template.written_closing(end)
        return closing, followed[len(common) :]

    def parse(
        self, token_ids: Sequence[int], *, context: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> ParsedTurn:
        """Parse a turn of the policy. Never raises for anything that the policy wrote.

        ``context`` are the ids before it; a block of thinking that the template opened there belongs to the
        turn. Calls that none of the ``tools`` accepts are problems.
        """
        return read_turn(self.turn_text(token_ids, context=context), self.call_format, tools)

    def parse_message(self, text: str, tools: Sequence[ToolSchema]) -> Message:
        """Parse a turn to a message of the history; invalid calls stay in its content."""
        turn = read_turn(text, self.call_format, tools)
        if turn.problems:
            reasoning, content, _ = split_thinking(text, self.call_format)
            return Message(role="assistant", content=content, reasoning=reasoning)
        return Message(
            role="assistant", content=turn.content, reasoning=turn.reasoning, tool_calls=turn.tool_calls
        )

    def turn_text(self, token_ids: Sequence[int], *, context: Sequence[int], is_closed: bool = True) -> str:
        """Decode a turn, including a block that the template has opened (``<think>``), without its closing.

        Special tokens are left out except those of thinking and tool calls.
        """
        if is_closed and token_ids and token_ids[-1] in self.closing.next_roles:
            token_ids = token_ids[:-1]
        skips = not self._visible_tokens
        if self._visible_tokens:
            special = self.tokenizer.added_tokens_decoder
            token_ids = [
                i
                for i in token_ids
                if i in self._visible_tokens or i not in special or not special[i].special
            ]
        if context:
            text = self.template.continuation.decode(token_ids, skip_special_tokens=skips)
            if self.template.continuation.adds_blank_after(context):
                text = text.removeprefix(" ")
        else:
            text = decode_text(self.tokenizer, token_ids, skip_special_tokens=skips)
        if self.lead and self._is_opened(context):
            text = text.removeprefix(self.lead)
        if is_closed:
            # A closing of ordinary tokens is part of the decoded text.
            text = self.closing.cut(text).removesuffix(self._white_space_before_end)
        return self.opened(context) + text

    def demonstration(self, text: str, context: Sequence[int]) -> str:
        """Adapt the text of a demonstration to the template.

        Removes white space that the template drops, and the opening of a block of thinking if the template
        has opened one; closes that block in front of a text without thinking.
        """
        drops_before, drops_after = self._drops_white_space
        if drops_before and self._is_opened(context):
            text = text.lstrip()
        if drops_after:
            text = text.rstrip()
        opened = self.opened(context)
        if not text or not opened:
            return text
        if THINKING_END not in text:
            return f"\n{THINKING_END}\n\n{text}"
        return text.removeprefix(opened) if text.startswith(opened) else text.removeprefix("<think>")

    @cached_property
    def _drops_white_space(self) -> tuple[bool, bool]:
        """Whether the template drops white space before and after an answer (Llama 2 and 3)."""
        answer = {"role": "assistant", "content": f"\n \n{MARK}\n \n"}
        text = self.template.render([USER_MESSAGE, answer], opened=False)
        before, _, after = text.partition(MARK)
        return not before.endswith("\n \n"), not after.startswith("\n \n")

    def turn_ids(self, text: str, context: Sequence[int], *, is_closed: bool) -> list[int]:
        """Encode a turn that was not sampled, as the template writes it after ``context``: with the white
        space before it, and with its end if it ``is_closed``.

        End tokens in the text are removed at its end; others get a space after their first character.
        """
        ids_of_ends = set(self.closing.token_ids)
        if self.tokenizer.eos_token_id is not None:
            ids_of_ends.add(self.tokenizer.eos_token_id)
        ends = [end for item in sorted(ids_of_ends) if (end := self._added_text(item))]
        while is_closed and (end := next((item for item in ends if text.rstrip().endswith(item)), "")):
            text = text.rstrip().removesuffix(end)
        for end in ends:
            text = text.replace(end, f"{end[0]} {end[1:]}")
        lead = self.lead if self._is_opened(context) else ""
        ids = self.template.continuation.encode(lead + text, context)
        if is_closed:
            ids += self._end_ids(text, (*context, *ids))
        return ids

    def recorded_turn(
        self, text: str, context: Sequence[int], *, stop: Sequence[str]
    ) -> tuple[list[int], bool]:
        """Encode a turn that was not sampled, up to the end of its first ``stop`` string if it has one.

        Returns the ids, and whether the template's end closes the turn: a stop string leaves it open.
        """
        ends = [text.index(string) + len(string) for string in stop if string in text]
        text = text[: min(ends)] if ends else text
        return self.turn_ids(text, context, is_closed=not ends), not ends

    def _added_text(self, token_id: int) -> str:
        added = self.tokenizer.added_tokens_decoder
        return str(added[token_id]) if token_id in added else ""

    def _end_ids(self, text: str, context: Sequence[int]) -> list[int]:
        """The ids with which the template ends a turn, up to its marker. Raises ModelError without any."""
        if self.closing.stop:
            return self.template.continuation.encode(self.closing.text, context)
        if self.closing.next_roles:
            read = read_turn(text, self.call_format, [PLACEHOLDER_TOOL]) if self.call_format else None
            is_call = read is not None and bool(read.tool_calls or read.problems)
            marker = self.closing.next_roles[-1 if is_call else 0]
            return self.template.continuation.encode(self._turn_end.text + self._added_text(marker), context)
        if self.closing.token_id is None:
            if self.tokenizer.eos_token_id is None:
                raise ModelError("the tokenizer has no end-of-turn id")
            return [self.tokenizer.eos_token_id]
        end = self._added_text(self.closing.token_id)
        before = self._turn_end.text.partition(end)[0]
        return self.template.continuation.encode(before + end, context)

    def opened(self, context: Sequence[int]) -> str:
        """The block of thinking that the template has opened at the end of the ids, or ""."""
        return self._opened if self._opened and self._is_opened(context) else ""

    def _is_opened(self, context: Sequence[int]) -> bool:
        """Whether a turn begins after these ids."""
        if not context:
            return False
        end = decode_text(self.tokenizer, context[-len(self.opening) - 1 :], skip_special_tokens=False)
        return end.endswith(self._generation)

    @property
    def _white_space_before_end(self) -> str:
        """White space between the text of a turn and its end token (Llama 2)."""
        text = self._turn_end.text
        return text[: len(text) - len(text.lstrip())] if self.closing.token_ids else ""

    @cached_property
    def lead(self) -> str:
        """White space between the opening of a turn and its text, which the policy itself has to write."""
        opened = self.template.render([USER_MESSAGE], opened=True)
        whole = self.template.render([USER_MESSAGE, ASSISTANT_MESSAGE], opened=False)
        lead = whole[len(opened) :].split(MARK)[0] if whole.startswith(opened) else ""
        return lead if lead.isspace() else ""

    @cached_property
    def _generation(self) -> str:
        """The decoded text that opens a turn, from its last marker on."""
        text = decode_text(self.tokenizer, self.opening, skip_special_tokens=False)
        before = text[: len(text) - len(self._opened)]
        starts = [match.start() for match in self.template.markers.finditer(before)]
        return text[starts[-1] :] if starts else text

    @cached_property
    def _visible_tokens(self) -> frozenset[int]:
        """Special tokens that are part of the text of the policy."""
        special = {i: str(token) for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        markers = self.call_format.markers if self.call_format else ()
        visible = find_thinking_tokens(special.values()).union(markers)
        return frozenset(i for i, token in special.items() if token in visible)

    # Messages as the chat of the template: missing roles, earlier thinking and calls, tools.

    def _to_chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> tuple[Chat, Sequence[ToolSchema]]:
        """Convert all messages except inline ones; return also the tools that the template renders itself."""
        if tools and not self.template.shows_tools:
            messages, tools = self._with_tool_descriptions(messages, tools), ()
        chat: Chat = []
        must_join = False
        for message in messages:
            if message.role == "inline":
                continue
            is_system = message.role == "system" and not self.template.supports_system
            entry = self._to_dict(message, "user" if is_system else message.role)
            is_repeat = bool(chat) and chat[-1]["role"] == entry["role"] != "tool"
            if is_repeat and (must_join or not self.template.supports_repeats):
                chat[-1]["content"] += f"\n\n{entry['content']}"
            else:
                chat.append(entry)
            must_join = is_system
        return chat, [self.template.escape(tool) for tool in tools]

    def _to_dict(self, message: Message, role: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"role": role, "content": self.template.escape(message.content)}
        if role == "tool":
            ids = {"tool_call_id": message.tool_call_id, "name": message.tool_name}
            return entry | {key: value for key, value in ids.items() if value}
        if role != "assistant":
            return entry
        calls = [
            replace(call, arguments=self.template.escape(call.arguments), raw=self.template.escape(call.raw))
            for call in message.tool_calls
        ]
        shape = self.template.call_shape if calls else None
        if shape is not None:
            entry = shape.message(calls, entry["content"])
        elif calls:
            if self.call_format is None:
                raise ModelError("the chat template does not render tool calls: name their call format")
            written = self.call_format.write(calls)
            entry["content"] = f"{entry['content']}\n{written}" if entry["content"] else written
        if message.reasoning:
            thinking = self.template.escape(message.reasoning)
            key = self.template.reasoning_key
            if key is not None:
                entry[key] = thinking
            elif self.history_thinking == "keep":
                entry["content"] = f"<think>\n{thinking}\n</think>\n\n{entry['content'] or ''}"
        return entry

    def _with_tool_descriptions(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Sequence[Message]:
        """Append the description of the call format to the system message."""
        if self.call_format is None:
            raise ModelError("the chat template does not render tools: name the call format")
        description = self.call_format.describe(tools)
        if messages and messages[0].role == "system":
            first = replace(messages[0], content=f"{messages[0].content}\n\n{description}")
            return [first, *messages[1:]]
        return [Message(role="system", content=description), *messages]
