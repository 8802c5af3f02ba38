"""Rates of several alternating sides, so that a slow minute of the machine affects all of them."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def alternate(
    sides: dict[str, Callable[[], int]],
    repeats: int,
    *,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median rate of every side; the first round is a warm-up. A GPU is synchronised, so that the
    work of one side is not counted for the other.
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, run in sides.items():
            synchronise(device)
            began = clock()
            count = run()
            synchronise(device)
            rates[name].append(count / (clock() - began))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def synchronise(device: str) -> None:
    """Wait until everything that was queued on a GPU is done; a CPU queues nothing."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def against(rates: dict[str, float], base: str) -> Sequence[str]:
    return [f"{rate:.0f} ({rate / rates[base]:.2f} x)" for rate in rates.values()]
