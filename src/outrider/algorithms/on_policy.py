"""What methods share in whose groups the policy plays every rollout in the same way."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from outrider.algorithms.base import GroupCredit, ObjectiveSettings
from outrider.algorithms.group_settings import GroupSettings, shape_returns
from outrider.rollout.episode import Limits
from outrider.rollout.hooks import Hook
from outrider.trace import Trace

SettingsT = TypeVar("SettingsT", bound=GroupSettings)


class OnPolicyGroup:
    """``num_rollouts`` on-policy rollouts a group; credit is the method's own."""

    def __init__(self, objective: ObjectiveSettings, *, num_rollouts: int, hooks: tuple[Hook, ...] = ()) -> None:
        self.objective = objective
        self.hooks = hooks
        self.modes = ("on_policy",) * num_rollouts

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """The same in every group."""
        return self.modes


class OnPolicyBatch(OnPolicyGroup, ABC, Generic[SettingsT]):
    """A method of the group family whose credit may span all groups of a step; ``max_response_tokens`` is the run's."""

    def __init__(self, settings: SettingsT, *, max_response_tokens: int = Limits().max_response_tokens) -> None:
        super().__init__(settings, num_rollouts=settings.group_size)
        self.settings = settings
        self._max_response_tokens = max_response_tokens

    def credit(self, trace: Trace) -> GroupCredit:
        """A batch of one group."""
        return self.credit_batch([trace])[0]

    @abstractmethod
    def credit_batch(self, traces: Sequence[Trace]) -> list[GroupCredit]:
        """Write the credit of all groups of a step; one entry a trace."""

    def _shaped(self, traces: Sequence[Trace], *, sum_kl: bool = True) -> list[dict[str, list[float]]]:
        """:func:`~outrider.algorithms.group_settings.shape_returns` of every group."""
        limit = self._max_response_tokens
        return [shape_returns(trace, self.settings, max_response_tokens=limit, sum_kl=sum_kl) for trace in traces]
