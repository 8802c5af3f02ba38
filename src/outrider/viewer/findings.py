"""Problems of a run that its files show, with the numbers behind them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem: its ``kind``, one or two sentences with numbers, the training ``steps`` that it is about,
    and what to check or change.
    """

    kind: str
    text: str
    steps: tuple[int, ...]
    look_at: str


def find_problems(run: Path) -> list[Finding]:
    """The problems of a run, most serious first. Missing and damaged files are skipped."""
    return []
