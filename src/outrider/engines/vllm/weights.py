"""How weights come into vLLM's own processes: classes of vLLM's that only those processes import.

``outrider`` takes pieces of safetensors, and needs no GPU; ``outrider-nccl`` and ``outrider-ipc`` are vLLM's
backends of these names (0.32), which hold the weights against the sum behind them. Neither of the latter two
has run on a GPU.
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
    """There is nobody to meet."""


@dataclass
class Piece(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Weights by their Hugging Face names as safetensors, and what their bytes have to come to."""

    piece: bytes
    checksum: int


class Pieces(WeightTransferEngine[Nothing, Piece]):  # type: ignore[misc]
    """The four calls of vLLM 0.32, in their order."""

    init_info_cls, update_info_cls = Nothing, Piece

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Layers are loaded one by one, as from a checkpoint."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One piece; the base class's method asks for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Piece) -> None:
        """Raises ValueError for other bytes than those that were sent."""
        if zlib.crc32(update_info.piece) != update_info.checksum:
            raise ValueError("a piece of the weights did not arrive as it was sent")
        self.model.load_weights(load(update_info.piece).items())

    def finish_weight_update(self) -> None:
        """Every layer is as it was loaded."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_head(self.model)

    def shutdown(self) -> None:
        """Nothing to do."""


class _Checked:
    """In front of a backend of vLLM's: what it gives to the model passes :class:`Checking`."""

    model: Any

    def start_weight_update(self) -> None:
        """A sum of nothing."""
        self._sum = WeightSum()
        self._is_confirmed = False
        super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        """Raises ValueError for a sum of other weights."""
        model, self.model = self.model, Checking(self.model, self._sum)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self._is_confirmed |= self.model.is_confirmed
            self.model = model

    def finish_weight_update(self) -> None:
        """Raises ValueError where no sum came."""
        if not self._is_confirmed:
            raise ValueError("the weights came without their sum: some are missing")
        super().finish_weight_update()  # type: ignore[misc]


class CheckedNccl(_Checked, NCCLWeightTransferEngine):  # type: ignore[misc]
    """``outrider-nccl``: packed buffers, broadcast by trainer rank 0."""


class CheckedIpc(_Checked, IPCWeightTransferEngine):  # type: ignore[misc]
    """``outrider-ipc``: packed buffers in the memory of the GPU that both are on."""
