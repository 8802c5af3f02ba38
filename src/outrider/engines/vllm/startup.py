"""What every process of vLLM calls when it starts (entry point ``vllm.general_plugins``): it makes known how
weights come from here (:mod:`outrider.engines.vllm.weights`).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing import parent_process
from typing import Final

BACKENDS: Final[Mapping[str, str]] = {
    "outrider": "Pieces",
    "outrider-nccl": "CheckedNccl",
    "outrider-ipc": "CheckedIpc",
}
"""Name -> class in :mod:`outrider.engines.vllm.weights`, imported when it is asked for."""
ENDS_WITH_PARENT: Final = "OUTRIDER_VLLM_ENDS_WITH_PARENT"
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def register() -> None:
    """Make the backends known to vLLM; called again it changes nothing. Where our engine started vLLM, its
    processes are to end with whoever started them: they would outlive one that is killed.
    """
    if parent_process() is not None and os.environ.get(ENDS_WITH_PARENT):
        _end_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, kind in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "outrider.engines.vllm.weights", kind)


def _end_with_parent() -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent is not None and parent.pid != os.getppid():  # it was too late
        os._exit(1)
