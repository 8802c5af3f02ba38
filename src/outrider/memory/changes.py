"""What changed in a run's memories, for the record: tips that came and went, and the steps' revision."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """One change. ``memory`` is ``tips`` or ``steps`` (the step-trace buffer, which only tells its revision:
    its own file holds the steps with theirs).

    ``version`` is the memory's after the change: of tips the number ever added to the buffer ``key``, of
    steps the revision. ``item_id``, ``text``, ``score``, ``writer`` (the rollout that wrote it) and
    ``written_at`` (its training step, from 0) belong to a tip.
    """

    memory: Literal["tips", "steps"]
    change: Literal["added", "removed", "revision"]
    version: int
    key: str = ""
    item_id: int = -1
    text: str = ""
    score: float = 0.0
    writer: str = ""
    written_at: int = -1
