"""Evaluations of a run in its report: a table per split, and scores over steps from before training on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.printing import score
from outrider.watch.curves import Chart, Point, Series
from outrider.watch.run_directory import Evaluation, RunData

_MAX_SERIES: Final = 4  # as many as the page has line styles for
SHARES: Final = frozenset({"score", "success"})  # shares of solved tasks; anything else is a number
_MAX_NAME: Final = 18  # characters that have room under the axis
_WITHOUT: Final = "Played on held-out tasks without retrieval, tips or any other help of training."
_WITH_MEMORY: Final = (
    "Trials with the memory that the labels name: played with what it holds by then, without training."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTable:
    """One split: ``rows`` are (metric, one cell a column); ``columns`` are the labels with their facts."""

    split: str
    played: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    warning: str


def evaluation_charts(run: RunData) -> list[tuple[Chart, str]]:
    """Score over step of each split's first metric, with a caption; one line for each panel that was
    evaluated twice or more.

    The last evaluation of step 0 is what training began with. What came before it, as the policy in front of
    a cold start, has no step: it stands at a named place left of step 0, and no line joins it.
    """
    is_trial = _has_trials(run)
    charts: list[tuple[Chart, str]] = []
    for split in dict.fromkeys(evaluation.split for evaluation in run.evaluations):
        evaluations = [
            evaluation for evaluation in run.evaluations if evaluation.split == split and evaluation.metrics
        ]
        name = next((metric for evaluation in evaluations for metric in evaluation.metrics), "")
        scored = [evaluation for evaluation in evaluations if name in evaluation.metrics]
        positions = {} if is_trial else _early_positions(scored)
        lines = [
            _line(
                tasks_hash,
                name,
                [evaluation for evaluation in scored if evaluation.panel_hash == tasks_hash],
                positions,
                is_trial=is_trial,
            )
            for tasks_hash in dict.fromkeys(evaluation.panel_hash for evaluation in scored)
        ]
        series = tuple(line for line in lines if len(line.values) > 1)[:_MAX_SERIES]
        if not series:
            continue
        is_share = name in SHARES
        axis = {position: _short(label) for label, position in positions.items()}
        x_label = "trial" if is_trial else "step"
        unit = "solved, %" if is_share else f"{name} (no share)"
        title = f"Evaluation on {split}"
        chart = Chart(
            title=title, x_label=x_label, y_label=unit, series=series, is_share=is_share, x_tick_labels=axis
        )
        before = " Left of step 0: before the cold start, which is no training step." if axis else ""
        charts.append(
            (chart, f"Points with 95 % intervals. {_describe_conditions(run, evaluations)}{before}")
        )
    return charts


def _early_positions(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Where on the axis stands, by label, what was evaluated at step 0 before the policy that training began
    with: a fifth of its length for each."""
    before = list(dict.fromkeys(evaluation.label for evaluation in evaluations if evaluation.step == 0))[:-1]
    spacing = max(1.0, max((evaluation.step for evaluation in evaluations), default=0) / 5)
    return {label: spacing * (index - len(before)) for index, label in enumerate(before)}


def _line(
    tasks_hash: str,
    name: str,
    evaluations: Sequence[Evaluation],
    positions: Mapping[str, float],
    *,
    is_trial: bool,
) -> Series:
    """The points of one panel; the last evaluation of a place or of a step stands for it."""
    latest: dict[float, Evaluation] = {}
    for number, evaluation in enumerate(evaluations, start=1):
        position = positions.get(evaluation.label, 0.0) if evaluation.step == 0 else evaluation.step
        latest[number if is_trial else position] = evaluation
    points: list[Point] = []
    for x, evaluation in sorted(latest.items()):
        value = evaluation.metrics[name]
        label = evaluation.label if is_trial or x < 0 else f"{evaluation.label}, step {evaluation.step}"
        points.append(Point(x=x, value=value.value, low=value.ci_low, high=value.ci_high, name=label))
        if x < 0:
            points.append(Point(x=x, value=None))  # what lies between is no training
    return Series(label=f"panel {tasks_hash[:12]}", points=tuple(points))


def _short(label: str) -> str:
    return label if len(label) <= _MAX_NAME else "before"


def _has_trials(run: RunData) -> bool:
    return run.config.get("evaluation.num_trials", "0") != "0"


def _describe_conditions(run: RunData, columns: Sequence[Evaluation]) -> str:
    if _has_trials(run):
        return _WITH_MEMORY
    num = max((evaluation.num_training_tasks for evaluation in columns), default=0)
    if not num:
        return _WITHOUT
    is_all_training = all(evaluation.num_training_tasks >= evaluation.num_tasks for evaluation in columns)
    task_kind = "training tasks" if is_all_training else f"tasks of which {num} are training tasks"
    return _WITHOUT.replace("held-out tasks", task_kind)


def evaluation_tables(run: RunData) -> list[EvaluationTable]:
    """A table per split; of a label that was evaluated several times the last."""
    tables: list[EvaluationTable] = []
    for split in dict.fromkeys(evaluation.split for evaluation in run.evaluations):
        last = {
            evaluation.label: evaluation for evaluation in run.evaluations if evaluation.split == split
        }  # the curve has them all
        columns = list(last.values())
        names = dict.fromkeys(name for evaluation in columns for name in evaluation.metrics)
        rows = tuple(
            (_row_name(name), tuple(_cell(evaluation, name) for evaluation in columns)) for name in names
        )
        if any(evaluation.graded_return is not None for evaluation in columns):
            rows += (("mean return (a number, no share)", tuple(map(_return_cell, columns))),)
        heads = tuple((evaluation.label, _head(evaluation)) for evaluation in columns)
        differs = len({evaluation.panel_hash for evaluation in columns}) > 1
        warning = "The panels differ: these columns were not measured on the same tasks." if differs else ""
        conditions = _describe_conditions(run, columns)
        tables.append(
            EvaluationTable(split=split, played=conditions, columns=heads, rows=rows, warning=warning)
        )
    return tables


def _row_name(name: str) -> str:
    return f"{name} (share of tasks solved)" if name in SHARES else f"{name} (a number, no share)"


def _head(evaluation: Evaluation) -> str:
    """Panel of an evaluation; faults are rollouts that are in none of its numbers."""
    faults = f", {evaluation.num_faults} FAULTS in no score" if evaluation.num_faults else ""
    return (
        f"step {evaluation.step}, {evaluation.num_tasks} tasks{faults}, temperature "
        f"{evaluation.temperature:g}, panel {evaluation.panel_hash[:12]}"
    )


def _cell(evaluation: Evaluation, name: str) -> str:
    metric = evaluation.metrics.get(name)
    if metric is None:
        return "not measured"
    return score(metric.value, metric.ci_low, metric.ci_high, is_share=name in SHARES)


def _return_cell(evaluation: Evaluation) -> str:
    mean_return = evaluation.mean_return
    return "not measured" if mean_return is None else score(mean_return, is_share=False)
