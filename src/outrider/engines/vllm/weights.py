"""Backends that load new weights in vLLM's own processes; only those processes import this module.

``outrider`` receives pieces of safetensors and needs no GPU. ``outrider-nccl`` and ``outrider-ipc`` are
vLLM's backends of these names (0.32) with a check of the sum of all weights; they have not run on a GPU yet.
"""

import zlib
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from outrider.engines.vllm.engine import repack_head
from outrider.engines.vllm.weight_sum import Checking, WeightSum


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """The backend needs no connection."""


@dataclass
class Piece(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Weights as safetensors with Hugging Face names, and the CRC-32 of the bytes."""

    piece: bytes
    checksum: int


class Pieces(WeightTransferEngine[Nothing, Piece]):  # type: ignore[misc]
    """The backend ``outrider``."""

    init_info_cls, update_info_cls = Nothing, Piece

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # the method of the base class requires an accelerator
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Piece) -> None:
        if zlib.crc32(update_info.piece) != update_info.checksum:
            raise ValueError("a piece of the weights did not arrive as it was sent")
        self.model.load_weights(load(update_info.piece).items())

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


class CheckedIpc(_Checked, IPCWeightTransferEngine):  # type: ignore[misc]
    """``outrider-ipc``: packed buffers in the memory of a shared GPU."""
