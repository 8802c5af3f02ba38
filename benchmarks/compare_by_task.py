"""Runs by task and method: one row per task, one column per method.

    python -m benchmarks.compare_by_task [NAME=]RUN ... [--depth N] [--markdown FILE] [--html FILE]

As in Table 1 of EMPO² (arXiv 2602.23008), each task may have a model of its own. Runs of ``outrider eval
--adapt`` also have curves over the trials of the adaptation (Fig. 8 of the paper).

The task of the variation ``scienceworld/find-animal/3`` is ``scienceworld/find-animal``, or its first N parts
with ``--depth N``. A run counts in the row of every task of its evaluation. NAME is the name of the column;
without it, the method of the run is the name.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from outrider.commands import positive
from outrider.errors import ConfigError, OutriderError
from outrider.evaluation.compare import (
    ComparedRun,
    Incomparable,
    load_run,
    run_names,
    unfinished,
)
from outrider.evaluation.compare_report import CONDITIONS, MAX_SERIES, Figure, Report, TextTable, show_report
from outrider.evaluation.statistics import (
    COVERAGE,
    UNBOUNDED,
    Band,
    Estimate,
    Sample,
    Scores,
    iqm_band,
    iqm_estimate,
)
from outrider.printing import Terminal, plural, score
from outrider.rollout.evaluate import interval
from outrider.viewer.configuration import STARTS, algorithm_name, comparable, is_trained
from outrider.viewer.run_reader import read_run

UNTRAINED: Final = "no training"
_WITHOUT_TIPS: Final = ("algorithm.memory_probability", "algorithm.intrinsic_coefficient")
_SHARES: Final = (0.0, 1.0)
_AVERAGE: Final = "mean over tasks"
_NOTHING: Final = "not measured"
_ONE_RUN_MARK: Final = " (1)"  # after a value of a single run
_MIDDLE: Final = (
    "Interquartile mean over seeds of each run's last evaluation [95 % bootstrap interval over seeds and "
    "variations]; the mean over tasks over the seeds that every task has [over seeds]."
)


def method_name(run: ComparedRun) -> str:
    """The algorithm of a training. For an evaluation, the algorithm of the training that produced its
    weights, and its memory for adaptation, or the engine if the engine is a method of its own.
    """
    config = run.config
    if is_trained(config):
        return _training_method(config)
    checkpoint = run.settings.get("model.initial_checkpoint", "none")
    parts: list[str] = []
    if checkpoint != "none":  # the method of the checkpoint's run, or the run's name if its folder is gone
        folder = Path(checkpoint).parent.parent
        trained = read_run(folder).config
        parts.append(_training_method(trained) if "algorithm.type" in trained else folder.name)
    if config.get("engine.type") == "retrospex":
        parts.append("retrospex")
    if config.get("evaluation.num_trials", "0") != "0":
        parts.append(config.get("evaluation.memory", "tips"))
    names = [part for part in parts if part != UNTRAINED]
    return ", ".join(names) or UNTRAINED


def same_method(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Keys of the settings that determine the trained policy and differ between two runs, comparing absolute
    paths. Seeds and the folder of the starting weights are ignored.
    """
    ours, theirs = (
        {key: value for key, value in comparable(config).items() if key not in STARTS}
        for config in (first, second)
    )
    return sorted(key for key in ours.keys() | theirs if ours.get(key) != theirs.get(key))


def _training_method(config: Mapping[str, str]) -> str:
    if config.get("train.num_steps") == "0":
        return "imitation"
    if all(config.get(key) in ("0", "0.0") for key in _WITHOUT_TIPS):
        return "grpo"  # the same, bit for bit
    return algorithm_name(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Results of one method on one task, or on the mean over tasks, by the last evaluations: mean return and
    share of solved variations, interquartile means over runs. The interval of a single run is over its
    variations.
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
    """Results by task and method.

    ``tasks`` are the numbers of variations. ``cells`` are by (task, method), without pairs that have no run.
    ``averages`` are means over all tasks of the methods that have every task.
    """

    tasks: Mapping[str, int]
    methods: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    averages: Mapping[str, Cell]
    curves: tuple[TrialCurves, ...]
    notes: tuple[str, ...]


def compare_by_task(run_args: Sequence[str], *, depth: int | None = None, seed: int = 0) -> TaskComparison:
    """Compare runs by task.

    Args:
        run_args: ComparedRun directories, or ``NAME=DIRECTORY`` to name the column. Columns have this order.
        depth: How many parts of a task key name the row (None: all but the last).
        seed: The seed of the bootstrap draws.

    Raises ConfigError without runs, DataError for a folder that is no run, and :class:`Incomparable` for runs
    that are no seeds of one method, or were evaluated in different ways.
    """
    if not run_args:
        raise ConfigError("name run directories")

    def to_row(key: str) -> str:
        parts = key.split("/")
        return "/".join(parts[:-1] if depth is None else parts[:depth]) or "all tasks"

    method_runs = _load(run_args)
    methods = tuple(dict.fromkeys(method for method, _ in method_runs))
    notes = [note for _, run in method_runs for note in _run_notes(run)]
    grouped: dict[tuple[str, str], list[ComparedRun]] = {}
    for method, run in method_runs:
        for row in {to_row(key) for key in (run.evaluations[-1].task_returns if run.evaluations else ())}:
            grouped.setdefault((row, method), []).append(run)
    if not grouped:
        raise ConfigError("none of these runs has an evaluation with scores of single tasks")
    grouped = dict(sorted(grouped.items(), key=lambda item: (item[0][0], methods.index(item[0][1]))))
    tasks = {
        row: _common_keys(
            row, [run for key, runs in grouped.items() if key[0] == row for run in runs], notes, to_row
        )
        for row in dict.fromkeys(row for row, _ in grouped)
    }
    for (row, method), runs in grouped.items():
        _require_seeds(row, method, runs, notes)
    notes += _cell_notes(methods, grouped)
    return TaskComparison(
        averages=_averages(methods, grouped, tasks, notes, seed=seed),
        tasks={row: len(keys) for row, keys in tasks.items()},
        methods=methods,
        cells={
            (row, method): _make_cell(
                method,
                *(
                    [[values[key] for key in tasks[row]] for values in runs_values]
                    for runs_values in _last(runs)
                ),
                seed=seed,
            )
            for (row, method), runs in grouped.items()
        },
        curves=tuple(_trial_curves(grouped, tasks, seed=seed)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _load(run_args: Sequence[str]) -> list[tuple[str, ComparedRun]]:
    """(method, run), by column."""
    named = []
    for arg in run_args:
        name, equals, path = arg.partition("=")
        is_named = equals and name and not Path(arg).exists()  # a folder's own name may have an equals sign
        named.append((name, Path(path)) if is_named else ("", Path(arg)))
    names = run_names([path for _, path in named])
    runs = [load_run(path, name) for (_, path), name in zip(named, names, strict=True)]
    method_runs = [(method or method_name(run), run) for (method, _), run in zip(named, runs, strict=True)]
    columns = list(dict.fromkeys(method for method, _ in method_runs))
    return sorted(method_runs, key=lambda entry: (columns.index(entry[0]), entry[1].name))


def _run_notes(run: ComparedRun) -> list[str]:
    """What could not be read of a run, is missing, or was lost to faults."""
    # A run that adapts takes no step, and has no metrics of any.
    notes = [
        f"{run.name}: {note}" for note in run.notes if not (run.trials and note == "metrics.jsonl is missing")
    ]
    if not run.evaluations:
        return [*notes, f"{run.name} has no evaluation"]
    last = run.evaluations[-1]
    notes += unfinished(run)
    expected, num_trials = run.config.get("evaluation.num_trials", "0"), len(run.trials)
    if num_trials and expected.isdecimal() and num_trials < int(expected) and not _has_solved_all(run):
        notes.append(f"{run.name} was cut: {num_trials} of {expected} trials")
    if not last.task_returns:  # earlier versions wrote none
        notes.append(f"{run.name} is in no row: its last evaluation has no returns of single tasks")
    if last.num_faults:
        notes.append(
            f"{run.name}: {plural(last.num_faults, 'rollout')} of the last evaluation ended in a fault, "
            "without a score"
        )
    return notes


def _cell_notes(methods: Sequence[str], cells: Mapping[tuple[str, str], Sequence[ComparedRun]]) -> list[str]:
    """Cells with fewer runs than others of their column, and test conditions that differ within a row."""
    notes = []
    for method in methods:
        sizes = {row: len(runs) for (row, cell_method), runs in cells.items() if cell_method == method}
        most = max(sizes.values(), default=0)
        if fewer := [f"{num} on {row}" for row, num in sizes.items() if num < most]:
            notes.append(f"{method} has {most} runs on a task, but {', '.join(fewer)}")
    first: dict[str, dict[str, str]] = {}
    differing: set[str] = set()
    for (row, _), runs in cells.items():
        own = {key: value for key, value in runs[0].config.items() if key.startswith(CONDITIONS)}
        others = first.setdefault(row, own)
        differing |= {key for key in own.keys() | others if own.get(key) != others.get(key)}
    if differing:
        notes.append(
            f"methods of one row were tested under different conditions ({', '.join(sorted(differing))}): "
            "their scores are not of one test"
        )
    return notes


def _has_solved_all(run: ComparedRun) -> bool:
    """Whether a run with Reflexion ended because nothing was left to solve."""
    return run.config.get("evaluation.memory") == "reflexion" and run.trials[-1].score >= 1.0


def _common_keys(
    row: str, runs: Sequence[ComparedRun], notes: list[str], to_row: Callable[[str], str]
) -> list[str]:
    """Keys of the variations that every run scored. Raises Incomparable for different splits or temperatures,
    or if there is none in common.
    """
    first = runs[0]
    for run in runs[1:]:
        ours, theirs = first.evaluations[-1], run.evaluations[-1]
        if (ours.split, ours.temperature) != (theirs.split, theirs.temperature):
            raise Incomparable(
                f"{first.name} and {run.name} were not evaluated alike on {row}: split {ours.split} at "
                f"temperature {ours.temperature:g}, and {theirs.split} at {theirs.temperature:g}"
            )
    every = [
        {key for key in last.task_returns if to_row(key) == row and key in last.task_scores}
        for last in (run.evaluations[-1] for run in runs)
    ]
    shared = sorted(set.intersection(*every))
    if not shared:
        raise Incomparable(f"the runs on {row} have no scored variation in common")
    if lost := len(set.union(*every)) - len(shared):
        notes.append(f"{row}: {lost} variation(s) that only some of the runs scored are left out")
    return shared


def _require_seeds(row: str, method: str, runs: Sequence[ComparedRun], notes: list[str]) -> None:
    """Raise Incomparable unless the runs of a cell differ in their seeds alone."""
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


def _last(runs: Sequence[ComparedRun]) -> tuple[list[Mapping[str, float]], list[Mapping[str, float]]]:
    """Returns and scores by task key of the last evaluations."""
    last = [run.evaluations[-1] for run in runs]
    return [evaluation.task_returns for evaluation in last], [evaluation.task_scores for evaluation in last]


def _make_cell(
    method: str, returns: Sequence[Sequence[float]], solved: Sequence[Sequence[float]], *, seed: int
) -> Cell:
    def estimate(rows: Sequence[Sequence[float]], within: tuple[float, float]) -> Estimate:
        # One run has an interval over variations; a bootstrap of equal returns would have no width.
        if len(rows) == 1 and len(rows[0]) > 1 and (within == _SHARES or len(set(rows[0])) > 1):
            low, high = interval(rows[0], binary=within == _SHARES and set(rows[0]) <= {0.0, 1.0})
            return Estimate(value=fmean(rows[0]), low=low, high=high)
        return iqm_estimate(Sample(name=method, scores=np.asarray(rows)), seed=seed, within=within)

    return Cell(returns=estimate(returns, UNBOUNDED), solved=estimate(solved, _SHARES), num_runs=len(returns))


def _averages(
    methods: Sequence[str],
    grouped: Mapping[tuple[str, str], Sequence[ComparedRun]],
    tasks: Mapping[str, Sequence[str]],
    notes: list[str],
    *,
    seed: int,
) -> dict[str, Cell]:
    """Means over tasks of each seed that every task has; the tasks of the table are taken as given."""
    averages = {}
    for method in methods:
        cells = [grouped.get((row, method), ()) for row in tasks]
        seeds = [[run.config["seed"] for run in runs] for runs in cells]
        # Evaluations of checkpoints may have one seed with several weights; then both identify a run.
        is_twice = any(len(set(entry)) < len(entry) for entry in seeds)
        by_key = [
            {
                (
                    run.config["seed"],
                    run.settings.get("model.initial_checkpoint", "none") if is_twice else "",
                ): run
                for run in runs
            }
            for runs in cells
        ]
        keys = sorted(set.intersection(*map(set, by_key)))
        if all(cells) and (num_dropped := max(map(len, cells)) - len(keys)):
            notes.append(
                f"the mean over tasks of {method} leaves out {num_dropped} seed(s) that not every task has"
            )
        if keys:
            means = [
                [
                    [
                        fmean(
                            fmean(values[task_key] for task_key in task_keys)
                            for values, task_keys in zip(row_values, tasks.values(), strict=True)
                        )
                    ]
                    for row_values in zip(*values_by_task, strict=True)
                ]
                for values_by_task in zip(
                    *(_last([runs[key] for key in keys]) for runs in by_key), strict=True
                )
            ]
            averages[method] = _make_cell(method, *means, seed=seed)
    return averages


def _trial_curves(
    grouped: Mapping[tuple[str, str], Sequence[ComparedRun]], tasks: Mapping[str, Sequence[str]], *, seed: int
) -> Iterable[TrialCurves]:
    for row, keys in tasks.items():
        adapted = {
            method: runs
            for (cell_row, method), runs in grouped.items()
            if cell_row == row and all(run.trials for run in runs)
        }
        if adapted:
            num = max(len(run.trials) for runs in adapted.values() for run in runs)
            bands = {
                method: iqm_band(
                    method, np.asarray([_trial_means(run, keys, num) for run in runs]), seed=seed
                )
                for method, runs in adapted.items()
            }
            yield TrialCurves(task=row, x=np.arange(1, num + 1, dtype=np.float64), bands=bands)


def _trial_means(run: ComparedRun, keys: Sequence[str], num: int) -> list[float]:
    """Mean return of each of ``num`` trials; NaN if a fault took a variation or the run was cut. Reflexion
    that solved everything has no further trial, and its result does not change any more.
    """
    means = [fmean(trial.task_returns.get(key, math.nan) for key in keys) for trial in run.trials]
    padding = means[-1] if _has_solved_all(run) else math.nan
    return [*means, *[padding] * (num - len(means))]


def task_tables(comparison: TaskComparison) -> list[TextTable]:
    """Mean returns, solved variations, and a table of trials for each task with an adaptation."""

    def table(title: str, show: Callable[[Cell], str], caption: str) -> TextTable:
        def cell(entry: Cell | None) -> str:
            return _NOTHING if entry is None else show(entry) + _ONE_RUN_MARK * (entry.num_runs == 1)

        rows = [
            (
                _short(task, comparison.tasks), str(num),
                *(cell(comparison.cells.get((task, method))) for method in comparison.methods),
            )
            for task, num in comparison.tasks.items()
        ]  # fmt: skip
        if len(comparison.tasks) > 1:
            averages = (cell(comparison.averages.get(method)) for method in comparison.methods)
            rows.append((_AVERAGE, "", *averages))
        columns = ("task", "variations", *comparison.methods)
        return TextTable(title=title, columns=columns, rows=tuple(rows), caption=f"{_MIDDLE} {caption}")

    return [
        table(
            "Mean return by task",
            lambda cell: _number(cell.returns),
            "Returns are the environment's, in its unit: no share.",
        ),
        table(
            "Solved variations by task",
            lambda cell: score(cell.solved.value, cell.solved.low, cell.solved.high),
            "Share of variations that were solved.",
        ),
        *map(_trial_table, comparison.curves),
    ]


def task_notes(comparison: TaskComparison) -> list[str]:
    """Notes on the reliability and completeness of the numbers."""
    notes = list(comparison.notes)
    means = comparison.averages.values() if len(comparison.tasks) > 1 else ()
    sizes = sorted({cell.num_runs for cell in (*comparison.cells.values(), *means)})
    if few := [num for num in sizes if num in COVERAGE]:
        shares = ", ".join(f"with {num} seeds about {COVERAGE[num]} %" for num in few)
        notes.append(f"an interval over so few seeds is too narrow: {shares} hold the true value, not 95 %")
    if 1 in sizes:
        notes.append(f"{_ONE_RUN_MARK.strip()} one run: the interval, if any, is over its variations alone")
    if missing := len(comparison.tasks) * len(comparison.methods) - len(comparison.cells):
        notes.append(f"{missing} cells have no run; a mean over tasks is of methods that have every task")
    if (most := max((len(curves.bands) for curves in comparison.curves), default=0)) > MAX_SERIES:
        notes.append(f"a figure shows the first {MAX_SERIES} of up to {most} methods; the tables have all")
    return notes


def _short(task: str, tasks: Mapping[str, int]) -> str:
    """The task without the folders that all tasks have in common."""
    parts = [name.split("/")[:-1] for name in tasks]
    common = 0
    while all(len(part) > common and part[common] == parts[0][common] for part in parts):
        common += 1
    return "/".join(task.split("/")[common:])


def _trial_table(curves: TrialCurves) -> TextTable:
    estimates = {
        method: [
            Estimate(value=float(value), low=float(low), high=float(high))
            for value, low, high in zip(band.value, band.low, band.high, strict=True)
        ]
        for method, band in curves.bands.items()
    }
    rows = tuple(
        (f"{x:.0f}", *(_number(values[index]) for values in estimates.values()))
        for index, x in enumerate(curves.x)
    )
    gains = "; ".join(_trial_gain(method, band.value) for method, band in curves.bands.items())
    return TextTable(
        title=f"Trials on {curves.task}: mean return",
        columns=("trial", *curves.bands),
        rows=rows,
        caption="Interquartile mean over seeds [95 % interval over seeds], no weight moves; trial 1 has "
        "nothing to read. Reflexion's is of the best try so far, any other of the trial alone. "
        f"{gains}. A best trial is picked after the fact: too high by that.",
    )


def _trial_gain(method: str, values: Scores) -> str:
    """First, best and last trial; the relative gain if the first one is above 0."""
    known = [(float(value), index) for index, value in enumerate(values) if math.isfinite(value)]
    if not known or not math.isfinite(values[0]):
        return f"{method}: {_NOTHING}"
    best, index = max(known, key=lambda entry: (entry[0], -entry[1]))
    first = float(values[0])
    share = f" ({100 * (best / first - 1):+.1f} %)" if first > 0 else ""
    return f"{method}: first {first:.4g}, best {best:.4g} at trial {index + 1}{share}, last {values[-1]:.4g}"


def _number(estimate: Estimate) -> str:
    return score(estimate.value, estimate.low, estimate.high, is_share=False)


def task_report(comparison: TaskComparison) -> Report:
    """Report of a comparison by task."""
    figures = [
        Figure(
            title=f"{curves.task}: mean return over trials", x_label="trial", y_label="return",
            caption="Trials with a memory that fills, no weight moves; the first has nothing to read.",
            x=curves.x, bands=curves.bands,
        )
        for curves in comparison.curves
    ]  # fmt: skip
    return Report(
        title="Runs by task",
        tables=task_tables(comparison),
        notes=task_notes(comparison),
        figures=figures,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the runs cannot be compared, 2 bad configuration."""
    parsed = make_parser().parse_args(arguments)
    try:
        comparison = compare_by_task(parsed.runs, depth=parsed.depth)
        return show_report(
            task_report(comparison), markdown=parsed.markdown, html=parsed.html, console=Terminal()
        )
    except OutriderError as error:
        print(f"benchmarks.compare_by_task: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_by_task")
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN")
    parser.add_argument(
        "--depth", type=positive, metavar="N",
        help="parts of a task's key that name its row (default: all but the last)",
    )  # fmt: skip
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="with figures of the trials")
    return parser


if __name__ == "__main__":
    sys.exit(main())
