"""What a device can do at most, measured on it: a copy for its memory's bandwidth, a product for its
matrix rate; and how much of both a decoding step and an update use.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from benchmarks.speed_clock import synchronise
from outrider.engines.local.model import median_seconds
from outrider.planning.memory import token_bytes, weight_bytes
from outrider.planning.shape import ModelShape
from outrider.training.packing import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``copy``: bytes read and written per second. ``product``: floating-point operations per second of a
    square product in the working precision.
    """

    copy: float
    product: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def measure_limits(device: str, dtype: torch.dtype, *, num_bytes: int, size: int) -> Limits:
    """A copy of ``num_bytes``, a product of two matrices of ``size`` x ``size``."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = source.clone()
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    copied = median_seconds(_waited(lambda: target.copy_(source), device), limit_s=10.0)
    multiplied = median_seconds(_waited(lambda: left @ right, device), limit_s=10.0)
    return Limits(copy=2 * num_bytes / copied, product=2 * size**3 / multiplied)


def _waited(run: Callable[[], object], device: str) -> Callable[[], None]:
    def whole() -> None:
        run()
        synchronise(device)

    return whole


def seconds(run: Callable[[], object], device: str) -> float:
    """Return the seconds of one call until the device has finished."""
    synchronise(device)
    began = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - began


def step_bytes(shape: ModelShape, *, rows: int, context: int, value_bytes: int) -> float:
    """Return the bytes that a decoding step reads: every weight once (without an untied embedding, of which
    it reads one row per token), and the keys and values of all rows.
    """
    read = weight_bytes(shape, tensor_parallel=1, value_bytes=value_bytes)
    if not shape.is_tied:
        read -= value_bytes * shape.embedding_parameters
    return read + rows * context * token_bytes(shape, tensor_parallel=1, value_bytes=value_bytes)


def update_operations(shape: ModelShape, batch: PackedBatch, *, trains_all: bool) -> float:
    """Return the useful operations of forward and backward pass: 6 per weight and token (4 if only adapters
    train, without the gradients of the weights), the vocabulary projection for scored tokens only, and 12 H D
    per layer for every pair of a query and a visible key. Recomputation is not counted.
    """
    per_weight = 6 if trains_all else 4
    layers = shape.num_layers * shape.layer_parameters * batch.num_tokens
    head = shape.embedding_parameters * len(batch.targets_U)
    pairs = 12 * shape.num_layers * shape.attention_width * seen_pairs(batch)
    return per_weight * (layers + head) + pairs


def seen_pairs(batch: PackedBatch) -> int:
    """Queries times the keys that each sees, over the tree of a packed row."""
    segments = batch.plan.segments
    return sum(
        one.length * sum(segments[index].length for index in one.ancestors)
        + one.length * (one.length + 1) // 2
        for one in segments
    )
