"""From messages to ids, appending only: a conversation's ids are never rendered twice.

The generic way to extend a chat with any Hugging Face template: render a stand-in conversation with and
without the new messages and keep the difference. (The package ``renderers`` does this per model family; it
brings the OpenAI client and its own config system, which is more than a light core should carry.)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from outrider.errors import ModelError
from outrider.types import Message


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that Outrider uses."""

    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Any:
        """Id -> added token, which says whether it is special."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Ids to text; :func:`text_of` asks for it as it is meant here."""
        ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """Render a conversation to text."""
        ...


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text that the ids spell, character by character.

    Some tokenizers are configured to tidy it (``a , b`` becomes ``a, b``): a tool would get other text than
    the policy wrote.
    """
    text = tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return str(text)


_Chat: TypeAlias = list[dict[str, str]]

_MARK: Final = "\u241euser\u241e"
_ASKED: Final = {"role": "user", "content": "a"}
_ANSWERED: Final = {"role": "assistant", "content": _MARK}


class ChatRenderer:
    """Renders prompts, observations and inline text for one tokenizer. Raises ModelError where its template
    cannot serve.

    ``end_of_turn`` are the ids after which an assistant message is closed (what the template writes there),
    ``opening`` those between the text of a user message and the assistant's answer. Text of a message that
    spells a special token (a chat marker in a question, a page or a retrieved step) gets a space after its
    first character: only the template writes markers.

    Not every template knows every conversation. Where it has no system message (``takes_system``), or drops
    it, its text goes in front of the first user message, and where roles must alternate, neighbours of one
    role become one message: both joined by an empty line, as Mistral's and Gemma's makers do.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        markers = sorted(
            (token for token in special if len(token) > 1), key=lambda token: (-len(token), token)
        )
        self._markers = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        closed = self._probe("assistant messages", [_ASKED, _ANSWERED])
        followed = self._probe("an observation after an answer", [_ASKED, _ANSWERED, _ASKED], opened=True)
        asked = self._probe("user messages", [{"role": "user", "content": _MARK}], opened=True)
        self._turn_end = self._closing(closed, followed)
        self.end_of_turn: tuple[int, ...] = tuple(self._encode(self._turn_end))
        self.closing = TurnClosing.of(tokenizer, self.end_of_turn)
        self._num_blank = self._leading_blanks()
        self.opening: tuple[int, ...] = tuple(self._encode(asked))
        self.takes_system = self._takes([{"role": "system", "content": _MARK}, _ASKED])
        self._takes_repeats = self._takes([_ASKED, {"role": "user", "content": _MARK}])

    def _render(self, chat: _Chat, *, opened: bool) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=opened))
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in chat)
            reason = " ".join(str(error).split())
            raise ModelError(
                f"the tokenizer has no usable chat template: it refuses {roles}: {reason}"
            ) from error

    def _probe(self, what: str, chat: _Chat, *, opened: bool = False) -> str:
        """The template's text behind the mark."""
        text = self._render(chat, opened=opened)
        if _MARK not in text:
            raise ModelError(f"the chat template drops {what}")
        return text.split(_MARK, 1)[1]

    def _takes(self, chat: _Chat) -> bool:
        try:
            return _MARK in self._render(chat, opened=True)
        except ModelError:
            return False

    def _closing(self, closed: str, followed: str) -> str:
        """The closing of an answer, the last one or not: some templates write one marker more where a
        conversation ends (Phi-3).
        """
        if followed.startswith(closed):
            return closed
        common = ""
        for piece in re.split(f"({self._markers.pattern})", closed):
            if not followed.startswith(common + piece):
                break
            common += piece
        if not self._markers.search(common):
            raise ModelError(
                "the chat template closes the last assistant message differently from an earlier one"
            )
        return common

    def _leading_blanks(self) -> int:
        """How many ids of the closing are blanks before its marker (Llama 2): a policy that has written the
        marker has closed."""
        marker = self._turn_end.lstrip()
        ids = tuple(self._encode(marker))
        is_behind = (
            self._markers.match(marker) and self.end_of_turn[len(self.end_of_turn) - len(ids) :] == ids
        )
        return len(self.end_of_turn) - len(ids) if is_behind else 0

    def _chat(self, messages: Sequence[Message]) -> _Chat:
        """The messages but the inline ones, as this template takes them."""
        chat: _Chat = []
        joins = False
        for message in messages:
            if message.role == "inline":
                continue
            is_system = message.role == "system" and not self.takes_system
            role = "user" if is_system else message.role
            text = self._plain(message.content)
            if chat and chat[-1]["role"] == role and (joins or not self._takes_repeats):
                chat[-1]["content"] += f"\n\n{text}"
            else:
                chat.append({"role": role, "content": text})
            joins = is_system
        return chat

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def _plain(self, text: str) -> str:
        return self._markers.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of the first messages with the assistant's turn opened. Inline messages may only follow."""
        inline = [m for m in messages if m.role == "inline"]
        text = self._render(self._chat(messages), opened=True)
        return tuple(self._encode(text + "".join(self._plain(m.content) for m in inline)))

    def bridge(self, previous_ids: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids that follow ``previous_ids`` (an assistant turn, closed or not) so that ``messages`` are said
        next.

        Inline messages continue the open assistant turn; chat messages close it first, with exactly those of
        the template's closing ids that the policy has not written itself, and open the next assistant turn.
        """
        inline = "".join(self._plain(m.content) for m in messages if m.role == "inline")
        chat = self._chat(messages)
        if not chat:
            return tuple(self._encode(inline))
        if inline:
            raise ValueError("inline and chat messages cannot answer the same turn")
        following = self._probe("answers", [_ASKED, _ANSWERED, *chat], opened=True)
        if not following.startswith(self._turn_end):
            raise ModelError(
                "the chat template closes the last assistant message differently from an earlier one"
            )
        rest = self._encode(following[len(self._turn_end) :])
        written = _overlap(previous_ids, self.end_of_turn)
        if self._num_blank and (without := _overlap(previous_ids, self.end_of_turn[self._num_blank :])):
            written = max(written, self._num_blank + without)
        return (*self.end_of_turn[written:], *rest)


def _overlap(ids: Sequence[int], ending: Sequence[int]) -> int:
    """How many leading ids of ``ending`` already stand at the end of ``ids``."""
    for length in range(min(len(ids), len(ending)), 0, -1):
        if tuple(ids[-length:]) == tuple(ending[:length]):
            return length
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnClosing:
    """Tokens or text that end a turn, by the template: generation stops there, whatever the tokenizer's EOS
    is.

    ``token_id`` is the marker (`<|im_end|>`, `<end_of_turn>`) where it is a token of its own; white space
    around it is the template's. ``text`` is what decoding shows of the closing: nothing of a special token;
    all there is where the marker is spelled in ordinary tokens. Neither is there where a template writes
    white space only, which answers hold too.
    """

    token_id: int | None
    text: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, end_of_turn: Sequence[int]) -> "TurnClosing":
        """The first added token in what the template writes behind an answer, else its text."""
        added = tokenizer.added_tokens_decoder
        marker = next((i for i in end_of_turn if i in added and str(added[i]).strip()), None)
        closing = list(end_of_turn) if marker is None else [marker]
        return cls(token_id=marker, text=text_of(tokenizer, closing, skip_special_tokens=True).strip())

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings for where no token says that the turn is over."""
        return (self.text,) if self.text and self.token_id is None else ()

    def cut(self, text: str) -> str:
        """A closed turn's text without its closing."""
        said, found, behind = text.rpartition(self.text) if self.text else ("", "", "")
        return said if found and not behind.strip() else text
