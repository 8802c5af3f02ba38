"""Attention over ragged rows, registered with transformers as the implementation ``outrider``.

Linear layers see one packed row of tokens without padding; only attention knows where sequences begin. Two
plans exist: :class:`TreePlan` (training: a segment attends to its ancestors and itself, so a shared prefix is
computed once) and :class:`CachePlan` (generation: keys and values live in slots, one per rollout).

Shape letters: N packed tokens, B rows, S slots, T cache positions, H query heads, K key-value heads, D head
size.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from outrider.engines.local.segment_attention import causal_attention
from outrider.errors import ModelError

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
