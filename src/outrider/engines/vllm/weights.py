"""Backends that load new weights in vLLM's own processes; only those processes import this module.

``outrider`` reads a file of safetensors and needs no GPU. ``outrider-nccl`` is vLLM's backend of this name
(0.32) with a check of the sum of all weights; it has not run on a GPU yet.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from outrider.engines.vllm.engine import repack_head
from outrider.engines.vllm.weight_sum import Checking, WeightSum


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """The backend needs no connection."""


@dataclass
class File(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A file of safetensors with Hugging Face names, and its CRC-32."""

    path: str
    checksum: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with safe_open(self.path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


class Files(WeightTransferEngine[Nothing, File]):  # type: ignore[misc]
    """The backend ``outrider``."""

    init_info_cls, update_info_cls = Nothing, File

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # the method of the base class requires an accelerator
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: File) -> None:
        with open(update_info.path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            checksum = zlib.crc32(data)
        if checksum != update_info.checksum:
            raise ValueError("the weights did not arrive as they were sent")
        self.model.load_weights(update_info.tensors())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_head(self.model)

    def shutdown(self) -> None:
        pass


class _Checked:
    """Mixin for a backend of vLLM that passes all weights through :class:`Checking`."""

    model: Any

    def start_weight_update(self) -> None:
        self._sum = WeightSum()
        self._is_confirmed = False
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        model, self.model = self.model, Checking(self.model, self._sum)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self._is_confirmed |= self.model.is_confirmed
            self.model = model

    def finish_weight_update(self) -> None:
        if not self._is_confirmed:
            raise ValueError("the weights arrived without their sum: some are missing")
        super().finish_weight_update()  # type: ignore[misc]
        repack_head(self.model)  # only CPUs have something to pack


class CheckedNccl(_Checked, NCCLWeightTransferEngine):  # type: ignore[misc]
    """``outrider-nccl``: packed buffers, broadcast by trainer rank 0."""
