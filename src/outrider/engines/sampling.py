"""From logits to tokens: seeded inverse-CDF sampling with exact log-probs and entropies, and stop-string detection.

Shape letters: B rows, V vocabulary.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from outrider.tokens import Tokenizer

_PART = "\ufffd"  # what a decoder writes for bytes that are no whole character
_ROWS = 16  # rows at a time: their float32 values (3 MB at 49,152 entries) stay in the processor's cache


def sample(
    logits_BV: torch.Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float], list[float]]:
    """One token a row: ids, log-probs at the row's temperature (1 when greedy), entropies at temperature 1 in nats.

    ``uniforms`` are the rows' own draws in [0, 1). Everything is computed in float32 over the whole vocabulary.
    """
    scale_B1 = torch.tensor([t if t > 0 else 1.0 for t in temperatures], device=logits_BV.device)[:, None]
    uniforms_B1 = torch.tensor(uniforms, dtype=torch.float32, device=logits_BV.device)[:, None]
    size = _ROWS if logits_BV.device.type == "cpu" else max(1, len(logits_BV))
    parts = zip(logits_BV.split(size), scale_B1.split(size), uniforms_B1.split(size), strict=True)
    greedy = [t == 0 for t in temperatures]
    sampled = [
        _sample(logits, scale, draws, greedy[i * size : (i + 1) * size], plain=all(t in (0, 1) for t in temperatures))
        for i, (logits, scale, draws) in enumerate(parts)
    ]
    chosen, picked, entropies = (torch.cat(column).tolist() for column in zip(*sampled, strict=True))
    return chosen, picked, entropies


def _sample(
    logits_BV: torch.Tensor, scale_B1: torch.Tensor, uniforms_B1: torch.Tensor, greedy: Sequence[bool], *, plain: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits_BV = logits_BV.float()
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    probs_BV = torch.softmax(logits_BV, dim=-1)
    entropies = -(probs_BV * logprobs_BV).sum(dim=-1)
    if not plain:
        logprobs_BV = torch.log_softmax(logits_BV / scale_B1, dim=-1)
        probs_BV = logprobs_BV.exp()
    cumulative_BV = probs_BV.cumsum(dim=-1)
    draws = uniforms_B1 * cumulative_BV[:, -1:]
    chosen = torch.searchsorted(cumulative_BV, draws, right=True)[:, 0].clamp_(max=logits_BV.shape[-1] - 1)
    if any(greedy):
        chosen = torch.where(torch.tensor(greedy, device=chosen.device), logprobs_BV.argmax(dim=-1), chosen)
    return chosen, logprobs_BV.gather(1, chosen[:, None])[:, 0], entropies


class StopStrings:
    """Tells when the newest token completes one of a request's stop strings.

    Text is only decoded when the newest piece may hold the end of a stop string's last character, and then only a short tail.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in range(vocabulary_size)]
        self._endings = lru_cache(maxsize=256)(self._compute_endings)

    def _compute_endings(self, character: str) -> frozenset[int]:
        ends = (character,) if character.isascii() else (character, _PART)
        return frozenset(i for i, piece in enumerate(self._pieces) if any(end in piece for end in ends))

    def completed(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the text of ``token_ids`` contains a stop string that its last token completed."""
        candidates = [s for s in stop if token_ids[-1] in self._endings(s[-1])]
        if not candidates:
            return False
        longest = max(len(s.encode()) for s in candidates)
        tail = list(token_ids[-(longest + 4) :])  # a token holds at least a byte; 4 spare for split characters
        before = self._tokenizer.decode(tail[:-1], skip_special_tokens=False).rstrip(_PART)  # the last token may complete it
        after = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(s in after and after.rfind(s) + len(s) > len(before) for s in candidates)


def uniform_stream(seed: int, num: int) -> np.ndarray:
    """The draws of one request: float32 in [0, 1), from its own generator."""
    return np.random.Generator(np.random.PCG64(seed)).random(num, dtype=np.float32)
