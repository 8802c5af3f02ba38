"""New weights inside vLLM's own processes, where a GPU is not at hand to receive them: vLLM's plug-in
``outrider`` (entry point ``vllm.general_plugins``), which every process of vLLM calls when it starts.
"""

import ctypes
import os
import signal
import sys
import zlib
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any, Final

BACKEND: Final = "outrider"
ENDS_WITH_PARENT: Final = "OUTRIDER_VLLM_ENDS_WITH_PARENT"
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def register() -> None:
    """Make the backend known to vLLM; called again it changes nothing. Where our engine has started vLLM, its
    processes are to end with whoever started them: they would outlive one that is killed.
    """
    if parent_process() is not None and os.environ.get(ENDS_WITH_PARENT):
        _end_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, made())


def _end_with_parent() -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent is not None and parent.pid != os.getppid():  # it was too late
        os._exit(1)


@dataclass
class Piece:
    """Weights by their Hugging Face names as safetensors, and what their bytes have to come to."""

    piece: bytes
    checksum: int


def made() -> Any:
    """The class of the backend: its bases are vLLM's."""
    from safetensors.torch import load
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from outrider.engines.vllm_requests import repack_head

    @dataclass
    class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
        """There is nobody to meet."""

    @dataclass
    class Update(Piece, WeightTransferUpdateInfo):  # type: ignore[misc]
        """A piece on its way."""

    class Pieces(WeightTransferEngine[Nothing, Update]):  # type: ignore[misc]
        """The four calls of vLLM 0.32, in their order."""

        init_info_cls, update_info_cls = Nothing, Update

        def init_transfer_engine(self, init_info: Nothing) -> None:
            """Nothing to do."""

        def start_weight_update(self) -> None:
            """Layers are loaded one by one, as from a checkpoint."""
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """One piece; the base class's method asks for an accelerator."""
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
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

    return Pieces
