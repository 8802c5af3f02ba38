"""A tokenizer with one token per character and a plain chat template: examples need neither torch nor a
download.
"""

from types import SimpleNamespace
from typing import Any

_START, _END = "\ue000", "\ue001"


class CharacterTokenizer:
    """The methods that :class:`outrider.tokens.Tokenizer` requires; ids are code points."""

    eos_token_id: int | None = ord(_END)

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The two markers of the template."""
        return {ord(one): SimpleMarker(content=one, special=True) for one in (_START, _END)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids."""
        return [ord(one) for one in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Ids to text."""
        text = "".join(map(chr, token_ids))
        return text.replace(_START, "").replace(_END, "") if skip_special_tokens else text

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        """The markers around role and content."""
        text = "".join(f"{_START}{one['role']}\n{one['content']}{_END}\n" for one in conversation)
        return text + (f"{_START}assistant\n" if add_generation_prompt else "")


class SimpleMarker(SimpleNamespace):
    """An added token, which prints as its text."""

    def __str__(self) -> str:
        return str(self.content)
