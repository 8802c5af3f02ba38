"""Metrics: every name is declared once, and every record is one line of ``metrics.jsonl``.

Imports neither torch nor numpy.
"""

from outrider.metrics.metric import Metric
from outrider.metrics.registry import DECLARED, WRITTEN_TOKENS, UndeclaredMetric, declare, declared_metric
from outrider.metrics.writer import Kind, MetricsWriter

__all__ = [
    "DECLARED",
    "WRITTEN_TOKENS",
    "Kind",
    "Metric",
    "MetricsWriter",
    "UndeclaredMetric",
    "declare",
    "declared_metric",
]
