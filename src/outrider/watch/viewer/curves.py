"""Every metric of a run over its steps, with what the registry says of it, and what an x axis may be."""

from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from outrider.metrics import WRITTEN_TOKENS, UndeclaredMetric, declared_metric
from outrider.watch.run_directory import RunData, finite, read_run

AXES: Final = ("step", "tokens", "calls", "seconds")


def metric_curves(run: Path) -> dict[str, Any]:
    """``x`` by axis and ``values`` by metric, one entry a training step; ``metrics`` describe them."""
    data = read_run(run)
    records = [record for record in data.records if record["kind"] == "train"]
    names = dict.fromkeys(name for record in records for name in record if name not in ("step", "kind"))
    values = {name: [finite(record.get(name)) for record in records] for name in names}
    columns = {name: column for name, column in values.items() if any(value is not None for value in column)}
    return {
        "x": {
            "step": [record["step"] for record in records],
            "tokens": _summed(values, len(records), WRITTEN_TOKENS),
            "calls": _summed(values, len(records), ("rollout/num_tool_calls",)),
            "seconds": _summed(values, len(records), ("time/step",)),
        },
        "values": columns,
        "metrics": {name: describe_metric(name) for name in columns},
        "evaluations": _evaluations(data),
        "notes": list(data.notes),
    }


def describe_metric(name: str) -> dict[str, str]:
    """Unit, meaning, healthy range and where to look; empty words for what no registry here has (the metric
    of a plug-in)."""
    try:
        metric = declared_metric(name)
    except UndeclaredMetric:
        return {"unit": "", "meaning": "not in the registry: of a plug-in", "healthy": "", "look_at": ""}
    return {
        "unit": "" if metric.unit == "1" else metric.unit,
        "meaning": metric.meaning,
        "healthy": metric.healthy,
        "look_at": metric.look_at,
    }


def _summed(values: dict[str, list[float | None]], length: int, names: tuple[str, ...]) -> list[float]:
    columns = [values[name] for name in names if name in values]
    return list(accumulate(sum(column[i] or 0.0 for column in columns) for i in range(length)))


def _evaluations(data: RunData) -> list[dict[str, Any]]:
    return [
        {
            "number": number,
            "label": evaluation.label,
            "step": evaluation.step,
            "split": evaluation.split,
            "num_tasks": evaluation.num_tasks,
            "num_faults": evaluation.num_faults,
            "score": [score.value, score.ci_low, score.ci_high]
            if (score := evaluation.metrics.get("score"))
            else None,
        }
        for number, evaluation in enumerate(data.evaluations)
    ]
