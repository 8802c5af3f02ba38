"""Runs on several processes (extra ``cluster``): Ray actors, with weights sharded by FSDP2.

Only this package imports ray. Its requirements are checked before a model is loaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import ConfigError
from outrider.training.learner import Learner
from outrider.training.restarts import Allowance
from outrider.training.settings import RunSettings

if TYPE_CHECKING:
    from outrider.distributed.actors import RemoteProcesses


def sharded_learner(settings: RunSettings, *, initial: bool) -> Learner:
    """Start Ray and the trainer ranks. Raises ConfigError without Ray or with a torch that is too old."""
    require_packages()
    from outrider.distributed.learner import ShardedLearner

    return ShardedLearner(settings, initial=initial)


def remote_rollouts(
    settings: RunSettings, learner: Learner, *, folder: Path, allowance: Allowance | None = None
) -> "RemoteProcesses":
    """Start Ray, unless the learner has started it, and the engines. Raises ConfigError without Ray."""
    require_ray("cluster.num_engines, num_rollout_workers and weights need")
    from outrider.distributed.actors import RemoteProcesses

    if not settings.has_ranks:
        return RemoteProcesses(settings, learner, folder=folder, allowance=allowance)
    from outrider.distributed.learner import ShardedLearner

    assert isinstance(learner, ShardedLearner)
    return RemoteProcesses(
        settings, learner, folder=folder, allowance=allowance, session=learner.session, ranks=learner
    )


def require_ray(subject: str) -> None:
    """Raise ConfigError with the missing package."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{subject} Ray: pip install 'outrider[cluster]'") from error


def require_packages() -> None:
    """Raise ConfigError with the missing package."""
    require_ray("cluster.num_trainers above 1 needs")
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: F401
        from torch.distributed.fsdp import FSDPModule

        FSDPModule.set_force_sum_reduction_for_comms  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "cluster.num_trainers above 1 needs a torch with FSDP2's sums and safetensors checkpoints: "
            "pip install --upgrade torch"
        ) from error
