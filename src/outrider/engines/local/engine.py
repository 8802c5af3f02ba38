"""Generation with transformers in process, on a CPU or one GPU, with the weights of the trainer (no copies).

:class:`LocalEngine` generates on the packed path, :class:`UnpackedEngine` with the model's own forward pass.
"""

import copy
import math
from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.engines.base import Engine, FinishReason, Generation, Request
from outrider.engines.local.attention import (
    DecodePlan,
    Prefill,
    PrefillPlan,
    SlotCache,
    decode_mask,
    num_keys,
    prefers_products,
)
from outrider.engines.local.cpu_kernels import MAX_ROWS, FewRows, PackedLinears
from outrider.engines.local.decode_graphs import DecodeGraphs
from outrider.engines.local.model import LanguageModel, declared_context
from outrider.engines.local.sampling import StopStrings, request_stream, sample
from outrider.engines.local.unpacked import (
    Unpacked,
    cached_logits,
    compute_batch,
    compute_logits,
    stack_caches,
    take_rows,
)
from outrider.errors import EngineFault, ModelError
from outrider.printing import plural
from outrider.tokens import Tokenizer

_CACHES = {
    "extended": "",
    "stepped": "; every turn is computed from its first token, because its cache takes one token at a time",
    "none": "; every token is computed from the first one, because transformers' cache does not fit",
}
_KIND = "q"  # 8 bytes per id
_SIZE = array(_KIND).itemsize

Ids = tuple[int, ...]


@dataclass(slots=True)
class _Row:
    """One request and its continuation so far. In a batch its slot is also its position."""

    index: int
    request: Request
    stream: np.random.Generator
    length: int  # of the context
    room: int  # tokens that may be sampled
    slot: int = -1
    logits: Tensor | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    num_prefilled: int = 0
    reason: FinishReason | None = None


class _Engine:
    """Common parts of both paths: limits, ends of generations, results."""

    def __init__(
        self,
        language_model: LanguageModel,
        context_length: int | None,
        max_rows: int,
        on_tokens: Callable[[int], None] | None,
    ) -> None:
        self._lm = language_model
        self._max_rows = max_rows
        # A GPU computes many tokens in the time that it takes to start the kernels of a few.
        self._prefill_tokens = 1024 if language_model.device.type == "cpu" else 8192
        self.tokenizer: Tokenizer = language_model.tokenizer
        longest = language_model.context_length
        self.context_length = min(context_length or longest, longest)
        self.weight_version = 0
        # called with the number of tokens after every decoding step: live progress
        self._on_tokens = on_tokens
        self._stops = StopStrings(self.tokenizer, len(language_model.tokenizer))

    def _start_row(self, index: int, request: Request) -> _Row:
        """Raises EngineFault if the context is empty or leaves no room."""
        length = len(request.token_ids)
        if not 0 < length < self.context_length:
            raise EngineFault(
                f"request {request.request_id}: {length} tokens do not fit a context of {self.context_length}"
            )
        room = min(request.max_tokens, self.context_length - length)
        return _Row(index, request, request_stream(request.seed), length, room)

    def _append_token(self, row: _Row, token: int, logprob: float, entropy: float) -> None:
        """Append a sampled token, and set ``row.reason`` if it ends the continuation. Raises EngineFault if
        the model computed no probability.
        """
        if not math.isfinite(logprob):
            raise EngineFault(
                f"request {row.request.request_id}: the log-prob of a sampled token is {logprob}: the weights"
                " are damaged, or the training diverged"
            )
        row.ids.append(token)
        row.logprobs.append(logprob)
        row.entropies.append(entropy)
        ends = self._lm.eos_texts
        # an end in the last token that there was room for is no truncation
        if token in self._lm.eos_token_ids or (ends and self._stops.completed(row.ids, ends)):
            row.reason = FinishReason.EOS
        elif row.request.stop and self._stops.completed(row.ids, row.request.stop):
            row.reason = FinishReason.STOP
        elif len(row.ids) == row.room:
            row.reason = FinishReason.LENGTH

    def _sample(self, active: Sequence[_Row], logits_BV: Tensor) -> None:
        """Append a token to every row."""
        temperatures, streams = zip(*((row.request.temperature, row.stream) for row in active), strict=True)
        cuts = [(row.request.top_k, row.request.top_p) for row in active]
        samples = sample(logits_BV, temperatures, streams, cuts)
        for row, token, logprob, entropy in zip(active, *samples, strict=True):
            self._append_token(row, token, logprob, entropy)
        if self._on_tokens is not None:
            self._on_tokens(len(active))

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

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """The trainer shares the model and may have left it in training mode, with dropout."""
        model = self._lm.model
        was_training = model.training
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


class Prefixes:
    """Numbered token sequences, searched for the longest common prefix with another sequence.

    Two lookups in a sorted list, however many sequences are stored. Sequences are compared as bytes, which is
    fast even if thousands have a long common prefix.
    """

    def __init__(self, sequences: Iterable[tuple[int, Sequence[int]]] = ()) -> None:
        self._entries = sorted((_packed(ids), number) for number, ids in sequences if ids)

    def add(self, number: int, ids: Sequence[int]) -> None:
        """Store a sequence, unless it is empty."""
        if ids:
            insort(self._entries, (_packed(ids), number))

    def replace(self, number: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Replace the sequence ``old`` of this number."""
        if old:
            entry = (_packed(old), number)
            index = bisect_left(self._entries, entry)
            assert self._entries[index] == entry
            del self._entries[index]
        self.add(number, new)

    def longest(self, ids: Sequence[int]) -> tuple[int, int | None]:
        """Return the length of the longest common prefix of ``ids`` with a stored sequence, and its number;
        (0, None) if there is none.

        In sorted order that sequence is directly before or after the position of ``ids``.
        """
        target = _packed(ids)
        # -1 sorts before an equal sequence with any number
        index = bisect_left(self._entries, (target, -1))
        best: tuple[int, int | None] = (0, None)
        for stored, number in self._entries[max(0, index - 1) : index + 1]:
            if (length := _common(stored, target) // _SIZE) > best[0]:
                best = (length, number)
        return best


def _packed(ids: Sequence[int]) -> bytes:
    # not in the order of the ids, but equal prefixes are still adjacent
    return array(_KIND, ids).tobytes()


def _common(first: bytes, second: bytes) -> int:
    """Return the length of the common prefix, by bisection over slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class LocalEngine(_Engine):
    """Batched generation on the packed path.

    Keys and values stay in slots between the turns of an episode. Contexts with a common prefix (a group's
    prompt, a fork) are computed once and copied. A request's tokens depend on its own seed;
    benchmarks/speed.py (``--only gap``) measures how much rounding depends on the batch.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        *,
        context_length: int | None = None,
        max_rows: int = 256,
        prefill_tokens: int | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        if language_model.unpacked is not None:
            raise ModelError(f"this model does not run packed: {language_model.unpacked.why}")
        super().__init__(language_model, context_length, max_rows, on_tokens)
        self._device = language_model.device
        self._prefill_tokens = prefill_tokens or self._prefill_tokens
        self._cache = SlotCache(dtype=language_model.dtype, device=self._device)
        self._few_rows = FewRows(language_model.model)
        self._use_few_rows = False
        self._packed = PackedLinears(language_model.model)
        self._uses_products = prefers_products(language_model.device, language_model.dtype)
        self._graphs = DecodeGraphs(language_model)
        # slot -> (cache key, or None if it is free; the ids whose keys and values it has)
        self._slots: list[tuple[str | None, Ids]] = []

    def with_own_cache(self) -> "LocalEngine":
        """Return an engine with the same model and packed weights, and keys and values of its own, so that
        its results do not depend on the requests of others. Only one of them may generate at a time.
        """
        other = copy.copy(self)
        other._cache, other._slots = SlotCache(dtype=self._lm.dtype, device=self._device), []
        other._graphs = DecodeGraphs(self._lm)  # which belong to a cache
        other._graphs.is_supported = self._graphs.is_supported
        return other

    def load(self, version: int) -> None:
        self.weight_version = version
        self._packed.drop()
        self._few_rows.drop()
        self._graphs.drop()  # the new weights may be other tensors
        self._slots = [(None, ()) for _ in self._slots]

    def free_cache(self) -> None:
        """Free the memory of keys, values and packed weights for an update."""
        self._packed.drop()
        self._few_rows.drop()
        self._graphs.drop()
        self._slots = []
        self._cache = SlotCache(dtype=self._lm.dtype, device=self._device)

    def release(self, cache_keys: Sequence[str]) -> None:
        released = frozenset(cache_keys)
        self._slots = [
            (None, ()) if key is None or key in released else (key, ids) for key, ids in self._slots
        ]

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Sample all requests; at most ``max_rows`` run at a time, and others join as rows finish.

        Raises EngineFault if a context is empty or leaves no room for a token.
        """
        if not requests:
            return []
        rows = [self._start_row(index, request) for index, request in enumerate(requests)]
        try:
            with self._evaluation_mode():
                # all positions at once: growing in the middle of decoding would copy every slot
                self._reserve(1, max(row.length + row.room for row in rows))
                # checked each time, because adapters may have been added
                self._use_few_rows = self._few_rows.is_supported
                with nullcontext() if self._use_few_rows else self._packed.active():
                    self._decode(deque(rows))
        finally:
            self.release([_unnamed(request) for request in requests if request.cache_key is None])
        return [self._generation(row) for row in rows]

    def _reserve(self, num_slots: int, num_positions: int) -> None:
        stored = [len(ids) for _, ids in self._slots][: self._cache.num_slots]
        self._cache.reserve(num_slots, num_positions, stored=stored)

    def _num_slots(self, num_rows: int) -> int:
        """Return the number of slots of a decoding step with ``num_rows`` rows."""
        if not self._graphs.is_supported:
            return len(self._slots)
        return max(len(self._slots) + 1, self._graphs.num_slots(num_rows))

    def _admit(self, waiting: deque[_Row], num_active: int) -> list[_Row]:
        """Return rows that join the batch, each in a slot after the active ones that has the keys and values
        of its context.

        Several rows join at once, because a prefill of one row costs nearly as much as one of many.
        """
        free = self._max_rows - num_active
        if not waiting or free < min(len(waiting), max(1, self._max_rows // 8)):
            return []
        joining = [waiting.popleft() for _ in range(min(free, len(waiting)))]
        while len(self._slots) < num_active + len(joining):
            self._slots.append((None, ()))
        # with the padding of a decoding step, because growing for it later would copy every slot
        self._reserve(self._num_slots(num_active + len(joining)), 1)
        for slot, row in enumerate(joining, start=num_active):
            self._assign_slot(row, slot)
        self._prefill(joining)
        return joining

    def _assign_slot(self, row: _Row, slot: int) -> None:
        """Assign this slot to the row; the content of another rollout moves to a later slot."""
        request = row.request
        later = range(slot, len(self._slots))
        stored_slot = next(
            (s for s in later if request.cache_key and self._slots[s][0] == request.cache_key), None
        )
        if stored_slot is None and self._slots[slot][0] is not None:
            stored_slot = next((s for s in later if self._slots[s][0] is None), None)
            if stored_slot is None:
                self._slots.append((None, ()))
                stored_slot = len(self._slots) - 1
                self._reserve(len(self._slots), 1)
        if stored_slot is not None and stored_slot != slot:
            self._swap(slot, stored_slot)
        self._slots[slot] = (request.cache_key or _unnamed(request), self._slots[slot][1])
        row.slot = slot

    def _swap(self, first: int, second: int) -> None:
        self._cache.swap(first, second, max(len(self._slots[first][1]), len(self._slots[second][1])))
        self._slots[first], self._slots[second] = self._slots[second], self._slots[first]

    def _prefill(self, rows: list[_Row]) -> None:
        """Compute what no slot has yet: first the contexts that are prefixes of others, then the rest."""
        # shorter contexts first, because longer ones may begin with them; then in the order of the requests
        waiting = deque(sorted(rows, key=lambda row: (row.length, row.index)))
        prefixes = Prefixes((slot, ids) for slot, (_, ids) in enumerate(self._slots))
        computed: dict[Ids, _Row] = {}
        while waiting:
            batch = self._next_batch(waiting, prefixes, computed)
            if batch:
                self._prefill_batch(batch)
            for row, _ in batch:
                self._record_cached(row, row.request.token_ids, prefixes)
                computed[row.request.token_ids] = row

    def _next_batch(
        self, waiting: deque[_Row], prefixes: Prefixes, computed: Mapping[Ids, _Row]
    ) -> list[tuple[_Row, int]]:
        """Take rows from ``waiting`` up to the token budget, each with the number of positions in its slot.

        A row with a common prefix with one of them waits for a later batch, when that prefix is computed.
        """
        batch: list[tuple[_Row, int]] = []
        begun = Prefixes()
        postponed: list[_Row] = []
        num_tokens = 0
        while waiting:
            row = waiting.popleft()
            if (twin := computed.get(row.request.token_ids)) is not None:
                self._cache.copy(twin.slot, row.slot, row.length)
                self._record_cached(row, row.request.token_ids, prefixes)
                row.logits = twin.logits
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
            # often in its own slot already, if this is the next turn of an episode
            if source is not None and self._slots[row.slot][1][:cached] != needed[:cached]:
                self._cache.copy(source, row.slot, cached)
            # only what is computed: a later row of this batch must not copy the rest
            self._record_cached(row, needed[:cached], prefixes)
            batch.append((row, cached))
            begun.add(row.slot, row.request.token_ids)
        waiting.extendleft(reversed(postponed))
        return batch

    def _record_cached(self, row: _Row, ids: Ids, prefixes: Prefixes) -> None:
        """Record the ids whose keys and values the row's slot has."""
        key, before = self._slots[row.slot]
        prefixes.replace(row.slot, before, ids)
        self._slots[row.slot] = (key, ids)

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
        # only of each row's last token: logits of whole prompts would need more memory than everything else
        logits = self._lm.head(hidden[[p.end - 1 for p in plan_rows]])
        for (row, _), row_logits in zip(batch, logits, strict=True):
            row.logits = row_logits

    def _decode(self, waiting: deque[_Row]) -> None:
        """Decode token by token; finished rows leave the batch at once."""
        active: list[_Row] = []
        logits: list[Tensor] = []
        while waiting or active:
            joining = self._admit(waiting, len(active))
            for row in joining:
                assert row.logits is not None
                logits.append(row.logits[None])
                row.logits = None
            active += joining
            self._sample(active, torch.cat(logits))
            active = self._compact(active)
            logits = [self._next_logits(active)] if active else []

    def _compact(self, active: list[_Row]) -> list[_Row]:
        """Move running rows to slots 0..B-1.

        The slot of a finished row without a cache key is free; its content may be copied until another row
        uses it.
        """
        num = len(active)
        position = 0
        while position < num:
            last = num - 1
            if active[position].reason is None and active[last].reason is None:
                position += 1
                continue
            # A finished last row stays where it is: there is nothing to move.
            finished = position if active[last].reason is None else last
            if active[finished].request.cache_key is None:
                self._slots[finished] = (None, self._slots[finished][1])
            num = last
            if finished != last:
                self._swap(finished, last)
                active[finished], active[last] = active[last], active[finished]
                active[finished].slot = finished
        return active[:num]

    def _next_logits(self, active: list[_Row]) -> Tensor:
        # the newest token is not in the cache yet: this step writes it at position `length`
        stored = [row.length + len(row.ids) - 1 for row in active]
        newest = [row.ids[-1] for row in active]
        for slot, row in enumerate(active):
            key, ids = self._slots[slot]
            self._slots[slot] = (key, (*ids, row.ids[-1]))
        if self._graphs.is_supported:
            self._reserve(self._num_slots(len(active)), 1)
            logits = self._graphs.logits(newest, stored, self._cache, used_slots=len(self._slots))
            if logits is not None:
                return logits
        num_seen = max(stored) + 1  # from host data: reading it from a GPU would wait for all queued work
        if self._uses_products:
            num_seen = min(num_keys(num_seen), self._cache.num_positions)
        lengths = torch.tensor(stored, device=self._device)
        plan = DecodePlan(
            cache=self._cache,
            lengths_B=lengths,
            mask_B11T=decode_mask(lengths, num_seen, dtype=self._lm.dtype),
            rows_B=torch.arange(len(active), device=self._device),
        )
        newest_B1 = torch.tensor(newest)[:, None]
        if self._use_few_rows and len(active) <= MAX_ROWS:
            return self._few_rows.logits(newest_B1, lengths[:, None], plan)[:, 0]
        output: Tensor = self._lm.head(self._lm.hidden(newest_B1, lengths[:, None], plan)[:, 0])
        return output


def _unnamed(request: Request) -> str:
    """The key of a request without a cache key, until its generation ends."""
    return f"request {request.request_id}"


@dataclass(slots=True, kw_only=True)
class _Context:
    """A computed sequence: its ids, its cache (of one row), and the logits [1, V] after it."""

    ids: Ids = ()
    cache: DynamicCache | None = None
    logits: Tensor | None = None


class UnpackedEngine(_Engine):
    """Batched generation on the unpacked path, with transformers' own cache.

    Up to ``max_rows`` requests decode together until all have ended; their caches are stacked. A context of
    several requests is computed once, and the next turn of a rollout continues with its cache. A fork is
    computed from its first token, because a cache of states or of a sliding window cannot be cut back. A
    request's tokens depend on its own seed; the batch changes only how the logits are rounded.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        *,
        context_length: int | None = None,
        max_rows: int = 256,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        if language_model.unpacked is None:
            raise ModelError("this model runs packed: LocalEngine generates with it")
        self._unpacked: Unpacked = language_model.unpacked
        num = max_rows if self._unpacked.batches_generation else 1
        super().__init__(language_model, context_length, num, on_tokens)
        self._contexts: dict[str, _Context] = {}

    def load(self, version: int) -> None:
        self.weight_version = version
        self._contexts = {}

    def free_cache(self) -> None:
        self._contexts = {}

    def release(self, cache_keys: Sequence[str]) -> None:
        for key in cache_keys:
            self._contexts.pop(key, None)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        rows = [self._start_row(index, request) for index, request in enumerate(requests)]
        counts = Counter(request.token_ids for request in requests)
        common: dict[Ids, _Context] = {}
        waiting = rows
        with self._evaluation_mode():
            while waiting:
                # positions of one batch have the same rotation
                rotation = self._rotation(waiting[0])
                batch = [row for row in waiting if self._rotation(row) == rotation][: self._max_rows]
                self._decode(batch, self._prefill(batch, counts, common))
                waiting = [row for row in waiting if row.reason is None]
        return [self._generation(row) for row in rows]

    def _rotation(self, row: _Row) -> int:
        return self._unpacked.rotation_index(row.length + len(row.ids))

    def _prefill(
        self, rows: Sequence[_Row], counts: Counter[Ids], common: dict[Ids, _Context]
    ) -> list[_Context]:
        """Compute the rows' contexts, starting from their previous turns or from other requests' contexts.

        ``common`` are computed prompts, and ``counts`` the number of rows that have not been prefilled yet.
        """
        contexts: list[_Context] = []
        pending: dict[int, tuple[_Context, Ids, _Row]] = {}
        for row in rows:
            request, ids = row.request, (*row.request.token_ids, *row.ids)
            context = self._contexts.pop(request.cache_key, None) if request.cache_key is not None else None
            # at least the last token is computed, for its logits
            extends = (
                context is not None and len(context.ids) < len(ids) and ids[: len(context.ids)] == context.ids
            )
            if context is None or not extends or not self._fits_cache(len(context.ids), len(ids)):
                context = _Context() if row.ids else common.setdefault(ids, _Context())
            if not row.ids:
                counts[ids] -= 1
                if not counts[ids]:
                    common.pop(ids, None)
            if len(context.ids) < len(ids) and id(context) not in pending:
                pending[id(context)] = (context, ids, row)
                if not row.ids:
                    row.num_prefilled = len(ids) - len(context.ids)
            contexts.append(context)
        waiting = [(context, ids) for context, ids, _ in pending.values()]
        while waiting:
            self._extend(*self._next_pass(waiting))
            waiting = [(context, ids) for context, ids in waiting if len(context.ids) < len(ids)]
        return contexts

    def _fits_cache(self, start: int, length: int) -> bool:
        """Whether a cache of ``start`` tokens can be extended to ``length`` in one pass."""
        unpacked = self._unpacked
        # beyond certain lengths every cached key has the wrong rotation
        turns = unpacked.rotation_index(start) != unpacked.rotation_index(length)
        steps = {"extended": length, "stepped": 1, "none": 0}[unpacked.cache]
        return not turns and length - start <= steps

    def _next_pass(self, waiting: Sequence[tuple[_Context, Ids]]) -> tuple[list[_Context], list[Ids]]:
        """Choose contexts, and equally many new tokens for each, because padding would change states.

        Every pass computes more than half of what is left of the longest context, so there are few passes.
        """
        left = sorted(waiting, key=lambda pair: len(pair[0].ids) - len(pair[1]))
        longest = len(left[0][1]) - len(left[0][0].ids)
        # a part of a sequence has the rotations of its own length, and a stepped cache takes no parts
        in_parts = self._unpacked.cache == "extended" and not self._unpacked.turns
        least = 1 << longest.bit_length() - 1 if in_parts else longest
        is_fresh = left[0][0].cache is None
        most = min(self._max_rows, max(1, self._prefill_tokens // longest))
        chosen = [
            (context, ids)
            for context, ids in left
            if len(ids) - len(context.ids) >= least and (context.cache is None) == is_fresh
        ][:most]
        num = min(len(ids) - len(context.ids) for context, ids in chosen)
        return [context for context, _ in chosen], [ids[: len(context.ids) + num] for context, ids in chosen]

    def _extend(self, contexts: Sequence[_Context], targets: Sequence[Ids]) -> None:
        """Extend the contexts to their targets, by equally many tokens, in one pass."""
        starts = [len(context.ids) for context in contexts]
        news = [torch.tensor(ids[start:]) for ids, start in zip(targets, starts, strict=True)]
        ids_BN = torch.stack(news).to(self._lm.device)
        if self._unpacked.cache == "none":
            last = [[ids_BN.shape[1] - 1]] * len(ids_BN)
            logits_BV, cache = compute_batch(compute_logits, self._lm.model, list(ids_BN), last), None
        else:
            caches = [context.cache for context in contexts if context.cache is not None]
            cache = stack_caches(caches, starts) if caches else DynamicCache(config=self._lm.model.config)
            logits_BV = cached_logits(self._lm.model, ids_BN, starts, cache)[:, -1]
        for row, (context, ids) in enumerate(zip(contexts, targets, strict=True)):
            context.ids, context.logits = ids, logits_BV[row : row + 1]
            context.cache = cache
            if cache is not None and len(contexts) > 1:
                context.cache = take_rows(cache, [row], len(ids))

    def _decode(self, active: list[_Row], contexts: Sequence[_Context]) -> None:
        """Decode token by token until all rows have ended or need other rotations, and so another prefill."""
        rotation = self._rotation(active[0])
        logits_BV = torch.cat([context.logits for context in contexts if context.logits is not None])
        caches = [context.cache for context in contexts if context.cache is not None]
        cache = stack_caches(caches, [row.length + len(row.ids) for row in active]) if caches else None
        del contexts, caches
        while active:
            lengths = [row.length + len(row.ids) for row in active]
            self._sample(active, logits_BV)
            running = []
            for index, row in enumerate(active):
                if row.reason is None:
                    if cache is not None and self._rotation(row) == rotation:
                        running.append(index)
                elif (key := row.request.cache_key) is not None and cache is not None:
                    ids = (*row.request.token_ids, *row.ids[:-1])
                    own = take_rows(cache, [index], len(ids)) if len(active) > 1 else cache
                    self._contexts[key] = _Context(ids=ids, cache=own)
            if not running or cache is None:
                return
            if len(running) < len(active):
                active, lengths = [active[index] for index in running], [lengths[index] for index in running]
                cache = take_rows(cache, running, max(lengths))
            newest_B1 = torch.tensor([[row.ids[-1]] for row in active], device=self._lm.device)
            logits_BV = cached_logits(self._lm.model, newest_B1, lengths, cache)[:, -1]


def make_engine(
    language_model: LanguageModel,
    *,
    context_length: int | None = None,
    max_rows: int = 256,
    on_tokens: Callable[[int], None] | None = None,
) -> Engine:
    """Return the engine of the model's path; ``max_rows`` limits its batch."""
    kind: Callable[..., Engine] = LocalEngine if language_model.unpacked is None else UnpackedEngine
    return kind(language_model, context_length=context_length, max_rows=max_rows, on_tokens=on_tokens)


def describe_path(language_model: LanguageModel, name: str) -> str:
    """Describe in one line how the model is computed, and why."""
    longest, unpacked = language_model.context_length, language_model.unpacked
    declared = declared_context(language_model.model.config, name)
    if unpacked is not None:
        line = (
            f"model {name!r} runs unpacked (transformers' own forward pass: exact, and slower), because "
            f"{unpacked.why}; contexts of up to {longest} tokens" + _CACHES[unpacked.cache]
        )
        alone = {"generation": unpacked.batches_generation, "the update": unpacked.batches_scoring}
        if parts := [part for part, is_batched in alone.items() if not is_batched]:
            line += f"; {' and '.join(parts)} one sequence at a time, because batches change its numbers"
    elif longest == declared:
        line = f"model {name!r} runs packed; contexts of up to {longest} tokens"
    else:
        line = (
            f"model {name!r} runs packed; contexts end at {longest} of {declared} positions, up to which "
            "nothing depends on a sliding window or on other rotations "
            '(model.forward = "unpacked" goes further)'
        )
    if unused := language_model.unused:
        line += f"; it has no place for {plural(len(unused), 'weight')} of its files, such as {unused[0]}"
    return line
