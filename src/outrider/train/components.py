"""Builds what a run needs from its settings; everything that can be missing is found here, before the first
rollout.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from safetensors.torch import load_file

from outrider.algorithms.algorithm import Algorithm
from outrider.algorithms.context import AlgorithmContext
from outrider.engines.base import Engine, EngineContext
from outrider.engines.local.model import load_model, resolve_precision
from outrider.engines.local.positions import check_positions
from outrider.environments.base import EnvironmentFactory, TaskFamily
from outrider.environments.families import make_family
from outrider.environments.tool_qa.datasets import panel_hash
from outrider.errors import CheckpointError, DataError
from outrider.memory.embedder import load_embedder
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.memory.steps.database import copy_database
from outrider.memory.steps.history import TokenCounter
from outrider.metrics import declare
from outrider.plugins import registry as plugins
from outrider.rollout.evaluate import EvaluationSettings
from outrider.rollout.whereabouts import Whereabouts
from outrider.tokens import ChatRenderer
from outrider.train.data.experts import demonstrations_of, fill_buffer
from outrider.train.data.no_expert import require_experts
from outrider.train.settings import RunSettings
from outrider.train.state.checkpoint import checkpoints_newest_first, require_intact
from outrider.train.state.checkpoint_state import STATE
from outrider.train.update.policy import Policy, Scorer, set_threads
from outrider.types import Message, Step, Task


@dataclass(slots=True, kw_only=True)
class Components:
    """The parts of a run. ``buffer`` is None for algorithms that do not retrieve, ``reference`` without a KL
    term.
    """

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
    # of the cold start, by task key; None: experts are asked
    demonstrations: Mapping[str, Sequence[Step] | None] | None = None
    whereabouts: Whereabouts = field(default_factory=Whereabouts)  # of all rollouts: for the one who watches


def build(
    settings: RunSettings,
    *,
    buffer_path: Path,
    resumed: bool,
    on_tokens: Callable[[int], None],
    note: Callable[[str], None],
) -> Components:
    """Load model, tasks, tools and buffer. Raises typed errors; nothing has been trained or played yet.

    A ``resumed`` run has its weights in a checkpoint and its buffer filled: neither is made again.
    """
    require_experts(settings)
    set_threads(settings.num_threads, device=settings.model.device)
    family = make_family(settings.environment)
    train_tasks = (
        family.tasks("train") if settings.train.num_steps or settings.cold_start.num_examples else ()
    )
    test_tasks = held_out_panel(family, settings.evaluation)
    if settings.train.num_steps and len(train_tasks) < settings.train.tasks_per_step:
        raise DataError(
            f"{len(train_tasks)} training tasks are fewer than train.tasks_per_step = {settings.train.tasks_per_step}"
        )
    begin = settings.cold_start if settings.cold_start.num_examples and not resumed else None
    named = begin.demonstrations if begin is not None else None
    demonstrations = None if named is None else demonstrations_of(named, train_tasks)
    with ExitStack() as made:  # closed again where a later part cannot be made
        factory = family.make()
        made.callback(factory.close)
        policy = make_policy(settings, initial=not resumed)
        longest = policy.language_model.context_length
        check_positions(settings, model=settings.model.name, longest=longest, note=note, resumed=resumed)
        renderer = ChatRenderer(policy.language_model.tokenizer)
        if not renderer.takes_system:
            note(
                "the chat template has no system message: a prompt's goes in front of its first user message"
            )
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
            demonstrations=demonstrations,
        )
        made.pop_all()
    return parts


def held_out_panel(family: TaskFamily, settings: EvaluationSettings) -> Sequence[Task]:
    """The first ``num_tasks`` of the split. Raises DataError where they are not the panel that the recipe
    names.
    """
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
    """The model with its optimiser, with the weights of ``model.initial_checkpoint`` where one is named and
    wanted.
    """
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


def make_engine(
    settings: RunSettings, policy: Policy, *, folder: Path, on_tokens: Callable[[int], None]
) -> Engine:
    """The engine that ``engine.type`` names; ``folder`` is where one with weights of its own reads them."""
    context = EngineContext(
        language_model=policy.language_model,
        export=policy.export,
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
    if not any((checkpoint / name).is_file() for name in ("masters.safetensors", STATE)):
        raise CheckpointError(f"{checkpoint} is no checkpoint: {_instead_of(checkpoint)}")
    require_intact(checkpoint, "masters.safetensors")
    try:
        masters = load_file(checkpoint / "masters.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read weights from {checkpoint}: {str(error).splitlines()[0]}"
        ) from error
    if {n: t.shape for n, t in masters.items()} != {n: t.shape for n, t in policy.masters.items()}:
        raise CheckpointError(
            f"{checkpoint} holds the weights of another model or adapter: set model.name, model.lora and "
            "model.trained_layers as in the config.toml of its run"
        )
    for name, master in policy.masters.items():
        master.copy_(masters[name])
    policy.round_masters()


def _instead_of(folder: Path) -> str:
    """What to name where a folder is no checkpoint; of a run directory its newest one."""
    if found := checkpoints_newest_first(folder / "checkpoints"):
        return f"it is a run directory, name one of its checkpoints, such as {found[0]}"
    return "it has no masters.safetensors; name a folder RUN/checkpoints/step-NNNNNN"


def make_algorithm(
    settings: RunSettings,
    buffer: StepTraceBuffer | None,
    *,
    vocabulary_size: int,
    stateful: bool,
    num_tokens: Callable[[str], int],
    train_tasks: Sequence[Task] = (),
) -> Algorithm:
    """The algorithm that ``algorithm.type`` names. Raises DataError for demonstrations that cannot be
    used.
    """
    context = AlgorithmContext(
        seed=settings.seed,
        num_training_steps=settings.train.num_steps,
        groups_per_step=settings.train.tasks_per_step,
        max_response_tokens=settings.rollout.max_response_tokens,
        vocabulary_size=vocabulary_size,
        is_stateful=stateful,
        count_tokens=num_tokens,
        train_tasks=train_tasks,
        buffer=buffer,
        load_embedder=load_embedder,
        read_demonstrations=demonstrations_of,
    )
    algorithm = cast(Algorithm, plugins.build("algorithms", settings.algorithm, context))
    declare(getattr(algorithm, "metrics", ()))
    return algorithm


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
    """The buffer of an algorithm that retrieves: the one that is named, or one that the family's experts
    fill.

    None where nothing retrieves.

    An evolving run writes to a copy of its own of the buffer that is named: other runs may use that one.
    """
    if not settings.algorithm.retrieves or not settings.train.num_steps:
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
