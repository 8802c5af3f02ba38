"""One declared metric: name, unit, meaning, healthy range and what to check if a value leaves the range."""

from dataclasses import dataclass

from outrider.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared metric.

    ``name`` is ``group/rest``; its last part may be a placeholder in braces that matches any name without a
    slash. ``unit`` is ``1`` for a pure number or a share. ``healthy`` is a description, not a bound that code
    checks.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
    look_at: str

    @property
    def group(self) -> str:
        """The part of the name before the first slash."""
        return self.name.split("/", 1)[0]


def group(prefix: str, *rows: tuple[str, str, str, str, str]) -> tuple[Metric, ...]:
    """Return the metrics of one group from rows of a table."""
    return tuple(
        Metric(name=f"{prefix}/{name}", unit=unit, meaning=meaning, healthy=healthy, look_at=look_at)
        for name, unit, meaning, healthy, look_at in rows
    )


def outcome_row(outcome: Outcome) -> tuple[str, str, str, str, str]:
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
