"""Builds what a run needs from its settings; everything that can be missing is found here, before the first rollout."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from outrider.algorithms.arpo import Arpo, ArpoSettings
from outrider.algorithms.base import Algorithm
from outrider.algorithms.empo2 import Empo2, Empo2Settings
from outrider.algorithms.gigpo import Gigpo, GigpoSettings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.luffy import Luffy, LuffySettings
from outrider.algorithms.rapo import Rapo, RapoSettings
from outrider.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusSettings
from outrider.algorithms.rejection import Rejection, RejectionSettings
from outrider.algorithms.rollout_replay import RolloutReplay, RolloutReplaySettings
from outrider.algorithms.tree_grpo import TreeGrpo, TreeGrpoSettings
from outrider.engines.base import Engine
from outrider.engines.local import LocalEngine
from outrider.engines.model import load_model, resolve_precision
from outrider.engines.vllm import VllmEngine, VllmSettings
from outrider.environments.base import EnvironmentFactory, TaskFamily
from outrider.environments.datasets import panel_hash
from outrider.environments.families import make_family
from outrider.errors import CheckpointError, DataError
from outrider.evals.runner import EvaluationSettings
from outrider.memory.database import copy_database
from outrider.memory.embedder import load_embedder
from outrider.memory.history import TokenCounter
from outrider.memory.steps import StepTraceBuffer
from outrider.rollout.whereabouts import Whereabouts
from outrider.tokens import ChatRenderer
from outrider.train.checkpoint import require_intact
from outrider.train.experts import demonstrations_of, fill_buffer
from outrider.train.policy import Policy, Scorer, set_threads
from outrider.train.settings import RunSettings
from outrider.types import Message, Task


@dataclass(slots=True, kw_only=True)
class Components:
    """The parts of a run. ``buffer`` is None for algorithms that do not retrieve, ``reference`` without a KL term."""

    settings: RunSettings
    policy: Policy
    reference: Scorer | None
    engine: Engine
    renderer: ChatRenderer
    family: TaskFamily
    factory: EnvironmentFactory
    train_tasks: Sequence[Task]
    test_tasks: Sequence[Task]
    buffer: StepTraceBuffer | None
    algorithm: Algorithm
    whereabouts: Whereabouts = field(default_factory=Whereabouts)  # of all rollouts: for the one who watches


def build(
    settings: RunSettings, *, buffer_path: Path, resumed: bool, on_tokens: Callable[[int], None], note: Callable[[str], None]
) -> Components:
    """Load model, tasks, tools and buffer. Raises typed errors; nothing has been trained or played yet.

    A ``resumed`` run has its weights in a checkpoint and its buffer filled: neither is made again.
    """
    set_threads(settings.num_threads, device=settings.model.device)
    family = make_family(settings.environment)
    train_tasks = family.tasks("train") if settings.train.num_steps or settings.cold_start.num_examples else ()
    test_tasks = held_out_panel(family, settings.evaluation)
    if settings.train.num_steps and len(train_tasks) < settings.train.tasks_per_step:
        raise DataError(
            f"{len(train_tasks)} training tasks are fewer than train.tasks_per_step = {settings.train.tasks_per_step}"
        )
    with ExitStack() as made:  # closed again where a later part cannot be made
        factory = family.make()
        made.callback(factory.close)
        policy = make_policy(settings, initial=not resumed)
        renderer = ChatRenderer(policy.language_model.tokenizer)
        if not renderer.takes_system:
            note("the chat template has no system message: a prompt's goes in front of its first user message")
        engine = make_engine(settings, policy, folder=buffer_path.parent / "engine", on_tokens=on_tokens)
        renderer = ChatRenderer(policy.language_model.tokenizer)
        buffer = open_buffer(
            settings,
            path=buffer_path,
            family=family,
            factory=factory,
            train_tasks=train_tasks,
            resumed=resumed,
            note=note,
            count_tokens=token_counter(renderer),
        )
        if buffer is not None:
            made.callback(buffer.close)
        algorithm = make_algorithm(
            settings,
            buffer,
            vocabulary_size=int(policy.model.config.get_text_config().vocab_size),
            stateful=family.stateful,
            num_tokens=token_counter(renderer),
            train_tasks=train_tasks,
        )
        parts = Components(
            settings=settings,
            policy=policy,
            reference=policy.frozen_copy() if settings.algorithm.needs_reference else None,
            engine=engine,
            renderer=renderer,
            family=family,
            factory=factory,
            train_tasks=train_tasks,
            test_tasks=test_tasks,
            buffer=buffer,
            algorithm=algorithm,
        )
        made.pop_all()
    return parts


def held_out_panel(family: TaskFamily, settings: EvaluationSettings) -> Sequence[Task]:
    """The first ``num_tasks`` of the split. Raises DataError where they are not the panel that the recipe names."""
    tasks = family.tasks(settings.split)[: settings.num_tasks]
    found = panel_hash(tasks)
    if settings.panel is not None and found != settings.panel:
        raise DataError(
            f"the {len(tasks)} tasks of the split {settings.split!r} are not the panel of the recipe: evaluation.panel is "
            f"{settings.panel}, theirs is {found} (evaluation.panel=none takes any)"
        )
    return tasks


def token_counter(renderer: ChatRenderer) -> Callable[[str], int]:
    """How many tokens a text inside a message has."""
    return lambda text: len(renderer.bridge((), [Message(role="inline", content=text)]))


def make_policy(settings: RunSettings, *, initial: bool = True) -> Policy:
    """The model with its optimiser, with the weights of ``model.initial_checkpoint`` where one is named and wanted."""
    model = load_model(settings.model.name, precision=settings.model.precision, device=settings.model.device)
    policy = Policy(
        model,
        settings.optimizer,
        lora=settings.model.lora,
        trained_layers=settings.model.trained_layers,
        seed=settings.seed,
        checkpoint_activations=settings.update.checkpoint_activations,
    )
    if initial and settings.model.initial_checkpoint is not None:
        load_weights(policy, Path(settings.model.initial_checkpoint))
    return policy


def make_engine(settings: RunSettings, policy: Policy, *, folder: Path, on_tokens: Callable[[int], None]) -> Engine:
    """The engine that ``engine.type`` names; ``folder`` is where one with weights of its own reads them."""
    lm = policy.language_model
    if not isinstance(settings.engine, VllmSettings):
        return LocalEngine(
            lm, context_length=settings.model.context_length, max_rows=settings.engine.max_rows, on_tokens=on_tokens
        )
    return VllmEngine(
        folder=folder,
        export=policy.export,
        tokenizer=lm.tokenizer,
        eos_token_ids=lm.eos_token_ids,
        eos_texts=lm.eos_texts,
        context_length=min(settings.model.context_length or lm.context_length, lm.context_length),
        precision=resolve_precision(settings.model.precision, settings.model.device),
        device=settings.model.device,
        settings=settings.engine,
        on_tokens=on_tokens,
    )


def load_weights(policy: Policy, checkpoint: Path) -> None:
    """Weights of a checkpoint without its optimiser. Raises CheckpointError."""
    require_intact(checkpoint, "masters.safetensors")
    try:
        masters = load_file(checkpoint / "masters.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read weights from {checkpoint}: {str(error).splitlines()[0]}") from error
    if {n: t.shape for n, t in masters.items()} != {n: t.shape for n, t in policy.masters.items()}:
        raise CheckpointError(f"{checkpoint} holds the weights of another model or adapter")
    for name, master in policy.masters.items():
        master.copy_(masters[name])
    policy.round_masters()


def make_algorithm(
    settings: RunSettings,
    buffer: StepTraceBuffer | None,
    *,
    vocabulary_size: int,
    stateful: bool,
    num_tokens: Callable[[str], int],
    train_tasks: Sequence[Task] = (),
) -> Algorithm:
    """The algorithm that ``algorithm.type`` names."""
    if isinstance(settings.algorithm, ArpoSettings):
        return Arpo(settings.algorithm, vocabulary_size=vocabulary_size, every_action=stateful)
    if isinstance(settings.algorithm, RapoSettings):
        return Rapo(
            settings.algorithm,
            buffer=buffer,
            num_training_steps=settings.train.num_steps,
            vocabulary_size=vocabulary_size,
            every_action=stateful,
        )
    if isinstance(settings.algorithm, Empo2Settings):
        return Empo2(
            settings.algorithm,
            embedder=load_embedder(settings.algorithm.memory.embedder),
            num_tokens=num_tokens,
            groups_per_step=settings.train.tasks_per_step,
            seed=settings.seed,
        )
    mixed = make_mixed_algorithm(settings, train_tasks)
    if mixed is not None:
        return mixed
    if isinstance(settings.algorithm, GigpoSettings):
        return Gigpo(settings.algorithm)
    if isinstance(settings.algorithm, ReinforcePlusPlusSettings):
        return ReinforcePlusPlus(settings.algorithm, max_response_tokens=settings.rollout.max_response_tokens)
    if isinstance(settings.algorithm, RejectionSettings):
        return Rejection(settings.algorithm)
    assert isinstance(settings.algorithm, GrpoSettings)
    return Grpo(settings.algorithm, max_response_tokens=settings.rollout.max_response_tokens)


def make_mixed_algorithm(settings: RunSettings, train_tasks: Sequence[Task]) -> Algorithm | None:
    """LUFFY, RolloutReplay or Tree-GRPO; None for another one. Raises DataError for demonstrations that cannot be used."""
    chosen = settings.algorithm
    if isinstance(chosen, LuffySettings):
        named = chosen.demonstrations if chosen.num_demonstrations and train_tasks else None
        return Luffy(chosen, paths={} if named is None else demonstrations_of(named, train_tasks))
    if isinstance(chosen, RolloutReplaySettings):
        return RolloutReplay(chosen, groups_per_step=settings.train.tasks_per_step, seed=settings.seed)
    return TreeGrpo(chosen) if isinstance(chosen, TreeGrpoSettings) else None


def open_buffer(
    settings: RunSettings,
    *,
    path: Path,
    family: TaskFamily,
    factory: EnvironmentFactory,
    train_tasks: Sequence[Task],
    resumed: bool,
    note: Callable[[str], None],
    count_tokens: TokenCounter,
) -> StepTraceBuffer | None:
    """RAPO's buffer: the one that is named, or one filled by the family's experts. None where nothing retrieves.

    An evolving run writes to a copy of its own of the buffer that is named: other runs may use that one.
    """
    if not isinstance(settings.algorithm, RapoSettings) or settings.algorithm.num_hybrid == 0 or not settings.train.num_steps:
        return None
    embedder = load_embedder(settings.buffer.embedder)
    named = Path(settings.buffer.path) if settings.buffer.path else None
    if named is not None and not settings.buffer.evolve:
        return _require_steps(StepTraceBuffer(named, embedder, mode="read"), "")
    if resumed and not path.exists():
        raise CheckpointError(f"{path} is missing: it holds the steps that this run retrieves; put it back")
    if named is not None and not path.exists():
        copy_database(named, path)
    buffer = StepTraceBuffer(path, embedder, mode="write")
    try:
        if buffer.report.lost_batch:
            note("the buffer's last writer was killed inside a batch: that batch is added again")
        if named is None and not resumed:
            tasks = train_tasks[: settings.buffer.num_tasks]
            fill_buffer(buffer, family, factory, tasks, settings, note, count_tokens=count_tokens)
            family.close()
        _require_steps(buffer, ": no expert solved a training task" if named is None and not resumed else "")
    except BaseException:
        buffer.close()
        raise
    return buffer


def _require_steps(buffer: StepTraceBuffer, why: str) -> StepTraceBuffer:
    if len(buffer) == 0:
        buffer.close()
        raise DataError(f"the step-trace buffer {buffer.path} is empty{why}")
    return buffer
