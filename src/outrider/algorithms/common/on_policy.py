"""Common parts of methods in whose groups the policy plays every rollout in the same way."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Generic, Self, TypeVar

from outrider.algorithms.algorithm import Algorithm, GroupFilter, TaskChoice
from outrider.algorithms.base import GroupAdvantages, ObjectiveSettings
from outrider.algorithms.common.group_settings import GroupSettings, groups_worth_training, shape_returns
from outrider.algorithms.context import AlgorithmContext
from outrider.rollout.hooks import Hook
from outrider.rollout.limits import Limits
from outrider.trace import Trace
from outrider.types import Task

SettingsT = TypeVar("SettingsT", bound=GroupSettings)


class OnPolicyGroup(Algorithm):
    """``num_rollouts`` on-policy rollouts per group; credit is the method's own."""

    def __init__(
        self, objective: ObjectiveSettings, *, num_rollouts: int, hooks: tuple[Hook, ...] = ()
    ) -> None:
        self.objective = objective
        self.hooks = hooks
        self.modes = ("on_policy",) * num_rollouts


class OnPolicyBatch(OnPolicyGroup, ABC, Generic[SettingsT]):
    """A method of the group family whose credit may span all groups of a step; ``max_response_tokens`` is the
    run's.
    """

    def __init__(
        self, settings: SettingsT, *, max_response_tokens: int = Limits().max_response_tokens
    ) -> None:
        super().__init__(settings, num_rollouts=settings.group_size)
        self.settings = settings
        self._max_response_tokens = max_response_tokens

    @classmethod
    def build(cls, settings: SettingsT, context: AlgorithmContext) -> Self:
        """For a run."""
        return cls(settings, max_response_tokens=context.max_response_tokens)

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """A batch of one group."""
        return self.advantages([trace])[0]

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        """The next ones, and with dynamic sampling further ones for groups that are left out."""
        rule = self.settings.dynamic_sampling
        if rule is None:
            return TaskChoice(num_groups=num_groups)
        select = partial(groups_worth_training, rule=rule)
        return TaskChoice(
            num_groups=num_groups, groups=GroupFilter(select=select, max_extra_batches=rule.max_extra_batches)
        )

    @abstractmethod
    def advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """Write the credit of all groups of a step; one entry a trace."""

    def _shaped(self, traces: Sequence[Trace], *, sum_kl: bool = True) -> list[dict[str, list[float]]]:
        """:func:`~outrider.algorithms.common.group_settings.shape_returns` of every group."""
        limit = self._max_response_tokens
        return [
            shape_returns(trace, self.settings, max_response_tokens=limit, sum_kl=sum_kl) for trace in traces
        ]
