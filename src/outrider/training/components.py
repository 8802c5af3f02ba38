"""The components of a run, which :mod:`outrider.training.setup` builds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.algorithms.base import Algorithm
from outrider.engines.base import Engine
from outrider.environments.base import EnvironmentFactory, TaskSet
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.episode import Sampling
from outrider.rollout.hooks import Hook, RolloutStatus
from outrider.rollout.scheduler import Scheduler
from outrider.tokens import ChatRenderer
from outrider.training.settings import RunSettings
from outrider.types import Task, Trajectory

if TYPE_CHECKING:
    from outrider.distributed.remote import RemoteProcesses
    from outrider.training.learner import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTasks:
    """The tasks of one evaluation set. ``num_training_tasks`` of them are training tasks."""

    name: str
    split: str
    tasks: Sequence[Task]
    num_training_tasks: int = 0


@dataclass(slots=True, kw_only=True)
class Components:
    """The components of a run. ``test_tasks`` are those of the main evaluation set. ``buffer`` is None if the
    algorithm does not retrieve, ``remote`` if this process generates all rollouts.
    """

    settings: RunSettings
    learner: "Learner"
    engine: Engine
    renderer: ChatRenderer
    task_set: TaskSet
    factory: EnvironmentFactory
    train_tasks: Sequence[Task]
    test_tasks: Sequence[Task]
    buffer: StepTraceBuffer | None
    algorithm: Algorithm
    remote: "RemoteProcesses | None" = None
    # for the cold start, by task key; None: from experts
    demonstrations: Mapping[str, Trajectory] | None = None
    num_training_tasks: int = 0  # among the evaluation tasks
    other_sets: Sequence[EvaluationTasks] = ()  # evaluation sets after the main one
    rollout_status: RolloutStatus = field(default_factory=RolloutStatus)

    @property
    def eval_sets(self) -> tuple[EvaluationTasks, ...]:
        """All evaluation sets, the main one first. The only set of ``evaluation.split`` has no name."""
        main = self.settings.evaluation.sets[0]
        first = EvaluationTasks(
            name=main.name,
            split=main.split,
            tasks=self.test_tasks,
            num_training_tasks=self.num_training_tasks,
        )
        return (first, *self.other_sets)

    def scheduler(
        self, *, training: bool, hooks: Sequence[Hook], on_finished: Callable[[int, int], None]
    ) -> Scheduler:
        """The scheduler of this process for training or evaluation."""
        settings = self.settings
        temperature = 1.0 if training else settings.evaluation.temperature
        truncation = {} if training else settings.evaluation.truncation
        return Scheduler(
            engine=self.engine,
            renderer=self.renderer,
            factory=self.factory,
            limits=settings.limits,
            sampling=Sampling(temperature=temperature, stop=self.task_set.stop, **truncation),
            run_seed=settings.seed,
            hooks=hooks,
            max_concurrent=settings.num_concurrent,
            max_retries=settings.train.max_retries,
            is_training=training,
            group_timeout_s=settings.train.group_timeout_s if training else None,
            on_finished=on_finished,
            rollout_status=self.rollout_status,
            marks_observations=training and settings.algorithm.observation_nll > 0,
        )
