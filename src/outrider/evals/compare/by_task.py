"""Runs by task and method: one row a task, one column a method, as in EMPO²'s Table 1, where every task may
have a model of its own; and curves over the trials of an adaptation (its Fig. 8).

A task here is what the keys of its variations begin with: of ``scienceworld/find-animal/3`` it is
``scienceworld/find-animal``. A run counts in the row of every task that its panel has.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from outrider.errors import ConfigError
from outrider.evals.compare.by_task_notes import cell_notes, has_solved_all, run_notes
from outrider.evals.compare.groups import is_trained
from outrider.evals.compare.method_names import method_name, same_method
from outrider.evals.compare.runs import Incomparable, Run, ScoredStep, load_run, run_names
from outrider.evals.statistics import UNBOUNDED, Band, Estimate, Sample, Scores, iqm_band, iqm_estimate
from outrider.rollout.evaluate import interval

_SHARES: Final = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What the runs of one method reached on one task (or on the mean over tasks), by their last evaluations:
    mean return and share of solved variations, interquartile means over runs. Of one run the interval is over
    its variations alone.
    """

    returns: Estimate
    solved: Estimate
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCurves:
    """Mean return on one task after each trial, by method; ``x`` counts trials from 1."""

    task: str
    x: Scores
    bands: Mapping[str, Band]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """Everything that is shown. ``cells`` by (task, method); a pair without runs is not in it. ``averages``
    are means over all tasks, of methods that have every one of them.
    """

    tasks: Mapping[str, int]
    methods: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    averages: Mapping[str, Cell]
    curves: tuple[TrialCurves, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MethodRun:
    method: str
    run: Run


def compare_by_task(run_args: Sequence[str], *, depth: int | None = None, seed: int = 0) -> TaskComparison:
    """``run_args``: run directories, each also as ``NAME=DIRECTORY`` where the column is to be called that;
    columns come in their order. ``depth``: how many parts of a key name a task (None: all but the last).

    Raises ConfigError without runs, DataError for a folder that is no run, and :class:`Incomparable` for runs
    that are no seeds of one method, or were evaluated in different ways.
    """
    if not run_args:
        raise ConfigError("compare --by-task needs run directories")
    method_runs = _load(run_args)
    scored = [entry for entry in method_runs if entry.run.evaluations]
    to_row = partial(_row, depth=depth)
    rows = _rows(scored, to_row)
    notes = [note for entry in method_runs for note in run_notes(entry.run)]
    tasks = {
        row: _common(row, [entry.run for entry in members], notes, to_row) for row, members in rows.items()
    }
    methods = tuple(dict.fromkeys(entry.method for entry in method_runs))
    grouped = {
        (row, method): cell_runs
        for row, members in rows.items()
        for method in methods
        if (cell_runs := [entry.run for entry in members if entry.method == method])
    }
    for (row, method), runs in grouped.items():
        _require_seeds(row, method, runs, notes)
    notes += cell_notes(methods, grouped)
    averages = _averages(methods, grouped, tasks, notes, seed=seed)
    return TaskComparison(
        tasks={row: len(keys) for row, keys in tasks.items()},
        methods=methods,
        cells={key: _cell(key[1], runs, tasks[key[0]], seed=seed) for key, runs in grouped.items()},
        averages=averages,
        curves=tuple(_curves(grouped, tasks, seed=seed)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _load(run_args: Sequence[str]) -> list[_MethodRun]:
    pairs = [_split(entry) for entry in run_args]
    names = run_names([path for _, path in pairs])
    runs = [load_run(path, name) for (_, path), name in zip(pairs, names, strict=True)]
    method_runs = [
        _MethodRun(method=method or method_name(run, path), run=run)
        for (method, path), run in zip(pairs, runs, strict=True)
    ]
    columns = list(dict.fromkeys(entry.method for entry in method_runs))
    return sorted(method_runs, key=lambda entry: (columns.index(entry.method), entry.run.name))


def _split(arg: str) -> tuple[str | None, Path]:
    """A folder whose own name has an equals sign is a folder."""
    name, equals, path = arg.partition("=")
    return (name, Path(path)) if equals and name and not Path(arg).exists() else (None, Path(arg))


def _rows(method_runs: Sequence[_MethodRun], to_row: Callable[[str], str]) -> dict[str, list[_MethodRun]]:
    """Runs by task, in the order of names."""
    rows: dict[str, list[_MethodRun]] = {}
    for entry in method_runs:
        for row in {to_row(key) for key in entry.run.evaluations[-1].task_returns}:
            rows.setdefault(row, []).append(entry)
    if not rows:
        raise ConfigError("none of these runs has an evaluation with scores of single tasks")
    return dict(sorted(rows.items()))


def _row(key: str, *, depth: int | None) -> str:
    parts = key.split("/")
    return "/".join(parts[:-1] if depth is None else parts[:depth]) or "all tasks"


def _common(row: str, runs: Sequence[Run], notes: list[str], to_row: Callable[[str], str]) -> list[str]:
    """Keys of the task that every run scored. Raises Incomparable for other splits or temperatures, or none
    in common.
    """
    first = runs[0]
    for run in runs[1:]:
        ours, theirs = first.evaluations[-1].conditions, run.evaluations[-1].conditions
        if (ours.split, ours.temperature) != (theirs.split, theirs.temperature):
            raise Incomparable(
                f"{first.name} and {run.name} were not evaluated alike on {row}: split {ours.split} at "
                f"temperature {ours.temperature:g}, and {theirs.split} at {theirs.temperature:g}"
            )
    last = [run.evaluations[-1] for run in runs]
    every = [
        {key for key in evaluation.task_returns if to_row(key) == row and key in evaluation.task_scores}
        for evaluation in last
    ]
    shared = sorted(set.intersection(*every))
    if not shared:
        raise Incomparable(f"the runs on {row} have no scored variation in common")
    if lost := len(set.union(*every)) - len(shared):
        notes.append(f"{row}: {lost} variation(s) that only some of the runs scored are left out")
    return shared


def _require_seeds(row: str, method: str, runs: Sequence[Run], notes: list[str]) -> None:
    """Runs of one cell differ in their seeds alone."""
    for run in runs[1:]:
        if differ := same_method(runs[0].settings, run.settings):
            raise Incomparable(
                f"{runs[0].name} and {run.name} are both {method!r} on {row} and differ in "
                f"{', '.join(differ[:3])}: name their columns, NAME=DIRECTORY"
            )
    starts = [(run.config["seed"], run.settings.get("model.initial_checkpoint")) for run in runs]
    if len(set(starts)) < len(starts):
        raise Incomparable(f"{method!r} has one seed twice on {row}: leave one of the runs out")
    same_weights = len({weights for _, weights in starts}) < len(runs)
    if not is_trained(runs[0].config) and same_weights:
        notes.append(f"{method} on {row}: several runs play the same weights, no training differs in them")


def _returns(evaluation: ScoredStep) -> Mapping[str, float]:
    return evaluation.task_returns


def _scores(evaluation: ScoredStep) -> Mapping[str, float]:
    return evaluation.task_scores


def _cell(method: str, runs: Sequence[Run], keys: Sequence[str], *, seed: int) -> Cell:
    def rows(metric: Callable[[ScoredStep], Mapping[str, float]]) -> list[list[float]]:
        return [[metric(run.evaluations[-1])[key] for key in keys] for run in runs]

    return _make_cell(method, rows(_returns), rows(_scores), seed=seed)


def _make_cell(
    method: str, returns: Sequence[Sequence[float]], solved: Sequence[Sequence[float]], *, seed: int
) -> Cell:
    def estimate(rows: Sequence[Sequence[float]], within: tuple[float, float]) -> Estimate:
        # of one run, over variations; a bootstrap of equal returns has no width, and is no interval
        if len(rows) == 1 and len(rows[0]) > 1 and (within == _SHARES or len(set(rows[0])) > 1):
            low, high = interval(rows[0], binary=within == _SHARES and set(rows[0]) <= {0.0, 1.0})
            return Estimate(value=fmean(rows[0]), low=low, high=high)
        return iqm_estimate(Sample(name=method, scores=np.asarray(rows)), seed=seed, within=within)

    return Cell(returns=estimate(returns, UNBOUNDED), solved=estimate(solved, _SHARES), num_runs=len(returns))


def _averages(
    methods: Sequence[str],
    grouped: Mapping[tuple[str, str], Sequence[Run]],
    tasks: Mapping[str, Sequence[str]],
    notes: list[str],
    *,
    seed: int,
) -> dict[str, Cell]:
    """Means over tasks of each seed that every task has; the tasks of the table are taken as given."""
    averages = {}
    for method in methods:
        cells = [grouped.get((row, method), ()) for row in tasks]
        paired = _paired(cells)
        if all(cells) and (num_dropped := max(map(len, cells)) - len(paired)):
            notes.append(
                f"the mean over tasks of {method} leaves out {num_dropped} seed(s) that not every task has"
            )
        last = [{row: run.evaluations[-1] for row, run in zip(tasks, runs, strict=True)} for runs in paired]
        if last:
            averages[method] = _make_cell(
                method,
                *([[_mean(each, tasks, metric)] for each in last] for metric in (_returns, _scores)),
                seed=seed,
            )
    return averages


def _paired(cells: Sequence[Sequence[Run]]) -> list[list[Run]]:
    """A run of every cell for each seed that all of them have. Where one seed plays several weights, as in
    evaluations of checkpoints that name no seed, it is one with its weights.
    """
    seeds = [[run.config["seed"] for run in runs] for runs in cells]
    is_twice = any(len(set(entry)) < len(entry) for entry in seeds)

    def key(run: Run) -> tuple[str, str]:
        start = run.settings.get("model.initial_checkpoint", "none")
        return run.config["seed"], start if is_twice else ""

    runs_by_key = [{key(run): run for run in runs} for runs in cells]
    return [
        [entry[run_key] for entry in runs_by_key]
        for run_key in sorted(set.intersection(*map(set, runs_by_key)))
    ]


def _mean(
    evaluations: Mapping[str, ScoredStep],
    tasks: Mapping[str, Sequence[str]],
    metric: Callable[[ScoredStep], Mapping[str, float]],
) -> float:
    return fmean(fmean(metric(evaluations[row])[key] for key in keys) for row, keys in tasks.items())


def _curves(
    grouped: Mapping[tuple[str, str], Sequence[Run]], tasks: Mapping[str, Sequence[str]], *, seed: int
) -> Iterable[TrialCurves]:
    for row, keys in tasks.items():
        adapted = {
            method: runs
            for (cell_row, method), runs in grouped.items()
            if cell_row == row and all(run.trials for run in runs)
        }
        if not adapted:
            continue
        num = max(len(run.trials) for runs in adapted.values() for run in runs)
        bands = {
            method: iqm_band(method, np.asarray([_line(run, keys, num) for run in runs]), seed=seed)
            for method, runs in adapted.items()
        }
        yield TrialCurves(task=row, x=np.arange(1, num + 1, dtype=np.float64), bands=bands)


def _line(run: Run, keys: Sequence[str], num: int) -> list[float]:
    """Mean return of each trial, of ``num``; NaN where a fault took one of the variations, and where a run
    was cut. Reflexion that solved everything has no further trial, and nothing changes any more.
    """
    line = [fmean(trial.task_returns.get(key, math.nan) for key in keys) for trial in run.trials]
    padding = line[-1] if has_solved_all(run) else math.nan
    return [*line, *[padding] * (num - len(line))]
