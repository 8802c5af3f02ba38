"""Metrics of a run that are outside of their healthy range."""

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.viewer.run_reader import RunData


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfRange:
    """A metric whose last value is outside of ``low`` to ``high`` (None: unbounded), and the training
    ``steps`` at which it was outside.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    steps: tuple[int, ...]


def bounds(name: str, settings: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Lowest and highest healthy value of a metric in a run with these (flat) settings; None if there is no
    bound, or if a schedule of the run makes it meaningless.
    """
    return None, None


def out_of_range(data: RunData) -> list[OutOfRange]:
    """The metrics whose last value is outside of their healthy range."""
    return []
