"""Seeded sampling that rounding rarely changes, exact log-probs and entropies, and stop-string detection.

Shape letters: B rows, V vocabulary, K blocks of the vocabulary, L ids of a block, N draws of a row (K + L).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.tokens import Tokenizer
from outrider.tokens.template import Continuation

_PART = "\ufffd"  # decoders write this for an incomplete character
_ROWS = 16  # rows at a time, whose float32 values (3 MB at 49,152 entries) stay in the processor's cache
# consecutive ids; 49,152 entries need 192 + 256 draws per token instead of 49,152
_BLOCK = 256
Cut: TypeAlias = tuple[int | None, float | None]
"""Top-k and top-p of a row; None: all ids."""
_NO_CUT: Final[Cut] = (None, None)
_LEAST = 2.0**-54  # an exponential draw is 0 once in 2**53, and is used as a divisor


def request_stream(seed: int) -> np.random.Generator:
    """Return the random generator of one request."""
    return np.random.Generator(np.random.PCG64(seed))


def sample(
    logits_BV: Tensor,
    temperatures: Sequence[float],
    streams: Sequence[np.random.Generator],
    cuts: Sequence[Cut] = (),
) -> tuple[list[int], list[float], list[float]]:
    """Sample one token per row: ids, log-probs at the row's temperature (1 if greedy), entropies in nats at
    temperature 1.

    Every call takes equally many draws from each of the ``streams`` (:func:`request_stream`). A token is
    sampled by a race of exponentials (the Gumbel-max trick) on two levels, which is exact: first a block of
    consecutive ids by its probability, then an id in it. An argmax changes only if rounding exceeds the
    distance of the two best, so different last digits of the logits (another batch, another processor) change
    a token with a probability of their own order. Sampling from the cumulated distribution would have a
    border at every id (``benchmarks/sampling.py``). Everything is computed in float32 over the whole
    vocabulary.

    ``cuts``, one per row, limit the ids that can be sampled; log-probs and entropies do not depend on them.
    """
    scale_B1 = torch.tensor([t if t > 0 else 1.0 for t in temperatures], device=logits_BV.device)[:, None]
    draws_BN = exponentials(streams, logits_BV.shape[-1]).to(logits_BV.device)
    size = _ROWS if logits_BV.device.type == "cpu" else max(1, len(logits_BV))
    parts = zip(logits_BV.split(size), scale_B1.split(size), draws_BN.split(size), strict=True)
    greedy = [t == 0 for t in temperatures]
    sampled = [
        _sample(
            logits,
            scale,
            draws,
            greedy[i * size : (i + 1) * size],
            plain=all(t in (0, 1) for t in temperatures),
            cuts=cuts[i * size : (i + 1) * size],
        )
        for i, (logits, scale, draws) in enumerate(parts)
    ]
    chosen, picked, entropies = (torch.cat(column).tolist() for column in zip(*sampled, strict=True))
    return chosen, picked, entropies


def exponentials(streams: Sequence[np.random.Generator], vocabulary_size: int) -> Tensor:
    """Return [B, N] draws of Exp(1) in float32, one row per stream: for every block of the vocabulary, then
    for every position in a block.

    Each is computed from one uniform draw, so the state of a stream depends only on the number of tokens.
    numpy guarantees the bits of uniform draws across versions, but not those of exponential draws.
    """
    uniforms_BN = np.empty((len(streams), -(-vocabulary_size // _BLOCK) + _BLOCK))
    for stream, row in zip(streams, uniforms_BN, strict=True):
        stream.random(out=row)
    # log1p(-u) instead of log(u), because u may be 0 but is never 1
    return torch.from_numpy(uniforms_BN).neg_().log1p_().neg_().clamp_(min=_LEAST).float()


def _sample(
    logits_BV: Tensor,
    scale_B1: Tensor,
    draws_BN: Tensor,
    greedy: Sequence[bool],
    *,
    plain: bool,
    cuts: Sequence[Cut],
) -> tuple[Tensor, Tensor, Tensor]:
    logits_BV = logits_BV.float()
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    probs_BV = torch.softmax(logits_BV, dim=-1)
    # at temperature 1: branching and retrieval compare entropies of the policy itself
    entropies = -(probs_BV * logprobs_BV).sum(dim=-1)
    if not plain:
        scaled_BV = logits_BV / scale_B1
        logprobs_BV, probs_BV = torch.log_softmax(scaled_BV, dim=-1), torch.softmax(scaled_BV, dim=-1)
    if any(cut != _NO_CUT for cut in cuts):
        probs_BV = torch.stack(
            [_truncate(probs_V, *cut) for probs_V, cut in zip(probs_BV, cuts, strict=True)]
        )
    chosen = _race(probs_BV, draws_BN)
    if any(greedy):
        chosen = torch.where(torch.tensor(greedy, device=chosen.device), logprobs_BV.argmax(dim=-1), chosen)
    return chosen, logprobs_BV.gather(1, chosen[:, None])[:, 0], entropies


def _truncate(probs_V: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Set all but the ``top_k`` likeliest ids to 0, and then all but the fewest likeliest ids whose share of
    the rest is at least ``top_p``. Equal probabilities are in the order of the ids.
    """
    ordered, ids = probs_V.sort(descending=True, stable=True)
    num = len(ids) if top_k is None else min(top_k, len(ids))
    if top_p is not None:
        shares = ordered[:num].double().cumsum(0) / ordered[:num].double().sum()
        num = min(num, int((shares < top_p).sum()) + 1)
    return torch.zeros_like(probs_V).scatter(0, ids[:num], ordered[:num])


def _race(probs_BV: Tensor, draws_BN: Tensor) -> Tensor:
    """Return [B]: the largest ratio of probability and draw, over the blocks and then over the ids of the
    winner.

    An id with probability 0 has the ratio 0 and loses: the winning block has a mass above 1e-21 (the largest
    block's mass is at least 1 / K, and draws are between 2**-54 and 37), so its likeliest id is far from
    underflow.
    """
    num_ids = probs_BV.shape[-1]
    num_whole = num_ids // _BLOCK
    whole_BKL = probs_BV[:, : num_whole * _BLOCK].unflatten(1, (num_whole, _BLOCK))
    rest_B1 = probs_BV[:, num_whole * _BLOCK :].sum(dim=-1, keepdim=True)
    masses_BK = torch.cat([whole_BKL.sum(dim=-1), rest_B1], dim=1)[:, : draws_BN.shape[-1] - _BLOCK]
    first_B1 = (masses_BK / draws_BN[:, :-_BLOCK]).argmax(dim=-1, keepdim=True) * _BLOCK
    ids_BL = first_B1 + torch.arange(_BLOCK, device=probs_BV.device)
    # masked, because only the last block of the vocabulary is shorter
    inside_BL = probs_BV.gather(1, ids_BL.clamp(max=num_ids - 1)).masked_fill_(ids_BL >= num_ids, 0.0)
    return first_B1[:, 0] + (inside_BL / draws_BN[:, -_BLOCK:]).argmax(dim=-1)


class StopStrings:
    """Detects that the newest token completes a stop string.

    Text is decoded only if the newest token may contain the end of a stop string's last character, and then
    only a short tail.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        # after other text, because some tokenizers drop the first blank of a text
        self._text = Continuation(tokenizer).decode
        self._pieces = [self._text([i]) for i in range(vocabulary_size)]
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
        # a token has at least one byte; 4 more for split characters
        tail = list(token_ids[-(longest + 4) :])
        before = self._text(tail[:-1]).rstrip(_PART)
        after = self._text(tail)
        return any(s in after and after.rfind(s) + len(s) > len(before) for s in candidates)
