"""The part of a Hugging Face tokenizer that Outrider uses, and text as it is spelled."""

from collections.abc import Sequence
from typing import Any, Protocol


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

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        """Render a conversation to text; ``options`` are ``tools`` and variables of the template."""
        ...


def decode_text(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text that the ids spell, character by character.

    Some tokenizers are configured to tidy it (``a , b`` becomes ``a, b``): a tool would get other text than
    the policy wrote.
    """
    text = tokenizer.decode(
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return str(text)
