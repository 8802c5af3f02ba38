"""What the machine can do at most: matrix products and memory copies, for the thread counts and precisions
given.

    python benchmarks/machine.py [--threads 1 2]

A decoding step reads every weight once and multiplies it with a few dozen rows; training multiplies it with
thousands. "torch's BLAS" are the products of torch where Outrider uses another library.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

from outrider.doctor import kernels, processor
from outrider.engines.local.cpu_kernels import prefers_onednn
from outrider.engines.local.model import copy_rate, product_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    table = Table(
        "threads",
        "precision",
        "32 rows",
        "256 rows",
        "2048 rows",
        "copy",
        title="TFLOP/s of 1536 x 576, GB/s",
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            name, copied = str(dtype).removeprefix("torch."), f"{copy_rate():.1f}"
            rates = (product_rate(rows, dtype, limit_s=5.0) for rows in (32, 256, 2048))
            table.add_row(str(threads), name, *(f"{rate:.3f}" for rate in rates), copied)
            if dtype == torch.float32 and prefers_onednn():
                rates = (product_rate(rows, dtype, limit_s=5.0, multiply=linear) for rows in (32, 256, 2048))
                table.add_row(str(threads), f"{name}, torch's BLAS", *(f"{rate:.3f}" for rate in rates), "")
    Console().print(table, f"processor: {processor()}", f"layers: {kernels()}", sep="\n")


if __name__ == "__main__":
    main()
