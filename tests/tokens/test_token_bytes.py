"""The bytes of single tokens, from which a program with log-probs assembles characters."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.environments.conversations import token_text
from outrider.rollout.external_agent import token_bytes
from outrider.tokens import decode_text
from tests.tiny import tiny_tokenizer

CORPUS = [
    "caf\u00e9 na\u00efve \U0001f60a\U0001f60a",
    "the tower of the city",
    "\u4eca\u65e5\u306f",
    "a b  c",
] * 3
SMILE = "\U0001f60a"


def finish(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    pieces = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    pieces.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<\uff5cend\uff5c>"]})
    pieces.add_tokens(["<think>", "</think>"])
    return pieces


def byte_level(*, use_regex: bool = True) -> PreTrainedTokenizerFast:
    """GPT-2, Llama 3, Qwen: BPE over letters that encode bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return finish(tokenizer)


def sentence_piece(*, adds_blank: bool) -> PreTrainedTokenizerFast:
    """Llama 2, Mistral, Phi-3 (``adds_blank``) and Gemma: letters, and bytes for characters that it lacks."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581t", "th", "\u00e9"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("\u2581", "t"), ("t", "h")]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), *steps] if adds_blank else steps
    )
    strip = [decoders.Strip(" ", 1, 0)] if adds_blank else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return finish(tokenizer)


def unigram() -> PreTrainedTokenizerFast:
    """T5, XLM-R: no bytes, blanks at the beginning of words."""
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), *((item, -2.0) for item in "\u2581abcdefgh\u00e9")], 0)
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return finish(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """BERT: continued words are marked, blanks are not there."""
    letters = [chr(item) for item in range(97, 123)]
    names = ["[UNK]", *letters, *(f"##{item}" for item in letters)]
    tokenizer = Tokenizer(
        models.WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Whitespace(),
        decoders.WordPiece(cleanup=False),
    )
    return finish(tokenizer)


class OfBytes:
    """A tokenizer in Python over tiktoken's tables, whose tokens are bytes (Qwen 1, Kimi)."""

    eos_token_id = None
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, **_: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids: list[int]) -> list[bytes]:
        return [bytes([item]) for item in ids]


class Opaque(OfBytes):
    """A tokenizer that does not expose its vocabulary."""

    convert_ids_to_tokens = None  # type: ignore[assignment]


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level BPE": byte_level,
    "byte-level BPE without words": lambda: byte_level(use_regex=False),
    "SentencePiece with a blank in front": lambda: sentence_piece(adds_blank=True),
    "SentencePiece": lambda: sentence_piece(adds_blank=False),
    "unigram": unigram,
    "WordPiece": word_piece,
    "characters": tiny_tokenizer,
    "bytes": OfBytes,
    "opaque": Opaque,
}
MADE = {name: make() for name, make in KINDS.items()}
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["<think>", "</think>", "<|im_end|>", "<\uff5cend\uff5c>", " ", "\n", SMILE, "caf\u00e9", "the"]
        ),
        st.text(max_size=6),
    ),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, cut=st.integers(0, 3))
def test_the_bytes_of_a_turn_are_its_utf_8(kind: str, text: str, cut: int) -> None:
    """Also of a turn that was cut inside a character."""
    tokenizer = MADE[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[: len(ids) - cut] if cut else ids
    pieces = token_bytes(tokenizer, ids)
    spelled = decode_text(tokenizer, ids, skip_special_tokens=False)
    assert len(pieces) == len(ids)
    whole = b"".join(pieces)
    head, lost, _ = spelled.partition("\ufffd")  # which decoders write for an incomplete character
    assert whole.startswith(head.encode()) if lost else whole == spelled.encode()


@pytest.mark.parametrize(
    "kind", ["byte-level BPE", "SentencePiece", "SentencePiece with a blank in front", "bytes"]
)
def test_parts_of_a_character_are_their_own_bytes(kind: str) -> None:
    tokenizer = MADE[kind]
    ids = tokenizer.encode("\u2603", add_special_tokens=False)  # in no corpus
    pieces = [piece for piece in token_bytes(tokenizer, ids) if piece]
    assert len(pieces) == 3 and b"".join(pieces) == "\u2603".encode()
    assert [token_text(piece) for piece in pieces] == [r"\xe2", r"\x98", r"\x83"]


def test_blanks_between_words_belong_to_tokens() -> None:
    tokenizer = MADE["SentencePiece with a blank in front"]
    ids = tokenizer.encode("th th", add_special_tokens=False)
    assert [token_text(piece) for piece in token_bytes(tokenizer, ids)] == ["t", "h", " t", "h"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_their_text(kind: str) -> None:
    tokenizer = MADE[kind]
    ends = [i for i, item in tokenizer.added_tokens_decoder.items() if str(item) == "<|im_end|>"]
    for end in ends:
        assert token_bytes(tokenizer, [end]) == (b"<|im_end|>",)


def test_no_tokens() -> None:
    assert all(token_bytes(item, []) == () for item in MADE.values())
