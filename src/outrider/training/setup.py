"""The policy and the engine that a run's settings name, and the weights that they begin with."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Literal, Protocol, cast

from safetensors import SafetensorError

from outrider.algorithms.base import Algorithm, AlgorithmContext
from outrider.config import shown_path
from outrider.engines.base import Engine, EngineContext
from outrider.engines.local.engine import describe_path
from outrider.engines.local.model import LanguageModel, check_positions, load_model, resolve_precision
from outrider.environments.base import EnvironmentSettings, TaskSet, make_task_set, observation_roles
from outrider.errors import CheckpointError, ConfigError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.metrics import declare
from outrider.plugins import registry as plugins
from outrider.plugins.listing import write_origins
from outrider.rollout.base import RolloutStatus
from outrider.rollout.hooks import Hook, as_hooks
from outrider.tokens import ChatRenderer, Tokenizer
from outrider.tokens.template_check import check_template
from outrider.training.adapters import coverage
from outrider.training.buffers import open_buffer
from outrider.training.checkpoint import STATE, checkpoints_newest_first, newest_step, require_intact
from outrider.training.components import Components, RemoteRollouts, token_counter
from outrider.training.data import read_eval_tasks, task_notes, training_tasks
from outrider.training.experts import read_demonstrations
from outrider.training.learner import Learner, LocalLearner
from outrider.training.no_expert import require_experts
from outrider.training.policy import OPTIMIZER, Policy, read_tensors, set_threads, tensor_files
from outrider.training.restarts import Allowance, run_with_restarts
from outrider.training.resume import require_continuable
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import ModelSettings, RunSettings
from outrider.training.trainer import Trainer
from outrider.types import Step, Task
from outrider.viewer.progress import SET_UP, Progress, TokenMeter, WatchedProgress, make_progress
from outrider.viewer.report import write_report
from outrider.viewer.run_reader import RecordedProgress
from outrider.viewer.summary import summary_lines
from outrider.viewer.trackers import make_trackers

# The renderer that a run's settings mean, tried out before the first rollout.


def make_renderer(
    tokenizer: Tokenizer, model: ModelSettings, environment: EnvironmentSettings | None
) -> ChatRenderer:
    """For the episodes of an environment; None: for one question and one answer. Raises ModelError for a chat
    template that lacks what its episodes need.
    """
    return ChatRenderer(
        tokenizer,
        template_kwargs=model.template_kwargs,
        call_format=None if environment is None else environment.call_format,
        observations=() if environment is None else observation_roles(environment),
        history_thinking=model.history_thinking,
    )


def make_checked_renderer(
    tokenizer: Tokenizer,
    model: ModelSettings,
    environment: EnvironmentSettings,
    *,
    note: Callable[[str], None],
) -> ChatRenderer:
    """The same, with every role and order of the episodes tried, and what a person should know told.

    Raises ModelError with the template's name and the role for what cannot be rendered.
    """
    renderer = make_renderer(tokenizer, model, environment)
    report = check_template(renderer, observation_roles(environment))
    if not renderer.supports_system:
        note("the chat template has no system message: a prompt's goes in front of its first user message")
    for line in report.notes():
        note(line)
    return renderer


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


# Builds what a run needs from its settings; everything that can be missing is found here, before the first
# rollout.


def build(
    settings: RunSettings,
    *,
    buffer_path: Path,
    resumed: bool,
    on_tokens: Callable[[int], None],
    note: Callable[[str], None],
    start_learner: StartLearner = local_learner,
    start_remote: StartRemote | None = None,
) -> Components:
    """Load model, tasks, tools and buffer. Raises typed errors; nothing has been trained or played yet.

    A ``resumed`` run has weights and a filled buffer: neither is made again. ``start_learner`` makes what
    learns, ``start_remote`` what plays where that is not this process.
    """
    require_experts(settings)
    set_threads(settings.num_threads, device=settings.model.device)
    tasks = _read_tasks(settings, resumed=resumed)
    for line in tasks.notes:
        note(line)
    with ExitStack() as cleanup:  # closed again where a later part cannot be made
        factory = tasks.task_set.make()
        cleanup.callback(factory.close)
        learner, renderer = learner_and_renderer(
            settings, resumed=resumed, note=note, start_learner=start_learner
        )
        cleanup.callback(learner.close)
        engines = _Engines.from_settings(
            settings, learner, cleanup, buffer_path.parent / "engine", on_tokens, start_remote
        )
        buffer = open_buffer(
            settings, path=buffer_path, task_set=tasks.task_set, factory=factory, train_tasks=tasks.train,
            resumed=resumed, note=note, count_tokens=token_counter(renderer),
        )  # fmt: skip
        if buffer is not None:
            cleanup.callback(buffer.close)
        parts = Components(
            settings=settings,
            learner=learner,
            engine=engines.engine,
            renderer=renderer,
            task_set=tasks.task_set,
            factory=factory,
            train_tasks=tasks.train,
            test_tasks=tasks.test,
            num_training_tasks=tasks.num_training_tasks,
            buffer=buffer,
            algorithm=_algorithm(settings, tasks, buffer, model=learner.language_model, renderer=renderer),
            remote=engines.remote,
            demonstrations=tasks.demonstrations,
        )
        if parts.remote is not None:
            parts.remote.begin(parts)
        cleanup.pop_all()
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engines:
    """The engine of this process, or the one that stands for those elsewhere."""

    engine: Engine
    remote: RemoteRollouts | None = None

    @classmethod
    def from_settings(
        cls,
        settings: RunSettings,
        learner: Learner,
        cleanup: ExitStack,
        folder: Path,
        on_tokens: Callable[[int], None],
        start_remote: StartRemote | None,
    ) -> "_Engines":
        if start_remote is None:
            return cls(engine=make_engine(settings, learner, folder=folder, on_tokens=on_tokens))
        remote = start_remote(settings, learner, folder=folder)
        cleanup.callback(remote.close)
        return cls(engine=remote.engine, remote=remote)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskSplits:
    """Tasks to play, and the demonstrations of a cold start still to come (None: experts are asked).
    ``num_training_tasks`` of the evaluation tasks are training tasks; ``notes`` are lines for the log.
    """

    task_set: TaskSet
    train: Sequence[Task]
    test: Sequence[Task]
    num_training_tasks: int
    notes: Sequence[str]
    demonstrations: Mapping[str, Sequence[Step] | None] | None


def _read_tasks(settings: RunSettings, *, resumed: bool) -> _TaskSplits:
    task_set = make_task_set(settings.environment)
    train = training_tasks(task_set, settings)
    test = read_eval_tasks(task_set, settings.evaluation)
    num_training, notes = task_notes(task_set, settings, train, test)
    cold_start = settings.cold_start if settings.cold_start.num_examples and not resumed else None
    demonstrations_file = cold_start.demonstrations if cold_start is not None else None
    return _TaskSplits(
        task_set=task_set,
        train=train,
        test=test,
        num_training_tasks=num_training,
        notes=notes,
        demonstrations=None
        if demonstrations_file is None
        else read_demonstrations(demonstrations_file, train, settings.environment),
    )


def _algorithm(
    settings: RunSettings,
    tasks: _TaskSplits,
    buffer: StepTraceBuffer | None,
    *,
    model: LanguageModel,
    renderer: ChatRenderer,
) -> Algorithm:
    return make_algorithm(
        settings,
        buffer,
        vocabulary_size=int(model.model.config.get_text_config().vocab_size),
        stateful=tasks.task_set.stateful,
        num_tokens=token_counter(renderer),
        train_tasks=tasks.train,
    )


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
        read_demonstrations=partial(read_demonstrations, environment=settings.environment),
    )
    algorithm = cast(Algorithm, plugins.build("algorithms", settings.algorithm, context))
    if old := [hook for hook in algorithm.hooks if hasattr(hook, "max_remark_tokens")]:
        # It would pass for a hook that asks nothing.
        raise ConfigError(f"{type(old[0]).__name__}.max_remark_tokens is called max_reflection_tokens now")
    if not all(isinstance(hook, Hook) for hook in algorithm.hooks):
        algorithm.hooks = as_hooks(algorithm.hooks)
    declare(getattr(algorithm, "metrics", ()))
    return algorithm


# From settings to a finished run: build the parts, train, write the report whatever happened.


def run_training(
    opened: tuple[RunDirectory, RunSettings],
    *,
    progress: Literal["auto", "rich", "plain", "none"],
    on_start: Callable[[Callable[[], bool]], None],
    start_learner: StartLearner = local_learner,
    start_remote: StartRemote | None = None,
) -> None:
    """Run or continue; ``start_learner`` makes what learns, ``start_remote`` what plays in other processes.
    ``on_start`` gets a function that asks the trainer to stop soon, and returns whether the display says so.

    Raises ConfigError for the folder of an adaptation, and what set-up and training raise; all that was
    opened is closed.
    """
    run, settings = opened
    stop = Event()
    displays: list[Progress] = []

    def request_stop() -> bool:
        stop.set()
        return bool(displays) and displays[0].stopping()

    on_start(request_stop)  # a request during set-up is honoured at its end
    with ExitStack() as cleanup:  # last in, first out; each is done even where another one fails
        cleanup.callback(run.release)
        # the set-up's failure, whatever it was: the same command works once the cause is gone
        cleanup.callback(run.roll_back)
        if settings.evaluation.num_trials:
            raise ConfigError(
                "evaluation.num_trials is for `outrider eval --adapt K`: training has no trials"
            )
        rollout_status = RolloutStatus()
        recorded_display = RecordedProgress(make_progress(progress), run.path)
        display = WatchedProgress(
            recorded_display, rollout_status=rollout_status, after_s=settings.train.watchdog_s
        )
        cleanup.callback(display.close)
        displays.append(display)

        allowance = Allowance(settings.cluster.max_restarts)
        start_with_allowance = None if start_remote is None else partial(start_remote, allowance=allowance)

        def begin(num_restarts: int, attempt_cleanup: ExitStack) -> Callable[[], None]:
            trainer = _set_up(
                run,
                settings,
                display,
                rollout_status,
                stop,
                attempt_cleanup,
                start_learner,
                start_with_allowance,
            )
            trainer.num_restarts = num_restarts
            if not num_restarts:
                _commit(run, settings)
                cleanup.callback(_log_results, run, display)
            return trainer.train

        run_with_restarts(begin, allowance=allowance, stop=stop, note=display.note)


def _set_up(
    run: RunDirectory,
    settings: RunSettings,
    display: Progress,
    rollout_status: RolloutStatus,
    stop: Event,
    cleanup: ExitStack,
    start_learner: StartLearner,
    start_remote: StartRemote | None,
) -> Trainer:
    """All parts of the run and its trainer; ``cleanup`` closes what was opened, last in, first out."""
    display.stage(SET_UP, None)
    meter = TokenMeter(display)
    newest = newest_step(run.checkpoints)
    for line in require_continuable(run, settings):
        display.note(line)
    parts = build(
        settings,
        buffer_path=run.path / "buffer.sqlite",
        resumed=newest is not None,
        on_tokens=meter,
        note=display.note,
        start_learner=start_learner,
        start_remote=start_remote,
    )
    cleanup.callback(parts.learner.close)
    if parts.remote is not None:
        cleanup.callback(parts.remote.close)
    parts.rollout_status = rollout_status
    if parts.buffer is not None:
        cleanup.callback(parts.buffer.close)
    cleanup.callback(parts.factory.close)
    config = settings.model_dump(mode="json")
    trackers = make_trackers(
        settings.trackers,
        run_dir=run.path,
        config=config,
        newest_step=newest,
        first_step=-settings.cold_start.max_steps,
        warn=display.note,
    )
    cleanup.callback(trackers.close)
    trainer = Trainer(run=run, parts=parts, progress=display, trackers=trackers, stop=stop)
    cleanup.callback(trainer.state.close)
    meter.num_done = lambda: trainer.num_done
    return trainer


def _commit(run: RunDirectory, settings: RunSettings) -> None:
    """The set-up has not failed: the folder stays."""
    write_origins(settings, run.path)  # where they are now: a run that goes on may find others
    run.commit()
    run.retain()


def _log_results(run: RunDirectory, display: Progress) -> None:
    """What was learned, its cost, and the report. What cannot be read or written is said: a run's own error
    must stay the one that is told.
    """
    try:
        for line in summary_lines(run.path):
            display.note(line)
        display.note(f"report: {write_report(run.path)}")
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        display.note(f"NO REPORT: {reason}; write it later with: outrider report {run.path}")
