"""Which environment variables make which kernels behave as on an older processor: whether their bits change.

    python -m benchmarks.instruction_sets

Each setting runs the same operations on the same numbers in its own process, because libraries read the
variables once.
"""

import hashlib
import os
import subprocess
import sys

import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.markdown_table import markdown
from outrider.engines.local import cpu_kernels as onednn
from outrider.engines.local.attention import causal_attention, prefers_products

SETTINGS = (
    "ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=SSE41",
    "ONEDNN_MAX_CPU_ISA=AVX2", "MKL_ENABLE_INSTRUCTIONS=SSE4_2", "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "MKL_CBWR=COMPATIBLE", "MKL_CBWR=AVX2",
)  # fmt: skip
CHILD, NOTHING = "--child", "no"


def main() -> None:
    if CHILD in sys.argv:
        print(" ".join(results()))
        return
    from outrider.doctor import kernels, processor

    plain = measured({})
    rows = []
    for setting in SETTINGS:
        name, _, value = setting.partition("=")
        rows.append((f"`{setting}`", *map(compared, measured({name: value}), plain)))
    print("Bits against those without the variable:\n")
    print(markdown(("variable", *operations()), rows))
    print(f"\nprocessor: {processor()}\nlayers: {kernels()}")


def compared(found: str, was: str) -> str:
    return NOTHING if NOTHING in (found, was) else "same" if found == was else "other"


def measured(variables: dict[str, str]) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.instruction_sets", CHILD]
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def operations() -> dict[str, torch.Tensor | None]:
    """torch's own draws and kernels, plain layers (float32: BLAS), attention, and oneDNN's plain and packed
    layers and products of attention where they are used.
    """
    drawn = np.random.default_rng(0)
    shapes = (64, 576), (1536, 576), (1, 9, 128, 64)
    rows, weight, heads = (
        torch.from_numpy(drawn.standard_normal(shape, dtype=np.float32)) for shape in shapes
    )
    named: dict[str, torch.Tensor | None] = {
        "normal draws": torch.randn(64, 576, generator=torch.Generator().manual_seed(0)),
        "softmax": rows.softmax(dim=-1),
        "attention": scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        "oneDNN layer, float32": onednn.linear(rows, weight) if onednn.prefers_onednn() else None,
    }
    few = heads.to(torch.bfloat16)
    if prefers_products(few.device, few.dtype):
        named["products of attention, bfloat16"] = causal_attention(few, few, few, 0.125)
    else:
        named["products of attention, bfloat16"] = None
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        x, w = rows.to(dtype), weight.to(dtype)
        named[f"plain layer, {name}"] = linear(x, w)
        packs = onednn.can_pack(dtype)
        named[f"packed layer, {name}"] = onednn.packed_linear(x, onednn.pack(w), None) if packs else None
    return named


def results() -> list[str]:
    """Return a digest of the result of each operation, or NOTHING if it does not run."""
    return [
        NOTHING if result is None else hashlib.sha256(result.float().numpy().tobytes()).hexdigest()
        for result in operations().values()
    ]


if __name__ == "__main__":
    main()
