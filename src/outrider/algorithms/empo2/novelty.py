"""What a new state is worth to EMPO² (arXiv 2602.23008, section 4.2 and appendix F): by visits, or by what a
predictor has not learned.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from numpy.typing import NDArray

from outrider.memory.distillation import RandomDistillation
from outrider.memory.novelty import NoveltyStore
from outrider.memory.tips import Key


class Novelty(Protocol):
    """A bonus for every state, and the memory that it comes from. ``metric`` names what is measured of it."""

    metric: ClassVar[str]

    def see(self, task_key: str, keys: Sequence[Key]) -> tuple[list[float], list[float]]:
        """The bonuses of states that were visited at the same time, before the coefficient; what is
        measured.
        """
        ...

    def snapshot(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Plain data and arrays for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Become what was saved."""
        ...


class CountNovelty(NoveltyStore):
    """``1 / n`` of a state that its task has visited n times."""

    metric: ClassVar[str] = "tips/state_visits"

    def see(self, task_key: str, keys: Sequence[Key]) -> tuple[list[float], list[float]]:
        """See :class:`Novelty`."""
        counts = self.visit_together(task_key, keys)
        return [visit_bonus(count) for count in counts], [float(count) for count in counts]


class DistilledNovelty(RandomDistillation):
    """The scaled error of random network distillation; one predictor, whatever the task is."""

    metric: ClassVar[str] = "tips/novelty_error"

    def see(self, task_key: str, keys: Sequence[Key]) -> tuple[list[float], list[float]]:
        """See :class:`Novelty`."""
        visits = self.visit_together(keys)
        return [bonus for bonus, _ in visits], [error for _, error in visits]


def visit_bonus(num_visits: int) -> float:
    """``1 / n`` of a state that was visited n times."""
    return 1.0 / num_visits
