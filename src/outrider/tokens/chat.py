"""From messages to ids, appending only: a conversation's ids are never rendered twice.

The generic way to extend a chat with any Hugging Face template: render a stand-in conversation with and
without the new messages and keep the difference. (The package ``renderers`` does this per model family; it
brings the OpenAI client and its own config system, which is more than a light core should carry.)
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from outrider.errors import ModelError
from outrider.tokens.abilities import Abilities
from outrider.tokens.calls import form_named, read_turn
from outrider.tokens.closing import TurnClosing, WrittenClosing
from outrider.tokens.conversation import ChatWriter
from outrider.tokens.parsed import ParsedTurn, opened_thinking, split_thinking
from outrider.tokens.template import ANSWERED, ASKED, MARK, Chat, Template
from outrider.tokens.tokenizer import Tokenizer, text_of
from outrider.types import Message, Role, ToolSchema

HistoryThinking = Literal["keep", "strip"]
_THINKING = ("<think>", "</think>")


class ChatRenderer:
    """Renders prompts, observations and inline text for one tokenizer. Raises ModelError where its template
    cannot serve.

    ``end_of_turn`` are the ids after which an assistant message is closed (what the template writes there),
    ``opening`` those between the text of a user message and the assistant's answer. Text of a message that
    spells a special token (a chat marker in a question, a page or a retrieved step) gets a space after its
    first character: only the template writes markers.

    Not every template knows every conversation. Where it has no system message (``takes_system``), or drops
    it, its text goes in front of the first user message, and where roles must alternate, neighbours of one
    role become one message: both joined by an empty line, as Mistral's and Gemma's makers do. Tools that a
    template does not show are told in the system message, in the words of ``call_format``.

    ``template_kwargs`` are variables of the template (``enable_thinking`` …). ``observations`` are the roles
    that answer a turn. ``history_thinking``: whether a conversation that is rendered again shows the
    thinking of its earlier turns.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        call_format: str | None = None,
        observations: Sequence[Role] = ("user",),
        history_thinking: HistoryThinking = "keep",
    ) -> None:
        self.tokenizer = tokenizer
        self.template = Template(tokenizer, template_kwargs or {})
        self.call_format = None if call_format is None else form_named(call_format)
        self.history_thinking = history_thinking
        self._turn_end = self._plain_closing(is_answered="user" in observations)
        self.end_of_turn: tuple[int, ...] = self._turn_end.ids
        self.closing = TurnClosing.of(tokenizer, self.end_of_turn)
        asked = self.template.behind("user messages", [{"role": "user", "content": MARK}], opened=True)
        self.opening: tuple[int, ...] = tuple(self.template.encode(asked))
        self._opened = opened_thinking(asked)
        self.abilities = Abilities(self.template)
        self.takes_system = self.abilities.takes_system
        self._writer = ChatWriter(
            self.template, self.abilities, self.call_format, keeps_thinking=history_thinking == "keep"
        )

    def _plain_closing(self, *, is_answered: bool) -> WrittenClosing:
        """The closing of a turn without calls. Raises ModelError where a user message cannot follow it and
        has to.
        """
        closed = self.template.behind("assistant messages", [ASKED, ANSWERED])
        try:
            followed = self.template.behind(
                "an observation after an answer", [ASKED, ANSWERED, ASKED], opened=True
            )
            return self.template.closing(closed, followed)
        except ModelError as error:
            if is_answered:
                told = str(error).removeprefix("the tokenizer has no usable chat template: ")
                raise ModelError(
                    f"the chat template of {self.template.name} refuses a user message behind an answer: "
                    f"{told}"
                ) from error
            return self.template.written_closing(closed)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Ids of the first messages with the assistant's turn opened. Inline messages may only follow."""
        inline = [m for m in messages if m.role == "inline"]
        text = self.whole_text(messages, tools)
        return tuple(self.template.encode(text + "".join(self.template.plain(m.content) for m in inline)))

    def whole_text(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, opened: bool = True
    ) -> str:
        """A conversation rendered at once, without its inline messages, as a server renders it."""
        chat, told = self._writer.chat(messages, tools)
        return self.template.render(chat, opened=opened, tools=told)

    def bridge(self, previous_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids that follow ``previous_ids`` (an assistant turn, closed or not) so that ``messages`` are said
        next.

        Inline messages continue the open assistant turn; chat messages close it first, with exactly those of
        the template's closing ids that the policy has not written itself, and open the next assistant turn.
        """
        inline = "".join(self.template.plain(m.content) for m in messages if m.role == "inline")
        chat, _ = self._writer.chat(messages)
        if not chat:
            return tuple(self.template.encode(inline))
        if inline:
            raise ValueError("inline and chat messages cannot answer the same turn")
        if chat[0]["role"] == "tool":
            closing, rest = self._after_calls(chat)
        else:
            closing = self._turn_end
            following = self.template.behind("answers", [ASKED, ANSWERED, *chat], opened=True)
            if not following.startswith(closing.text):
                raise ModelError(
                    "the chat template closes the last assistant message differently from an earlier one"
                )
            rest = following[len(closing.text) :]
        return (*closing.missing(previous_ids), *self.template.encode(rest))

    def _after_calls(self, chat: Chat) -> tuple[WrittenClosing, str]:
        """The closing of a turn that calls tools, and the text of their results behind it."""
        stand_in, mark = self.abilities.calling_turn([one for one in chat if one["role"] == "tool"])
        closed = self.template.behind("tool calls", [ASKED, stand_in], mark=mark)
        followed = self.template.behind("tool results", [ASKED, stand_in, *chat], opened=True, mark=mark)
        common = self.template.closing(closed, followed).text
        end = self._turn_end.text
        if not common.endswith(end):  # a marker of its own for turns that call
            last = [found.start() for found in self.template.markers.finditer(common)][-1:]
            end = common[last[0] :] if last else common
        closing = self._turn_end if end == self._turn_end.text else self.template.written_closing(end)
        return closing, followed[len(common) :]

    def parse(
        self, token_ids: Sequence[int], *, context: Sequence[int] = (), tools: Sequence[ToolSchema] = ()
    ) -> ParsedTurn:
        """See :meth:`outrider.tokens.renderer.Renderer.parse`."""
        return read_turn(self.turn_text(token_ids, context=context), self.call_format, tools)

    def message_of(self, text: str, tools: Sequence[ToolSchema]) -> Message:
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
        if self._kept:
            special = self.tokenizer.added_tokens_decoder
            said = [i for i in token_ids if i in self._kept or i not in special or not special[i].special]
            text = text_of(self.tokenizer, said, skip_special_tokens=False)
        else:
            text = text_of(self.tokenizer, token_ids, skip_special_tokens=True)
        # Where a template closes turns with ordinary tokens, decoding shows them as text.
        return self.opened(context) + (self.closing.cut(text) if is_closed else text)

    def opened(self, context: Sequence[int]) -> str:
        """What the template has opened at the end of the ids and the next turn goes on with."""
        if not self._opened or not context:
            return ""
        end = text_of(self.tokenizer, context[-len(self.opening) :], skip_special_tokens=False)
        return self._opened if end.endswith(self._generation) else ""

    @cached_property
    def _generation(self) -> str:
        """The text that opens a turn: from its last marker on, as it is decoded."""
        text = text_of(self.tokenizer, self.opening, skip_special_tokens=False)
        before = text[: len(text) - len(self._opened)]
        starts = [found.start() for found in self.template.markers.finditer(before)]
        return text[starts[-1] :] if starts else text

    @cached_property
    def _kept(self) -> frozenset[int]:
        """Special tokens that are part of what the policy says."""
        wanted = {*_THINKING, *(self.call_format.markers if self.call_format else ())}
        added = self.tokenizer.added_tokens_decoder
        return frozenset(i for i, token in added.items() if token.special and str(token) in wanted)
