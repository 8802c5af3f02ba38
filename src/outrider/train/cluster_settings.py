"""Settings of a run on more than one process. They need neither torch nor ray."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from outrider.config import Settings


class ClusterSettings(Settings):
    """More than one process (extra ``cluster``): ``num_trainers`` ranks hold the weights, their optimiser and
    the reference in shards and share each update; ``num_engines`` and ``num_rollout_workers`` processes
    generate and play.

    One engine and one worker are in the process that trains, unless ``weights`` says how weights go to them:
    through Ray's object store (``store``; ``auto`` where there are several), through files in the run
    directory (``disk``), or from the trainers' GPUs to those of vLLM (``nccl``; ``ipc`` on the same one). An
    engine has ``tensor_parallel`` GPUs; ``placement`` ``colocate`` puts one on each trainer's, which sleeps
    while that works. The loss and the gradient are those of one process within 1e-6; the same number of
    ranks gives the same bits. ``ray_address``: ``local`` starts a Ray of the run's own, ``auto`` or an
    address joins one. ``placement_timeout_s`` bounds the wait for processors, ``update_timeout_s`` one call
    of the ranks, a start, and a transfer of weights, ``turn_timeout_s`` one batch of an engine; a rollout
    worker answers a heartbeat within ``heartbeat_s``. ``max_staleness`` 1 plays the rollouts of the
    next step beside the update of this one: its tokens are one version old, which the sampler correction
    weighs. ``in_flight`` lets engines take new weights between two turns of an episode, and groups of
    ``max_staleness`` further steps play beside an update: no token is older than that, and the same seed does
    not give the same bits. ``batching``: an engine gets a round of requests of
    all rollouts of a worker (``rounds``), which come to the same bits again, or each as soon as it is there
    (``stream``), and no turn waits for another one's. A process that dies or is silent is
    replaced, or all begin anew from the newest checkpoint: ``max_restarts`` times within an hour, counted
    together.
    """

    details: ClassVar[frozenset[str]] = frozenset(
        {"max_restarts", "placement_timeout_s", "update_timeout_s", "turn_timeout_s", "heartbeat_s"}
    )

    num_trainers: int = Field(1, ge=1)
    num_engines: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1)
    num_rollout_workers: int = Field(1, ge=1)
    placement: Literal["disaggregate", "colocate"] = "disaggregate"
    max_staleness: int = Field(0, ge=0)
    in_flight: bool = False
    weights: Literal["auto", "nccl", "ipc", "store", "disk"] = "auto"
    batching: Literal["rounds", "stream"] = "rounds"
    ray_address: str = "local"
    placement_timeout_s: float = Field(120.0, gt=0)
    update_timeout_s: float = Field(3600.0, gt=0)
    turn_timeout_s: float = Field(600.0, gt=0)
    heartbeat_s: float = Field(60.0, gt=0)
    max_restarts: int = Field(3, ge=0)

    @property
    def is_remote(self) -> bool:
        """Whether engines and rollout workers are processes of their own."""
        several = self.num_engines > 1 or self.num_rollout_workers > 1
        return several or self.weights != "auto" or self.placement == "colocate"

    @property
    def sends_directly(self) -> bool:
        """Whether weights go from GPU to GPU."""
        return self.weights in ("nccl", "ipc")

    @property
    def num_processes(self) -> int:
        """Actors of the run."""
        trainers = self.num_trainers if self.num_trainers > 1 else 0
        return trainers + (self.num_engines + self.num_rollout_workers if self.is_remote else 0)

    @model_validator(mode="after")
    def _validate(self) -> "ClusterSettings":
        if self.placement == "colocate" and self.max_staleness:
            raise ValueError("placement = colocate has max_staleness = 0: engines sleep while trainers work")
        if self.max_staleness > 1 and not self.in_flight:
            raise ValueError("max_staleness above 1 needs in_flight = true")
        if self.batching == "stream" and not self.is_remote:
            raise ValueError("batching = stream needs engines in processes of their own: weights = store")
        if self.in_flight and (not self.max_staleness or self.batching != "stream"):
            raise ValueError(
                "in_flight needs max_staleness of at least 1, and batching = stream: engines take weights "
                "between two requests"
            )
        if self.max_staleness and not self.is_remote:
            raise ValueError(
                "max_staleness needs engines in processes of their own: weights = store, or several of them"
            )
        if self.placement == "colocate" and (self.tensor_parallel, self.num_engines) != (
            1,
            self.num_trainers,
        ):
            raise ValueError(
                "placement = colocate puts an engine on the GPU of each trainer: tensor_parallel = 1 and "
                "num_engines = num_trainers"
            )
        if self.weights == "ipc" and self.placement != "colocate":
            raise ValueError("weights = ipc goes within a GPU: placement = colocate, or weights = nccl")
        if self.weights == "nccl" and self.placement == "colocate":
            raise ValueError("weights = nccl goes from one GPU to another: placement = disaggregate, or ipc")
        if self.tensor_parallel > 1 and not self.is_remote:
            raise ValueError(
                "tensor_parallel needs engines in processes of their own: weights = store, or several of them"
            )
        return self
