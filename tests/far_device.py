"""A device that this machine lacks: tensors that lie on the CPU and say that they are elsewhere.

An operation that mixes them with tensors of the CPU is refused as CUDA refuses it, so that a run of real code
over them finds every place that forgets the model's device, without a GPU. torch calls the place ``meta``
here, the only other device whose gradients a build for CPUs computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

FAR: Final = torch.device("meta")
_INDEXED: Final = ("aten.index.", "aten.index_put", "aten._index_put")  # indices may lie on the CPU
_MOVED: Final = ("aten.copy_.", "aten._to_copy.", "aten.to.")


class FarTensor(Tensor):
    """Its numbers are those of ``near``, a tensor of the CPU."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> "FarTensor":
        far: FarTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.size(), strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype,
            device=FAR, requires_grad=near.requires_grad,
        )  # fmt: skip
        far.near = near
        return far

    def tolist(self) -> Any:
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, dict(kwargs or {}))


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the near tensors; its results are where the operation says, else where they were."""
    _refuse_mixed(str(func), args, kwargs)
    is_far = any(isinstance(one, FarTensor) for one in tree_iter((args, kwargs)))
    if (asked := kwargs.get("device")) is not None:
        is_far = torch.device(asked) == FAR
        kwargs["device"] = torch.device("cpu")
    out = func(*_near(args), **_near(kwargs))
    if str(func).split(".")[1].endswith("_"):  # in place
        return args[0]
    return tree_map_only(Tensor, FarTensor, out) if is_far else out


def _near(values: Any) -> Any:
    return tree_map_only(FarTensor, lambda one: one.near, values)


def _refuse_mixed(name: str, args: Any, kwargs: Any) -> None:
    """CUDA takes a number of the CPU (a tensor without dimensions), an index of it, and a copy."""
    if name.startswith(_MOVED):
        return
    if name.startswith(_INDEXED) and isinstance(args[0], FarTensor):
        args = (args[0], args[2:])
    tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
    far = [isinstance(one, FarTensor) for one in tensors]
    if any(far) and any(one.dim() and not is_far for one, is_far in zip(tensors, far, strict=True)):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")


class _Made(TorchDispatchMode):
    """What torch itself makes far away has numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, dict(kwargs or {}))


class _Given(TorchFunctionMode):
    """Lists of numbers, which torch would forget on the way to a ``meta`` tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") == FAR:
            return FarTensor(func(*args, **kwargs | {"device": "cpu"}))
        if func is Tensor.__getitem__ and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]))
        return func(*args, **kwargs)


@contextmanager
def far_device() -> Iterator[None]:
    """What asks for :data:`FAR` inside gets far tensors."""
    with _Made(), _Given():
        yield


def moved(model: nn.Module) -> nn.Module:
    """The model with its weights and buffers far away; tied ones stay tied."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                far = known.setdefault(id(one), nn.Parameter(FarTensor(one.detach()), one.requires_grad))
                module._parameters[name] = far
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = FarTensor(buffer)
    return model
