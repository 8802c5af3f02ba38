"""The parts of a run (:mod:`outrider.training.setup` makes them)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.algorithms.base import Algorithm
from outrider.engines.base import Engine
from outrider.environments.base import EnvironmentFactory, TaskSet
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.hooks import RolloutStatus
from outrider.tokens import ChatRenderer
from outrider.training.settings import RunSettings
from outrider.types import Step, Task

if TYPE_CHECKING:
    from outrider.distributed.actors import RemoteProcesses
    from outrider.training.learner import Learner


@dataclass(slots=True, kw_only=True)
class Components:
    """The parts of a run. ``buffer`` is None for algorithms that do not retrieve, ``remote`` where one
    process plays everything.
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
    # of the cold start, by task key; None: from experts
    demonstrations: Mapping[str, Sequence[Step] | None] | None = None
    num_training_tasks: int = 0  # of the evaluation tasks
    rollout_status: RolloutStatus = field(
        default_factory=RolloutStatus
    )  # of all rollouts: for the one who watches
