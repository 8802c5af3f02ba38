"""Entry point ``vllm.general_plugins``, called by every process of vLLM when it starts: registers the
backends of :mod:`outrider.engines.vllm.weights`.
"""

import ctypes
import os
import signal
import sys
from multiprocessing import parent_process
from typing import Final

ENDS_WITH_PARENT: Final = "OUTRIDER_VLLM_ENDS_WITH_PARENT"
_BACKENDS: Final = {"outrider": "Files", "outrider-nccl": "CheckedNccl"}
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def register() -> None:
    """Register the backends; may be called twice.

    Processes of a vLLM that our engine started would survive a killed parent, so they are set to end with it.
    """
    parent = parent_process()
    if parent is not None and os.environ.get(ENDS_WITH_PARENT) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent.pid != os.getppid():  # it ended before
            os._exit(1)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, kind in _BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "outrider.engines.vllm.weights", kind)
