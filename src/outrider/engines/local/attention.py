"""Attention over packed rows, registered with transformers as the implementation ``outrider``.

Linear layers see one packed row of tokens without padding; only attention knows where sequences begin. The
plans are :class:`TreePlan` (training: a segment attends to its ancestors and itself, so a shared prefix is
computed once), :class:`FlexPlan` (the same in one call on a GPU), and :class:`PrefillPlan` and
:class:`DecodePlan` (generation: keys and values are in slots, one per rollout).

Shape letters: B rows or sequences, S slots, N packed tokens or queries, L positions after padding, T keys or
cache positions, H query heads, K key-value heads, G query heads per key-value head, D head size.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from outrider.engines.local.processor import read_processor
from outrider.errors import ModelError

IMPLEMENTATION = "outrider"
LEAST_HEAD_SIZE: Final = 16  # of flex attention's kernel
BLOCK: Final = 128  # positions of a side of the blocks of flex attention's mask
LEAST_POSITIONS: Final = 1024
"""Of a padded row of flex attention. The kernel skips most blocks of the padding, and every further length is
a program that is compiled for seconds.
"""
PROGRAMS: Final = 256
"""Programs that may be compiled for one process: each length, with and without gradient, for every kind of
layer (head size, window, scale). torch's own limit is 8, after which it silently falls back to the plain
formula with all scores in memory.
"""
# Of plain products. oneDNN generates a program for every shape and keeps a limited number (set_threads of
# training/policy.py), so queries and keys are padded to whole steps.
_QUERY_BLOCK = 64  # queries of a block, whose scores the cache has space for
_QUERY_STEP = 32
_KEY_STEP = 128
_KEY_BLOCK = 1024  # terms that oneDNN adds in the same order, however many zeros follow
_NUM_SCORES = 2**18  # of several rows, a megabyte in float32
_MOST_SCORES = 2**22  # of several key-value heads
_FEW_QUERIES = 16  # rows of a product that is faster transposed
_MASK_ALIGNMENT = 8
_LIMITS: Final[Mapping[str, Any]] = {
    "recompile_limit": PROGRAMS,
    "accumulated_recompile_limit": 4 * PROGRAMS,
    "fail_on_recompile_limit_hit": True,
}


def causal_attention(query_BHND: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
    """Causal attention [B, H, N, D] in which the queries are the last N of the T keys.

    In bfloat16 on a CPU, plain products replace the fused kernel, which makes little use of the instructions
    for bfloat16: in the backward pass, and on some processors in the forward pass too. In float32 the fused
    kernel is faster (benchmarks/update_profile.py prints both).
    """
    tensors = query_BHND, key_BKTD, value_BKTD
    is_gpu = query_BHND.device.type != "cpu"
    # adapters may train keys and values only
    has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if has_gradient and (is_gpu or query_BHND.dtype.itemsize < 4):
        kind = _RepeatableAttention if is_gpu else _CpuAttention
        output: Tensor = kind.apply(*tensors, scale)  # type: ignore[no-untyped-call]
        return output
    return _attend(*tensors, scale)


@cache
def _has_fast_products() -> bool:
    # oneDNN reads these variables; without the instructions it computes such products slowly
    limits = {os.environ.get(f"{name}_MAX_CPU_ISA", "").upper() for name in ("ONEDNN", "DNNL")}
    is_limited = any("BF16" not in limit for limit in limits - {"", "ALL", "DEFAULT"})
    return (
        read_processor().prefers_bfloat16_products and torch.backends.mkldnn.is_available() and not is_limited
    )


def prefers_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention is computed with plain products instead of torch's fused kernel."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _has_fast_products()


def _products(query_BHND: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float) -> Tensor:
    """Causal attention with plain products, for several rows or a part of a row at a time.

    In bfloat16, :class:`DecodePlan` and the update have the same bits, because oneDNN adds the terms of a
    product in an order that does not depend on the number of rows.
    """
    batch, heads, num_new, size = query_BHND.shape
    key_heads, first_own = key_BKTD.shape[1], key_BKTD.shape[2] - num_new
    queries, keys, values = _padded(query_BHND, _QUERY_STEP), *map(_padded_keys, (key_BKTD, value_BKTD))
    # tokens first, because callers take them so
    output = queries.new_empty((batch, queries.shape[2], heads, size)).transpose(1, 2)
    repeats, num_scores = heads // key_heads, min(queries.shape[2], _QUERY_BLOCK) * keys.shape[2]
    num_rows = max(1, _NUM_SCORES // (heads * num_scores))
    num_heads = min(key_heads, max(1, _MOST_SCORES // (repeats * num_scores)))
    blocks = (
        range(0, number, step)
        for number, step in ((batch, num_rows), (key_heads, num_heads), (num_new, _QUERY_BLOCK))
    )
    for first, head, start in product(*blocks):
        rows, block = (
            slice(first, first + num_rows),
            slice(start, min(start + _QUERY_BLOCK, queries.shape[2])),
        )
        key_part = slice(head, head + num_heads)
        query_part = slice(head * repeats, (head + num_heads) * repeats)
        num, seen = block.stop - start, min(num_keys(first_own + block.stop), keys.shape[2])
        key, value = keys[rows, key_part, :seen], values[rows, key_part, :seen]
        # the query heads of a key-value head are consecutive rows
        query = queries[rows, query_part, block].reshape(*key.shape[:2], repeats * num, size)
        scores = _scores(query, key, scale).reshape(len(key), -1, num, seen)
        _hide_later_keys(scores, first_own + start)
        probs = scores.softmax(dim=-1).to(query.dtype).view(*query.shape[:3], seen)
        output[rows, query_part, block] = _mixed(probs, value).view(len(key), -1, num, size)
    return output[:, :, :num_new]


def num_keys(num_seen: int) -> int:
    """Return how many keys plain products compute for ``num_seen``."""
    step = _KEY_STEP if num_seen <= _KEY_BLOCK else 4 * _KEY_STEP
    return -(-num_seen // step) * step


def _padded(tensor: Tensor, step: int) -> Tensor:
    """Append zeros to the tokens [..., N, D] up to a multiple of ``step``."""
    return pad(tensor, (0, 0, 0, -tensor.shape[-2] % step))


def _padded_keys(tensor: Tensor) -> Tensor:
    return _padded(tensor, num_keys(tensor.shape[-2]))


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return [..., N, T] in float32 or better; the product is rounded to the precision of the queries."""
    is_few = query.shape[-2] <= _FEW_QUERIES
    product_NT = (key @ query.mT).mT if is_few else query @ key.mT
    return product_NT.to(torch.promote_types(query.dtype, torch.float32)).mul_(scale)


def _hide_later_keys(scores: Tensor, position: int) -> None:
    """Set the scores [..., N, T] of keys after their query, the first at ``position``, to minus infinity."""
    own = scores[..., position:]
    is_later = torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device).triu(1)
    own.masked_fill_(is_later, float("-inf"))


def _mixed(probs: Tensor, value: Tensor) -> Tensor:
    """Return ``probs`` [..., N, T] @ ``value`` [..., T, D] with the same bits for every number of unseen keys
    after those of a query.
    """
    blocks = zip(probs.split(_KEY_BLOCK, dim=-1), value.split(_KEY_BLOCK, dim=-2), strict=True)
    parts: list[Tensor] = [p @ v for p, v in blocks]
    if len(parts) == 1:
        return parts[0]
    exact = torch.promote_types(probs.dtype, torch.float32)
    return torch.stack([part.to(exact) for part in parts]).sum(dim=0).to(probs.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    if prefers_products(query.device, query.dtype):
        return _products(query, key, value, scale)
    num_new, num_seen = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if grouped and num_new > 1 and query.device.type == "cuda" and query.dtype == torch.float32:
        # in float32 no kernel but the one that stores all scores takes grouped heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    if num_new == num_seen:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    if num_new > 1 and query.device.type == "cuda":
        return _lower_right(query, key, value, scale)
    mask = None
    if num_new > 1:
        every = torch.ones(num_new, num_seen, dtype=torch.bool, device=query.device)
        mask = every.tril(num_seen - num_new)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _lower_right(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The same with a mask for a GPU's flash kernel. With a boolean mask and grouped heads torch would use
    the kernel that stores all scores.
    """
    mask = causal_lower_right(query.shape[2], key.shape[2])
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


class _RecomputedAttention(torch.autograd.Function):
    """Saves only queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return _attend(query, key, value, scale)


class _CpuAttention(_RecomputedAttention):
    """The backward pass recomputes P = softmax(QK').

    Products are rounded to the precision of the queries (in bfloat16 also QK', for which torch's fused kernel
    uses float32); softmax and everything between the products are computed in float32 or better.
    """

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # head by head and block by block, so that the scores of a block stay in cache
        query_BHND, key_BKTD, value_BKTD = ctx.saved_tensors
        num_new, num_seen, size = query_BHND.shape[2], key_BKTD.shape[2], query_BHND.shape[3]
        repeats = query_BHND.shape[1] // key_BKTD.shape[1]
        # padding has no gradient: its rows of the output's gradient are zeros, and no query sees its keys
        queries, outputs = (_padded(tensor, _QUERY_STEP) for tensor in (query_BHND, gradient))
        keys, values = map(_padded_keys, (key_BKTD, value_BKTD))
        exact = torch.promote_types(query_BHND.dtype, torch.float32)
        grad_query = torch.empty_like(queries)
        # sums over query blocks, in which bfloat16 would lose small terms
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=exact) for tensor in (keys, values))
        for row, head in product(range(len(keys)), range(keys.shape[1])):
            heads = slice(head * repeats, (head + 1) * repeats)
            for start in range(0, num_new, _QUERY_BLOCK):
                block = slice(start, min(start + _QUERY_BLOCK, queries.shape[2]))
                position = num_seen - num_new + start
                seen = min(num_keys(position + block.stop - start), keys.shape[2])
                # the query heads of a key-value head are consecutive rows
                query, output = (tensor[row, heads, block].reshape(-1, size) for tensor in (queries, outputs))
                key, value = keys[row, head, :seen], values[row, head, :seen]
                gradients = _block_gradients(query, key, value, output, repeats, position, ctx.scale)
                grad_query[row, heads, block] = gradients[0].view(repeats, -1, size)
                grad_key[row, head, :seen] += gradients[1]
                grad_value[row, head, :seen] += gradients[2]
        grads = (grad[:, :, :num_seen].to(query_BHND.dtype) for grad in (grad_key, grad_value))
        return grad_query[:, :, :num_new], *grads, None


class _RepeatableAttention(_RecomputedAttention):
    """The fused backward passes of a GPU add in a fixed order only in torch's strict deterministic mode. A
    run's mode warns instead of failing, because not every operation has a deterministic form, so the strict
    mode is for the backward pass of attention, before which attention is computed again. Without a
    deterministic mode nothing is strict.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad(), deterministic_mode(torch.are_deterministic_algorithms_enabled()):
            output = _attend(query, key, value, ctx.scale)
            gradients = torch.autograd.grad(output, (query, key, value), gradient)
        return *gradients, None


@contextmanager
def deterministic_mode(is_on: bool) -> Iterator[None]:
    """With or without torch's strict deterministic mode."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warns_only)


def _block_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    repeats: int,
    position: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dV = P'dO, dS = P * (dO V' - rowsum), dQ = dS K, dK = dS'Q; the first query of each of the ``repeats``
    heads has this ``position``.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.t()).to(exact).mul_(scale)
    _hide_later_keys(scores.view(repeats, len(query) // repeats, -1), position)
    probs = torch.softmax(scores, dim=-1)
    grad_scores = (gradient @ value.t()).to(exact).mul_(probs)
    grad_scores.sub_(probs * grad_scores.sum(dim=-1, keepdim=True)).mul_(scale)
    rounded = grad_scores.to(query.dtype)
    return rounded @ key, rounded.t() @ query, probs.to(query.dtype).t() @ gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """``length`` packed tokens whose context is the segments with the numbers ``ancestors``, oldest first,
    and themselves.
    """

    length: int
    ancestors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """The tree of one packed training row; the segments cover the row in order."""

    segments: tuple[Segment, ...]

    def attend(
        self,
        module: nn.Module,
        query_1HND: Tensor,
        key_1KND: Tensor,
        value_1KND: Tensor,
        scale: float,
    ) -> Tensor:
        """Return [1, N, H, D]; no token sees another branch or another sequence.

        Neighbours of the same shape (rollouts of a group, unrelated sequences) are the batch of one call.
        """
        # tokens first, as the projections wrote them, so that nothing is transposed in memory
        row = (tensor.transpose(1, 2)[0] for tensor in (query_1HND, key_1KND, value_1KND))
        runs = self._runs()
        lengths = [sum(self.segments[index].length for index in run) for run in runs]
        # not slices: the gradient of a slice is a whole row of zeros, for each run and layer
        queries, keys, values = (tensor.split(lengths) if len(runs) > 1 else (tensor,) for tensor in row)
        numbers = {run[0]: number for number, run in enumerate(runs)}
        outputs = []
        for number, run in enumerate(runs):
            before = [numbers[index] for index in self.segments[run[0]].ancestors]
            query, own_key, own_value = (
                parts[number].unflatten(0, (len(run), -1)) for parts in (queries, keys, values)
            )
            if before:  # [B, T, K, D]: the common context, then each sequence's own tokens
                own_key, own_value = (
                    torch.cat([*(parts[i].expand(len(run), -1, -1, -1) for i in before), own], dim=1)
                    for parts, own in ((keys, own_key), (values, own_value))
                )
            output = causal_attention(
                query.transpose(1, 2), own_key.transpose(1, 2), own_value.transpose(1, 2), scale
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[None]

    def _runs(self) -> list[list[int]]:
        """Group neighbours with the same length and ancestors; an ancestor is a group of its own."""
        ancestors = {index for segment in self.segments for index in segment.ancestors}
        runs: list[list[int]] = []
        for index, segment in enumerate(self.segments):
            last = runs[-1][-1] if runs else None
            if last is None or segment != self.segments[last] or not ancestors.isdisjoint((last, index)):
                runs.append([])
            runs[-1].append(index)
        return runs


def _untouched(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocate zeros; on a CPU from the system, so that positions that no rollout reaches use no memory.

    Freed memory is returned at once. Blocks of the allocator, each slightly larger than the last, would
    fragment it.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    memory = mmap.mmap(
        -1, max(1, math.prod(shape)) * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    return torch.frombuffer(memory, dtype=like.dtype, count=math.prod(shape)).view(shape)


@dataclass(slots=True, kw_only=True)
class SlotCache:
    """Keys and values of up to S rollouts of T positions: a pair [S, K, T, D] per layer, grown on demand."""

    dtype: torch.dtype
    device: torch.device
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    num_slots: int = 0
    num_positions: int = 0

    def reserve(self, num_slots: int, num_positions: int, *, stored: Sequence[int] = ()) -> None:
        """Make room; the first ``stored`` positions of each slot are copied. Grows in steps, so that a longer
        episode does not copy at every turn.
        """
        if num_slots <= self.num_slots and num_positions <= self.num_positions:
            return
        if num_slots > self.num_slots:
            self.num_slots = max(num_slots, self.num_slots + self.num_slots // 4)
        self.num_positions = max(-(-num_positions // 128) * 128, self.num_positions)
        for index, (keys, values) in self.layers.items():
            self.layers[index] = (self._grown(keys, stored), self._grown(values, stored))

    def _grown(self, old: Tensor, stored: Sequence[int]) -> Tensor:
        new = _untouched((self.num_slots, old.shape[1], self.num_positions, old.shape[3]), old)
        for slot, length in enumerate(stored):
            new[slot, :, :length] = old[slot, :, :length]
        return new

    def layer(self, index: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pair of a layer, allocated at its first use for the heads of ``key`` [., K, ., D]."""
        if index not in self.layers:
            shape = (self.num_slots, key.shape[1], self.num_positions, key.shape[3])
            self.layers[index] = (_untouched(shape, key), _untouched(shape, key))
        return self.layers[index]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of a slot (a shared prompt or a fork)."""
        for keys, values in self.layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""
        for pair in self.layers.values():
            for tensor in pair:
                saved = tensor[first, :, :length].clone()
                tensor[first, :, :length] = tensor[second, :, :length]
                tensor[second, :, :length] = saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The tokens [start, end) of the packed row extend ``slot`` after its first ``cached`` positions."""

    start: int
    end: int
    slot: int
    cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Several ragged prefills in one packed row."""

    cache: SlotCache
    rows: tuple[Prefill, ...]

    def attend(
        self,
        module: nn.Module,
        query_1HND: Tensor,
        key_1KND: Tensor,
        value_1KND: Tensor,
        scale: float,
    ) -> Tensor:
        """Write the new keys and values into their slots and attend row by row; returns [1, N, H, D]."""
        keys, values = self.cache.layer(module.layer_idx, key_1KND)  # type: ignore[arg-type]
        outputs = []
        for row in self.rows:
            length = row.cached + row.end - row.start
            keys[row.slot, :, row.cached : length] = key_1KND[0, :, row.start : row.end]
            values[row.slot, :, row.cached : length] = value_1KND[0, :, row.start : row.end]
            seen_keys = keys[row.slot : row.slot + 1, :, :length]
            seen_values = values[row.slot : row.slot + 1, :, :length]
            outputs.append(
                causal_attention(query_1HND[:, :, row.start : row.end], seen_keys, seen_values, scale)
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """One new token for each of the slots 0..B-1, after ``lengths_B`` stored positions.

    ``mask_B11T`` is added to the scores and has the precision of the queries, because a boolean mask would be
    converted in every layer.
    """

    cache: SlotCache
    lengths_B: Tensor
    mask_B11T: Tensor
    rows_B: Tensor

    def attend(
        self,
        module: nn.Module,
        query_BH1D: Tensor,
        key_BK1D: Tensor,
        value_BK1D: Tensor,
        scale: float,
    ) -> Tensor:
        keys, values = self.cache.layer(module.layer_idx, key_BK1D)  # type: ignore[arg-type]
        keys[self.rows_B, :, self.lengths_B] = key_BK1D[:, :, 0]
        values[self.rows_B, :, self.lengths_B] = value_BK1D[:, :, 0]
        batch, heads, _, size = query_BH1D.shape
        num_seen = self.mask_B11T.shape[3]
        # The heads of a group become queries of one head, so that keys and values are read once per group.
        query = query_BH1D.reshape(batch, keys.shape[1], heads // keys.shape[1], size)
        seen_keys, seen_values = keys[:batch, :, :num_seen], values[:batch, :, :num_seen]
        if prefers_products(query.device, query.dtype):
            num_rows = max(1, _NUM_SCORES // (heads * num_seen))
            tensors = query, seen_keys, seen_values, self.mask_B11T
            output = torch.cat(
                [
                    _mixed(_scores(rows, key, scale).add_(mask).softmax(dim=-1).to(rows.dtype), value)
                    for rows, key, value, mask in zip(*(one.split(num_rows) for one in tensors), strict=True)
                ]
            )
        else:
            output = scaled_dot_product_attention(
                query, seen_keys, seen_values, attn_mask=self.mask_B11T, scale=scale
            )
        return output.reshape(batch, heads, 1, size).transpose(1, 2)


def decode_mask(lengths_B: Tensor, num_seen: int, *, dtype: torch.dtype) -> Tensor:
    """Return [B, 1, 1, T] of 0 and minus infinity: what each row sees of the first ``num_seen`` positions.

    On a GPU rows begin at multiples of 8 numbers, as the kernel requires; torch would copy another mask in
    every layer.
    """
    positions = torch.arange(num_seen, device=lengths_B.device)[None, None, None, :]
    unseen = positions > lengths_B[:, None, None, None]
    width = num_seen if lengths_B.device.type == "cpu" else -(-num_seen // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    mask = torch.zeros((len(lengths_B), 1, 1, width), dtype=dtype, device=lengths_B.device)
    return mask[..., :num_seen].masked_fill_(unseen, float("-inf"))


class Plan(Protocol):
    """Where keys and values are stored, and which of them each token sees."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        /,
    ) -> Tensor:
        """Return the attention output, tokens before heads."""


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Plan,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    # sliding_window is ignored: load_model limits contexts to the window
    if softcap is not None or s_aux is not None:
        raise ModelError("attention has a soft cap or sinks")
    if value.shape[-1] != key.shape[-1]:
        raise ModelError("attention has values of another size than its keys")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(module, query, key, value, scale), None


def hidden_states(
    model: PreTrainedModel, ids_BN: Tensor, positions_BN: Tensor, plan: Plan | None = None
) -> Tensor:
    """Return the last hidden states [B, N, E], multiplied by :func:`logit_factor`, so that their vocabulary
    projection gives the logits. Attention follows ``plan``; without one it is that of transformers.
    """
    backbone: Any = model.base_model
    options = {} if plan is None else {"plan": plan}
    states: Tensor = backbone(
        input_ids=ids_BN, position_ids=positions_BN, use_cache=False, **options
    ).last_hidden_state
    # a model of a user, for example a table, may have no configuration
    factor = logit_factor(model.config) if hasattr(model, "config") else 1
    return states if factor == 1 else states * factor


def logit_factor(config: PreTrainedConfig) -> float:
    """Return the number with which a model multiplies the output of its vocabulary projection. Models of
    Granite divide by theirs. A model that does something else is found when it is loaded.
    """
    text = config.get_text_config()
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):  # Cohere, Falcon-H1, Granite
        if factor := getattr(text, name, None):
            return 1 / float(factor) if text.model_type.startswith("granite") else float(factor)
    return 1.0


def register() -> None:
    """Register the implementation with transformers; may be called twice."""
    AttentionInterface.register(IMPLEMENTATION, _forward)
    # the plan replaces the mask
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, **__: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexPlan:
    """A :class:`TreePlan` as one call of flex attention on a GPU, built once for all layers of a micro-batch.

    The segments of a tree are packed depth first, so the descendants of a segment are one interval after it:
    a query q sees a key k exactly if ``k <= q < end[k]``, where ``end[k]`` ends the interval of the segment
    of k. Rows are padded to powers of two, to limit compilations; padding attends only within its own block.
    The reference is :meth:`TreePlan.attend`.
    """

    mask: BlockMask
    num_positions: int

    @classmethod
    def from_plan(cls, plan: TreePlan, *, device: torch.device) -> "FlexPlan":
        """Raises ValueError if segments are not packed depth first."""
        segment_ends = [0] * len(plan.segments)
        position = 0
        for index, segment in enumerate(plan.segments):
            if any(segment_ends[ancestor] != position for ancestor in segment.ancestors):
                raise ValueError("the segments of a packed row are not in depth-first order")
            position += segment.length
            for number in (*segment.ancestors, index):
                segment_ends[number] = position
        lengths = torch.tensor([segment.length for segment in plan.segments])
        length = bucket(position)
        # padding sees the padding in its block, so that no row of scores is empty
        ends_L = (torch.arange(length, dtype=torch.int32) // BLOCK + 1) * BLOCK
        ends_L[:position] = torch.tensor(segment_ends, dtype=torch.int32).repeat_interleave(lengths)
        return cls(mask=_mask(ends_L.to(device)), num_positions=length)

    def attend(
        self, module: nn.Module, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, scale: float
    ) -> Tensor:
        """Return [1, N, H, D]. Raises ModelError if more than :data:`PROGRAMS` programs would be compiled."""
        num_tokens = query_1HND.shape[2]
        rest = (0, 0, 0, self.num_positions - num_tokens)
        query, key, value = (pad(tensor, rest) for tensor in (query_1HND, key_1KND, value_1KND))
        try:
            with dynamo_config.patch(**_LIMITS):
                output: Tensor = _attention(query.device.type)(
                    query,
                    key,
                    value,
                    block_mask=self.mask,
                    scale=scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
        except FailOnRecompileLimitHit as error:
            raise ModelError(
                f"flex attention would be compiled more than {PROGRAMS} times for this model: set "
                "update.attention=segments"
            ) from error
        return output[:, :, :num_tokens].transpose(1, 2)


def bucket(num: int, least: int = LEAST_POSITIONS) -> int:
    """Return the padded length: the next power of two, at least ``least``."""
    return max(least, 1 << (num - 1).bit_length())


def _mask(ends_L: Tensor) -> BlockMask:
    """Build the mask from the first and the last end of every block of keys, without an L x L tensor."""
    blocks = torch.arange(len(ends_L) // BLOCK, device=ends_L.device)
    first_end, last_end = (bound(ends_L.view(-1, BLOCK), dim=1).values for bound in (torch.min, torch.max))
    query, key = blocks[:, None], blocks[None, :]
    is_whole = (key < query) & (first_end >= (query + 1) * BLOCK)
    is_part = (key <= query) & (last_end > query * BLOCK) & ~is_whole

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_L[key])

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return [1, 1, Q] numbers of chosen blocks of keys, and [1, 1, Q, K] block indices, chosen first."""
        order = chosen.int().argsort(dim=1, descending=True, stable=True).int()
        return chosen.sum(dim=1).int()[None, None], order.contiguous()[None, None]

    return BlockMask.from_kv_blocks(*listed(is_part), *listed(is_whole), BLOCK_SIZE=BLOCK, mask_mod=sees)


@cache
def _attention(device: str) -> Callable[..., Any]:
    """Compile flex attention with one program per length; on a CPU there is no kernel, only the plain
    formula.
    """
    plain: Callable[..., Any] = flex_attention
    return plain if device == "cpu" else torch.compile(plain, dynamic=False)
