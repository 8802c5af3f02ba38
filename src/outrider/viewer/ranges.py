"""Metrics of a run that are outside of their healthy range (:class:`~outrider.metrics.Metric`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.metrics import Metric, UndeclaredMetric, declared_metric
from outrider.viewer.run_reader import RunData, finite

_STREAK: Final = 5  # consecutive values that make an alarm: one step of few rollouts is noise
_SOLVED: Final = 0.9  # success rate from which equal returns are no problem
_OF_SPREAD: Final = ("reward/std", "group/fraction_without_signal")
_SELDOM: Final = 0.2  # earlier steps outside per step inside: a metric around its bound leaves nothing


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
    """The metrics that end outside of their healthy range, if most of their last values are outside: a single
    step may be so by chance.
    """
    records = [record for record in data.records if record["kind"] == "train"]
    entries = []
    for name in dict.fromkeys(name for record in records for name in record):
        if (metric := _bounded(name, data.settings)) is None:
            continue
        known = [record for record in records if finite(record.get(name)) is not None]
        outside = [_is_outside(metric, name, record) for record in known]
        if any(outside[-1:]) and 2 * sum(outside[-_STREAK:]) > len(outside[-_STREAK:]):
            low, high = _limits(metric, known[-1])
            steps = [_step(record) for record, is_outside in zip(known, outside, strict=True) if is_outside]
            value = finite(known[-1][name]) or 0.0
            entries.append(OutOfRange(name=name, value=value, low=low, high=high, steps=tuple(steps)))
    return entries


@dataclass(slots=True)
class RangeWatch:
    """Finds the step at which a metric has left its healthy range, for alarms of a training.

    A metric leaves its range if it is outside for several consecutive steps and was inside at most of the
    steps before. One that was never inside, or is now and then, is listed by :func:`out_of_range` only.
    """

    settings: Mapping[str, str]
    _counts: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # inside, outside, now outside

    @classmethod
    def from_run(cls, data: RunData) -> "RangeWatch":
        """Continue after the recorded steps of a run."""
        watch = cls(data.settings)
        for record in data.records:
            if record["kind"] == "train":
                watch.update(_step(record), record)
        return watch

    def update(self, step: int, values: Mapping[str, Any]) -> list[str]:
        """Alarms of a training step with these metrics."""
        lines = []
        for name in values:
            metric = _bounded(name, self.settings)
            if metric is None or finite(values[name]) is None:
                continue
            inside, outside, streak = self._counts.get(name, (0, 0, 0))
            if _is_outside(metric, name, values):
                streak += 1
            else:
                inside, outside, streak = inside + 1, outside + streak, 0
            self._counts[name] = inside, outside, streak
            if streak == _STREAK and inside >= _STREAK and outside <= _SELDOM * inside:
                lines.append(
                    f"ALARM: step {step}: {name} is {values[name]:.3g} and has been outside of its healthy "
                    f"range ({metric.healthy_range}) for {streak} steps; look at: {metric.look_at}"
                )
        return lines


def has_policy_term(settings: Mapping[str, str]) -> bool:
    """Whether rollouts with help of a self-distillation, if there is one, have a policy gradient."""
    return settings.get("algorithm.distill.policy_weight") not in ("0", "0.0")


def _step(record: Mapping[str, Any]) -> int:
    return int(record["step"])


def _bounded(name: str, settings: Mapping[str, str]) -> Metric | None:
    """The declaration of a metric whose bounds apply to the run."""
    try:
        metric = declared_metric(name)
    except UndeclaredMetric:
        return None
    has_bound = (metric.low, metric.high, metric.at_least, metric.at_most) != (None,) * 4
    applies = metric.only_if is None or settings.get(metric.only_if[0]) == metric.only_if[1]
    needs_spread = name in _OF_SPREAD and not has_policy_term(settings)
    return metric if has_bound and applies and not needs_spread else None


def _limits(metric: Metric, record: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The bounds at a step, with the values of the other metrics that they name."""
    lows = (metric.low, finite(record.get(metric.at_least or "")))
    highs = (metric.high, finite(record.get(metric.at_most or "")))
    return (
        max((low for low in lows if low is not None), default=None),
        min((high for high in highs if high is not None), default=None),
    )


def _is_outside(metric: Metric, name: str, record: Mapping[str, Any]) -> bool:
    if name in _OF_SPREAD and (finite(record.get("reward/success_rate")) or 0.0) >= _SOLVED:
        return False
    value, (low, high) = float(record[name]), _limits(metric, record)
    return (low is not None and value < low) or (high is not None and value > high) or value == metric.low
