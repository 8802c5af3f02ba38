"""One tokenizer's chat template: rendering, and text that must not become its markers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from outrider.errors import ModelError
from outrider.tokens.closing import WrittenClosing
from outrider.tokens.tokenizer import Tokenizer
from outrider.types import ToolSchema

Chat: TypeAlias = list[dict[str, Any]]

MARK: Final = "\u241euser\u241e"
ASKED: Final = {"role": "user", "content": "a"}
ANSWERED: Final = {"role": "assistant", "content": MARK}


class Template:
    """The chat template of a tokenizer with its variables (``enable_thinking`` …). Raises ModelError for what
    it refuses.

    Text that spells a special token (a chat marker in a question, a page or a retrieved step) gets a space
    after its first character: only the template writes markers.
    """

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
        self.variables = dict(variables)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        markers = sorted(
            (token for token in special if len(token) > 1), key=lambda token: (-len(token), token)
        )
        self.markers = re.compile("|".join(map(re.escape, markers)) or r"(?!)")

    def render(self, chat: Chat, *, opened: bool, tools: Sequence[ToolSchema] = ()) -> str:
        """The text of a conversation; ``opened``: with the assistant's next turn begun."""
        options: dict[str, Any] = dict(self.variables)
        if tools:
            options["tools"] = [{"type": "function", "function": dict(tool)} for tool in tools]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=opened, **options
                )
            )
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in chat)
            reason = " ".join(str(error).split())
            raise ModelError(
                f"the tokenizer has no usable chat template: it refuses {roles}: {reason}"
            ) from error

    def behind(self, what: str, chat: Chat, *, opened: bool = False, mark: str = MARK) -> str:
        """The template's text behind the mark. Raises ModelError where the mark was dropped."""
        text = self.render(chat, opened=opened)
        if mark not in text:
            raise ModelError(f"the chat template drops {what}")
        return text.split(mark, 1)[1]

    def takes(
        self, chat: Chat, *, opened: bool = True, tools: Sequence[ToolSchema] = (), mark: str = MARK
    ) -> bool:
        """Whether a conversation with the mark in it is rendered with it."""
        try:
            return mark in self.render(chat, opened=opened, tools=tools)
        except ModelError:
            return False

    def plain(self, text: str) -> str:
        """The text with nothing in it that reads as a marker."""
        return self.markers.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def encode(self, text: str) -> list[int]:
        """Ids of text that may hold the template's markers."""
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def closing(self, closed: str, followed: str) -> WrittenClosing:
        """The closing of an answer, the last one or not: some templates write one marker more where a
        conversation ends (Phi-3). Raises ModelError where they have nothing in common.
        """
        common = closed if followed.startswith(closed) else self._common(closed, followed)
        return self.written_closing(common)

    def _common(self, closed: str, followed: str) -> str:
        common = ""
        for piece in re.split(f"({self.markers.pattern})", closed):
            if not followed.startswith(common + piece):
                break
            common += piece
        if not self.markers.search(common):
            raise ModelError(
                "the chat template closes the last assistant message differently from an earlier one"
            )
        return common

    def written_closing(self, text: str) -> WrittenClosing:
        """A closing with the blanks before its marker counted."""
        ids = tuple(self.encode(text))
        marker = text.lstrip()
        behind = tuple(self.encode(marker))
        has_blanks = self.markers.match(marker) and ids[len(ids) - len(behind) :] == behind
        return WrittenClosing(text=text, ids=ids, num_blank=len(ids) - len(behind) if has_blanks else 0)
