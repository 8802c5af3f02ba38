"""The tables of tasks and methods, and of trials, as plain text that every output draws in its own way."""

import math
from collections.abc import Callable, Mapping
from typing import Final

from outrider.evals.compare.by_task import Cell, TaskComparison, TrialCurves
from outrider.evals.compare.tables import MAX_SERIES, TextTable
from outrider.evals.statistics import COVERAGE, Estimate
from outrider.printing import score

_AVERAGE: Final = "mean over tasks"
_NOTHING: Final = "not measured"
_ONE_RUN_MARK: Final = " (1)"  # behind a value that no seeds are behind


def task_tables(comparison: TaskComparison) -> list[TextTable]:
    """Mean returns, solved variations, and a table of trials for each task that somebody adapted to."""
    return [
        _table(
            comparison,
            "Mean return by task",
            lambda cell: _number(cell.returns) + _one_run_mark(cell),
            _RETURNS,
        ),
        _table(
            comparison,
            "Solved variations by task",
            lambda cell: _share(cell.solved) + _one_run_mark(cell),
            _SOLVED,
        ),
        *map(_trial_table, comparison.curves),
    ]


def task_notes(comparison: TaskComparison) -> list[str]:
    """Notes that a reader must know beside the numbers."""
    notes = list(comparison.notes)
    means = comparison.averages.values() if len(comparison.tasks) > 1 else ()
    sizes = sorted({cell.num_runs for cell in (*comparison.cells.values(), *means)})
    if few := [num for num in sizes if num in COVERAGE]:
        shares = ", ".join(f"with {num} seeds about {COVERAGE[num]} %" for num in few)
        notes.append(f"an interval over so few seeds is too narrow: {shares} hold the true value, not 95 %")
    if 1 in sizes:
        notes.append(f"{_ONE_RUN_MARK.strip()} one run: the interval, if any, is over its variations alone")
    if missing := sum(
        (task, method) not in comparison.cells for task in comparison.tasks for method in comparison.methods
    ):
        notes.append(f"{missing} cells have no run; a mean over tasks is of methods that have every task")
    if (most := max((len(curves.bands) for curves in comparison.curves), default=0)) > MAX_SERIES:
        notes.append(f"a figure shows the first {MAX_SERIES} of up to {most} methods; the tables have all")
    return notes


_MIDDLE: Final = (
    "Interquartile mean over seeds of each run's last evaluation [95 % bootstrap interval over seeds and "
    "variations]; the mean over tasks over the seeds that every task has [over seeds]."
)
_RETURNS: Final = f"{_MIDDLE} Returns are the environment's, in its unit: no share."
_SOLVED: Final = f"{_MIDDLE} Share of variations that were solved."


def _table(comparison: TaskComparison, title: str, cell: Callable[[Cell], str], caption: str) -> TextTable:
    rows = [
        (_short(task, comparison.tasks), str(num), *_cells(comparison, task, cell))
        for task, num in comparison.tasks.items()
    ]
    if len(comparison.tasks) > 1:
        averages = [
            cell(comparison.averages[method]) if method in comparison.averages else _NOTHING
            for method in comparison.methods
        ]
        rows.append((_AVERAGE, "", *averages))
    return TextTable(
        title=title, columns=("task", "variations", *comparison.methods), rows=tuple(rows), caption=caption
    )


def _cells(comparison: TaskComparison, task: str, cell: Callable[[Cell], str]) -> list[str]:
    return [
        cell(comparison.cells[task, method]) if (task, method) in comparison.cells else _NOTHING
        for method in comparison.methods
    ]


def _short(task: str, tasks: Mapping[str, int]) -> str:
    """Without the folders that all tasks have in common."""
    parts = [name.split("/")[:-1] for name in tasks]
    common = 0
    while all(len(part) > common and part[common] == parts[0][common] for part in parts):
        common += 1
    return "/".join(task.split("/")[common:])


def _trial_table(curves: TrialCurves) -> TextTable:
    rows = tuple(
        (f"{x:.0f}", *(_number(_trial_estimate(curves, method, index)) for method in curves.bands))
        for index, x in enumerate(curves.x)
    )
    gains = "; ".join(_gain(curves, method) for method in curves.bands)
    return TextTable(
        title=f"Trials on {curves.task}: mean return",
        columns=("trial", *curves.bands),
        rows=rows,
        caption="Interquartile mean over seeds [95 % interval over seeds], no weight moves; trial 1 has "
        "nothing to read. Reflexion's is of the best try so far, any other of the trial alone. "
        f"{gains}. A best trial is picked after the fact: too high by that.",
    )


def _trial_estimate(curves: TrialCurves, method: str, index: int) -> Estimate:
    band = curves.bands[method]
    return Estimate(value=float(band.value[index]), low=float(band.low[index]), high=float(band.high[index]))


def _gain(curves: TrialCurves, method: str) -> str:
    """First, best and last trial; the relative gain where the first one is above 0."""
    values = curves.bands[method].value
    known = [(float(value), index) for index, value in enumerate(values) if math.isfinite(value)]
    if not known or not math.isfinite(values[0]):
        return f"{method}: {_NOTHING}"
    best, index = max(known, key=lambda entry: (entry[0], -entry[1]))
    first = float(values[0])
    share = f" ({100 * (best / first - 1):+.1f} %)" if first > 0 else ""
    return f"{method}: first {first:.4g}, best {best:.4g} at trial {index + 1}{share}, last {values[-1]:.4g}"


def _one_run_mark(cell: Cell) -> str:
    return _ONE_RUN_MARK if cell.num_runs == 1 else ""


def _number(estimate: Estimate) -> str:
    return score(estimate.value, estimate.low, estimate.high, is_share=False)


def _share(estimate: Estimate) -> str:
    return score(estimate.value, estimate.low, estimate.high)
