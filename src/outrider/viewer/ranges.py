"""Metrics of a run that are outside of their healthy range (:class:`~outrider.metrics.Metric`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.metrics import Metric, UndeclaredMetric, declared_metric
from outrider.viewer.run_reader import RunData, finite

_STREAK: Final = 5
"""Consecutive values that make an alarm: one step of few rollouts is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfRange:
    """A metric that ends outside of its healthy range, ``low`` to ``high`` at the last step (None:
    unbounded), and the training ``steps`` at which it was outside.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    steps: tuple[int, ...]


def bounds(name: str, settings: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Lowest and highest healthy value of a metric in a run with these (flat) settings; None if there is no
    bound, or if the bound does not apply to the run, for example because a schedule fades.
    """
    metric = _bounded(name, settings)
    return (None, None) if metric is None else (metric.low, metric.high)


def out_of_range(data: RunData) -> list[OutOfRange]:
    """The metrics whose last value is outside of their healthy range, if most of the last values are: a
    single step may leave it by chance.
    """
    records = [record for record in data.records if record["kind"] == "train"]
    entries = []
    for name in dict.fromkeys(name for record in records for name in record):
        if (metric := _bounded(name, data.settings)) is None:
            continue
        checked = [
            (record, outside)
            for record in records
            if (outside := _is_outside(metric, name, record)) is not None
        ]
        last = [outside for _, outside in checked[-_STREAK:]]
        if last and last[-1] and 2 * sum(last) > len(last):
            record = checked[-1][0]
            lows = (metric.low, finite(record.get(metric.at_least or "")))
            highs = (metric.high, finite(record.get(metric.at_most or "")))
            entries.append(
                OutOfRange(
                    name=name,
                    value=finite(record[name]) or 0.0,
                    low=max((low for low in lows if low is not None), default=None),
                    high=min((high for high in highs if high is not None), default=None),
                    steps=tuple(int(str(record["step"])) for record, outside in checked if outside),
                )
            )
    return entries


@dataclass(slots=True)
class RangeWatch:
    """Finds the step at which a metric has left its healthy range, for alarms of a training.

    A metric leaves its range if it has been inside for several steps, and outside for as many later ones. One
    that was never inside is a property of the run, which :func:`out_of_range` lists.
    """

    settings: Mapping[str, str]
    _streaks: dict[str, int] = field(default_factory=dict)  # steps outside; inside if negative
    _was_inside: set[str] = field(default_factory=set)
    _has_alarm: set[str] = field(default_factory=set)

    @classmethod
    def from_run(cls, data: RunData) -> "RangeWatch":
        """Continue after the recorded steps of a run."""
        watch = cls(data.settings)
        for record in data.records:
            if record["kind"] == "train":
                watch.update(int(str(record["step"])), record)
        return watch

    def update(self, step: int, values: Mapping[str, Any]) -> list[str]:
        """Alarms of a training step with these metrics; one alarm per metric and run."""
        lines = []
        for name in values:
            metric = _bounded(name, self.settings)
            if metric is None or (outside := _is_outside(metric, name, values)) is None:
                continue
            streak = self._streaks.get(name, 0)
            self._streaks[name] = streak = max(streak, 0) + 1 if outside else min(streak, 0) - 1
            if streak <= -_STREAK:
                self._was_inside.add(name)
            if streak >= _STREAK and name in self._was_inside and name not in self._has_alarm:
                self._has_alarm.add(name)
                lines.append(
                    f"ALARM: step {step}: {name} is {values[name]:.3g} and has been outside of its healthy "
                    f"range ({metric.healthy_range}) for {streak} steps; look at: {metric.look_at}"
                )
        return lines


def _bounded(name: str, settings: Mapping[str, str]) -> Metric | None:
    """The declaration of a metric whose bounds apply to the run."""
    try:
        metric = declared_metric(name)
    except UndeclaredMetric:
        return None
    has_bound = (metric.low, metric.high, metric.at_least, metric.at_most) != (None,) * 4
    applies = metric.only_if is None or settings.get(metric.only_if[0]) == metric.only_if[1]
    return metric if has_bound and applies else None


def _is_outside(metric: Metric, name: str, record: Mapping[str, Any]) -> bool | None:
    """Whether the value of a record is outside; None if it has none."""
    value = finite(record.get(name))
    if value is None:
        return None
    least, most = (finite(record.get(other or "")) for other in (metric.at_least, metric.at_most))
    return (
        (metric.low is not None and value <= metric.low)
        or (metric.high is not None and value > metric.high)
        or (least is not None and value < least)
        or (most is not None and value > most)
    )
