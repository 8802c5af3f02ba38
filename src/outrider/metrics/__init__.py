"""Metrics: every name is declared once, every record is one line of ``metrics.jsonl``. No torch, no numpy."""

from outrider.metrics.declared import DECLARED, Metric, UndeclaredMetric, declared_metric
from outrider.metrics.writer import CutReport, Kind, MetricsWriter

__all__ = ["DECLARED", "CutReport", "Kind", "Metric", "MetricsWriter", "UndeclaredMetric", "declared_metric"]
