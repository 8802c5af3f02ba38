"""Runs on several processes: trainer ranks, engines and rollout workers, on this machine or on those of a
Ray.

:mod:`outrider.distributed.processes` starts and calls them. Weights are sharded by FSDP2. Only
:mod:`outrider.distributed.nodes` imports ray. Requirements are checked before a model is loaded.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigError
from outrider.training.restarts import Allowance
from outrider.training.settings import RunSettings

if TYPE_CHECKING:
    from outrider.distributed.processes import Cluster
    from outrider.distributed.remote import RemoteProcesses
    from outrider.training.learner import Learner


def open_cluster(settings: RunSettings) -> "Cluster":
    """Start the fork server of this machine, or join a Ray. Raises ConfigError without Ray."""
    if settings.cluster.ray_address == "local":
        from outrider.distributed.processes import Cluster

        return Cluster(settings.cluster)
    require_ray(f"cluster.ray_address = {settings.cluster.ray_address} needs")
    from outrider.distributed.nodes import RayCluster

    return RayCluster(settings.cluster)


def start_ranks(settings: RunSettings, *, cluster: "Cluster", initial: bool) -> "Learner":
    """Start the trainer ranks of a run. Raises ConfigError with a torch that is too old."""
    require_torch()
    from outrider.distributed.learner import ShardedLearner

    return ShardedLearner(settings, cluster, initial=initial)


def start_rollout_processes(
    settings: RunSettings,
    learner: "Learner",
    *,
    cluster: "Cluster",
    folder: Path,
    allowance: Allowance | None = None,
) -> "RemoteProcesses":
    """Start the engines and the rollout workers of a run."""
    from outrider.distributed.learner import ShardedLearner
    from outrider.distributed.remote import RemoteProcesses

    ranks = learner if isinstance(learner, ShardedLearner) else None
    return RemoteProcesses(settings, learner, cluster, folder=folder, allowance=allowance, ranks=ranks)


def starters(settings: RunSettings, cluster: "Cluster") -> dict[str, Callable[..., object]]:
    """Return the arguments of :func:`outrider.training.setup.run_training` for a run on several processes."""
    found: dict[str, Callable[..., object]] = {}
    if settings.has_ranks:
        found["start_learner"] = partial(start_ranks, cluster=cluster)
    if settings.cluster.is_remote:
        found["start_remote"] = partial(start_rollout_processes, cluster=cluster)
    return found


def require_ray(subject: str) -> None:
    """Raise ConfigError with the missing package."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{subject} Ray: pip install 'outrider[cluster]'") from error


def require_torch() -> None:
    """Raise ConfigError for a torch without the parts of FSDP2 that trainer ranks use."""
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: F401
        from torch.distributed.fsdp import FSDPModule

        FSDPModule.set_force_sum_reduction_for_comms  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "cluster.num_trainers above 1 needs a torch with FSDP2's sums and safetensors checkpoints: "
            "pip install --upgrade torch"
        ) from error
