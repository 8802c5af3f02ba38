"""The policy and the engine that a run's settings name, and the weights that they begin with."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from safetensors import SafetensorError

from outrider.config_paths import shown_path
from outrider.engines.base import Engine, EngineContext
from outrider.engines.local.choice import describe_path
from outrider.engines.local.model import load_model, resolve_precision
from outrider.engines.local.positions import check_positions
from outrider.errors import CheckpointError
from outrider.plugins import registry as plugins
from outrider.tokens import ChatRenderer
from outrider.train.cluster_restarts import Allowance
from outrider.train.components import RemoteRollouts
from outrider.train.learner import Learner, LocalLearner
from outrider.train.rendering import make_checked_renderer
from outrider.train.settings import RunSettings
from outrider.train.state.checkpoint import checkpoints_newest_first, require_intact
from outrider.train.state.checkpoint_state import STATE
from outrider.train.update.adapters import coverage
from outrider.train.update.policy import Policy
from outrider.train.update.weight_files import OPTIMIZER, read_tensors, tensor_files


class StartLearner(Protocol):
    """Makes what learns; ``initial``: with the weights that a run begins with."""

    def __call__(self, settings: RunSettings, *, initial: bool) -> Learner:
        """Raises what a model that cannot be loaded raises."""
        ...


class StartRemote(Protocol):
    """Starts engines in other processes; ``folder`` is theirs, ``allowance`` how often they may be
    replaced (None: as the settings have it).
    """

    def __call__(
        self,
        settings: RunSettings,
        learner: Learner,
        *,
        folder: Path,
        allowance: Allowance | None = None,
    ) -> RemoteRollouts:
        """Raises what a model that cannot be loaded raises, and ClusterFault."""
        ...


def local_learner(settings: RunSettings, *, initial: bool) -> Learner:
    """The policy in this process, with a reference where the algorithm has use for one."""
    policy = make_policy(settings, initial=initial)
    reference = policy.frozen_copy() if settings.algorithm.needs_reference else None
    return LocalLearner(settings=settings, policy=policy, reference=reference)


def learner_and_renderer(
    settings: RunSettings, *, resumed: bool, note: Callable[[str], None], start_learner: StartLearner
) -> tuple[Learner, ChatRenderer]:
    """The model with its chat template, and what a person should know of them."""
    learner = start_learner(settings, initial=not resumed)
    note(describe_path(learner.language_model, settings.model.name))
    lora = settings.model.lora
    if lora is not None and (message := coverage(learner.language_model.model, lora)):
        note(message)
    longest = learner.language_model.context_length
    check_positions(settings, model=settings.model.name, longest=longest, note=note, resumed=resumed)
    tokenizer = learner.language_model.tokenizer
    return learner, make_checked_renderer(tokenizer, settings.model, settings.environment, note=note)


def make_policy(settings: RunSettings, *, initial: bool = True) -> Policy:
    """The model with its optimiser, with the weights of ``model.initial_checkpoint`` where one is named and
    wanted.
    """
    model_settings = settings.model
    model = load_model(
        model_settings.name,
        precision=model_settings.precision,
        device=model_settings.device,
        forward=model_settings.forward,
    )
    policy = Policy(
        model,
        settings.optimizer,
        lora=settings.model.lora,
        trained_layers=settings.model.trained_layers,
        seed=settings.seed,
        checkpoint_activations=settings.update.checkpoint_activations,
        uses_flex=settings.update.uses_flex(settings.model.device),
    )
    if initial and settings.model.initial_checkpoint is not None:
        load_weights(policy, Path(settings.model.initial_checkpoint))
    return policy


def make_engine(
    settings: RunSettings, learner: Learner, *, folder: Path, on_tokens: Callable[[int], None]
) -> Engine:
    """The engine that ``engine.type`` names; ``folder`` is where one with weights of its own reads them."""
    context = EngineContext(
        language_model=learner.language_model,
        export=learner.export,
        folder=folder,
        context_length=settings.model.context_length,
        precision=resolve_precision(settings.model.precision, settings.model.device),
        device=settings.model.device,
        seed=settings.seed,
        on_tokens=on_tokens,
    )
    return cast(Engine, plugins.build("engines", settings.engine, context))


def load_weights(policy: Policy, checkpoint: Path) -> None:
    """Weights of a checkpoint without its optimiser. Raises CheckpointError."""
    files = [name for name in tensor_files(checkpoint) if name != OPTIMIZER]
    if not any((checkpoint / name).is_file() for name in (*files, STATE)):
        raise CheckpointError(f"{shown_path(checkpoint)} is no checkpoint: {_suggest_checkpoint(checkpoint)}")
    for name in files:
        require_intact(checkpoint, name)
    try:
        masters = read_tensors(checkpoint, with_optimizer=False)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read weights from {shown_path(checkpoint)}: {str(error).splitlines()[0]}"
        ) from error
    if {n: t.shape for n, t in masters.items()} != {n: t.shape for n, t in policy.masters.items()}:
        raise CheckpointError(
            f"{shown_path(checkpoint)} holds the weights of another model or adapter: set model.name, "
            "model.lora and model.trained_layers as in the config.toml of its run"
        )
    for name, master in policy.masters.items():
        master.copy_(masters[name])
    policy.round_masters()


def _suggest_checkpoint(folder: Path) -> str:
    """Name to suggest where a folder is no checkpoint: of a run directory its newest one."""
    if checkpoints := checkpoints_newest_first(folder / "checkpoints"):
        return f"it is a run directory, name one of its checkpoints, such as {shown_path(checkpoints[0])}"
    return "it has no masters.safetensors; name a folder RUN/checkpoints/step-NNNNNN"
