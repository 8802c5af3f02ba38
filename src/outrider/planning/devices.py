"""Devices by name: memory and peak rate of dense bfloat16 matrix products, and this machine's CPU.

From NVIDIA's data sheets of the SXM modules: A100 80GB (312 TFLOP/s), H100 and H200 (1,979 TFLOP/s with
sparsity, so 989 without; 80 GB and 141 GB).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """``memory`` in bytes, ``peak`` in floating-point operations per second (0: unknown). The processes of a
    run on a CPU share ``memory``; every GPU has its own.
    """

    name: str
    memory: float
    peak: float
    is_cpu: bool = False


DEVICES: Final[Mapping[str, Device]] = {
    "A100": Device(name="A100", memory=80 * GB, peak=312e12),
    "H100": Device(name="H100", memory=80 * GB, peak=989e12),
    "H200": Device(name="H200", memory=141 * GB, peak=989e12),
}


def this_cpu() -> Device:
    """The processor of this machine with its memory; its rate is unknown until it is measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(name="CPU", memory=float(memory), peak=0.0, is_cpu=True)
