"""The ranks of a run over gloo and NCCL: what all of them know, and who computes what."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outrider.scale.placement import Shape, assign_to_ranks
from outrider.train.update.pack import RolloutPath

ValueT = TypeVar("ValueT")


class GlooRanks:
    """This process among ``size`` of them. A collective that takes longer than the group's limit raises."""

    def __init__(self, shape: Shape) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._shape = shape

    def gather(self, value: ValueT) -> list[ValueT]:
        """See :class:`outrider.train.update.ranks.Ranks`."""
        values: list[ValueT | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def share(self, paths: Sequence[RolloutPath]) -> list[RolloutPath]:
        """See :class:`outrider.train.update.ranks.Ranks`."""
        return assign_to_ranks(paths, num_ranks=self.size, cost=self._shape.cost)[self.rank]


def open_store(host: str, *, size: int, timeout_s: float) -> TCPStore:
    """Where ranks meet, on a free port; kept by rank 0 as long as the others need it."""
    return TCPStore(
        host, 0, size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def join(host: str, port: int, *, rank: int, size: int, timeout_s: float, device: str = "cpu") -> None:
    """Meet the other ranks: over gloo, and over NCCL for what is on a GPU, of which Ray shows each rank its
    own. Raises what torch raises when they do not come in time.
    """
    limit = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, size, is_master=False, timeout=limit, wait_for_workers=False)
    backend = "gloo"
    if device != "cpu":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
