"""Weights of linear layers in the layout that the CPU's matrix kernels read.

A decoding step multiplies a few dozen rows with every weight; bringing the weights into that layout costs as
much as the product, and is the same work at every step. The packed copies live as long as a generation does.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import MethodType

import torch
from torch import nn

from outrider.engines.local import onednn

_MIN_ROWS = 2
_MAX_ROWS = 256  # above, the product itself dominates


class PackedLinears:
    """Lets the plain linear layers of a CPU model use packed weights while :meth:`active`.

    It does nothing where they cannot be had.
    """

    def __init__(self, model: nn.Module) -> None:
        linears = (module for module in model.modules() if isinstance(module, nn.Linear))
        self._linears = [linear for linear in linears if _is_packable(linear)]
        self._packed: list[torch.Tensor] | None = None

    def drop(self) -> None:
        """Forget the copies: the weights moved, or their memory is needed."""
        self._packed = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Decoding steps inside use the copies, which are made at the first one after :meth:`drop`."""
        if self._packed is None:
            self._packed = [onednn.pack(linear.weight.detach()) for linear in self._linears]
        for linear, packed in zip(self._linears, self._packed, strict=True):
            linear.forward = MethodType(_Forward(packed), linear)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for linear in self._linears:
                with suppress(AttributeError):
                    del linear.forward


class _Forward:
    def __init__(self, packed: torch.Tensor) -> None:
        self._packed = packed

    def __call__(self, linear: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        if not _MIN_ROWS <= rows.numel() // rows.shape[-1] <= _MAX_ROWS:
            return nn.functional.linear(rows, linear.weight, linear.bias)
        return onednn.packed_linear(rows, self._packed, linear.bias)


def _is_packable(module: nn.Linear) -> bool:
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and onednn.can_pack(module.weight.dtype)
    )
