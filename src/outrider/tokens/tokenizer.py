"""The part of a Hugging Face tokenizer that Outrider uses, and text as it is spelled."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Protocol


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


# The bytes that single tokens stand for, parts of characters included.


_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK: Final = "\u2581"  # what SentencePiece writes for a blank
_LOST: Final = "\ufffd"


def token_bytes(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, visible_text: str | None = None
) -> tuple[bytes, ...]:
    """The bytes of every token of a turn. Joined, they are the UTF-8 of the turn's text with its special
    tokens, even if a character is spread over several tokens.

    A vocabulary spells bytes in one of two ways: byte-level BPE writes one letter per byte, SentencePiece
    writes ``<0xE4>``. For other vocabularies, all bytes of a character belong to the token that completes it.
    SentencePiece also writes a blank in front of a first word, and templates white space in front of an
    answer. If ``visible_text`` (the turn's text as it is passed on) is given, white space in front of it is
    left out.
    """
    text = decode_text(tokenizer, token_ids, skip_special_tokens=False)
    pieces = _vocabulary_bytes(tokenizer, token_ids)
    if pieces is not None:
        shorter = [pieces[0][1:], *pieces[1:]] if pieces and pieces[0].startswith(b" ") else pieces
        if _matches_text(pieces, text) or _matches_text(shorter, text):
            if visible_text is not None:
                return _without_lead(pieces, visible_text)
            return tuple(pieces if _matches_text(pieces, text) else shorter)
    pieces = _decode_pieces(tokenizer, token_ids)
    return tuple(pieces) if visible_text is None else _without_lead(pieces, visible_text)


def _without_lead(pieces: Sequence[bytes], visible_text: str) -> tuple[bytes, ...]:
    """The bytes without what they have more of white space at the beginning than ``visible_text``."""
    num_more = _num_blanks(b"".join(pieces)) - _num_blanks(visible_text.encode())
    left: list[bytes] = []
    for piece in pieces:
        left.append(piece[max(0, num_more) :])
        num_more -= len(piece)
    return tuple(left)


def _num_blanks(text: bytes) -> int:
    return len(text) - len(text.lstrip())


def token_text(piece: bytes) -> str:
    r"""A token's text as OpenAI's server writes it: parts of characters as ``\xf0\x9f``."""
    return piece.decode("utf-8", "backslashreplace")


def _matches_text(pieces: Sequence[bytes], text: str) -> bool:
    """Whether the bytes are those of the text, up to an incomplete character: decoders replace it, and some
    the bytes in front of it too.
    """
    joined = b"".join(pieces)
    head, lost, _ = text.partition(_LOST)
    return joined.startswith(head.encode()) if lost else joined == text.encode()


def _vocabulary_bytes(tokenizer: Any, token_ids: Sequence[int]) -> list[bytes] | None:
    """Every token's bytes as the vocabulary spells them; None if this tokenizer does not tell."""
    names = getattr(tokenizer, "convert_ids_to_tokens", None)
    if names is None:
        return None
    added = tokenizer.added_tokens_decoder
    is_byte_level = _is_byte_level(tokenizer)
    pieces: list[bytes] = []
    for number, name in zip(token_ids, names(list(token_ids)), strict=True):
        if number in added:
            pieces.append(str(added[number]).encode())
        elif isinstance(name, bytes):  # tokenizers made of tiktoken's
            pieces.append(name)
        elif not isinstance(name, str):
            return None
        elif is_byte_level:
            pieces.append(_from_letters(name))
        elif match := _FALLBACK.fullmatch(name):
            pieces.append(bytes([int(match[1], 16)]))
        else:
            pieces.append(name.replace(_BLANK, " ").encode())
    return pieces


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the vocabulary writes one letter per byte."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is not None:
        try:
            return "ByteLevel" in _types(json.loads(decoder.__getstate__()))
        except (AttributeError, TypeError, ValueError):
            pass
    return hasattr(tokenizer, "byte_decoder")  # tokenizers in Python, such as GPT-2's


def _types(decoder: Any) -> set[str]:
    if not isinstance(decoder, Mapping):
        return set()
    inner = decoder.get("decoders")
    names = {str(decoder.get("type"))}
    return names.union(*map(_types, inner)) if isinstance(inner, list) else names


def _from_letters(name: str) -> bytes:
    try:
        return bytes(_letters()[letter] for letter in name)
    except KeyError:  # an added token that is declared nowhere
        return name.encode()


@cache
def _letters() -> Mapping[str, int]:
    """The letter of each byte in byte-level BPE: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _decode_pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[bytes]:
    """What every token adds to the text. Decoding starts a few tokens earlier, since many decoders treat the
    first token of a text in their own way.
    """

    def text(first: int, last: int) -> str:
        return decode_text(tokenizer, token_ids[first:last], skip_special_tokens=False)

    pieces: list[bytes] = []
    start = read = 0
    for end in range(1, len(token_ids) + 1):
        before, whole = text(start, read), text(start, end)
        is_open = whole.endswith(_LOST) and end < len(token_ids)
        if is_open or not whole.startswith(before):
            pieces.append(b"")
            continue
        pieces.append(whole[len(before) :].encode())
        start, read = read, end
    return pieces
