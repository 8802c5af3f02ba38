"""Stop strings over byte-level tokens: found at the token that completes them, also where characters are
split.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.engines.local.sampling import StopStrings


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and a few for several: parts of characters, and a part together with what
    follows.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = {
        text: "".join(
            piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
        )
        for text in "é日🙂"
    }
    merges = [
        (whole["日"][0], whole["日"][1]),
        (whole["é"][1], "a"),
        (whole["🙂"][1], whole["🙂"][2]),
        ("a", "b"),
    ]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *(one + other for one, other in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_tokenizer()
STOPS = StopStrings(TOKENIZER, len(TOKENIZER))
texts = st.text(alphabet="aé日🙂b", max_size=8)


@given(before=texts, stop=st.text(alphabet="aé日🙂b", min_size=1, max_size=9), after=texts)
def test_a_stop_string_is_found_at_the_token_that_completes_it(before: str, stop: str, after: str) -> None:
    ids = TOKENIZER.encode(before + stop + after)
    ends = [end for end in range(1, len(ids) + 1) if stop in TOKENIZER.decode(ids[:end])]
    found = [end for end in range(1, len(ids) + 1) if STOPS.completed(ids[:end], (stop,))]
    assert found[0] == ends[0]


@pytest.mark.parametrize("stop", ["。", "</答案>", "結束語在此處了", "é", "🙂"])
def test_characters_of_several_byte_tokens(stop: str) -> None:
    ids = TOKENIZER.encode("a 日記" + stop)
    assert STOPS.completed(ids, ("nothing", stop))
    assert not any(STOPS.completed(ids[:end], (stop,)) for end in range(1, len(ids)))


def test_part_of_another_character_completes_nothing() -> None:
    ids = TOKENIZER.encode("語誠")  # their first byte is the same
    assert not any(STOPS.completed(ids[:end], ("語語",)) for end in range(1, len(ids) + 1))
