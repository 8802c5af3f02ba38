"""What the machine can do at most: matrix products and memory copies, for the thread counts and precisions given.

    python benchmarks/machine.py [--threads 1 2]

A decoding step reads every weight once and multiplies it with a few dozen rows; training multiplies it with thousands.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    table = Table(
        "threads", "precision", "32 rows", "256 rows", "2048 rows", "copy", title=f"TFLOP/s x 1536 x 576, GB/s; {processor()}"
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            rates = [product_rate(rows, dtype) for rows in (32, 256, 2048)]
            table.add_row(
                str(threads), str(dtype).removeprefix("torch."), *(f"{rate:.3f}" for rate in rates), f"{copy_rate():.1f}"
            )
    Console().print(table)


def processor() -> str:
    return f"AMX {'yes' if torch.cpu._is_amx_tile_supported() else 'no'}, bf16 vectors {torch.cpu._is_avx512_bf16_supported()}"


def median_seconds(run: Callable[[], object], repeats: int = 15) -> float:
    seconds = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:])


def product_rate(rows: int, dtype: torch.dtype) -> float:
    """TFLOP/s of a layer of the demo's model."""
    states, weight = torch.randn(rows, 576).to(dtype), torch.randn(1536, 576).to(dtype)
    times = max(1, 2048 // rows)
    return 2 * rows * 576 * 1536 * times / median_seconds(lambda: [linear(states, weight) for _ in range(times)]) / 1e12


def copy_rate() -> float:
    """GB/s read and written by a copy into memory that is there already."""
    source = torch.zeros(2**28, dtype=torch.uint8)
    target = source.clone()
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source)) / 1e9


if __name__ == "__main__":
    main()
