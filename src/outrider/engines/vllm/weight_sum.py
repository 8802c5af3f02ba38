"""Whether weights that went from one GPU to another are those that were sent: a sum that both sides make, and
that comes behind them as a tensor of its own.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

NAME: Final = "outrider.weight_sum"
_FACTOR: Final = 1_000_003


class WeightSum:
    """Of the halves of all words, tensor by tensor: other bytes, another order or one that is missing come to
    another number. Computed where the tensors are; 64 bits, which wrap around.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, tensor: Tensor) -> None:
        """The next one, of a type of at least two bytes."""
        part = tensor.detach().contiguous().view(-1).view(torch.int16).sum(dtype=torch.int64)
        self._total = part if self._total is None else self._total * _FACTOR + part

    @property
    def total(self) -> Tensor:
        """[1], int64."""
        return torch.zeros(1, dtype=torch.int64) if self._total is None else self._total.reshape(1)


def append_sum(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All weights as they are, and behind them their sum."""
    weight_sum = WeightSum()
    for name, tensor in weights:
        weight_sum.add(tensor)
        yield name, tensor
    yield NAME, weight_sum.total


class Checking:
    """In the place of a model that loads weights: holds what passes against the sum at its end."""

    def __init__(self, model: Any, weight_sum: WeightSum) -> None:
        self._model, self._sum = model, weight_sum
        self.is_confirmed = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError for a sum of other weights."""
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
