"""All declared metrics, by name."""

from collections.abc import Iterable
from typing import Final

from outrider.errors import ConfigError, OutriderError
from outrider.metrics.metric import Metric
from outrider.metrics.of_rollouts import ROLLOUT_METRICS
from outrider.metrics.of_updates import UPDATE_METRICS

# all that the policy wrote in a step
WRITTEN_TOKENS: Final = ("tokens/policy", "tokens/remarks", "tokens/discarded")

DECLARED: Final[tuple[Metric, ...]] = (*ROLLOUT_METRICS, *UPDATE_METRICS)

_DECLARED_BY_NAME = {metric.name: metric for metric in DECLARED}
_OPEN = {metric.name.rpartition("/")[0]: metric for metric in DECLARED if metric.name.endswith("}")}


class UndeclaredMetric(OutriderError, KeyError):
    """A metric was logged under a name that no declaration has."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the repr


def declare(metrics: Iterable[Metric]) -> None:
    """Declare what a plug-in measures beside what is declared here. Raises ConfigError for a name that means
    something else.
    """
    for metric in metrics:
        if (known := _DECLARED_BY_NAME.get(metric.name, metric)) != metric:
            raise ConfigError(f"metric {metric.name!r} is declared already, as: {known.meaning}")
        if "/" not in metric.name:
            raise ConfigError(f"metric {metric.name!r} has no group: GROUP/NAME")
        _DECLARED_BY_NAME[metric.name] = metric
        if metric.name.endswith("}"):
            _OPEN[metric.name.rpartition("/")[0]] = metric


def declared_metric(name: str) -> Metric:
    """The declaration of a name; a placeholder in braces matches any one part.

    Raises :class:`UndeclaredMetric`, a ``KeyError``, when there is none.
    """
    parent, _, last = name.rpartition("/")
    metric = _DECLARED_BY_NAME.get(name) or _OPEN.get(parent)
    if metric is not None and last and "{" not in name:
        return metric
    raise UndeclaredMetric(f"metric {name!r} is not declared in outrider.metrics")
