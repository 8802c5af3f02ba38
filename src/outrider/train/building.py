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
from outrider.environments.base import TaskFamily
from outrider.environments.families import make_family
from outrider.errors import ConfigError
from outrider.memory.embedder import load_embedder
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.metrics import declare
from outrider.plugins import registry as plugins
from outrider.tokens import ChatRenderer
from outrider.train.components import Components, Elsewhere, token_counter
from outrider.train.data.buffer_opening import open_buffer
from outrider.train.data.experts import demonstrations_of
from outrider.train.data.no_expert import require_experts
from outrider.train.data.task_checks import held_out_panel, task_notes, training_tasks
from outrider.train.learner import Learner
from outrider.train.models import (
    StartElsewhere,
    StartLearner,
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
    start: StartLearner = local_learner,
    spread: StartElsewhere | None = None,
) -> Components:
    """Load model, tasks, tools and buffer. Raises typed errors; nothing has been trained or played yet.

    A ``resumed`` run has weights and a filled buffer: neither is made again. ``start`` makes what learns,
    ``spread`` what plays where that is not this process.
    """
    require_experts(settings)
    set_threads(settings.num_threads, device=settings.model.device)
    tasks = _read_tasks(settings, resumed=resumed)
    for line in tasks.notes:
        note(line)
    with ExitStack() as made:  # closed again where a later part cannot be made
        factory = tasks.family.make()
        made.callback(factory.close)
        learner, renderer = learner_and_renderer(settings, resumed=resumed, note=note, start=start)
        made.callback(learner.close)
        played = _Played.by(settings, learner, made, buffer_path.parent / "engine", on_tokens, spread)
        buffer = open_buffer(
            settings, path=buffer_path, family=tasks.family, factory=factory, train_tasks=tasks.train,
            resumed=resumed, note=note, count_tokens=token_counter(renderer),
        )  # fmt: skip
        if buffer is not None:
            made.callback(buffer.close)
        parts = Components(
            settings=settings,
            learner=learner,
            engine=played.engine,
            renderer=renderer,
            family=tasks.family,
            factory=factory,
            train_tasks=tasks.train,
            test_tasks=tasks.test,
            num_training_tasks=tasks.num_training_tasks,
            buffer=buffer,
            algorithm=_algorithm(settings, tasks, buffer, model=learner.language_model, renderer=renderer),
            elsewhere=played.elsewhere,
            demonstrations=tasks.demonstrations,
        )
        if parts.elsewhere is not None:
            parts.elsewhere.begin(parts)
        made.pop_all()
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """The engine of this process, or the one that stands for those elsewhere."""

    engine: Engine
    elsewhere: Elsewhere | None = None

    @classmethod
    def by(
        cls,
        settings: RunSettings,
        learner: Learner,
        made: ExitStack,
        folder: Path,
        on_tokens: Callable[[int], None],
        spread: StartElsewhere | None,
    ) -> "_Played":
        if spread is None:
            return cls(engine=make_engine(settings, learner, folder=folder, on_tokens=on_tokens))
        elsewhere = spread(settings, learner, folder=folder)
        made.callback(elsewhere.close)
        return cls(engine=elsewhere.engine, elsewhere=elsewhere)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tasks:
    """Tasks to play, and the demonstrations of a cold start still to come (None: experts are asked).
    ``num_training_tasks`` of the evaluation tasks are training tasks; ``notes`` are lines for the log.
    """

    family: TaskFamily
    train: Sequence[Task]
    test: Sequence[Task]
    num_training_tasks: int
    notes: Sequence[str]
    demonstrations: Mapping[str, Sequence[Step] | None] | None


def _read_tasks(settings: RunSettings, *, resumed: bool) -> _Tasks:
    family = make_family(settings.environment)
    train = training_tasks(family, settings)
    test = held_out_panel(family, settings.evaluation)
    num_training, notes = task_notes(family, settings, train, test)
    begin = settings.cold_start if settings.cold_start.num_examples and not resumed else None
    named = begin.demonstrations if begin is not None else None
    return _Tasks(
        family=family,
        train=train,
        test=test,
        num_training_tasks=num_training,
        notes=notes,
        demonstrations=None if named is None else demonstrations_of(named, train, settings.environment),
    )


def _algorithm(
    settings: RunSettings,
    tasks: _Tasks,
    buffer: StepTraceBuffer | None,
    *,
    model: LanguageModel,
    renderer: ChatRenderer,
) -> Algorithm:
    return make_algorithm(
        settings,
        buffer,
        vocabulary_size=int(model.model.config.get_text_config().vocab_size),
        stateful=tasks.family.stateful,
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
        read_demonstrations=partial(demonstrations_of, environment=settings.environment),
    )
    algorithm = cast(Algorithm, plugins.build("algorithms", settings.algorithm, context))
    if old := [hook for hook in algorithm.hooks if hasattr(hook, "max_remark_tokens")]:
        # It would pass for a hook that asks nothing.
        raise ConfigError(f"{type(old[0]).__name__}.max_remark_tokens is called max_reflection_tokens now")
    declare(getattr(algorithm, "metrics", ()))
    return algorithm
