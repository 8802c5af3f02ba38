"""Whether processes of a layout fit on their GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from outrider.planning.memory import (
    MARGIN,
    SLEEPING_BYTES,
    rank_bytes,
    token_bytes,
    weight_bytes,
    with_margin,
)
from outrider.planning.shape import ModelShape
from outrider.planning.workload import Workload

Placement = Literal["process", "colocate", "disaggregate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``process``: trainer and engine are one process on one GPU. ``colocate``: engines on the trainers'
    GPUs, asleep while these work. ``disaggregate``: GPUs of their own.
    """

    placement: Placement = "process"
    trainers: int = 1
    engines: int = 1
    tensor_parallel: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs of all processes."""
        own = self.engines * self.tensor_parallel if self.placement == "disaggregate" else 0
        return self.trainers + own

    @property
    def overrides(self) -> list[str]:
        """Settings that ask for it."""
        if self.placement == "process":
            return []
        found = {
            "num_trainers": self.trainers,
            "num_engines": self.engines,
            "tensor_parallel": self.tensor_parallel,
            "placement": self.placement,
        }
        return [f"cluster.{name}={value}" for name, value in found.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes of a layout. ``rank``: of one trainer rank by what they are for; ``trainer_gpu`` and
    ``engine_gpu``: the whole of such a GPU without keys and values (the same where both are one);
    ``episodes``: how many of the longest ones an engine has room for at a time.
    """

    layout: Layout
    rank: Mapping[str, float]
    weights: float
    trainer_gpu: float
    engine_gpu: float
    token: float
    episodes: int
    gpu_memory: float

    @property
    def fits(self) -> bool:
        """Both kinds of GPU, with room for an episode."""
        return max(self.trainer_gpu, self.engine_gpu) <= self.gpu_memory and self.episodes >= 1


def fit(shape: ModelShape, work: Workload, layout: Layout, *, gpu_memory: float) -> Fit:
    """Count it. A GPU needs 1.1 times the bytes of its processes and 2 GB
    (:func:`outrider.planning.memory.with_margin`); what is left is for keys and values.

    A colocated GPU counts the trainer's peak, the engine's weights and what a sleeping engine leaves: both at
    once, an upper bound.
    """
    rank = rank_bytes(shape, replace(work.training, ranks=layout.trainers))
    trainer, tp = sum(rank.values()), layout.tensor_parallel
    together = layout.placement != "disaggregate"
    shared = layout.placement == "process" and work.shares_weights
    # an engine of another process has weights in bfloat16
    value_bytes = work.training.value_bytes if shared else 2
    weights = 0.0 if shared else weight_bytes(shape, tensor_parallel=tp)
    asleep = SLEEPING_BYTES if layout.placement == "colocate" else 0
    both = with_margin(trainer + weights + asleep)
    engine = both if together else with_margin(weights)
    token = token_bytes(shape, tensor_parallel=tp, value_bytes=value_bytes)
    room = max(0.0, gpu_memory - engine) / MARGIN
    return Fit(
        layout=layout,
        rank=rank,
        weights=weights,
        trainer_gpu=both if together else with_margin(trainer),
        engine_gpu=engine,
        token=token,
        episodes=int(room // (token * work.context)),
        gpu_memory=gpu_memory,
    )
