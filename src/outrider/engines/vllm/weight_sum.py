"""Checksum of weights that are sent from GPU to GPU: sender and receiver compute it, and it is sent as the
last tensor.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

NAME: Final = "outrider.weight_sum"
_FACTOR: Final = 1_000_003


class WeightSum:
    """A sum over the 16-bit words of all tensors, which depends on their order; 64 bits that wrap around.

    Computed on the device of the tensors.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, tensor: Tensor) -> None:
        """Add the next tensor, whose type has at least two bytes."""
        part = tensor.detach().contiguous().view(-1).view(torch.int16).sum(dtype=torch.int64)
        self._total = part if self._total is None else self._total * _FACTOR + part

    @property
    def total(self) -> Tensor:
        """[1], int64."""
        return torch.zeros(1, dtype=torch.int64) if self._total is None else self._total.reshape(1)


def append_sum(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights, followed by their sum."""
    weight_sum = WeightSum()
    for name, tensor in weights:
        weight_sum.add(tensor)
        yield name, tensor
    yield NAME, weight_sum.total


class Checking:
    """Stands for a model that loads weights and checks them against the sum at their end."""

    def __init__(self, model: Any, weight_sum: WeightSum) -> None:
        self._model, self._sum = model, weight_sum
        self.is_confirmed = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError if the sum does not match."""
        loaded = []
        for name, tensor in weights:
            if name != NAME:
                self._sum.add(tensor)
                loaded.append((name, tensor))
            elif int(tensor) != int(self._sum.total):
                raise ValueError("the weights did not arrive as they were sent")
            else:
                self.is_confirmed = True
        self._model.load_weights(loaded)
