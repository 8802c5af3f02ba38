"""One declared metric: name, unit, meaning, healthy range and what to check if a value leaves the range."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared metric.

    ``name`` is ``group/rest``; its last part may be a placeholder in braces that matches any name without a
    slash. ``unit`` is ``1`` for a pure number or a share.

    Healthy values are above ``low``, at most ``high``, at least the metric named ``at_least`` and at most the
    one named ``at_most`` of the same step, as far as these are set. ``only_if`` is a setting with its value:
    the bounds apply only to runs with it, for example because a schedule of other runs fades. ``healthy`` is
    what else is healthy, in words.
    """

    name: str
    unit: str
    meaning: str
    healthy: str = ""
    look_at: str
    low: float | None = None
    high: float | None = None
    at_least: str | None = None
    at_most: str | None = None
    only_if: tuple[str, str] | None = None

    @property
    def group(self) -> str:
        """The part of the name before the first slash."""
        return self.name.split("/", 1)[0]

    @property
    def healthy_range(self) -> str:
        """The bounds and ``healthy``, in words."""
        parts = [
            "" if self.low is None else f"above {self.low:g}",
            "" if self.high is None else f"at most {self.high:g}" if self.high else "0",
            "" if self.at_least is None else f"at least {self.at_least}",
            "" if self.at_most is None else f"at most {self.at_most}",
            self.healthy,
        ]
        text = ", ".join(part for part in parts if part)
        return text if self.only_if is None else f"{text} (if {' = '.join(self.only_if)})"


Row: TypeAlias = tuple[str, str, str, str | Mapping[str, Any], str]
"""Name without its group, unit, meaning, healthy (words, or the fields of the range), look_at."""


def group(prefix: str, *rows: Row) -> tuple[Metric, ...]:
    """Return the metrics of one group from rows of a table."""
    return tuple(
        Metric(
            name=f"{prefix}/{name}",
            unit=unit,
            meaning=meaning,
            look_at=look_at,
            **({"healthy": healthy} if isinstance(healthy, str) else healthy),
        )
        for name, unit, meaning, healthy, look_at in rows
    )


def outcome_row(outcome: Outcome) -> Row:
    """Return the table row of one rollout outcome."""
    healthy = "most rollouts" if outcome is Outcome.FINISHED else "0 or rare"
    look_at = (
        "the tool, simulator or engine: faults never count as reward"
        if outcome.is_fault
        else "the sample rollouts in the report"
    )
    return (
        f"num_{outcome.value}",
        "rollouts",
        f"rollouts of this step that ended as `{outcome.value}`",
        healthy,
        look_at,
    )
