"""Builds what a run needs from its settings; everything that can be missing is found here, before the first
rollout.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from outrider.algorithms.algorithm import Algorithm
from outrider.algorithms.context import AlgorithmContext
from outrider.engines.base import Engine
from outrider.engines.local.model import LanguageModel
from outrider.environments.base import TaskSet
from outrider.environments.families import make_task_set
from outrider.errors import ConfigError
from outrider.memory.embedder import load_embedder
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.metrics import declare
from outrider.plugins import registry as plugins
from outrider.tokens import ChatRenderer
from outrider.train.components import Components, RemoteRollouts, token_counter
from outrider.train.data.buffer_opening import open_buffer
from outrider.train.data.experts import read_demonstrations
from outrider.train.data.no_expert import require_experts
from outrider.train.data.task_checks import read_eval_tasks, task_notes, training_tasks
from outrider.train.learner import Learner
from outrider.train.models import (
    StartLearner,
    StartRemote,
    learner_and_renderer,
    local_learner,
    make_engine,
)
from outrider.train.settings import RunSettings
from outrider.train.update.policy import set_threads
from outrider.types import Step, Task


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

    A ``resumed`` run has weights and a filled buffer: neither is made again. ``start_learner`` makes what learns,
    ``start_remote`` what plays where that is not this process.
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
    declare(getattr(algorithm, "metrics", ()))
    return algorithm
