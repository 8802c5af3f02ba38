"""Tables, verdicts and notes of a comparison, as plain text that every output draws in its own way."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from outrider.errors import ConfigError
from outrider.evaluation.compare import (
    AXES,
    SCORE,
    ComparedRun,
    Comparison,
    Curves,
    Incomparable,
    is_trained,
    load_run,
    method_name,
    run_names,
    same_method,
    unfinished,
)
from outrider.evaluation.statistics import (
    ALPHA,
    COVERAGE,
    MIN_SEEDS,
    UNBOUNDED,
    Band,
    Estimate,
    Sample,
    Scores,
    iqm_band,
    iqm_estimate,
)
from outrider.printing import is_graded, points, score
from outrider.rollout.evaluate import interval
from outrider.viewer.report_parts import number

MAX_SERIES: Final = 8  # as many as the page has line styles for
_COST_RATIO: Final = 1.1  # from this ratio of mean costs on, a note says that the groups did not pay the same
CONDITIONS: Final = ("environment.", "rollout.")  # settings that training and the test have in common


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of plain text that every output draws in its own way."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str


def verdicts(comparison: Comparison) -> list[str]:
    """One sentence per pair of groups."""
    sentences: list[str] = []
    for pair in comparison.pairs:
        winner = pair.verdict.winner
        if winner is None:
            reasons = "; ".join(pair.verdict.reasons)
            sentences.append(f"No winner between {pair.first} and {pair.second}: {reasons}.")
        else:
            loser = pair.second if winner == pair.first else pair.first
            gain = f"{_gain(pair.difference)} ({pair.first} - {pair.second})"
            sentences.append(f"{winner} scores higher than {loser}: {gain}.")
    return sentences or ["No two groups have scores to compare."]


def notes(comparison: Comparison) -> list[str]:
    """Notes that a reader must know beside the numbers."""
    runs = [run for group in comparison.groups for run in group.runs]
    messages = [
        *comparison.notes,
        *(f"{run.name} has no evaluation: its group has no score" for run in runs if not run.evaluations),
    ]
    if len(comparison.groups) == 1:
        messages.append("all runs have one configuration: there is nothing to compare but their seeds")
    scored = [run for run in runs if run.evaluations]
    messages += [
        f"{run.name}: {num} rollout(s) of the last evaluation ended in a fault and are in no score"
        for run in scored
        if (num := run.evaluations[-1].num_faults)
    ]
    if scored and comparison.num_tasks is None:
        missing = ", ".join(run.name for run in scored if not run.evaluations[-1].task_scores)
        messages.append(f"no scores of single tasks: {missing or 'the runs have no scored task in common'}")
    elif comparison.num_left_out:
        messages.append(
            f"{comparison.num_left_out} task(s) are left out: a fault kept them from being scored in some run"
        )
    if few := sorted({len(group.runs) for group in comparison.groups if group.score} & COVERAGE.keys()):
        shares = ", ".join(f"with {num} seeds about {COVERAGE[num]} %" for num in few)
        messages.append(
            "a bootstrap interval over so few seeds is too narrow: "
            f"{shares} of such intervals hold the true value, not 95 %"
        )
    if conditions := [key for key, _ in comparison.settings if key.startswith(CONDITIONS)]:
        messages.append(
            f"the groups were tested under different conditions ({', '.join(conditions)}): "
            "their scores are not of one test"
        )
    if len(nums := {run.config.get("evaluation.num_samples", "1") for run in runs if run.evaluations}) > 1:
        messages.append(
            "the evaluations drew different numbers of samples a task "
            f"({', '.join(sorted(nums))}): their noise differs"
        )
    if len({run.config.get("num_threads") for run in runs}) > 1:
        messages.append("the runs used different numbers of threads: their seconds do not compare")
    messages += [line for axis in AXES for line in _cost_notes(comparison, axis)]
    if len(comparison.groups) > MAX_SERIES:
        messages.append(f"the figures show the first {MAX_SERIES} of {len(comparison.groups)} groups")
    return messages


def _cost_notes(comparison: Comparison, axis: str) -> list[str]:
    spent = {group.label: group.costs[axis] for group in comparison.groups if axis in group.costs}
    if not spent or not max(spent.values()):
        return []
    most, least = max(spent, key=lambda label: spent[label]), min(spent, key=lambda label: spent[label])
    if not spent[least]:
        return [f"final scores are not at equal {axis}: {most} took {number(spent[most])}, {least} none"]
    if spent[most] < _COST_RATIO * spent[least]:
        return []
    return [
        (
            f"final scores are not at equal {axis}: {most} took "
            f"{spent[most] / spent[least]:.2f} times those of {least}"
        )
    ]


def tables(comparison: Comparison) -> list[TextTable]:
    """Groups, pairs, scores at equal cost, runs, and the settings that differ; empty ones are left out."""
    labels = tuple(group.label for group in comparison.groups)
    settings = TextTable(
        title="Settings that differ", columns=("setting", *labels),
        rows=tuple((key, *values) for key, values in comparison.settings),
        caption=("Seeds, starting weights, the size of a token budget and what only changes speed, "
                 "checkpoints or evaluation do not count."),
    )  # fmt: skip
    every = [
        _group_table(comparison),
        _pair_table(comparison),
        _cost_table(comparison),
        _run_table(comparison),
        settings,
    ]
    return [table for table in every if table.rows]


def _group_table(comparison: Comparison) -> TextTable:
    conditions = comparison.conditions
    intro = (
        f"Split {conditions.split}, panel {conditions.panel_hash[:12]}, temperature "
        f"{conditions.temperature:g}. "
        if conditions
        else ""
    )
    over = "seeds" if comparison.num_tasks is None else f"seeds and {comparison.num_tasks} tasks"
    graded = _is_graded(comparison)
    rows = tuple(
        (group.label, str(len(group.runs)), "not measured" if group.score is None else _percent(group.score),
         *((_mean_return(group.runs),) if graded else ()),
         *(number(group.costs[axis]) if axis in group.costs else "not measured" for axis in AXES))
        for group in comparison.groups
    )  # fmt: skip
    return TextTable(
        title="Groups",
        columns=("group", "seeds", "score", *(("mean return",) if graded else ()), *AXES),
        rows=rows,
        caption=f"{intro}Score: interquartile mean over seeds of the last evaluation [95 % bootstrap "
        f"interval over {over}]. Costs: means over runs, of training steps only: no cold start, "
        "no evaluation, and a step that was taken again after a stop counts once.",
    )


def _pair_table(comparison: Comparison) -> TextTable:
    rows = tuple(
        (f"{pair.first} - {pair.second}", _gain(pair.difference), _range(pair.improvement, "{:.2f}"),
         "none" if pair.test is None else f"{pair.test.p:.3g} ({pair.test.name})",
         *("none" if p is None else f"{p:.3g}" for p in (pair.p_corrected, pair.p_seeds)),
         pair.verdict.winner or "none")
        for pair in comparison.pairs
    )  # fmt: skip
    return TextTable(
        title="Differences",
        columns=(
            "groups",
            "difference",
            "chance that the first is higher",
            "p over tasks",
            "p over tasks, Holm",
            "p over seeds, Holm",
            "winner",
        ),
        rows=rows,
        caption=f"A winner needs {MIN_SEEDS} seeds a side, both corrected p below {ALPHA:g} and an interval "
        "of the difference without 0. The test over tasks takes the trained policies as given; the "
        "one over seeds (Welch's) and the interval ask for other seeds. A chance of 1.00 [1.00, "
        "1.00] says that every run of one side is higher, not that every other run would be.",
    )


def _cost_table(comparison: Comparison) -> TextTable:
    rows = tuple(
        (
            curve.quantity,
            f"{number(float(curve.x[-1]))} {curve.axis}",
            *(_end_of_curve(curve, group.label) for group in comparison.groups),
        )
        for curve in comparison.curves
    )
    return TextTable(
        title="At equal cost",
        columns=("quantity", "at", *(group.label for group in comparison.groups)),
        rows=rows,
        caption="The end of each curve: the largest cost that every run reached, with 95 % intervals over "
        "seeds. A held-out score between two evaluations lies on the straight line between them; "
        "a training reward is the mean of the curve's last bin.",
    )


def _run_table(comparison: Comparison) -> TextTable:
    graded = _is_graded(comparison)
    rows = tuple(
        (run.name, group.label, run.config["seed"],
         *((score(run.evaluations[-1].score), str(run.evaluations[-1].step)) if run.evaluations
           else ("not measured", "")),
         *((_mean_return([run]),) if graded else ()),
         *(number(run.cost_at_step(axis, run.num_steps)) if axis in run.costs else "not measured"
           for axis in AXES))
        for group in comparison.groups
        for run in group.runs
    )  # fmt: skip
    caption = "Score: mean success over the tasks that the run's last evaluation scored."
    columns = ("run", "group", "seed", "score", "at step", *(("mean return",) if graded else ()), *AXES)
    return TextTable(title="Runs", columns=columns, rows=rows, caption=caption)


def _is_graded(comparison: Comparison) -> bool:
    """Whether the last evaluation of some run has a mean return other than its share of solved tasks."""
    last = [run.evaluations[-1] for group in comparison.groups for run in group.runs if run.evaluations]
    return any(
        evaluation.task_returns and is_graded(evaluation.score, fmean(evaluation.task_returns.values()))
        for evaluation in last
    )


def _mean_return(runs: Sequence[ComparedRun]) -> str:
    """Mean over runs of the mean return over the tasks of the last evaluation."""
    last = [run.evaluations[-1].task_returns for run in runs if run.evaluations]
    means = [fmean(returns.values()) for returns in last if returns]
    return number(fmean(means)) if means else "not measured"


def _percent(estimate: Estimate) -> str:
    return score(estimate.value, estimate.low, estimate.high) + _one_seed_mark(estimate)


def _gain(difference: Estimate) -> str:
    return points(difference.value, difference.low, difference.high) + _one_seed_mark(difference)


def _one_seed_mark(estimate: Estimate) -> str:
    return "" if estimate.has_interval else " (one seed: no interval)"


def _range(estimate: Estimate, form: str) -> str:
    value, low, high = (form.format(part) for part in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]" if estimate.has_interval else f"{value}{_one_seed_mark(estimate)}"


def _end_of_curve(curves: Curves, label: str) -> str:
    band = curves.bands[label]
    estimate = Estimate(value=float(band.value[-1]), low=float(band.low[-1]), high=float(band.high[-1]))
    if not math.isfinite(estimate.value):
        return "not measured"
    return _percent(estimate) if curves.quantity == SCORE else _range(estimate, "{:.4g}")


# Runs by task and method (``outrider compare --by-task``): one row per task, one column per method, as in
# Table 1 of EMPO² (arXiv 2602.23008), where each task may have a model of its own; and curves over the trials
# of an adaptation (its Fig. 8).
#
# The task of the variation ``scienceworld/find-animal/3`` is ``scienceworld/find-animal``. A run counts in
# the row of every task of its evaluation.


_SHARES: Final = (0.0, 1.0)
_AVERAGE: Final = "mean over tasks"
_NOTHING: Final = "not measured"
_ONE_RUN_MARK: Final = " (1)"  # after a value of a single run
_MIDDLE: Final = (
    "Interquartile mean over seeds of each run's last evaluation [95 % bootstrap interval over seeds and "
    "variations]; the mean over tasks over the seeds that every task has [over seeds]."
)


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
        raise ConfigError("compare --by-task needs run directories")

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
            f"{run.name}: {last.num_faults} rollout(s) of the last evaluation ended in a fault "
            "and are in no score"
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
