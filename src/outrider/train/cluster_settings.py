"""Settings of a run on more than one process. They need neither torch nor ray."""

from typing import ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.config import Settings

# What the design names and no code does yet: refused, so that a recipe never asks for it in silence.
_NOT_YET: Final = {
    "num_engines": 1, "tensor_parallel": 1, "num_rollout_workers": 1, "placement": "disaggregate",
    "max_staleness": 0, "in_flight": False, "weights": "auto",
}  # fmt: skip


class ClusterSettings(Settings):
    """More than one process (extra ``cluster``): ``num_trainers`` ranks hold the weights, their optimiser and
    the reference in shards and share each update.

    The loss and the gradient are those of one process within 1e-6; the same number of ranks gives the same
    bits. ``ray_address``: ``local`` starts a Ray of the run's own, ``auto`` or an address joins one.
    ``placement_timeout_s`` bounds the wait for processors, ``update_timeout_s`` one call of the ranks. The
    other fields have one possible value so far.
    """

    details: ClassVar[frozenset[str]] = frozenset({"placement_timeout_s", "update_timeout_s"})

    num_trainers: int = Field(1, ge=1)
    num_engines: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1)
    num_rollout_workers: int = Field(1, ge=1)
    placement: Literal["disaggregate", "colocate"] = "disaggregate"
    max_staleness: int = Field(0, ge=0)
    in_flight: bool = False
    weights: Literal["auto", "nccl", "ipc", "store", "disk"] = "auto"
    ray_address: str = "local"
    placement_timeout_s: float = Field(120.0, gt=0)
    update_timeout_s: float = Field(3600.0, gt=0)

    @model_validator(mode="after")
    def _possible(self) -> "ClusterSettings":
        if self.placement == "colocate" and self.max_staleness:
            raise ValueError("placement = colocate has max_staleness = 0: engines sleep while trainers work")
        if self.max_staleness > 1 and not self.in_flight:
            raise ValueError("max_staleness above 1 needs in_flight = true")
        for name, only in _NOT_YET.items():
            if getattr(self, name) != only:
                told = str(only).lower() if isinstance(only, bool) else only
                raise ValueError(f"{name} is {told} so far: rollouts run in one process")
        return self
