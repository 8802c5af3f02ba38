"""The parts of a run (:mod:`outrider.training.setup` makes them)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from outrider.algorithms.base import Algorithm
from outrider.engines.base import Engine
from outrider.environments.base import EnvironmentFactory, TaskSet
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.rollout.base import RolloutStatus
from outrider.rollout.scheduler import Rollouts
from outrider.tokens import ChatRenderer
from outrider.trace import Trace
from outrider.training.settings import RunSettings
from outrider.types import Step, Task

if TYPE_CHECKING:
    from outrider.training.async_rollouts import GroupPlayer, RolloutPrefetch
    from outrider.training.learner import Learner


class RemoteRollouts(Protocol):
    """Engines and rollouts in other processes; ``engine`` sends them the weights."""

    @property
    def engine(self) -> Engine:
        """Stands for all engines."""
        ...

    def begin(self, parts: "Components") -> None:
        """Start what plays, once all other parts are there."""
        ...

    def rollouts(
        self,
        parts: "Components",
        *,
        training: bool,
        on_finished: Callable[[int, int], None],
        prefetch: "RolloutPrefetch | None" = None,
    ) -> Rollouts:
        """Plays the groups of training, with the algorithm's hooks, or of an evaluation; ``prefetch`` where
        that is beside an update.
        """
        ...

    def group_player(self, parts: "Components") -> "GroupPlayer":
        """Plays the groups of training one by one, several at a time, while weights come and go."""
        ...

    def probes(self, trace: Trace) -> list[Trace]:
        """A few tokens of every engine behind the prompt of a group: whether it has the newest weights."""
        ...

    def busy_s(self) -> float:
        """Seconds in which an engine generated, since the run began: mean over engines."""
        ...

    def metrics(self) -> dict[str, float]:
        """Of the newest transfer of weights, and of processes that were replaced since the last call, by
        their declared names.
        """
        ...

    def notes(self) -> list[str]:
        """What happened to processes since the last call: for the person who watches."""
        ...

    def close(self) -> None:
        """End what was started; may be called twice."""
        ...


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
    remote: RemoteRollouts | None = None
    # of the cold start, by task key; None: experts are asked
    demonstrations: Mapping[str, Sequence[Step] | None] | None = None
    num_training_tasks: int = 0  # of the evaluation tasks
    rollout_status: RolloutStatus = field(
        default_factory=RolloutStatus
    )  # of all rollouts: for the one who watches
