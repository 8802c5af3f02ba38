"""What to change where a run does not fit: fewer tokens in a pass, or more GPUs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from outrider.planning.fit import Fit, Layout, Placement, fit
from outrider.planning.shape import ModelShape
from outrider.planning.workload import Workload

_MAX_NODES: Final = 64
_MIN_TOKENS: Final = 256


def smallest_fit(
    shape: ModelShape, work: Workload, placement: Placement, *, gpu_memory: float, gpus_per_node: int
) -> Fit | None:
    """The fewest GPUs, and then the fewest per engine, that hold it; None where no number of them does.

    Trainers are a power of two within a node, else whole nodes; an engine is within a node.
    """
    for trainers in _gpu_counts(gpus_per_node):
        for tp in _tensor_parallel_sizes(shape, gpus_per_node):
            if placement == "colocate" and trainers % tp:
                continue
            engines = trainers // tp if placement == "colocate" else 1
            layout = Layout(placement=placement, trainers=trainers, engines=engines, tensor_parallel=tp)
            if (candidate := fit(shape, work, layout, gpu_memory=gpu_memory)).fits:
                return candidate
    return None


def fits_if_checkpointed(shape: ModelShape, work: Workload, layout: Layout, *, gpu_memory: float) -> bool:
    """Whether ``update.checkpoint_activations`` alone makes it fit."""
    candidate = replace(work, training=replace(work.training, checkpointed=True))
    return not work.training.checkpointed and fit(shape, candidate, layout, gpu_memory=gpu_memory).fits


def largest_tokens(shape: ModelShape, work: Workload, layout: Layout, *, gpu_memory: float) -> int | None:
    """The largest ``update.max_tokens`` in halves of the recipe's that fits, None where none does. Below the
    longest episode it would change nothing: an episode is one micro-batch at least.
    """
    tokens = work.training.max_tokens // 2
    while tokens >= max(work.episode_tokens, _MIN_TOKENS):
        candidate = replace(work, training=replace(work.training, max_tokens=tokens))
        if fit(shape, candidate, layout, gpu_memory=gpu_memory).fits:
            return tokens
        tokens //= 2
    return None


def smallest_share(shape: ModelShape, work: Workload, layout: Layout, *, gpu_memory: float) -> float | None:
    """The smallest ``engine.memory`` in steps of 0.05 with room for an episode, None if no share fits."""
    for twentieths in range(1, 20):
        candidate = replace(work, engine_memory=twentieths / 20)
        if fit(shape, candidate, layout, gpu_memory=gpu_memory).fits:
            return twentieths / 20
    return None


def _gpu_counts(gpus_per_node: int) -> Iterator[int]:
    number = 1
    while number < gpus_per_node:
        yield number
        number *= 2
    yield from (gpus_per_node * nodes for nodes in range(1, _MAX_NODES + 1))


def _tensor_parallel_sizes(shape: ModelShape, gpus_per_node: int) -> list[int]:
    """GPUs per engine: vLLM cuts heads evenly."""
    powers = [2**power for power in range(gpus_per_node.bit_length())]
    return [tp for tp in powers if tp <= gpus_per_node and shape.num_heads % tp == 0]
