"""What ends a generation, and which contexts have room for one: the same for both paths."""

import copy
from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.engines.base import Engine, FinishReason, Generation, Request
from outrider.engines.local.attention import DecodePlan, Prefill, PrefillPlan, SlotCache, decode_mask
from outrider.engines.local.cpu_kernels import MAX_ROWS, FewRows, PackedLinears
from outrider.engines.local.model import LanguageModel, declared_context
from outrider.engines.local.sampling import StopStrings, request_stream, sample
from outrider.engines.local.unpacked import Unpacked, cached_logits, compute_logits
from outrider.errors import EngineFault, ModelError
from outrider.tokens import Tokenizer


def max_new_tokens(request: Request, context_length: int) -> int:
    """Tokens that may be written. Raises EngineFault for a context that is empty or leaves no room."""
    if not 0 < len(request.token_ids) < context_length:
        raise EngineFault(
            f"request {request.request_id}: {len(request.token_ids)} tokens do "
            f"not fit a context of {context_length}"
        )
    return min(request.max_tokens, context_length - len(request.token_ids))


class Endings:
    """EOS ids, texts that close a turn, and a request's own stop strings."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._lm = language_model
        self._stops = StopStrings(language_model.tokenizer, len(language_model.tokenizer))

    def reason(self, request: Request, ids: Sequence[int], room: int) -> FinishReason | None:
        """Why ``ids``, what was written so far, is the whole answer; None where it goes on."""
        ends = self._lm.eos_texts
        # An end in the last token that there was room for is an end and no truncation.
        if ids[-1] in self._lm.eos_token_ids or (ends and self._stops.completed(ids, ends)):
            return FinishReason.EOS
        if request.stop and self._stops.completed(ids, request.stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) == room else None


# Which stored token sequence begins most like a new one: two look-ups in a sorted list, however many are
# stored.


_KIND = "q"  # 8 bytes an id: sequences are compared as bytes, which is quick where thousands begin alike
_SIZE = array(_KIND).itemsize


class Prefixes:
    """Token sequences, each under a number of its own."""

    def __init__(self, sequences: Iterable[tuple[int, Sequence[int]]] = ()) -> None:
        self._entries = sorted((_packed(ids), number) for number, ids in sequences if ids)

    def add(self, number: int, ids: Sequence[int]) -> None:
        """Store a sequence; an empty one begins like nothing and is left out."""
        if ids:
            insort(self._entries, (_packed(ids), number))

    def replace(self, number: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Store ``new`` where ``old`` was stored under this number."""
        if old:
            entry = (_packed(old), number)
            index = bisect_left(self._entries, entry)
            assert self._entries[index] == entry
            del self._entries[index]
        self.add(number, new)

    def longest(self, ids: Sequence[int]) -> tuple[int, int | None]:
        """Length of the longest beginning that a stored sequence shares with ``ids``, and its number; (0,
        None) without one.

        In sorted order it stands right before or right behind the place of ``ids``.
        """
        target = _packed(ids)
        # -1: in front of an equal sequence, whatever its number.
        index = bisect_left(self._entries, (target, -1))
        best: tuple[int, int | None] = (0, None)
        for stored, number in self._entries[max(0, index - 1) : index + 1]:
            if (length := _common(stored, target) // _SIZE) > best[0]:
                best = (length, number)
        return best


def _packed(ids: Sequence[int]) -> bytes:
    # Not in the order of the ids, but equal beginnings still lie side by side, which is all that is asked.
    return array(_KIND, ids).tobytes()


def _common(first: bytes, second: bytes) -> int:
    """Length of the common beginning, by halves: slices are compared at once."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Batched generation with transformers, in process, on CPU or one GPU.
#
# Keys and values stay in slots between the turns of an episode; contexts that share a beginning (a group's
# prompt, a fork) are computed once and copied. A request's tokens depend on its own seed; the floating-point
# level at which they could depend on the batch is measured by benchmarks/speed.py (``--only gap``;
# docs/benchmarks.md).


@dataclass(slots=True)
class _Row:
    """One request. A running one owns slot ``slot``, which is also its position in the batch."""

    index: int
    request: Request
    stream: np.random.Generator
    length: int  # of the context
    room: int  # tokens that may be written
    slot: int = -1
    logits: torch.Tensor | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    num_prefilled: int = 0
    reason: FinishReason | None = None


class LocalEngine:
    """The engine of the default path (DESIGN section 5). Shares its weights with the trainer: nothing is
    copied.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        *,
        context_length: int | None = None,
        max_rows: int = 256,
        prefill_tokens: int = 1024,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        if language_model.unpacked is not None:
            raise ModelError(f"this model does not run packed: {language_model.unpacked.why}")
        self._lm = language_model
        self._model = language_model.model
        self.tokenizer: Tokenizer = language_model.tokenizer
        self.context_length = min(
            context_length or language_model.context_length, language_model.context_length
        )
        self.weight_version = 0
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        # called with the number of tokens after every decoding step: live progress
        self._on_tokens = on_tokens
        self._device = language_model.device
        self._endings = Endings(language_model)
        self._cache = SlotCache(dtype=language_model.dtype, device=self._device)
        self._few_rows = FewRows(self._model)
        self._use_few_rows = False
        self._packed = PackedLinears(self._model)
        # slot -> (cache key or None where it is free, the ids whose keys and values it holds)
        self._slots: list[tuple[str | None, tuple[int, ...]]] = []

    def load(self, version: int) -> None:
        """Take the version and forget every cached key and value."""
        self.weight_version = version
        self._drop_packed()
        self._slots = [(None, ()) for _ in self._slots]

    def free_cache(self) -> None:
        """Give the memory of keys, values and packed weights back: an update needs it more."""
        self._drop_packed()
        self._slots = []
        self._cache = SlotCache(dtype=self._lm.dtype, device=self._device)

    def _drop_packed(self) -> None:
        self._packed.drop()
        self._few_rows.drop()

    def release(self, cache_keys: Sequence[str]) -> None:
        """Forget what is kept for these rollouts; the memory is used again."""
        released = frozenset(cache_keys)
        self._slots = [
            (None, ()) if key is None or key in released else (key, ids) for key, ids in self._slots
        ]

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample all requests; results in the order asked. At most ``max_rows`` run at a time; others join as
        rows finish.

        Raises EngineFault when a context is empty or leaves no room for a token.
        """
        if not requests:
            return []
        rows = [self._row(index, request) for index, request in enumerate(requests)]
        was_training = self._model.training
        # The trainer shares the model and may have left it in training mode, with dropout.
        self._model.eval()
        try:
            # All positions at once: growing in the middle of decoding would copy every slot.
            self._reserve(1, max(row.length + row.room for row in rows))
            # asked every time: adapters may have come since the last one
            self._use_few_rows = self._few_rows.is_supported
            with nullcontext() if self._use_few_rows else self._packed.active():
                self._decode(deque(rows))
        finally:
            self._model.train(was_training)
            self.release([_unnamed(request) for request in requests if request.cache_key is None])
        return [self._generation(row) for row in rows]

    def _reserve(self, num_slots: int, num_positions: int) -> None:
        stored = [len(ids) for _, ids in self._slots][: self._cache.num_slots]
        self._cache.reserve(num_slots, num_positions, stored=stored)

    def _row(self, index: int, request: Request) -> _Row:
        room = max_new_tokens(request, self.context_length)
        return _Row(index, request, request_stream(request.seed), len(request.token_ids), room)

    def _admit(self, waiting: deque[_Row], num_active: int) -> list[_Row]:
        """Rows that join the batch, each in a slot behind the active ones with its context's keys and values
        in it.

        A few places are filled at once: a prefill of one row costs nearly as much as one of many.
        """
        free = self._max_rows - num_active
        if not waiting or free < min(len(waiting), max(1, self._max_rows // 8)):
            return []
        joining = [waiting.popleft() for _ in range(min(free, len(waiting)))]
        while len(self._slots) < num_active + len(joining):
            self._slots.append((None, ()))
        self._reserve(len(self._slots), 1)
        for slot, row in enumerate(joining, start=num_active):
            self._assign_slot(row, slot)
        self._prefill(joining)
        return joining

    def _assign_slot(self, row: _Row, slot: int) -> None:
        """Give the row this slot; what it holds of another rollout is kept in another slot behind."""
        request = row.request
        behind = range(slot, len(self._slots))
        stored_slot = next(
            (s for s in behind if request.cache_key and self._slots[s][0] == request.cache_key), None
        )
        if stored_slot is None and self._slots[slot][0] is not None:
            stored_slot = next((s for s in behind if self._slots[s][0] is None), None)
            if stored_slot is None:
                self._slots.append((None, ()))
                stored_slot = len(self._slots) - 1
                self._reserve(len(self._slots), 1)
        if stored_slot is not None and stored_slot != slot:
            self._cache.swap(
                slot, stored_slot, max(len(self._slots[slot][1]), len(self._slots[stored_slot][1]))
            )
            self._slots[slot], self._slots[stored_slot] = self._slots[stored_slot], self._slots[slot]
        self._slots[slot] = (request.cache_key or _unnamed(request), self._slots[slot][1])
        row.slot = slot

    def _prefill(self, rows: list[_Row]) -> None:
        """Compute what no slot holds yet: first the contexts that others begin with, then the rest."""
        # Shorter contexts first, because longer ones may begin with them; equal ones in the order asked.
        waiting = deque(sorted(rows, key=lambda row: (row.length, row.index)))
        prefixes = Prefixes((slot, ids) for slot, (_, ids) in enumerate(self._slots))
        computed: dict[tuple[int, ...], _Row] = {}
        while waiting:
            batch = self._next_batch(waiting, prefixes, computed)
            if batch:
                self._prefill_batch(batch)
            for row, _ in batch:
                self._record_cached(row, row.request.token_ids, prefixes)
                computed[row.request.token_ids] = row

    def _next_batch(
        self, waiting: deque[_Row], prefixes: Prefixes, computed: Mapping[tuple[int, ...], _Row]
    ) -> list[tuple[_Row, int]]:
        """Rows from the front of ``waiting`` until the token budget is full, each with the length of what its
        slot holds now.

        A row that begins like one of them stays for a later batch: what it shares is computed by then.
        """
        batch: list[tuple[_Row, int]] = []
        begun = Prefixes()
        postponed: list[_Row] = []
        num_tokens = 0
        while waiting:
            row = waiting.popleft()
            if (twin := computed.get(row.request.token_ids)) is not None:
                self._copy_twin(twin, row, prefixes)
                continue
            needed = row.request.token_ids[:-1]  # the last token is always computed: its logits are needed
            cached, source = prefixes.longest(needed)
            if begun.longest(needed)[0] > cached:
                postponed.append(row)
                continue
            num_tokens += row.length - cached
            if batch and num_tokens > self._prefill_tokens:
                waiting.appendleft(row)
                break
            # Its own slot often holds them: an episode's turns go on in place.
            if source is not None and self._slots[row.slot][1][:cached] != needed[:cached]:
                self._cache.copy(source, row.slot, cached)
            # Only what is there now: a later row of this batch must not copy what is still to be computed.
            self._record_cached(row, needed[:cached], prefixes)
            batch.append((row, cached))
            begun.add(row.slot, row.request.token_ids)
        waiting.extendleft(reversed(postponed))
        return batch

    def _record_cached(self, row: _Row, ids: tuple[int, ...], prefixes: Prefixes) -> None:
        """Note which ids the row's slot holds the keys and values of."""
        key, before = self._slots[row.slot]
        prefixes.replace(row.slot, before, ids)
        self._slots[row.slot] = (key, ids)

    def _copy_twin(self, twin: _Row, row: _Row, prefixes: Prefixes) -> None:
        """The same context was computed for another row: nothing is left to compute."""
        self._cache.copy(twin.slot, row.slot, row.length)
        self._record_cached(row, row.request.token_ids, prefixes)
        row.logits = twin.logits

    def _prefill_batch(self, batch: list[tuple[_Row, int]]) -> None:
        ids: list[int] = []
        positions: list[int] = []
        plan_rows = []
        for row, cached in batch:
            new = row.request.token_ids[cached:]
            plan_rows.append(Prefill(start=len(ids), end=len(ids) + len(new), slot=row.slot, cached=cached))
            ids.extend(new)
            positions.extend(range(cached, row.length))
            row.num_prefilled = len(new)
        plan = PrefillPlan(cache=self._cache, rows=tuple(plan_rows))
        hidden = self._lm.hidden(torch.tensor([ids]), torch.tensor([positions]), plan)[0]
        # Of each row's last token only: logits of a whole prompt would need more memory than all else.
        logits = self._lm.head(hidden[[p.end - 1 for p in plan_rows]])
        for (row, _), row_logits in zip(batch, logits, strict=True):
            row.logits = row_logits

    def _decode(self, waiting: deque[_Row]) -> None:
        """Token by token; a finished row leaves the batch at once and its slot is swapped behind the active
        ones.
        """
        active: list[_Row] = []
        logits: list[torch.Tensor] = []
        while waiting or active:
            joining = self._admit(waiting, len(active))
            for row in joining:
                assert row.logits is not None
                logits.append(row.logits[None])
                row.logits = None
            active += joining
            temperatures, streams = zip(
                *((row.request.temperature, row.stream) for row in active), strict=True
            )
            chosen, logprobs, entropies = sample(torch.cat(logits), temperatures, streams)
            for row, token, logprob, entropy in zip(active, chosen, logprobs, entropies, strict=True):
                self._accept(row, token, logprob, entropy)
            if self._on_tokens is not None:
                self._on_tokens(len(active))
            active = self._compact(active)
            logits = [self._next_logits(active)] if active else []

    def _accept(self, row: _Row, token: int, logprob: float, entropy: float) -> None:
        row.ids.append(token)
        row.logprobs.append(logprob)
        row.entropies.append(entropy)
        row.reason = self._endings.reason(row.request, row.ids, row.room)

    def _compact(self, active: list[_Row]) -> list[_Row]:
        """Keep running rows in slots 0..B-1; the order of the rest is kept where possible.

        The slot of a finished row without a name is free: what it holds may be copied until another row takes
        it.
        """
        num = len(active)
        position = 0
        while position < num:
            if active[position].reason is None:
                position += 1
                continue
            if active[position].request.cache_key is None:
                self._slots[position] = (None, self._slots[position][1])
            num -= 1
            if position != num:
                length = max(len(self._slots[position][1]), len(self._slots[num][1]))
                self._cache.swap(position, num, length)
                self._slots[position], self._slots[num] = self._slots[num], self._slots[position]
                active[position], active[num] = active[num], active[position]
                active[position].slot = position
        return active[:num]

    def _next_logits(self, active: list[_Row]) -> torch.Tensor:
        # The newest token is not in the cache yet: this step writes it at position `length`.
        stored = [row.length + len(row.ids) - 1 for row in active]
        num_seen = max(stored) + 1  # from the host: asked of a GPU it would wait for all that is queued
        lengths = torch.tensor(stored, device=self._device)
        plan = DecodePlan(
            cache=self._cache,
            lengths_B=lengths,
            mask_B11T=decode_mask(lengths, num_seen, dtype=self._lm.dtype),
            rows_B=torch.arange(len(active), device=self._device),
        )
        newest_B1 = torch.tensor([[row.ids[-1]] for row in active])
        for slot, row in enumerate(active):
            key, ids = self._slots[slot]
            self._slots[slot] = (key, (*ids, row.ids[-1]))
        if self._use_few_rows and len(active) <= MAX_ROWS:
            return self._few_rows.logits(newest_B1, lengths[:, None], plan)[:, 0]
        logits: torch.Tensor = self._lm.head(self._lm.hidden(newest_B1, lengths[:, None], plan)[:, 0])
        return logits

    def _generation(self, row: _Row) -> Generation:
        assert row.reason is not None
        return Generation(
            request_id=row.request.request_id,
            token_ids=tuple(row.ids),
            logprobs=tuple(row.logprobs),
            entropies=tuple(row.entropies),
            finish_reason=row.reason,
            weight_version=self.weight_version,
            num_prefilled_tokens=row.num_prefilled,
        )


def _unnamed(request: Request) -> str:
    """The key of a request that keeps nothing after its generation."""
    return f"request {request.request_id}"


# Generation on the unpacked path: one request after the other, with transformers' own cache.
#
# Slower than :class:`outrider.engines.local.engine.LocalEngine`, whose rows share every product, and its bits
# are the request's alone: no other request of the batch takes part in them. A context that several requests
# ask for is computed once and its cache copied; a fork is computed from its first token, because a cache of
# states or of a sliding window cannot be cut back to where the fork leaves.


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


# The engine that generates with a loaded model, and what a person should know of the model's path.


_CACHES = {
    "extended": "",
    "stepped": "; every turn is computed from its first token, because its cache takes one token at a time",
    "none": "; every token is computed from the first one, because transformers' cache does not fit",
}


def make_engine(
    language_model: LanguageModel,
    *,
    context_length: int | None = None,
    max_rows: int = 256,
    on_tokens: Callable[[int], None] | None = None,
) -> Engine:
    """The one of the path that the model was loaded on; ``max_rows`` bounds the rows of the packed one."""
    if language_model.unpacked is not None:
        return UnpackedEngine(language_model, context_length=context_length, on_tokens=on_tokens)
    return LocalEngine(language_model, context_length=context_length, max_rows=max_rows, on_tokens=on_tokens)


def describe_path(language_model: LanguageModel, name: str) -> str:
    """One line: how the model is computed, and why."""
    unused = language_model.unused
    rest = f"; it has no place for {len(unused)} weights of its files, such as {unused[0]}" if unused else ""
    return _describe_forward(language_model, name) + rest


def _describe_forward(language_model: LanguageModel, name: str) -> str:
    longest, unpacked = language_model.context_length, language_model.unpacked
    if unpacked is not None:
        return (
            f"model {name!r} runs unpacked (transformers' own forward pass, one sequence at a time: exact, "
            f"and slower), because {unpacked.why}; contexts of up to {longest} tokens"
            + _CACHES[unpacked.cache]
        )
    declared = declared_context(language_model.model.config, name)
    if longest == declared:
        return f"model {name!r} runs packed; contexts of up to {longest} tokens"
    return (
        f"model {name!r} runs packed; contexts end at {longest} of {declared} positions, up to which nothing "
        'depends on a sliding window or on other rotations (model.forward = "unpacked" goes further)'
    )
