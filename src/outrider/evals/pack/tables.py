"""Tables of a pack: every score and interval computed again from single tasks, costs, and comparisons.

Packing writes it as ``tables.json``; verifying computes it anew and compares.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from outrider.errors import OutriderError, PackError
from outrider.evals.compare.compare import Comparison, compare
from outrider.evals.compare.runs import AXES, load_run
from outrider.evals.pack.difference import first_difference
from outrider.evals.pack.exact import exact_groups, read_exact
from outrider.evals.pack.format import EXACT, Manifest, read_bytes
from outrider.evals.pack.panel_run import eval_tasks_rows
from outrider.evals.pack.panels import read_recipe
from outrider.evals.statistics import Estimate
from outrider.rollout.evaluate import interval
from outrider.watch.run_directory import finite

MAX_TASKS: Final = 10_000


def make_tables(pack: Path, manifest: Manifest) -> dict[str, Any]:
    """All tables of a pack, as JSON gives them back.

    Raises PackError naming file and line where a score, an interval or a mean return is not what the single
    tasks give.
    """
    trained = [name for name, run in sorted(manifest.runs.items()) if run.kind == "training"]
    for name in trained:
        read_recipe(pack, name)
    try:
        tables = _tables(pack, manifest, trained)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:  # values that no run writes
        raise PackError(f"the results cannot be read: {type(error).__name__}: {error}"[:300]) from error
    plain: dict[str, Any] = json.loads(json.dumps(_plain(tables)))
    return plain


def _tables(pack: Path, manifest: Manifest, trained: Sequence[str]) -> dict[str, Any]:
    eval_tasks_runs = [name for name, run in sorted(manifest.runs.items()) if run.kind == "panel"]
    last: dict[str, list[str]] = {}
    rows: list[dict[str, Any]] = []
    for name in trained:
        run_rows = _evaluation_rows(pack, name)
        rows += run_rows
        if run_rows:
            last.setdefault(run_rows[-1]["panel_hash"], []).append(name)
    return {
        "evaluations": rows,
        "panels": [row for name in eval_tasks_runs for row in eval_tasks_rows(pack / "runs" / name, name)],
        "costs": [_costs(pack, name) for name in trained],
        "comparisons": [_comparison(pack, names) for names in last.values() if len(names) > 1],
        "exact": exact_groups(read_exact(pack / EXACT)) if EXACT in manifest.files else [],
    }


def _evaluation_rows(pack: Path, name: str) -> list[dict[str, Any]]:
    """One row per evaluation, in the order of the file; where it has scores of tasks, all follows from
    them.
    """
    file = pack / "runs" / name / "evaluations.jsonl"
    lines = read_bytes(file).splitlines() if file.is_file() else []
    rows = []
    for number, content in enumerate(lines, start=1):
        location = f"runs/{name}/evaluations.jsonl:{number}"
        try:
            line = json.loads(content)
            score = line["metric"]["score"]
            row = {
                "run": name, "label": str(line["label"]), "step": int(line["step"]),
                "split": str(line["split"]), "panel_hash": str(line["panel_hash"]),
                "temperature": float(line["temperature"]), "num_tasks": int(line["num_tasks"]),
                "num_faults": int(line.get("num_faults", 0)), "score": finite(score["value"]),
                "ci_low": finite(score["ci_low"]), "ci_high": finite(score["ci_high"]),
                "mean_return": finite(line.get("mean_return")), "has_tasks": bool(line.get("task_scores")),
            }  # fmt: skip
            tasks, returns = (
                _finite_values(line.get(key) or {}, f"{location}: {key}")
                for key in ("task_scores", "task_returns")
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise PackError(f"{location} is no evaluation: {type(error).__name__}: {error}"[:300]) from error
        if tasks and (difference := first_difference(row, row | _recomputed(tasks, returns, row))):
            raise PackError(f"{location}: {difference}")
        rows.append(row)
    return rows


def _recomputed(tasks: Sequence[float], returns: Sequence[float], row: Mapping[str, Any]) -> dict[str, Any]:
    low, high = interval(tasks, binary=all(value in (0.0, 1.0) for value in tasks))
    values = {"score": fmean(tasks), "ci_low": low, "ci_high": high, "num_tasks": len(tasks)}
    # After a fault the mean over rollouts is not the mean over tasks.
    return values | ({"mean_return": fmean(returns)} if returns and not row["num_faults"] else {})


def _finite_values(task_values: Mapping[str, Any], location: str) -> list[float]:
    if len(task_values) > MAX_TASKS:
        raise PackError(f"{location} has more than {MAX_TASKS} tasks")
    values = [finite(value) for value in task_values.values()]
    if any(value is None for value in values):
        raise PackError(f"{location} has a value that is no number")
    return [value for value in values if value is not None]


def _costs(pack: Path, name: str) -> dict[str, Any]:
    run = load_run(pack / "runs" / name, name)
    spent = {axis: float(run.costs[axis][-1]) for axis in AXES if axis in run.costs and run.num_steps}
    return {"run": name, "seed": run.config["seed"], "algorithm": run.config["algorithm.type"], **spent}


def _comparison(pack: Path, names: Sequence[str]) -> dict[str, Any]:
    """The groups and pairs of ``outrider compare``; the reason where these runs cannot be compared."""
    try:
        comparison = compare([pack / "runs" / name for name in names])
    except PackError:
        raise
    except OutriderError as error:
        return {"runs": sorted(names), "refused": str(error)}
    return {"runs": sorted(names), "groups": _groups(comparison), "pairs": _pairs(comparison)}


def _groups(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {"group": group.label, "runs": sorted(run.name for run in group.runs), "costs": dict(group.costs),
         "score": None if group.score is None else _estimate(group.score)}
        for group in comparison.groups
    ]  # fmt: skip


def _pairs(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {"first": pair.first, "second": pair.second, "difference": _estimate(pair.difference),
         "improvement": _estimate(pair.improvement), "p_tasks": pair.p_corrected, "p_seeds": pair.p_seeds,
         "winner": pair.verdict.winner, "reasons": list(pair.verdict.reasons)}
        for pair in comparison.pairs
    ]  # fmt: skip


def _estimate(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "ci_low": estimate.low, "ci_high": estimate.high}


def _plain(value: Any) -> Any:
    """The tree with None where a number is not defined."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
