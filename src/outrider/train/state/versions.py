"""Packages, libraries, the processor and its use: they decide a run's bits beside its seed and settings.

Every checkpoint holds it; a run that goes on under another one says so. Which variables act where is in
docs/portability.md.
"""

import os
import re
from collections.abc import Mapping

import numpy as np
import torch
import transformers

import outrider
from outrider.engines.local.processor import read_processor

_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
)  # fmt: skip
_LIBRARIES = {
    "BLAS": r"(Math Kernel Library Version .+?) for|BLAS_INFO=(\w+)",
    "oneDNN": r"(?:MKL-DNN|oneDNN) (v[\d.]+)",
}
_SETS = "instruction sets"


def versions() -> dict[str, str]:
    """Both kinds together, as a checkpoint holds them."""
    return {**_software(), **_machine()}


def differences(recorded: Mapping[str, str]) -> list[str]:
    """A line for each kind that differs; what an earlier Outrider did not record is not compared."""
    lines = []
    for kind, current in {"VERSIONS": _software(), "PROCESSOR": _machine()}.items():
        changed = {name: now for name, now in current.items() if recorded.get(name, now) != now}
        if changed:
            descriptions = [_describe_difference(name, recorded[name], now) for name, now in changed.items()]
            lines.append(
                f"OTHER {kind}: the checkpoint was written with {', '.join(descriptions)}; "
                "the run goes on, but not to the same bits for sure"
            )
    return lines


def chosen_instructions() -> list[str]:
    """NAME=VALUE of the variables set that choose other kernels of torch, oneDNN, BLAS or numpy."""
    return [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]


def _software() -> dict[str, str]:
    built = torch.__config__.show()
    packages = {
        "outrider": outrider.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
    return packages | {name: _search_version(pattern, built) for name, pattern in _LIBRARIES.items()}


def _machine() -> dict[str, str]:
    processor = read_processor()
    return {
        "processor": processor.model,
        _SETS: " ".join(sorted(processor.instruction_sets)) or "unknown",
        "torch's kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "variables": " ".join(chosen_instructions()) or "none",
    }


def _search_version(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return next(group for group in match.groups() if group) if match else "none"


def _describe_difference(name: str, was: str, now: str) -> str:
    """Of two long lists only what one has and the other has not."""
    if name != _SETS:
        return f"{name} {was} (now {now})"
    removed, added = set(was.split()) - set(now.split()), set(now.split()) - set(was.split())
    return (
        f"{name} {' '.join(sorted(removed)) or 'as now'} (now {' '.join(sorted(added)) or 'without these'})"
    )
