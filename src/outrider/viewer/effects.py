"""Whether retrieval, tips or branching raised the return, compared within groups."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Mean difference of the return between the rollouts of ``kind`` (``hybrid``, ``tips`` or ``forked``) and
    the on-policy rollouts of the same group, with its 95 % interval over ``num_groups`` groups (NaN for fewer
    than two).

    ``by_step`` has (training step, mean difference, number of groups) in order. ``text`` is one sentence with
    the result and its caveat.
    """

    kind: str
    difference: float
    low: float
    high: float
    num_groups: int
    by_step: tuple[tuple[int, float, int], ...]
    text: str


def effects(run: Path) -> list[Effect]:
    """One entry per kind that the run has together with on-policy rollouts in at least one group. Missing and
    damaged files are skipped.
    """
    return []
