"""A process that computes as the least x86-64 processor does, so that its bits are the same on all of them
(docs/portability.md).
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

try:
    from numpy._core import _multiarray_umath as umath
except ImportError:  # numpy 1
    from numpy.core import _multiarray_umath as umath  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[2]
# What glibc's mathematical functions choose their variants by, in its spelling.
_GLIBC = (
    "AVX",
    "AVX2",
    "FMA",
    "FMA4",
    "AVX512F",
    "AVX512CD",
    "AVX512BW",
    "AVX512DQ",
    "AVX512VL",
    "ERMS",
    "AVX_Fast_Unaligned_Load",
)


def missing() -> str | None:
    """Why the record says nothing about this machine; None where it does."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not sys.platform.startswith("linux"):
        return (
            "the golden record holds the bits of x86-64 on Linux, and this "
            f"is {platform.machine()} on {sys.platform}"
        )
    return None


def variables() -> Mapping[str, str]:
    """One variable for each library that picks its kernels by processor."""
    makefile = (ROOT / "Makefile").read_text()
    [lesser] = re.findall(r"^LESSER := (.*)$", makefile, re.MULTILINE)
    return {
        **dict(one.split("=", 1) for one in lesser.split()),  # torch, oneDNN and MKL
        "NPY_DISABLE_CPU_FEATURES": " ".join(umath.__cpu_dispatch__),
        "OPENBLAS_CORETYPE": "Prescott",  # numpy's and scipy's
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=" + ",".join(f"-{name}" for name in _GLIBC),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }


def run_lowest(arguments: Sequence[str], *, timeout: float) -> None:
    """``python -m tests.golden ...`` on the least processor. Raises CalledProcessError with what it wrote."""
    command = [sys.executable, "-m", "tests.golden", *arguments]
    ended = subprocess.run(
        command, env={**os.environ, **variables()}, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    if ended.returncode:
        raise AssertionError(
            f"{' '.join(command)}: {ended.returncode}\n{ended.stdout[-4000:]}\n{ended.stderr[-8000:]}"
        )


def versions() -> dict[str, str]:
    """Packages whose kernels are part of the bits."""
    import torch
    import transformers

    return {
        "torch": str(torch.__version__).partition("+")[0],
        "numpy": np.__version__,
        "transformers": transformers.__version__,
    }
