"""Builds the components of a run from its settings, and runs the training.

:func:`run_training` is the entry point. Everything that can be missing is found in :func:`build`, before the
first rollout.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias, cast

from safetensors import SafetensorError
from torch import Tensor

from outrider.algorithms.base import Algorithm, AlgorithmContext
from outrider.algorithms.distill_help import add_help_hook, file_lines, find_help_hook
from outrider.config import shown_path
from outrider.engines.base import Engine, EngineContext
from outrider.engines.local.engine import describe_path
from outrider.engines.local.model import LanguageModel, check_positions, load_model, resolve_precision
from outrider.environments.base import (
    EnvironmentFactory,
    EnvironmentSettings,
    TaskSet,
    make_task_set,
    observation_roles,
)
from outrider.errors import CheckpointError, ConfigError, DataError
from outrider.memory.embedders import load_embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.step_store import TokenCounter, copy_database
from outrider.metrics import declare
from outrider.plugins import registry as plugins
from outrider.plugins.listing import write_origins
from outrider.printing import plural, shell_command
from outrider.rollout.hooks import Hook, RolloutStatus, as_hooks
from outrider.tokens import ChatRenderer, Tokenizer
from outrider.tokens.template_check import check_template
from outrider.tokens.tool_calls import find_thinking_tokens
from outrider.training.adapters import coverage
from outrider.training.checkpoint import (
    STATE,
    checkpoints_newest_first,
    find_weights,
    newest_step,
    require_intact,
)
from outrider.training.components import Components
from outrider.training.data import (
    first_group,
    group_starts,
    read_eval_tasks,
    read_other_sets,
    require_some_tasks,
    task_notes,
    training_tasks,
)
from outrider.training.experts import (
    check_buffer_calls,
    fill_buffer,
    read_demonstrations,
    read_trajectories,
)
from outrider.training.learner import Learner, LocalLearner
from outrider.training.policy import OPTIMIZER, Policy, read_tensors, set_threads, tensor_files
from outrider.training.resume import note_start, require_continuable, weights_differences
from outrider.training.run_dir import RunDirectory
from outrider.training.settings import (
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    require_experts,
    require_extras,
)
from outrider.training.trainer import Trainer
from outrider.types import Task, ToolCall
from outrider.viewer.progress import (
    SET_UP,
    Progress,
    ProgressMode,
    TokenMeter,
    WatchedProgress,
    make_progress,
)
from outrider.viewer.report import write_report
from outrider.viewer.run_reader import RecordedProgress
from outrider.viewer.summary import summary_lines
from outrider.viewer.trackers import make_trackers

StartLearner: TypeAlias = Callable[..., Learner]
"""``start(settings, initial=...)`` makes the learner; ``initial``: with the weights that a run begins with.
Raises ModelError.
"""
StartRemote: TypeAlias = Callable[..., Any]
"""``start(settings, learner, folder=...)`` starts engines in other processes, which get the folder. Raises
ModelError and ClusterFault.
"""


def local_learner(settings: RunSettings, *, initial: bool) -> Learner:
    """The policy in this process, with a frozen reference if the algorithm needs one."""
    policy = make_policy(settings, initial=initial)
    reference = policy.frozen_copy() if settings.algorithm.needs_reference else None
    return LocalLearner(settings=settings, policy=policy, reference=reference)


def run_training(
    opened: tuple[RunDirectory, RunSettings],
    *,
    progress: ProgressMode,
    on_start: Callable[[Callable[[], bool]], None],
    recipe: str | None = None,
    start_learner: StartLearner = local_learner,
    start_remote: StartRemote | None = None,
) -> None:
    """Build the components, train or continue, and write the report whatever happened. ``recipe`` is the name
    of its file for the log (None: the run's own ``config.toml``).

    ``start_remote`` starts engines in other processes, if there are any. ``on_start`` gets a function that
    requests a stop after the current step and returns whether the display reports that.

    Raises ConfigError for the folder of an adaptation, and what set-up and training raise; everything that
    was opened is closed.
    """
    run, settings = opened
    stop = Event()
    displays: list[Progress] = []

    def request_stop() -> bool:
        stop.set()
        return bool(displays) and displays[0].stopping()

    on_start(request_stop)  # a request during set-up is honoured at its end
    with ExitStack() as cleanup:  # last in, first out; each is done even if another one fails
        cleanup.callback(run.release)
        # If the set-up fails, the same command works once the cause is gone.
        cleanup.callback(run.roll_back)
        if settings.evaluation.num_trials:
            raise ConfigError(
                "evaluation.num_trials is for evaluations (outrider eval --adapt K; num_trials=K in Python): "
                "training has no trials"
            )
        rollout_status = RolloutStatus()
        recorded = RecordedProgress(make_progress(progress), run.path)
        display = WatchedProgress(
            recorded,
            rollout_status=rollout_status,
            after_s=settings.train.watchdog_s,
        )
        cleanup.callback(display.close)
        displays.append(display)
        note_start(
            display,
            run=run.path,
            source=f"recipe {shlex.quote(recipe or str(run.path / 'config.toml'))}",
            num_threads=settings.num_threads,
            device=settings.model.device,
        )

        def begin(num_restarts: int, attempt_cleanup: ExitStack) -> Callable[[], None]:
            trainer = _set_up(
                run, settings, display, rollout_status, stop, attempt_cleanup, start_learner, start_remote
            )
            trainer.num_restarts = num_restarts
            recorded.on_alarm = trainer.trackers.alert
            if not num_restarts:  # the set-up has not failed: the folder stays
                write_origins(settings, run.path)  # where plug-ins are now: a resumed run may find others
                run.retain()
                cleanup.callback(_log_results, run, display)
            return trainer.train

        if not settings.has_ranks and start_remote is None:
            with ExitStack() as parts_cleanup:
                begin(0, parts_cleanup)()
            return
        from outrider.training.restarts import Allowance, run_with_restarts

        allowance = Allowance(settings.cluster.max_restarts)
        if start_remote is not None:
            start_remote = partial(start_remote, allowance=allowance)
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
    """All components of the run and its trainer; ``cleanup`` closes what was opened, last in, first out."""
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
    trackers = make_trackers(
        settings.trackers,
        run_dir=run.path,
        tracking=settings.tracking,
        config=settings.model_dump(mode="json"),
        newest_step=newest,
        first_step=-settings.cold_start.max_steps,
        warn=display.note,
    )
    cleanup.callback(trackers.close)
    trainer = Trainer(run=run, parts=parts, progress=display, trackers=trackers, stop=stop)
    cleanup.callback(trainer.state.close)
    meter.num_done = lambda: trainer.num_done
    return trainer


def _log_results(run: RunDirectory, display: Progress) -> None:
    """Print what was learned and its cost, and write the report. An error here is only reported: if the run
    failed, its own error must stay the one that is raised.
    """
    try:
        for line in summary_lines(run.path):
            display.note(line, event="summary")
        report = write_report(run.path)
        display.note(
            f"report: {shlex.quote(str(report))}", event="end", run=str(run.path), report=str(report)
        )
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        display.note(f"NO REPORT: {reason}; write it later with: {shell_command('report', run.path)}")


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
    """Load model, tasks, tools and buffer. Raises typed errors; nothing has been trained or generated yet.

    A ``resumed`` run has weights and a filled buffer: neither is made again.
    """
    require_experts(settings)
    require_extras(settings)
    model_settings = settings.model
    set_threads(settings.num_threads, device=model_settings.device)
    task_set = make_task_set(settings.environment)
    train_tasks = training_tasks(task_set, settings)
    test_tasks = read_eval_tasks(task_set, settings.evaluation)
    require_some_tasks(train_tasks, test_tasks, settings)
    num_training_tasks, lines = task_notes(task_set, settings, train_tasks, test_tasks)
    other_sets, other_lines = read_other_sets(task_set, settings, train_tasks)
    lines += other_lines
    if settings.train.max_policy_tokens is not None and settings.algorithm.depends_on_num_steps:
        lines.append(
            f"the probability of a retrieval changes until step {settings.train.num_steps}: if "
            "train.max_policy_tokens ends the run before, it does not reach final_probability; set "
            "algorithm.retrieval.schedule_steps"
        )
    demonstrations = None  # use experts
    if settings.cold_start.num_examples and settings.cold_start.demonstrations is not None and not resumed:
        demonstrations = read_trajectories(
            settings.cold_start.demonstrations, train_tasks, settings.environment
        )
    for line in lines:
        note(line)
    with ExitStack() as cleanup:  # closed again if a later component cannot be made
        factory = task_set.make()
        cleanup.callback(factory.close)
        learner = start_learner(settings, initial=not resumed)
        cleanup.callback(learner.close)  # it may have started processes, and the checks below can fail
        language_model = learner.language_model
        note(describe_path(language_model, model_settings.name))
        if model_settings.initial_checkpoint is not None and not settings.trains:
            for line in weights_differences(Path(model_settings.initial_checkpoint)):
                note(line)
        if model_settings.lora is not None and (
            message := coverage(language_model.model, model_settings.lora)
        ):
            note(message)
        check_positions(
            settings,
            model=model_settings.name,
            longest=language_model.context_length,
            note=note,
            resumed=resumed,
        )
        renderer = make_checked_renderer(
            language_model.tokenizer, model_settings, settings.environment, note=note
        )
        if model_settings.lora is not None or model_settings.trained_layers is not None:
            note_unlearnable_tokens(language_model, renderer, note=note)
        remote = None
        if start_remote is None:
            context = EngineContext(
                language_model=language_model,
                export=learner.export,
                folder=buffer_path.parent / "engine",
                context_length=model_settings.context_length,
                precision=resolve_precision(model_settings.precision, model_settings.device),
                device=model_settings.device,
                seed=settings.seed,
                on_tokens=on_tokens,
            )
            engine = cast(Engine, plugins.build("engines", settings.engine, context))
        else:
            remote = start_remote(settings, learner, folder=buffer_path.parent / "engine")
            cleanup.callback(remote.close)
            engine = remote.engine
        buffer = open_buffer(
            settings, path=buffer_path, task_set=task_set, factory=factory, train_tasks=train_tasks,
            resumed=resumed, note=note, count_tokens=renderer.count_tokens,
        )  # fmt: skip
        if buffer is not None:
            cleanup.callback(buffer.close)
        algorithm = make_algorithm(
            settings,
            buffer,
            vocabulary_size=int(language_model.model.config.get_text_config().vocab_size),
            stateful=task_set.stateful,
            count_tokens=renderer.count_tokens,
            train_tasks=train_tasks,
        )
        check_reflections(algorithm, context_length=engine.context_length)
        parts = Components(
            settings=settings,
            learner=learner,
            engine=engine,
            renderer=renderer,
            task_set=task_set,
            factory=factory,
            train_tasks=train_tasks,
            test_tasks=test_tasks,
            num_training_tasks=num_training_tasks,
            other_sets=other_sets,
            buffer=buffer,
            algorithm=algorithm,
            remote=remote,
            demonstrations=demonstrations,
        )
        if (help_hook := find_help_hook(algorithm)) is not None:
            help_hook.renderer, help_hook.context_length = renderer, engine.context_length
            for line in file_lines(help_hook, train_tasks):
                note(line)
        if remote is not None:
            remote.begin(parts)
        cleanup.pop_all()
    return parts


def check_reflections(algorithm: Algorithm, *, context_length: int) -> None:
    """Raise ConfigError if reflections that are turns of a rollout leave no room in the context."""
    longest = max(
        (hook.max_reflection_tokens for hook in algorithm.hooks if hook.num_episodes > 1), default=0
    )
    if longest >= context_length:
        raise ConfigError(
            f"algorithm.max_reflection_tokens = {longest} does not fit into the context of {context_length} "
            "tokens, so no reflection would be written: lower it, or raise model.context_length"
        )


def make_policy(settings: RunSettings, *, initial: bool = True) -> Policy:
    """The model with its optimizer; ``initial``: with the weights of ``model.initial_checkpoint``, if set."""
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
        lora=model_settings.lora,
        trained_layers=model_settings.trained_layers,
        seed=settings.seed,
        checkpoint_activations=settings.update.checkpoint_activations,
        uses_flex=settings.update.uses_flex(model_settings.device),
    )
    if initial and model_settings.initial_checkpoint is not None:
        load_weights(policy, Path(model_settings.initial_checkpoint))
    return policy


def load_frozen(settings: ModelSettings) -> LanguageModel:
    """Load a model, with the weights of ``initial_checkpoint`` if it is set, that does not train. Raises
    ModelError and CheckpointError.
    """
    loaded = load_model(
        settings.name, precision=settings.precision, device=settings.device, forward=settings.forward
    )
    if settings.initial_checkpoint is None:
        loaded.model.requires_grad_(False)
        return loaded
    # a policy knows masters and adapters; on a GPU, its float32 masters would need twice the model's memory
    optimizer = OptimizerSettings(states="float32" if settings.device == "cpu" else "cpu")
    policy = Policy(loaded, optimizer, lora=settings.lora, trained_layers=settings.trained_layers)
    load_weights(policy, Path(settings.initial_checkpoint))
    return policy.freeze()


def load_weights(policy: Policy, checkpoint: Path) -> None:
    """Load the weights of a checkpoint without its optimizer state. Raises CheckpointError."""
    if (source := find_weights(checkpoint)) is None:
        return  # an evaluation of the model itself, whose weights the policy has
    checkpoint = source
    files = [name for name in tensor_files(checkpoint) if name != OPTIMIZER]
    if not any((checkpoint / name).is_file() for name in (*files, STATE)):
        if checkpoints := checkpoints_newest_first(checkpoint / "checkpoints"):
            suggestion = (
                f"it is a run directory, name one of its checkpoints, such as {shown_path(checkpoints[0])}"
            )
        else:
            suggestion = "it has no masters.safetensors; name a folder RUN/checkpoints/step-NNNNNN"
        raise CheckpointError(f"{shown_path(checkpoint)} is no checkpoint: {suggestion}")
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
            f"{shown_path(checkpoint)} has the weights of another model or adapter: set model.name, "
            "model.lora and model.trained_layers as in the config.toml of its run"
        )
    for name, master in policy.masters.items():
        master.copy_(masters[name])
    policy.round_masters()


def make_renderer(
    tokenizer: Tokenizer, model: ModelSettings, environment: EnvironmentSettings | None
) -> ChatRenderer:
    """The renderer for the episodes of an environment; None: for one question and one answer.

    Raises ModelError if the chat template lacks what the episodes need.
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
    """:func:`make_renderer`, after rendering every role and order of messages of the episodes.

    Raises ModelError, naming the template and the role, if one cannot be rendered.
    """
    renderer = make_renderer(tokenizer, model, environment)
    report = check_template(renderer, observation_roles(environment))
    words = set(re.findall(r"\w+", str(getattr(tokenizer, "chat_template", ""))))
    if unknown := [name for name in model.template_kwargs if name not in words]:
        keys = ", ".join(f"model.template_kwargs.{name}" for name in unknown)
        note(f"No effect: {keys}: the chat template does not contain {'them' if unknown[1:] else 'it'}")
    if not renderer.supports_system:
        note("the chat template has no system message: a prompt's goes in front of its first user message")
    for line in report.notes():
        note(line)
    return renderer


def note_unlearnable_tokens(
    language_model: LanguageModel, renderer: ChatRenderer, *, note: Callable[[str], None]
) -> None:
    """Report tokens of calls, of the template's thinking and of ends of turns that a model with a frozen
    vocabulary projection cannot write.

    Tokens that pre-training never saw share one row of the projection, so no hidden state prefers one of them
    (``<tool_call>`` in Qwen2.5-Coder-0.5B, ``<|eot_id|>`` in base models of Llama 3).
    """
    if any("lora_" in name for name, _ in language_model.head.named_parameters()):
        return  # an adapter trains the projection
    weight = cast(Tensor, language_model.head.weight).detach()
    added = renderer.tokenizer.added_tokens_decoder
    template = str(getattr(renderer.tokenizer, "chat_template", ""))
    markers = find_thinking_tokens({str(token) for token in added.values()})
    ids = {token_id for token_id, token in added.items() if str(token) in markers and str(token) in template}
    ids |= renderer.closing.token_ids
    if renderer.call_format is not None:
        call = ToolCall(name="a", arguments={}, call_id="call00000")
        ids |= set(renderer.template.encode(renderer.call_format.write([call])))
    for token_id in sorted(ids & set(added)):
        row = weight[token_id].float()
        near = 1e-3 * row.norm()
        num_equal = sum(int(((rows.float() - row).norm(dim=1) <= near).sum()) for rows in weight.split(8192))
        if num_equal > 1:
            note(
                f"ALARM: the policy cannot learn to write {str(added[token_id])!r}: its row of the frozen "
                f"vocabulary projection is equal to {plural(num_equal - 1, 'other')}; train all weights (no "
                "model.lora, no model.trained_layers), or use an environment.protocol (for example tags) and "
                "model.template_kwargs without it"
            )


def open_buffer(
    settings: RunSettings,
    *,
    path: Path,
    task_set: TaskSet,
    factory: EnvironmentFactory,
    train_tasks: Sequence[Task],
    resumed: bool,
    note: Callable[[str], None],
    count_tokens: TokenCounter,
) -> StepTraceBuffer | None:
    """The buffer of an algorithm that retrieves: the one that the recipe names, or one that the
    environment's experts fill. None if nothing is retrieved.

    An evolving run writes to its own copy of the buffer that the recipe names: other runs may use that one.
    """
    if not settings.algorithm.retrieves or not settings.train.num_steps:
        return None
    embedder = load_embedder(settings.buffer.embedder)
    source_path = Path(settings.buffer.path) if settings.buffer.path else None
    if source_path is not None and not settings.buffer.evolve:
        buffer = _require_steps(StepTraceBuffer(source_path, embedder, mode="read"), "")
        check_buffer_calls(buffer, settings.environment, note)
        return buffer
    if resumed and not path.exists():
        raise CheckpointError(
            f"{path} is missing: it contains the steps that this run retrieves; put it back"
        )
    if source_path is not None and not path.exists():
        copy_database(source_path, path)
    buffer = StepTraceBuffer(path, embedder, mode="write")
    reason = ""
    try:
        if buffer.lost_batch:
            note("the buffer's last writer was killed inside a batch: that batch is added again")
        if source_path is None and not resumed:
            tasks = train_tasks[: settings.buffer.num_tasks]
            try:
                filled = fill_buffer(
                    buffer, task_set, factory, tasks, settings, note, count_tokens=count_tokens
                )
            finally:
                task_set.close()  # ends the experts' processes; a later request starts them again
            reason = (
                f": no trajectory of an expert entered it (of {plural(len(tasks), 'task')}: "
                f"{filled.outcomes()})"
            )
        _require_steps(buffer, reason)
        if source_path is not None:
            check_buffer_calls(buffer, settings.environment, note)
    except BaseException:
        buffer.close()
        raise
    return buffer


def _require_steps(buffer: StepTraceBuffer, reason: str) -> StepTraceBuffer:
    if len(buffer) == 0:
        buffer.close()
        raise DataError(f"the step-trace buffer {buffer.path} is empty{reason}")
    return buffer


def make_algorithm(
    settings: RunSettings,
    buffer: StepTraceBuffer | None,
    *,
    vocabulary_size: int,
    stateful: bool,
    count_tokens: Callable[[str], int],
    train_tasks: Sequence[Task] = (),
) -> Algorithm:
    """The algorithm that ``algorithm.type`` names. Raises DataError for demonstrations that cannot be
    used.
    """
    context = AlgorithmContext(
        seed=settings.seed,
        num_training_steps=settings.train.num_steps,
        groups_per_step=settings.train.tasks_per_step,
        first_group=partial(first_group, group_starts(settings.train, train_tasks)),
        max_response_tokens=settings.max_rollout_tokens,
        vocabulary_size=vocabulary_size,
        is_stateful=stateful,
        count_tokens=count_tokens,
        train_tasks=train_tasks,
        buffer=buffer,
        load_embedder=load_embedder,
        read_demonstrations=partial(read_demonstrations, environment=settings.environment),
    )
    algorithm = cast(Algorithm, plugins.build("algorithms", settings.algorithm, context))
    if old := [hook for hook in algorithm.hooks if hasattr(hook, "max_remark_tokens")]:
        # Otherwise the hook would request no reflection.
        raise ConfigError(f"{type(old[0]).__name__}.max_remark_tokens is called max_reflection_tokens now")
    if not all(isinstance(hook, Hook) for hook in algorithm.hooks):
        algorithm.hooks = as_hooks(algorithm.hooks)
    add_help_hook(algorithm, count_tokens=count_tokens)
    declare(getattr(algorithm, "metrics", ()))
    return algorithm
