"""Rounding of weights to bfloat16 without losing small steps."""

import torch
from torch import Tensor

from outrider.seeding import stream_seed

_MASK = 2**32 - 1


@torch.no_grad()
def dither(weights: Tensor, name: str, *, seed: int, first_row: int = 0) -> None:
    """Shift float32 weights that are values of bfloat16 to random places of the intervals that round to these
    values, in place. Other weights, zeros and infinities stay as they are.

    If they started at the values, rounding to the nearest one would drop every later step of less than half
    of the distance between two values (0.2 to 0.4 % of a weight). From random places, a step changes the
    rounded weights by its own size on average, as in stochastic rounding. But the random numbers are drawn
    once: while a weight stays, its rounded value stays.

    The numbers depend on ``seed``, ``name`` and the position in the whole tensor, so every device and any
    number of ranks has the same ones. ``first_row``: position of the first row, if ``weights`` is a part of
    the tensor.
    """
    if not weights.numel():
        return
    rows = weights.detach().view(1) if weights.dim() == 0 else weights.detach()
    size = rows[0].numel()
    block = 2**18 if rows.device.type == "cpu" else 2**24  # cache of a processor, launches of a GPU
    first = first_row * size
    for part in rows.split(max(1, block // size)):
        bits = part.view(torch.int32)
        is_value = (bits & 0xFFFF == 0) & (part != 0) & part.isfinite()
        bits += _offsets(first, part, key=stream_seed(seed, "rounding", name)) * is_value
        first += part.numel()


def _offsets(first: int, like: Tensor, *, key: int) -> Tensor:
    """Random integers below half of an interval, in units of float32's last bit: a hash of the positions from
    ``first`` on, with the shape of ``like``. The hash is the finalizer of MurmurHash3.
    """
    hashed = torch.arange(first, first + like.numel(), device=like.device)
    hashed.bitwise_xor_(key & _MASK).mul_(0x9E3779B1).add_(key >> 32).bitwise_and_(_MASK)
    hashed.bitwise_xor_(hashed >> 16).mul_(0x85EBCA6B).bitwise_and_(_MASK)
    hashed.bitwise_xor_(hashed >> 13).mul_(0xC2B2AE35).bitwise_and_(_MASK)
    hashed.bitwise_xor_(hashed >> 16)
    return (hashed.remainder_(2**16 - 1) - (2**15 - 1)).to(torch.int32).view(like.shape)
