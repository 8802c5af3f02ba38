"""Evaluations of a run as charts over training steps and as tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from outrider.printing import plural, score
from outrider.rollout.evaluate import PairedGain, describe_conditions, gain_over_start
from outrider.viewer.report_parts import Chart, Point, Series
from outrider.viewer.run_reader import Evaluation, RunData

_MAX_SERIES: Final = 4  # the number of line styles of the page
_MAX_NAME: Final = 18  # characters that fit under the axis
_WITHOUT: Final = "Played on held-out tasks without retrieval, tips or any other help of training."
_WITH_MEMORY: Final = (
    "Trials with the memory that the labels name: played with what it holds by then, without training."
)


def evaluation_charts(run: RunData) -> list[tuple[Chart, str]]:
    """Charts of each split's score over training steps, with captions. A chart has one line for each
    set of tasks that was evaluated at least twice.

    The last evaluation at step 0 is the policy at the start of training. Earlier evaluations, such as that of
    the policy before a cold start, have no training step: they are drawn at a labelled position left of step
    0 and are not joined by a line.
    """
    is_trial = run.has_trials
    charts: list[tuple[Chart, str]] = []
    for name_of_set, group in _evaluation_sets(run):
        scored = [evaluation for evaluation in group if evaluation.interval]
        positions = {} if is_trial else _early_positions(scored)
        lines = [
            _line(
                tasks_hash,
                [evaluation for evaluation in scored if evaluation.panel_hash == tasks_hash],
                positions,
                is_trial=is_trial,
            )
            for tasks_hash in dict.fromkeys(evaluation.panel_hash for evaluation in scored)
        ]
        series = tuple(line for line in lines if len(line.values) > 1)[:_MAX_SERIES]
        if not series:
            continue
        axis = {
            position: label if len(label) <= _MAX_NAME else "before" for label, position in positions.items()
        }
        x_label = "trial" if is_trial else "step"
        title, unit = f"Evaluation on {name_of_set}", "solved, %"
        chart = Chart(
            title=title, x_label=x_label, y_label=unit, series=series, is_share=True, x_tick_labels=axis
        )
        before = " Left of step 0: before the cold start, which is no training step." if axis else ""
        charts.append((chart, f"Points with 95 % intervals. {_describe_conditions(run, scored)}{before}"))
    return charts


def _early_positions(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Positions on the x axis, by label, of evaluations before the start of training: left of step 0, each a
    fifth of the axis length further."""
    before = list(dict.fromkeys(evaluation.label for evaluation in evaluations if evaluation.step == 0))[:-1]
    spacing = max(1.0, max((evaluation.step for evaluation in evaluations), default=0) / 5)
    return {label: spacing * (index - len(before)) for index, label in enumerate(before)}


def _line(
    tasks_hash: str, evaluations: Sequence[Evaluation], positions: Mapping[str, float], *, is_trial: bool
) -> Series:
    """The line of one set of tasks. If a position or step was evaluated several times, the last one
    counts."""
    latest: dict[float, Evaluation] = {}
    for trial, evaluation in enumerate(evaluations, start=1):
        position = positions.get(evaluation.label, 0.0) if evaluation.step == 0 else evaluation.step
        latest[trial if is_trial else position] = evaluation
    points: list[Point] = []
    for x, evaluation in sorted(latest.items()):
        label = evaluation.label if is_trial or x < 0 else f"{evaluation.label}, step {evaluation.step}"
        value, low, high = evaluation.interval or (None, None, None)
        points.append(Point(x=x, value=value, low=low, high=high, name=label))
        if x < 0:
            points.append(Point(x=x, value=None))  # break the line: no training happened in between
    return Series(label=f"panel {tasks_hash[:12]}", points=tuple(points))


def _describe_conditions(run: RunData, columns: Sequence[Evaluation]) -> str:
    if run.has_trials:
        return _WITH_MEMORY
    num = max((evaluation.num_training_tasks for evaluation in columns), default=0)
    if not num:
        return _WITHOUT
    is_all_training = all(evaluation.num_training_tasks >= evaluation.num_tasks for evaluation in columns)
    task_kind = "training tasks" if is_all_training else f"tasks of which {num} are training tasks"
    return _WITHOUT.replace("held-out tasks", task_kind)


def score_mark(config: Mapping[str, str]) -> str:
    """A sentence for scores of a run whose success rule is another one than the benchmark's."""
    marks = {
        ("environment.success_at", "positive"): "Every final score above 0 counts as a success",
        ("environment.option_scoring", "released"): "Some goals cannot reach the full score",
    }
    return " ".join(
        f"{text} ({key} = {value})." for (key, value), text in marks.items() if config.get(key) == value
    )


def evaluation_tables(run: RunData) -> list[dict[str, Any]]:
    """A table per split for the template: ``rows`` are (name, one cell per column), ``columns`` the labels
    with their details. If a label was evaluated several times, the table has the last result.
    """
    tables: list[dict[str, Any]] = []
    for name_of_set, group in _evaluation_sets(run):
        last = {evaluation.label: evaluation for evaluation in group}  # the chart has all evaluations
        columns = list(last.values())
        rows: list[tuple[str, list[str]]] = []
        if any(evaluation.interval for evaluation in columns):
            cells = [score(*(evaluation.interval or (math.nan,))) for evaluation in columns]
            rows.append(("score (share of tasks solved)", cells))
        if any(evaluation.graded_return is not None for evaluation in columns):
            returns = [evaluation.mean_return for evaluation in columns]
            cells = ["not measured" if mean is None else score(mean, is_share=False) for mean in returns]
            rows.append(("mean return (a number, no share)", cells))
        differs = len({evaluation.panel_hash for evaluation in columns}) > 1
        tables.append(
            {
                "split": name_of_set,
                "played": f"{_describe_conditions(run, columns)} {score_mark(run.config)}".rstrip(),
                "columns": [(evaluation.label, _head(run, evaluation)) for evaluation in columns],
                "rows": rows,
                "warning": "The panels differ: these columns were not measured on the same tasks."
                if differs
                else "",
            }
        )
    return tables


def _evaluation_sets(run: RunData) -> list[tuple[str, list[Evaluation]]]:
    """The evaluations of each split and evaluation set, with its name."""
    groups: dict[tuple[str, str], list[Evaluation]] = {}
    for evaluation in run.evaluations:
        groups.setdefault((evaluation.panel, evaluation.split), []).append(evaluation)
    return [
        (f"{panel} (split {split})" if panel else split, group) for (panel, split), group in groups.items()
    ]


def _head(run: RunData, evaluation: Evaluation) -> str:
    """Column header: the tasks of an evaluation, and its faulted rollouts, which no metric includes."""
    conditions = describe_conditions(
        split=evaluation.split,
        panel_hash=evaluation.panel_hash,
        temperature=evaluation.temperature,
        num_samples=run.config.get("evaluation.num_samples", "1"),
        truncation=evaluation.truncation,
    )
    faults = f", {evaluation.num_faults} FAULTS in no score" if evaluation.num_faults else ""
    return f"step {evaluation.step}, {plural(evaluation.num_tasks, 'task')}{faults}, {conditions}"


def gain_of_main(run: RunData) -> PairedGain | None:
    """The gain of the last evaluation on the main set over the last one at step 0."""
    scored = [asdict(evaluation) for evaluation in run.main_evaluations if evaluation.interval]
    return gain_over_start(scored) if scored else None


def format_evaluation(evaluation: Evaluation) -> str:
    """The score of an evaluation with its interval, the tasks and the temperature."""
    text = score(*(evaluation.interval or (math.nan,)))
    kind = "training task" if evaluation.num_training_tasks >= evaluation.num_tasks else "task"
    share = (
        f" ({evaluation.num_training_tasks} of training)"
        if 0 < evaluation.num_training_tasks < evaluation.num_tasks
        else ""
    )
    return f"{text}  {plural(evaluation.num_tasks, kind)}{share}, temperature {evaluation.temperature:g}"
