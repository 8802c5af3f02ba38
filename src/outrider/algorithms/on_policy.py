"""What methods share in whose groups the policy plays every rollout in the same way."""

from collections.abc import Sequence

from outrider.algorithms.base import ObjectiveSettings
from outrider.rollout.hooks import Hook


class OnPolicyGroup:
    """``num_rollouts`` on-policy rollouts a group; credit is the method's own."""

    def __init__(self, objective: ObjectiveSettings, *, num_rollouts: int, hooks: tuple[Hook, ...] = ()) -> None:
        self.objective = objective
        self.hooks = hooks
        self.modes = ("on_policy",) * num_rollouts

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """The same in every group."""
        return self.modes
