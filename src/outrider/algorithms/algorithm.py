"""An algorithm is one class with defaults, asked by the trainer at each place where methods differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from numpy.typing import NDArray

from outrider.algorithms.base import GroupAdvantages, ObjectiveSettings
from outrider.memory.changes import MemoryChange
from outrider.metrics import Metric
from outrider.rollout.hooks import Hook
from outrider.trace import Trace
from outrider.types import Step, Task

if TYPE_CHECKING:  # an algorithm's settings are read without torch
    from outrider.algorithms.common.token_loss import TokenLoss, TokenLossInputs

Arrays = Mapping[str, NDArray[Any]]
ExpertPaths = Mapping[str, Sequence[Step] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Which groups of a step are worth training on. Others are left out, and further tasks are played for
    them.

    After ``max_extra_batches`` further rounds the step trains on the groups that it has.
    """

    select: Callable[[Sequence[Trace]], list[Trace]]
    max_extra_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """Tasks of a training step: the ``num_groups`` that come next in the run's order, or these ``tasks``.

    ``tasks`` leave the order where it is. ``groups`` filters what was played in the order (None: all are
    trained on).
    """

    num_groups: int
    tasks: Sequence[Task] | None = None
    groups: GroupFilter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Further ``groups`` with advantages that join a step, metrics, and why rollouts were ``lost``."""

    groups: list[Trace] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


class StepPlay(Protocol):
    """How an algorithm gets rollouts of its own in a training step, in the environment and within the run's
    limits.
    """

    def request_expert_paths(self, tasks: Sequence[Task]) -> tuple[ExpertPaths, list[str]]:
        """Steps by task key (None: there is no expert), and why experts could not be asked."""

    def play_experts(self, tasks: Sequence[Task], paths: ExpertPaths) -> list[Trace]:
        """One rollout per task that follows these steps, in the state that the task's group began in."""


class Algorithm:
    """One page an algorithm. ``modes[i]`` is the mode of rollout i of a group; every method has a default.

    ``objective`` holds the settings of the loss, ``hooks`` act inside the rollouts, ``metrics`` declares what
    it measures beside what :mod:`outrider.metrics.declared` has. As a plug-in, a class with ``Settings`` (a
    subclass of :class:`ObjectiveSettings`), made by ``build(settings, context)`` with
    :class:`outrider.algorithms.context.AlgorithmContext`, or of its settings alone.
    """

    metrics: ClassVar[Sequence[Metric]] = ()
    objective: ObjectiveSettings
    hooks: tuple[Hook, ...] = ()
    modes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Name of the method in evaluations after training."""
        return self.objective.label

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """The modes of the rollouts of group number ``group`` of a training step."""
        return self.modes

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        """Chooses among the training ``tasks``: by default the next ``num_groups``, the run's
        ``train.tasks_per_step``.
        """
        return TaskChoice(num_groups=num_groups)

    def augment(self, traces: Sequence[Trace], *, step: int, play: StepPlay) -> Augmentation:
        """Rollouts that join the played ``traces`` in place, and groups that are trained on beside them."""
        return Augmentation()

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Write ``assign_advantages`` and ``ratio_scale`` on the trainable nodes of every rollout that has a return."""
        raise NotImplementedError(f"{type(self).__name__} has neither assign_advantages nor advantages")

    def advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """:meth:`assign_advantages` of all groups of a step, one entry a trace; for statistics that span them."""
        return [self.assign_advantages(trace) for trace in traces]

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """The loss of every trained token: by default what the objective says."""
        return self.objective.token_loss(inputs)

    def measure(self, traces: Sequence[Trace]) -> dict[str, float]:
        """Metrics of a step's groups after their advantages, by their declared names."""
        return {}

    @property
    def remembers(self) -> bool:
        """Whether there is a :meth:`state`, which a checkpoint then has to hold."""
        return type(self).state is not Algorithm.state

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Memories as plain data and arrays, for a checkpoint; empty for an algorithm that remembers
        nothing. With ``cluster.max_staleness`` 1 a checkpoint comes between the rollouts of a step and its
        :meth:`measure`: what hooks have counted for that belongs here too.
        """
        return {}, {}

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Become what :meth:`state` saved."""

    def memory_changes(self) -> list[MemoryChange]:
        """What came into memories and went since this was last asked: it is recorded with every step."""
        return []

    def counts(self) -> list[dict[str, int]]:
        """Counts of the hooks over the whole run; they go into checkpoints, and a step's metrics are made of
        their growth.
        """
        return []

    def restore_counts(self, saved: Sequence[Mapping[str, int]]) -> None:
        """Back to what :meth:`counts` gave."""
