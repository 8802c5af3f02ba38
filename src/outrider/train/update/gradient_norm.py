"""The global gradient norm in float64, from sums of squares that ranks can add, and clipping by it.

In float32 the norm of an embedding is off by 1e-5, and by another amount where the gradient is in shards;
clipping would carry that into the weights.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def sum_of_squares(gradients: Iterable[Tensor]) -> float:
    """Over all entries of all tensors, squared and summed in float64; NaN and infinity come through."""
    norms = [float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients]
    return math.fsum(norm * norm for norm in norms) if all(map(math.isfinite, norms)) else math.nan


@torch.no_grad()
def clip(gradients: Iterable[Tensor], *, norm: float, max_norm: float) -> None:
    """Scale all of them so that their global norm, which is ``norm`` now, is at most ``max_norm``."""
    scale = max_norm / (norm + 1e-6)
    if scale < 1.0:  # not where the norm is NaN: nothing is stepped on then
        for gradient in gradients:
            gradient.mul_(scale)
