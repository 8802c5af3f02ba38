"""The way into this package: what it needs is asked for before a model is loaded."""

from outrider.errors import ConfigError
from outrider.train.learner import Learner
from outrider.train.settings import RunSettings


def sharded_learner(settings: RunSettings, *, initial: bool) -> Learner:
    """For :func:`outrider.train.building.build`: starts Ray and the ranks. Raises ConfigError without Ray,
    and for a torch that is too old.
    """
    require_packages()
    from outrider.scale.learner import ShardedLearner

    return ShardedLearner(settings, initial=initial)


def require_packages() -> None:
    """Raises ConfigError, naming what to install."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "cluster.num_trainers above 1 needs Ray: pip install 'outrider[cluster]'"
        ) from error
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: F401
        from torch.distributed.fsdp import FSDPModule

        FSDPModule.set_force_sum_reduction_for_comms  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "cluster.num_trainers above 1 needs a torch with FSDP2's sums and safetensors checkpoints: "
            "pip install --upgrade torch"
        ) from error
