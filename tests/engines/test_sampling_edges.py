"""Vocabularies of whole blocks, stop strings that are tokens of their own, and those that came before."""

import math

import pytest
import torch

from outrider.engines.local.sampling import StopStrings, request_stream, sample
from tests.engines.test_sampling import byte_tokenizer


def test_a_special_token_can_be_a_stop_string() -> None:
    """Decoders leave special tokens out unless they are asked for them."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    stops, ids = StopStrings(tokenizer, len(tokenizer)), tokenizer.encode("ab<|end|>")
    assert stops.completed(ids, ("<|end|>",)) and not stops.completed(ids[:-1], ("<|end|>",))
    assert stops.completed(ids, ("b<|end|>",)) and stops.completed(ids, ("zz", "<|end|>"))
    after = tokenizer.encode("<|end|>a|>")
    assert not stops.completed(after, ("<|end|>",)) and stops.completed(after, ("a|>",))


@pytest.mark.parametrize("text", ["abb", "abab", "ab日b"])
def test_only_the_token_that_completes_a_stop_string_stops(text: str) -> None:
    """What follows may hold the string's last character without completing it."""
    tokenizer = byte_tokenizer()
    stops, ids = StopStrings(tokenizer, len(tokenizer)), tokenizer.encode(text)
    whole = [tokenizer.decode(ids[:end]) for end in range(1, len(ids) + 1)]
    found = [stops.completed(ids[:end], ("ab",)) for end in range(1, len(ids) + 1)]
    assert found == [text.endswith("ab") for text in whole]


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 512, 513, 768])
def test_a_certain_id_is_drawn_wherever_it_stands(size: int) -> None:
    """Blocks have 256 ids; a vocabulary may end with one of them, or in the middle."""
    for place in {0, size // 2, max(0, size - 257), size - 1}:
        logits = torch.full((1, size), -200.0)
        logits[0, place] = 0.0
        ids, logprobs, entropies = sample(logits, [1.0], [request_stream(place)])
        assert (ids, logprobs) == ([place], [0.0]) and entropies == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize("size", [256, 300, 512])
def test_log_probs_are_those_at_the_temperature_and_entropies_those_at_one(size: int) -> None:
    """Half of the mass on one id, the other half over all others: at a temperature of 1/2 the odds are
    squared.
    """
    others = size - 1
    logits = torch.zeros(4, size, dtype=torch.float64)
    logits[:, 7] = math.log(others)
    temperatures = [0.5, 1.0, 2.0, 0.0]
    streams = [request_stream(number) for number in range(4)]
    ids, logprobs, entropies = sample(logits, temperatures, streams)
    assert entropies == pytest.approx([math.log(2) + 0.5 * math.log(others)] * 4, rel=1e-5)
    for chosen, found, temperature in zip(ids, logprobs, temperatures, strict=True):
        odds = others ** (1 / (temperature or 1.0))  # greedy rows tell the log-prob at 1
        weight = odds if chosen == 7 else 1.0
        assert found == pytest.approx(math.log(weight / (odds + others)), rel=1e-5, abs=2e-6)
    assert ids[3] == 7
