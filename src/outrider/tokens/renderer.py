"""The contract between messages and ids: what a model family needs to be played, trained and served."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Protocol

from outrider.errors import ModelError
from outrider.tokens.call_formats import get_call_format, read_turn
from outrider.tokens.template import (
    ASSISTANT_MESSAGE,
    MARK,
    PLACEHOLDER_TOOL,
    USER_MESSAGE,
    Abilities,
    Chat,
    ChatWriter,
    Template,
    Tokenizer,
    TurnClosing,
    WrittenClosing,
    decode_text,
    load_templates,
)
from outrider.tokens.tool_calls import THINKING_END, ParsedTurn, opened_thinking, split_thinking
from outrider.types import Message, Role, ToolSchema


class Renderer(Protocol):
    """Messages to ids and back. Ids are only ever appended: what the policy wrote is never made into ids a
    second time.
    """

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Ids of the first messages with the assistant's turn opened; ``tools`` are told to the model."""
        ...

    def bridge(self, previous_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids that follow ``previous_ids`` (an assistant turn, closed or not) so that ``messages`` are said
        next.
        """
        ...

    def parse(
        self, token_ids: Sequence[int], *, context: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> ParsedTurn:
        """Read a turn of the policy. ``context`` are the ids before it: what the template opened there
        belongs to the turn. Calls of tools that ``tools`` lack are problems. Never raises for what was
        written.
        """
        ...


# From messages to ids, appending only: a conversation's ids are never rendered twice.
#
# The generic way to extend a chat with any Hugging Face template: render a stand-in conversation with and
# without the new messages and keep the difference. (The package ``renderers`` does this per model family; it
# brings the OpenAI client and its own config system, which is more than a light core should carry.)


HistoryThinking = Literal["keep", "strip"]
_THINKING = ("<think>", THINKING_END)


class ChatRenderer:
    """Renders prompts, observations and inline text for one tokenizer. Raises ModelError where its template
    cannot serve.

    ``end_of_turn`` are the ids after which an assistant message is closed (what the template writes there),
    ``opening`` those between the text of a user message and the assistant's answer. Text of a message that
    spells a special token (a chat marker in a question, a page or a retrieved step) gets a space after its
    first character: only the template writes markers.

    Not every template knows every conversation. Where it has no system message (``supports_system``), or
    drops it, its text goes in front of the first user message, and where roles must alternate, neighbours of
    one role become one message: both joined by an empty line, as Mistral's and Gemma's makers do. Tools that
    a template does not show are told in the system message, in the words of ``call_format``.

    ``template_kwargs`` are variables of the template (``enable_thinking`` …). ``observations`` are the roles
    that answer a turn. ``history_thinking``: whether a conversation that is rendered again shows the
    thinking of its earlier turns.

    If a tokenizer has several templates, conversations with tools are rendered by ``tool_use`` and others by
    ``default``, as transformers chooses; ``template_kwargs`` may name one for all (``chat_template``).
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
        opening_text = self.template.behind("user messages", [{"role": "user", "content": MARK}], opened=True)
        self.opening: tuple[int, ...] = tuple(self.template.encode_behind((), opening_text))
        self._opened = opened_thinking(opening_text)
        self.abilities = Abilities(self.template)
        self.supports_system = self.abilities.supports_system
        self.closing = self._find_closing(opening_text)
        self._writer = ChatWriter(
            self.template, self.abilities, self.call_format, keeps_thinking=history_thinking == "keep"
        )

    def with_tools(self, has_tools: bool) -> "ChatRenderer":
        """The renderer of conversations with or without tools; this one unless the tokenizer has a template
        of its own for each.
        """
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
        """How turns end. Behind an answer some templates write nothing of their own (GLM): the token that
        begins the next message ends the turn then, unless it begins the assistant's messages too.
        """
        closing = TurnClosing.from_ids(self.tokenizer, self.end_of_turn)
        if self._turn_end.text.strip():
            return closing
        opening = self.template.first_marker(opening_text)
        token_ids: list[int] = []
        for read_text in (self._text_behind_answer, self._text_behind_call):
            try:
                marker = self.template.first_marker(read_text())
            except ModelError:
                continue
            if (
                marker is not None
                and (opening is None or marker[1] != opening[1])
                and marker[1] not in token_ids
            ):
                token_ids.append(marker[1])
        return replace(closing, token_id=token_ids[0], next_roles=tuple(token_ids)) if token_ids else closing

    def _text_behind_answer(self) -> str:
        return self.template.behind(
            "an observation after an answer", [USER_MESSAGE, ASSISTANT_MESSAGE, USER_MESSAGE], opened=True
        )

    def _text_behind_call(self) -> str:
        return self._after_calls(
            [{"role": "tool", "content": "a", "tool_call_id": "call00000", "name": "lookup"}]
        )[1]

    def _plain_closing(self, *, is_answered: bool) -> WrittenClosing:
        """The closing of a turn without calls. Raises ModelError where a user message cannot follow it and
        has to.
        """
        closed = self.template.behind("assistant messages", [USER_MESSAGE, ASSISTANT_MESSAGE])
        try:
            return self.template.closing(closed, self._text_behind_answer())
        except ModelError as error:
            if is_answered:
                reason = str(error).removeprefix("the tokenizer has no usable chat template: ")
                raise ModelError(
                    f"the chat template of {self.template.name} refuses a user message behind an answer: "
                    f"{reason}"
                ) from error
            return self.template.written_closing(closed)

    @property
    def turn_end_text(self) -> str:
        """What the template writes behind an answer."""
        return self._turn_end.text

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Ids of the first messages with the assistant's turn opened. Inline messages may only follow."""
        inline = [m for m in messages if m.role == "inline"]
        text = self.whole_text(messages, tools)
        return tuple(self.template.encode(text + "".join(self.template.plain(m.content) for m in inline)))

    def whole_text(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, opened: bool = True
    ) -> str:
        """A conversation rendered at once, without its inline messages, as a server renders it."""
        renderer = self.with_tools(bool(tools) or any(message.role == "tool" for message in messages))
        chat, template_tools = renderer._writer.chat(messages, tools)
        return renderer.template.render(chat, opened=opened, tools=template_tools)

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text inside a message."""
        return len(self.bridge((), [Message(role="inline", content=text)]))

    def bridge(self, previous_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids that follow ``previous_ids`` (an assistant turn, closed or not) so that ``messages`` are said
        next.

        Inline messages continue the open assistant turn; chat messages close it first, with exactly those of
        the template's closing ids that the policy has not written itself, and open the next assistant turn.
        A turn that the policy has ended with the tokenizer's end token is closed: no second one follows.
        """
        if any(m.role == "tool" for m in messages) and (renderer := self.with_tools(True)) is not self:
            return renderer.bridge(previous_ids, messages)
        inline = "".join(self.template.plain(m.content) for m in messages if m.role == "inline")
        chat, _ = self._writer.chat(messages)
        if not chat:
            return tuple(self.template.encode_behind(previous_ids, inline))
        if inline:
            raise ValueError("inline and chat messages cannot answer the same turn")
        if chat[0]["role"] == "tool":
            closing, rest = self._after_calls(chat)
        else:
            closing = self._turn_end
            text = self.template.behind("answers", [USER_MESSAGE, ASSISTANT_MESSAGE, *chat], opened=True)
            if not text.startswith(closing.text):
                raise ModelError(
                    "the chat template closes the last assistant message differently from an earlier one"
                )
            rest = text[len(closing.text) :]
        closing, rest = self._with_next_role(closing, rest)
        missing = closing.missing(previous_ids)
        if self._ends_with_eos(previous_ids) and closing.text.strip() and not self.closing.next_roles:
            missing = closing.behind_marker
        return (*missing, *self.template.encode_behind((*previous_ids, *missing), rest))

    def _with_next_role(self, closing: WrittenClosing, rest: str) -> tuple[WrittenClosing, str]:
        """A closing that is nothing but white space ends with the token that begins the next message: the
        policy may have ended its turn with that one.
        """
        marker = None if closing.text.strip() else self.template.first_marker(rest)
        if marker is None:
            return closing, rest
        return self.template.written_closing(closing.text + marker[0]), rest[len(marker[0]) :]

    def _ends_with_eos(self, previous_ids: Sequence[int]) -> bool:
        """Whether the turn ends with the tokenizer's end token, which is not the template's."""
        if not previous_ids or self.closing.token_id is None:
            return False
        return previous_ids[-1] == self.tokenizer.eos_token_id not in self.closing.token_ids

    def _after_calls(self, chat: Chat) -> tuple[WrittenClosing, str]:
        """The closing of a turn that calls tools, and the text of their results behind it."""
        placeholder, mark = self.abilities.calling_turn(
            [message for message in chat if message["role"] == "tool"]
        )
        closed = self.template.behind("tool calls", [USER_MESSAGE, placeholder], mark=mark)
        followed = self.template.behind(
            "tool results", [USER_MESSAGE, placeholder, *chat], opened=True, mark=mark
        )
        common = self.template.closing(closed, followed).text
        end = self._turn_end.text
        if not common.endswith(end):  # a marker of its own for turns that call
            last = [match.start() for match in self.template.markers.finditer(common)][-1:]
            end = common[last[0] :] if last else common
        closing = self._turn_end if end == self._turn_end.text else self.template.written_closing(end)
        return closing, followed[len(common) :]

    def parse(
        self, token_ids: Sequence[int], *, context: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> ParsedTurn:
        return read_turn(self.turn_text(token_ids, context=context), self.call_format, tools)

    def parse_message(self, text: str, tools: Sequence[ToolSchema]) -> Message:
        """A turn as a message of the history; calls that cannot be read stay in its words."""
        turn = read_turn(text, self.call_format, tools)
        if turn.problems:
            reasoning, words, _ = split_thinking(text, self.call_format)
            return Message(role="assistant", content=words, reasoning=reasoning)
        return Message(
            role="assistant", content=turn.content, reasoning=turn.reasoning, tool_calls=turn.tool_calls
        )

    def turn_text(self, token_ids: Sequence[int], *, context: Sequence[int], is_closed: bool = True) -> str:
        """The text of a turn with what the template has opened for it (``<think>``), without its closing.

        Special tokens are left out, but those that thinking and tool calls are read by.
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
            if self.template.continuation.adds_blank_behind(context):
                text = text.removeprefix(" ")
        else:
            text = decode_text(self.tokenizer, token_ids, skip_special_tokens=skips)
        if self.lead and self._is_opened(context):
            text = text.removeprefix(self.lead)
        if is_closed:
            # Where a template closes turns with ordinary tokens, decoding shows them as text.
            text = self.closing.cut(text).removesuffix(self._white_space_before_end)
        return self.opened(context) + text

    def demonstration(self, text: str, context: Sequence[int]) -> str:
        """A demonstrator's turn as the template writes it: without the white space around it that the
        template drops, without a second opening of a block of thinking that the template has opened, and
        with that block closed in front of a text that does not think.
        """
        drops_before, drops_behind = self._drops_white_space
        if drops_before and self._is_opened(context):
            text = text.lstrip()
        if drops_behind:
            text = text.rstrip()
        opened = self.opened(context)
        if not text or not opened:
            return text
        if THINKING_END not in text:
            return f"\n{THINKING_END}\n\n{text}"
        return text.removeprefix(opened) if text.startswith(opened) else text.removeprefix("<think>")

    @cached_property
    def _drops_white_space(self) -> tuple[bool, bool]:
        """Whether the template drops white space in front of an answer, and behind it (Llama 2 and 3)."""
        answer = {"role": "assistant", "content": f"\n \n{MARK}\n \n"}
        text = self.template.render([USER_MESSAGE, answer], opened=False)
        before, _, behind = text.partition(MARK)
        return not before.endswith("\n \n"), not behind.startswith("\n \n")

    def turn_ids(self, text: str, context: Sequence[int], *, is_closed: bool) -> list[int]:
        """The ids of a turn that somebody else has written, as the template writes it behind ``context``:
        with the white space in front of it, and with its end if it ``is_closed``.

        End tokens that the text spells are no ends: those behind it are left out, others get a space after
        their first character.
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
        ids = self.template.encode_behind(context, lead + text)
        if is_closed:
            ids += self._end_ids(text, (*context, *ids))
        return ids

    def _added_text(self, token_id: int) -> str:
        added = self.tokenizer.added_tokens_decoder
        return str(added[token_id]) if token_id in added else ""

    def _end_ids(self, text: str, context: Sequence[int]) -> list[int]:
        """The ids with which the template ends a turn, up to its marker. Raises ModelError without one."""
        if self.closing.stop:
            return self.template.encode_behind(context, self.closing.text)
        if self.closing.next_roles:
            read = read_turn(text, self.call_format, [PLACEHOLDER_TOOL]) if self.call_format else None
            is_call = read is not None and bool(read.tool_calls or read.problems)
            marker = self.closing.next_roles[-1 if is_call else 0]
            return self.template.encode_behind(context, self._turn_end.text + self._added_text(marker))
        if self.closing.token_id is None:
            if self.tokenizer.eos_token_id is None:
                raise ModelError("the tokenizer has no end-of-turn id")
            return [self.tokenizer.eos_token_id]
        end = self._added_text(self.closing.token_id)
        before = self._turn_end.text.partition(end)[0]
        return self.template.encode_behind(context, before + end)

    def opened(self, context: Sequence[int]) -> str:
        """What the template has opened at the end of the ids and the next turn goes on with."""
        return self._opened if self._opened and self._is_opened(context) else ""

    def _is_opened(self, context: Sequence[int]) -> bool:
        """Whether a turn begins behind these ids."""
        if not context:
            return False
        end = decode_text(self.tokenizer, context[-len(self.opening) - 1 :], skip_special_tokens=False)
        return end.endswith(self._generation)

    @property
    def _white_space_before_end(self) -> str:
        """What the template writes between the text of a turn and its end token (Llama 2)."""
        text = self._turn_end.text
        return text[: len(text) - len(text.lstrip())] if self.closing.token_ids else ""

    @cached_property
    def lead(self) -> str:
        """White space that the template writes between the opening of a turn and its text, and that a policy
        which writes as its template does writes itself.
        """
        opened = self.template.render([USER_MESSAGE], opened=True)
        whole = self.template.render([USER_MESSAGE, ASSISTANT_MESSAGE], opened=False)
        lead = whole[len(opened) :].split(MARK)[0] if whole.startswith(opened) else ""
        return lead if lead.isspace() else ""

    @cached_property
    def _generation(self) -> str:
        """The text that opens a turn: from its last marker on, as it is decoded."""
        text = decode_text(self.tokenizer, self.opening, skip_special_tokens=False)
        before = text[: len(text) - len(self._opened)]
        starts = [match.start() for match in self.template.markers.finditer(before)]
        return text[starts[-1] :] if starts else text

    @cached_property
    def _visible_tokens(self) -> frozenset[int]:
        """Special tokens that are part of what the policy says."""
        markers = {*_THINKING, *(self.call_format.markers if self.call_format else ())}
        added = self.tokenizer.added_tokens_decoder
        return frozenset(i for i, token in added.items() if token.special and str(token) in markers)
