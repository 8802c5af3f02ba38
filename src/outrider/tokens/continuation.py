"""Text in the middle of a conversation, as ids and back, as if the whole conversation were encoded at once.

SentencePiece tokenizers (Llama 2, Mistral, Phi-3, T5) put a blank in front of whatever they encode, some of
them behind every special token too, and drop the first blank of whatever they decode. A turn, a result or one
token that is encoded or decoded alone would gain or lose a blank.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Final

from outrider.tokens.tokenizer import Tokenizer, decode_text

_PROBE: Final = "a b\na  b"
# Text to encode in front of a continuation. One is enough unless a token spans it and what follows it.
_ANCHORS: Final = ("\n", "a", ".", "0", "\u00b6", "\x01", "A", "\n\n\n", "a.")


class Continuation:
    """Encodes and decodes text that stands behind other ids of one tokenizer.

    For a tokenizer that treats the beginning of a text like any other place (byte-level ones do), both are
    the tokenizer's own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {i: str(token) for i, token in added.items()}
        self._stripping = {i for i, token in added.items() if getattr(token, "rstrip", False)}

    def encode(self, text: str, behind: Sequence[int] = ()) -> list[int]:
        """Ids of ``text`` behind other ids; without ids, in the middle of some text."""
        if not text:
            return []
        last = behind[-1] if behind else None
        if last is not None and last in self._added:
            is_special = last in self._stripping or self._adds_blank_at_start
            return self._behind_token(last, text) if is_special else self._encode(text)
        return self._encode_in_text(text) if self._adds_blank_at_start else self._encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text that the ids add to a conversation, with its first blank."""
        if self._decoding_anchor is None:
            return decode_text(self._tokenizer, ids, skip_special_tokens=skip_special_tokens)
        anchor, text = self._decoding_anchor
        whole = decode_text(self._tokenizer, [anchor, *ids], skip_special_tokens=skip_special_tokens)
        return whole[len(text) :]

    def adds_blank_behind(self, ids: Sequence[int]) -> bool:
        """Whether text behind these ids is encoded with a blank that nobody wrote."""
        return bool(ids) and ids[-1] in self._added and self._adds_blank_behind_tokens

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _behind_token(self, token: int, text: str) -> list[int]:
        ids = self._encode(self._added[token] + text)
        return ids[1:] if ids and ids[0] == token else self._encode_in_text(text)

    def _encode_in_text(self, text: str) -> list[int]:
        """A boundary of tokens behind the anchor means that nothing in front of it changed what follows."""
        for anchor in self._anchors:
            before = self._encode(anchor)
            ids = self._encode(anchor + text)
            if ids[: len(before)] == before and len(ids) > len(before):
                return ids[len(before) :]
        return self._encode(text)

    @cached_property
    def _anchors(self) -> tuple[str, ...]:
        """Those that the vocabulary spells."""
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        known = (anchor for anchor in _ANCHORS if unknown is None or unknown not in self._encode(anchor))
        return tuple(anchor for anchor in known if self._encode(anchor))

    @cached_property
    def _adds_blank_at_start(self) -> bool:
        return self._encode_in_text(_PROBE) != self._encode(_PROBE)

    @cached_property
    def _adds_blank_behind_tokens(self) -> bool:
        """Whether the blank of the beginning stands behind special tokens too."""
        special = [i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special]
        token = next((i for i in special if self._encode(self._added[i]) == [i]), None)
        if token is None or not self._adds_blank_at_start:
            return False
        return self._behind_token(token, _PROBE) != self._encode_in_text(_PROBE)

    @cached_property
    def _decoding_anchor(self) -> tuple[int, str] | None:
        """An id and its text, to decode others behind; None where pieces decode as they do together."""
        ids = self._encode(_PROBE)
        whole = self._decode(ids)
        pieces = [self._decode(ids[:index]) + self._decode(ids[index:]) for index in range(1, len(ids))]
        if all(piece == whole for piece in pieces):
            return None
        # Letters, and no bytes of a byte fallback: these decode together with the bytes behind them.
        for anchor in ("a", "A", "0", "."):
            last = (self._encode(anchor) or ids)[-1]
            text = self._decode([last])
            if text == anchor and self._decode([last, *ids]).startswith(text):
                return last, text
        return None

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_text(self._tokenizer, ids, skip_special_tokens=False)
