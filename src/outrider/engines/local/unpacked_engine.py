"""Generation on the unpacked path: one request after the other, with transformers' own cache.

Slower than :class:`outrider.engines.local.engine.LocalEngine`, whose rows share every product, and its bits
are the request's alone: no other request of the batch takes part in them. A context that several requests ask
for is computed once and its cache copied; a fork is computed from its first token, because a cache of states
or of a sliding window cannot be cut back to where the fork leaves.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.engines.base import Generation, Request
from outrider.engines.local.endings import Endings, max_new_tokens
from outrider.engines.local.model import LanguageModel
from outrider.engines.local.sampling import request_stream, sample
from outrider.engines.local.unpacked import Unpacked, compute_logits
from outrider.engines.local.unpacked_check import cached_logits
from outrider.errors import ModelError
from outrider.tokens import Tokenizer

Ids = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Read:
    """What was computed of one sequence: its ids, the cache that holds them, and the logits behind them."""

    ids: Ids = ()
    cache: DynamicCache | None = None
    logits: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class _Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


class UnpackedEngine:
    """The engine of the unpacked path. Shares its weights with the trainer: nothing is copied."""

    def __init__(
        self,
        language_model: LanguageModel,
        *,
        context_length: int | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        if language_model.unpacked is None:
            raise ModelError("this model runs packed: LocalEngine generates with it")
        self._lm = language_model
        self._unpacked: Unpacked = language_model.unpacked
        self.tokenizer: Tokenizer = language_model.tokenizer
        self.context_length = min(
            context_length or language_model.context_length, language_model.context_length
        )
        self.weight_version = 0
        self._on_tokens = on_tokens
        self._endings = Endings(language_model)
        self._reads: dict[str, _Read] = {}

    def load(self, version: int) -> None:
        """Take the version and forget every cache."""
        self.weight_version = version
        self._reads = {}

    def free_cache(self) -> None:
        """Give the memory of all caches back."""
        self._reads = {}

    def release(self, cache_keys: Sequence[str]) -> None:
        """Forget what is kept for these rollouts."""
        for key in cache_keys:
            self._reads.pop(key, None)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample all requests, in the order asked. Raises EngineFault when a context is empty or leaves no
        room for a token.
        """
        rooms = [max_new_tokens(request, self.context_length) for request in requests]
        model = self._lm.model
        was_training = model.training
        # The trainer shares the model and may have left it in training mode, with dropout.
        model.eval()
        counts = Counter(request.token_ids for request in requests)
        common: dict[Ids, _Read] = {}
        try:
            return [
                self._answer(request, room, counts, common)
                for request, room in zip(requests, rooms, strict=True)
            ]
        finally:
            model.train(was_training)

    def _answer(
        self, request: Request, room: int, counts: Counter[Ids], common: dict[Ids, _Read]
    ) -> Generation:
        read, num_prefilled = self._prompt(request, counts, common)
        stream, answer, reason = request_stream(request.seed), _Answer(), None
        while reason is None:
            if answer.ids:
                self._advance(read, (*read.ids, answer.ids[-1]))
            assert read.logits is not None
            chosen, logprobs, entropies = sample(read.logits, [request.temperature], [stream])
            answer.ids += chosen
            answer.logprobs += logprobs
            answer.entropies += entropies
            reason = self._endings.reason(request, answer.ids, room)
            if self._on_tokens is not None:
                self._on_tokens(1)
        if request.cache_key is not None:
            self._reads[request.cache_key] = read
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(answer.ids),
            logprobs=tuple(answer.logprobs),
            entropies=tuple(answer.entropies),
            finish_reason=reason,
            weight_version=self.weight_version,
            num_prefilled_tokens=num_prefilled,
        )

    def _prompt(self, request: Request, counts: Counter[Ids], common: dict[Ids, _Read]) -> tuple[_Read, int]:
        """The request's context, and how many of its tokens were computed for it."""
        ids = request.token_ids
        counts[ids] -= 1
        # Taken out, because a request that fails in the middle leaves a cache that nobody can use.
        own = self._reads.pop(request.cache_key, None) if request.cache_key is not None else None
        # The last token is always computed: its logits are needed.
        if own is not None and len(own.ids) < len(ids) and ids[: len(own.ids)] == own.ids:
            num_computed = self._advance(own, ids)
            return own, num_computed
        num_computed = 0
        if ids not in common:
            common[ids] = _Read()
            num_computed = self._advance(common[ids], ids)
        # The last one that asks may have the original.
        return (copy.deepcopy(common[ids]) if counts[ids] else common.pop(ids)), num_computed

    def _advance(self, read: _Read, ids: Ids) -> int:
        """Bring ``read`` to ``ids``, which begin with what it holds; how many tokens were computed."""
        unpacked, start = self._unpacked, len(read.ids)
        fits_cache = unpacked.cache == "extended" or (unpacked.cache == "stepped" and len(ids) == start + 1)
        # Behind one of these lengths every cached key is turned by the wrong factors.
        turns = unpacked.rotation_index(start) != unpacked.rotation_index(len(ids))
        if unpacked.cache == "none":
            read.cache, start = None, 0
        elif read.cache is None or not fits_cache or turns:
            read.cache, start = DynamicCache(config=self._lm.model.config), 0
        new = torch.tensor(ids[start:], device=self._lm.device)
        if read.cache is None:
            read.logits = compute_logits(self._lm.model, new, torch.tensor([len(ids) - 1], device=new.device))
        else:
            read.logits = cached_logits(self._lm.model, new, start, read.cache)
        read.ids = ids
        return len(new)
