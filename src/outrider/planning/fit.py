"""Whether processes of a layout fit on their GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from outrider.errors import ConfigError
from outrider.planning.memory import (
    MARGIN,
    PROCESS_BYTES,
    SLEEPING_BYTES,
    rank_bytes,
    token_bytes,
    weight_bytes,
    with_margin,
)
from outrider.planning.shape import ModelShape
from outrider.planning.workload import Workload

GIB: Final = 2**30
# engine.memory where a recipe does not set it: beside a trainer, on a GPU of its own, GiB on a CPU
# (outrider.engines.vllm_requests.options, outrider.scale.vllm)
_SHARE_COLOCATED, _SHARE_ALONE, _CPU_GIB = 0.3, 0.9, 2.0
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
        settings = {
            "num_trainers": self.trainers,
            "num_engines": self.engines,
            "tensor_parallel": self.tensor_parallel,
            "placement": self.placement,
        }
        return [f"cluster.{name}={value}" for name, value in settings.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes of a layout. ``rank``: of one trainer rank by purpose; ``trainer_gpu`` and ``engine_gpu``: all of
    such a GPU without keys and values (the same if both are one; on a CPU both are the sum of all processes);
    ``episodes``: how many of the longest ones an engine has room for at a time; ``engine_share``: the share
    of a GPU that vLLM uses (``engine.memory``), None for an engine that takes what the trainer leaves.
    """

    layout: Layout
    rank: Mapping[str, float]
    weights: float
    trainer_gpu: float
    engine_gpu: float
    token: float
    episodes: int
    gpu_memory: float
    engine_share: float | None = None

    @property
    def fits(self) -> bool:
        """Both kinds of GPU, with room for an episode."""
        return max(self.trainer_gpu, self.engine_gpu) <= self.gpu_memory and self.episodes >= 1


def fit(shape: ModelShape, work: Workload, layout: Layout, *, gpu_memory: float) -> Fit:
    """Count it. A GPU needs 1.1 times the bytes of its processes and 2 GB
    (:func:`outrider.planning.memory.with_margin`); what is left is for keys and values.

    A colocated GPU counts the trainer's peak, the engine's weights and what a sleeping engine leaves: both at
    once, an upper bound. vLLM uses at most its share ``engine.memory`` of a GPU: 1.1 times its weights, and
    keys and values in the rest. Raises ConfigError if ``engine.memory`` is no share.
    """
    rank = rank_bytes(shape, replace(work.training, ranks=layout.trainers))
    trainer, tp = sum(rank.values()), layout.tensor_parallel
    shares_gpu = layout.placement != "disaggregate"
    shared = layout.placement == "process" and work.shares_weights
    # an engine of another process has weights in bfloat16
    value_bytes = work.training.value_bytes if shared else 2
    weights = 0.0 if shared else weight_bytes(shape, tensor_parallel=tp)
    asleep = SLEEPING_BYTES if layout.placement == "colocate" else 0
    shared_gpu_bytes = with_margin(trainer + weights + asleep)
    engine = shared_gpu_bytes if shares_gpu else with_margin(weights)
    token = token_bytes(shape, tensor_parallel=tp, value_bytes=value_bytes)
    room = max(0.0, gpu_memory - engine) / MARGIN
    share = _engine_share(work, layout)
    if share is not None:
        room = min(room, max(0.0, share * gpu_memory - MARGIN * weights))
    return Fit(
        layout=layout,
        rank=rank,
        weights=weights,
        trainer_gpu=shared_gpu_bytes if shares_gpu else with_margin(trainer),
        engine_gpu=engine,
        token=token,
        episodes=int(room // (token * work.context)),
        gpu_memory=gpu_memory,
        engine_share=share,
    )


def fit_cpu(shape: ModelShape, work: Workload, layout: Layout, *, memory: float) -> Fit:
    """Count the processes of a run on a CPU, which share ``memory`` bytes: 1.1 times their tensors and 0.5 GB
    each; keys and values get the rest, or ``engine.memory`` GiB of vLLM.
    """
    rank = rank_bytes(shape, replace(work.training, ranks=layout.trainers))
    shared = layout.placement == "process" and work.shares_weights
    value_bytes = work.training.value_bytes
    weights = 0.0 if shared else weight_bytes(shape, tensor_parallel=1, value_bytes=value_bytes)
    engines = layout.engines if weights else 0
    num_processes = layout.trainers + (engines if layout.placement != "process" else 0)
    total = (
        MARGIN * (layout.trainers * sum(rank.values()) + engines * weights) + num_processes * PROCESS_BYTES
    )
    token = token_bytes(shape, tensor_parallel=1, value_bytes=value_bytes)
    room = max(0.0, memory - total) / MARGIN / layout.engines
    if work.has_vllm:
        room = min(room, GIB * (work.engine_memory or _CPU_GIB))
    return Fit(
        layout=layout, rank=rank, weights=weights, trainer_gpu=total, engine_gpu=total, token=token,
        episodes=int(room // (token * work.context)), gpu_memory=memory,
    )  # fmt: skip


def _engine_share(work: Workload, layout: Layout) -> float | None:
    if not work.has_vllm:
        return None
    default = _SHARE_ALONE if layout.placement == "disaggregate" else _SHARE_COLOCATED
    share = default if work.engine_memory is None else work.engine_memory
    if share > 1:
        raise ConfigError(f"engine.memory = {share:g}: on a GPU it is a share between 0 and 1")
    return share
