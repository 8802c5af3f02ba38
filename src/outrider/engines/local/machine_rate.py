"""How fast this machine multiplies: what bounds generation and update, measured briefly."""

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

_NUM_WARM_UP = 3


def median_seconds(run: Callable[[], object], *, repeats: int = 15, limit_s: float = math.inf) -> float:
    """Median of ``repeats`` calls after three that warm up; of those done when ``limit_s`` seconds are
    over.
    """
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < repeats + _NUM_WARM_UP and (not seconds or time.perf_counter() - began < limit_s):
        before = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds[_NUM_WARM_UP:] or seconds[-1:])


def product_rate(num_rows: int, dtype: torch.dtype, *, limit_s: float = math.inf) -> float:
    """TFLOP/s of a layer of the demo's model (1,536 x 576) over ``num_rows`` rows, at torch's thread
    count.
    """
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(rows, 576, generator=generator).to(dtype) for rows in (num_rows, 1536))
    times = max(1, 2048 // num_rows)
    seconds = median_seconds(lambda: [linear(states, weight) for _ in range(times)], limit_s=limit_s)
    return 2 * num_rows * 576 * 1536 * times / seconds / 1e12


def copy_rate() -> float:
    """GB/s read and written by a copy into memory that is there already."""
    source = torch.zeros(2**28, dtype=torch.uint8)
    target = source.clone()
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source)) / 1e9
