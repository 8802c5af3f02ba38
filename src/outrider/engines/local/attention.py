"""Attention of one training segment over its context; in bfloat16 on CPU with a backward pass of matrix
products.

The fused CPU kernel's backward pass does not use the matrix unit of a processor that has one, and a unit is
what bfloat16 is chosen for there. So the forward is fused, and the backward computes the probabilities again
and uses plain products, a block of queries at a time: what lies after the block is never computed. In float32
the fused backward pass is the faster one (benchmarks/update_profile.py prints both).

Shape letters: B sequences, H query heads, K key-value heads, G query heads per key-value head, N queries, T
keys, D head size.
"""

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from outrider.errors import ModelError

_BLOCK = 128  # queries: with them a block's scores over a thousand keys take about a megabyte


def causal_attention(
    query_BHND: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention [B, H, N, D] in which the queries are the last N of the T keys."""
    if query_BHND.requires_grad and query_BHND.device.type == "cpu" and query_BHND.dtype.itemsize < 4:
        output: torch.Tensor = _CpuAttention.apply(  # type: ignore[no-untyped-call]
            query_BHND, key_BKTD, value_BKTD, scale
        )
        return output
    return _fused(query_BHND, key_BKTD, value_BKTD, scale)


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    num_new, num_seen = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if num_new == num_seen:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    if num_new > 1 and query.device.type == "cuda":
        return _lower_right(query, key, value, scale)
    mask = None if num_new == 1 else _hidden(query, num_seen).logical_not()
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _lower_right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """The same with a mask that a GPU's flash kernel knows: for a boolean one with grouped heads there is
    only the kernel that holds all scores in memory.
    """
    mask = causal_lower_right(query.shape[2], key.shape[2])
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _hidden(query: torch.Tensor, num_seen: int) -> torch.Tensor:
    """[N, T]: True where a key lies after its query."""
    num_new = query.shape[2]
    return torch.ones(num_new, num_seen, dtype=torch.bool, device=query.device).triu(num_seen - num_new + 1)


class _CpuAttention(torch.autograd.Function):
    """Saves queries, keys and values only; P = softmax(QK') is computed again.

    Products are rounded to the precision of the queries (of bfloat16, QK' too, where the fused forward pass
    keeps float32); softmax and what lies between the products are computed in float32 or better.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return _fused(query, key, value, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Head by head and block by block, so that a block's scores stay in cache; sums over blocks in
        float32 or better.
        """
        query_BHND, key_BKTD, value_BKTD = ctx.saved_tensors
        num_new, num_seen, size = query_BHND.shape[2], key_BKTD.shape[2], query_BHND.shape[3]
        repeats = query_BHND.shape[1] // key_BKTD.shape[1]
        exact = torch.promote_types(query_BHND.dtype, torch.float32)
        grad_query = torch.empty_like(query_BHND)
        # Sums over query blocks, in which bfloat16 would lose small terms.
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=exact) for tensor in (key_BKTD, value_BKTD))
        for row, head in product(range(len(key_BKTD)), range(key_BKTD.shape[1])):
            queries = slice(head * repeats, (head + 1) * repeats)
            for start in range(0, num_new, _BLOCK):
                block = slice(start, min(start + _BLOCK, num_new))
                seen = num_seen - num_new + block.stop
                # the query heads of a key-value head lie one below the other
                query, output = (
                    tensor[row, queries, block].reshape(-1, size) for tensor in (query_BHND, gradient)
                )
                key, value = key_BKTD[row, head, :seen], value_BKTD[row, head, :seen]
                gradients = _block_gradients(query, key, value, output, repeats, ctx.scale)
                grad_query[row, queries, block] = gradients[0].view(repeats, -1, size)
                grad_key[row, head, :seen] += gradients[1]
                grad_value[row, head, :seen] += gradients[2]
        return grad_query, grad_key.to(key_BKTD.dtype), grad_value.to(value_BKTD.dtype), None


def _block_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gradient: torch.Tensor,
    repeats: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dV = P'dO, dS = P * (dO V' - rowsum), dQ = dS K, dK = dS'Q; the last keys are the block's own."""
    exact = torch.promote_types(query.dtype, torch.float32)
    num_own = len(query) // repeats
    scores = (query @ key.t()).to(exact).mul_(scale)
    # Only the block's own keys can lie after one of its queries: the mask covers no others.
    hidden = torch.ones(num_own, num_own, dtype=torch.bool, device=query.device).triu(1)
    scores.view(repeats, num_own, -1)[:, :, len(key) - num_own :].masked_fill_(hidden, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    grad_scores = (gradient @ value.t()).to(exact).mul_(probs)
    grad_scores.sub_(probs * grad_scores.sum(dim=-1, keepdim=True)).mul_(scale)
    rounded = grad_scores.to(query.dtype)
    return rounded @ key, rounded.t() @ query, probs.to(query.dtype).t() @ gradient


# Attention over ragged rows, registered with transformers as the implementation ``outrider``.
#
# Linear layers see one packed row of tokens without padding; only attention knows where sequences begin. Two
# plans exist: :class:`TreePlan` (training: a segment attends to its ancestors and itself, so a shared prefix
# is computed once) and :class:`CachePlan` (generation: keys and values live in slots, one per rollout).
#
# Shape letters: N packed tokens, B rows, S slots, T cache positions, H query heads, K key-value heads, D head
# size.


IMPLEMENTATION = "outrider"
_MASK_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """``length`` packed tokens whose context is the segments numbered ``ancestors``, oldest first, and
    themselves.
    """

    length: int
    ancestors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """How the tokens of one packed training row may see each other; the segments cover the row in order."""

    segments: tuple[Segment, ...]

    def attend(
        self,
        module: nn.Module,
        query_1HND: torch.Tensor,
        key_1KND: torch.Tensor,
        value_1KND: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention output [1, N, H, D]; no token sees another branch or another sequence.

        Neighbours of one shape (a group's rollouts, sequences with nothing in common) are the batch of one
        call.
        """
        # tokens first, as the projections wrote them: nothing is transposed in memory
        row = (tensor.transpose(1, 2)[0] for tensor in (query_1HND, key_1KND, value_1KND))
        runs = self._runs()
        lengths = [sum(self.segments[index].length for index in run) for run in runs]
        # split and not slices: the gradient of a slice is a whole row of zeros, once per run and layer
        queries, keys, values = (tensor.split(lengths) if len(runs) > 1 else (tensor,) for tensor in row)
        numbers = {run[0]: number for number, run in enumerate(runs)}
        outputs = []
        for number, run in enumerate(runs):
            before = [numbers[index] for index in self.segments[run[0]].ancestors]
            query, own_key, own_value = (
                parts[number].unflatten(0, (len(run), -1)) for parts in (queries, keys, values)
            )
            key = _after([keys[i] for i in before], own_key).transpose(1, 2)
            value = _after([values[i] for i in before], own_value).transpose(1, 2)
            output = causal_attention(query.transpose(1, 2), key, value, scale)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[None]

    def _runs(self) -> list[list[int]]:
        """Numbers of neighbours with one length and the same ancestors; what is an ancestor stands alone."""
        ancestors = {index for segment in self.segments for index in segment.ancestors}
        runs: list[list[int]] = []
        for index, segment in enumerate(self.segments):
            last = runs[-1][-1] if runs else None
            if last is None or segment != self.segments[last] or not ancestors.isdisjoint((last, index)):
                runs.append([])
            runs[-1].append(index)
        return runs


def _after(before: Sequence[torch.Tensor], own_BNKD: torch.Tensor) -> torch.Tensor:
    """[B, T, K, D]: a context that all B have in common, then what each has of its own."""
    if not before:
        return own_BNKD
    return torch.cat([*(part.expand(len(own_BNKD), -1, -1, -1) for part in before), own_BNKD], dim=1)


def _untouched(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros; on a CPU from the system and not from the allocator: positions that no rollout reaches take no
    memory.

    What is freed goes back at once, where blocks of the allocator, each a little larger than the last, would
    leave holes.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    memory = mmap.mmap(
        -1, max(1, math.prod(shape)) * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    return torch.frombuffer(memory, dtype=like.dtype, count=math.prod(shape)).view(shape)


@dataclass(slots=True, kw_only=True)
class SlotCache:
    """Keys and values of up to S rollouts, T positions each: one [S, K, T, D] pair per layer, grown on
    demand.
    """

    dtype: torch.dtype
    device: torch.device
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    num_slots: int = 0
    num_positions: int = 0

    def reserve(self, num_slots: int, num_positions: int, *, stored: Sequence[int] = ()) -> None:
        """Make room; the first ``stored`` positions of each slot stay. Grows in steps: a longer episode does
        not copy at every turn.
        """
        if num_slots <= self.num_slots and num_positions <= self.num_positions:
            return
        if num_slots > self.num_slots:
            self.num_slots = max(num_slots, self.num_slots + self.num_slots // 4)
        self.num_positions = max(-(-num_positions // 128) * 128, self.num_positions)
        for index, (keys, values) in self.layers.items():
            self.layers[index] = (self._grown(keys, stored), self._grown(values, stored))

    def _grown(self, old: torch.Tensor, stored: Sequence[int]) -> torch.Tensor:
        new = _untouched((self.num_slots, old.shape[1], self.num_positions, old.shape[3]), old)
        for slot, length in enumerate(stored):
            new[slot, :, :length] = old[slot, :, :length]
        return new

    def layer(self, index: int, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair of a layer, made at its first use with the head layout of ``key`` [., K, ., D]."""
        if index not in self.layers:
            shape = (self.num_slots, key.shape[1], self.num_positions, key.shape[3])
            self.layers[index] = (_untouched(shape, key), _untouched(shape, key))
        return self.layers[index]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of a slot: a shared prompt or a fork."""
        for keys, values in self.layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange two slots up to ``length`` positions."""
        for pair in self.layers.values():
            for tensor in pair:
                saved = tensor[first, :, :length].clone()
                tensor[first, :, :length] = tensor[second, :, :length]
                tensor[second, :, :length] = saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """New tokens [start, end) of the packed row extend ``slot`` after its first ``cached`` positions."""

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
        query_1HND: torch.Tensor,
        key_1KND: torch.Tensor,
        value_1KND: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Write the new keys and values into their slots and attend, row by row; [1, N, H, D]."""
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
    """One new token for each of the slots 0..B-1; ``lengths_B`` counts the positions stored before it.

    ``mask_B11T`` is added to the scores, in the precision of the queries: a boolean one is converted in every
    layer.
    """

    cache: SlotCache
    lengths_B: torch.Tensor
    mask_B11T: torch.Tensor
    rows_B: torch.Tensor

    def attend(
        self,
        module: nn.Module,
        query_BH1D: torch.Tensor,
        key_BK1D: torch.Tensor,
        value_BK1D: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Append and attend for all rows at once; the heads of one key-value group become queries of one
        head.
        """
        keys, values = self.cache.layer(module.layer_idx, key_BK1D)  # type: ignore[arg-type]
        keys[self.rows_B, :, self.lengths_B] = key_BK1D[:, :, 0]
        values[self.rows_B, :, self.lengths_B] = value_BK1D[:, :, 0]
        batch, heads, _, size = query_BH1D.shape
        num_seen = self.mask_B11T.shape[3]
        # So keys and values are read once per group of heads, and not repeated for each.
        query = query_BH1D.reshape(batch, keys.shape[1], heads // keys.shape[1], size)
        output = scaled_dot_product_attention(
            query,
            keys[:batch, :, :num_seen],
            values[:batch, :, :num_seen],
            attn_mask=self.mask_B11T,
            scale=scale,
        )
        return output.reshape(batch, heads, 1, size).transpose(1, 2)


def decode_mask(lengths_B: torch.Tensor, num_seen: int, *, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, 1, T] of 0 and minus infinity: what each row sees of the first ``num_seen`` positions.

    On a GPU its rows begin at multiples of 8 numbers: the kernel that takes a mask wants them so, and torch
    would copy another one in every layer.
    """
    positions = torch.arange(num_seen, device=lengths_B.device)[None, None, None, :]
    unseen = positions > lengths_B[:, None, None, None]
    width = num_seen if lengths_B.device.type == "cpu" else -(-num_seen // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    mask = torch.zeros((len(lengths_B), 1, 1, width), dtype=dtype, device=lengths_B.device)
    return mask[..., :num_seen].masked_fill_(unseen, float("-inf"))


class Plan(Protocol):
    """Where keys and values lie, and what each token may see of them."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        /,
    ) -> torch.Tensor:
        """Attention output, tokens before heads."""
        ...


def _forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    plan: Plan,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """``sliding_window`` is among the ignored arguments: load_model keeps contexts within the window."""
    if softcap is not None or s_aux is not None:
        raise ModelError("attention has a soft cap or sinks")
    if value.shape[-1] != key.shape[-1]:
        raise ModelError("attention has values of another size than its keys")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(module, query, key, value, scale), None


def _no_mask(*_: object, **__: object) -> None:
    """The plan decides what a token may see."""


def register() -> None:
    """Make the implementation known to transformers; calling it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _forward)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


# Attention over a packed training row in one call on a GPU: flex attention, one block mask a micro-batch.
#
# The segments of a tree are packed depth first, so that whoever descends from a segment lies in one interval
# behind it: a query q sees a key k exactly where ``k <= q < end[k]``, with the end of the interval of the
# segment of k. Rows are padded to one length an octave, so that compilations are few; what is padded attends
# within its own block only, which costs next to nothing. The reference is
# :meth:`outrider.engines.local.attention.TreePlan.attend`.
#
# Shape letters: N packed tokens, L positions after padding, H query heads, K key-value heads, D head size.


BLOCK: Final = 128  # positions of a side of the mask's blocks
PROGRAMS: Final = 256
"""Programs that may be compiled for one process: each length, with and without gradient, for every kind of
layer (head size, window, scale). torch's own limit is 8, behind which it falls back, silently, to the plain
formula with all scores in memory.
"""
_LIMITS: Final[Mapping[str, Any]] = {
    "recompile_limit": PROGRAMS,
    "accumulated_recompile_limit": 4 * PROGRAMS,
    "fail_on_recompile_limit_hit": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexPlan:
    """A :class:`TreePlan` on a device; made once for all layers of a micro-batch."""

    mask: BlockMask
    num_positions: int

    @classmethod
    def from_plan(cls, plan: TreePlan, *, device: torch.device) -> "FlexPlan":
        """Raises ValueError for segments that are not packed depth first."""
        num_tokens = sum(segment.length for segment in plan.segments)
        length = bucket(num_tokens)
        # what is padded sees what is padded in its block: no row of scores is empty
        ends = (torch.arange(length, dtype=torch.int32) // BLOCK + 1) * BLOCK
        ends[:num_tokens] = _ends_N(plan)
        return cls(mask=_mask(ends.to(device)), num_positions=length)

    def attend(
        self, module: nn.Module, query_1HND: Tensor, key_1KND: Tensor, value_1KND: Tensor, scale: float
    ) -> Tensor:
        """Attention output [1, N, H, D]. Raises ModelError where more programs than :data:`PROGRAMS` would be
        compiled.
        """
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


def bucket(num_tokens: int) -> int:
    """The padded length: the next power of two, and at least a block."""
    return max(BLOCK, 1 << (num_tokens - 1).bit_length())


def _ends_N(plan: TreePlan) -> Tensor:
    """[N]: where the interval of a token's segment and its descendants ends."""
    ends = [0] * len(plan.segments)
    position = 0
    for index, segment in enumerate(plan.segments):
        if any(ends[ancestor] != position for ancestor in segment.ancestors):
            raise ValueError("the segments of a packed row are not in depth-first order")
        position += segment.length
        for number in (*segment.ancestors, index):
            ends[number] = position
    lengths = torch.tensor([segment.length for segment in plan.segments])
    return torch.tensor(ends, dtype=torch.int32).repeat_interleave(lengths)


def _mask(ends_L: Tensor) -> BlockMask:
    """From the first and the last end of every block of keys: nothing of the size of L x L is made."""
    blocks = torch.arange(len(ends_L) // BLOCK, device=ends_L.device)
    first_end, last_end = (bound(ends_L.view(-1, BLOCK), dim=1).values for bound in (torch.min, torch.max))
    query, key = blocks[:, None], blocks[None, :]
    is_whole = (key < query) & (first_end >= (query + 1) * BLOCK)
    is_part = (key <= query) & (last_end > query * BLOCK) & ~is_whole

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_L[key])

    return BlockMask.from_kv_blocks(*_listed(is_part), *_listed(is_whole), BLOCK_SIZE=BLOCK, mask_mod=sees)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, Q] numbers of chosen blocks of keys, and [1, 1, Q, K] which, in front of those that are not."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True).int()
    return chosen.sum(dim=1).int()[None, None], order.contiguous()[None, None]


@cache
def _attention(device: str) -> Callable[..., Any]:
    """Compiled where there is a kernel of it, with a program for every length; the plain formula else."""
    plain: Callable[..., Any] = flex_attention
    return plain if device == "cpu" else torch.compile(plain, dynamic=False)
