"""Attention over a packed training row in one call on a GPU: flex attention, one block mask a micro-batch.

The segments of a tree are packed depth first, so that whoever descends from a segment lies in one interval
behind it: a query q sees a key k exactly where ``k <= q < end[k]``, with the end of the interval of the
segment of k. Rows are padded to one length an octave, so that compilations are few; what is padded attends
within its own block only, which costs next to nothing. The reference is
:meth:`outrider.engines.local.attention.TreePlan.attend`.

Shape letters: N packed tokens, L positions after padding, H query heads, K key-value heads, D head size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from outrider.engines.local.attention import TreePlan
from outrider.errors import ModelError

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
