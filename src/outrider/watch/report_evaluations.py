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
    for split in dict.fromkeys(one.split for one in run.evaluations):
        ours = [one for one in run.evaluations if one.split == split and one.metrics]
        name = next((metric for one in ours for metric in one.metrics), "")
        scored = [one for one in ours if name in one.metrics]
        places = {} if is_trial else _places(scored)
        lines = [
            _line(panel, name, [one for one in scored if one.panel_hash == panel], places, is_trial=is_trial)
            for panel in dict.fromkeys(one.panel_hash for one in scored)
        ]
        series = tuple(line for line in lines if len(line.values) > 1)[:_MAX_SERIES]
        if not series:
            continue
        is_share = name in SHARES
        axis = {place: _short(label) for label, place in places.items()}
        x_label = "trial" if is_trial else "step"
        unit = "solved, %" if is_share else f"{name} (no share)"
        title = f"Evaluation on {split}"
        chart = Chart(
            title=title, x_label=x_label, y_label=unit, series=series, is_share=is_share, places=axis
        )
        before = " Left of step 0: before the cold start, which is no training step." if axis else ""
        charts.append((chart, f"Points with 95 % intervals. {_played(run, ours)}{before}"))
    return charts


def _places(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Where on the axis stands, by label, what was evaluated at step 0 before the policy that training began
    with: a fifth of its length for each."""
    before = list(dict.fromkeys(one.label for one in evaluations if one.step == 0))[:-1]
    gap = max(1.0, max((one.step for one in evaluations), default=0) / 5)
    return {label: gap * (index - len(before)) for index, label in enumerate(before)}


def _line(
    panel: str, name: str, evaluations: Sequence[Evaluation], places: Mapping[str, float], *, is_trial: bool
) -> Series:
    """The points of one panel; the last evaluation of a place or of a step stands for it."""
    found: dict[float, Evaluation] = {}
    for number, one in enumerate(evaluations, start=1):
        place = places.get(one.label, 0.0) if one.step == 0 else one.step
        found[number if is_trial else place] = one
    points: list[Point] = []
    for x, one in sorted(found.items()):
        value = one.metrics[name]
        told = one.label if is_trial or x < 0 else f"{one.label}, step {one.step}"
        points.append(Point(x=x, value=value.value, low=value.ci_low, high=value.ci_high, name=told))
        if x < 0:
            points.append(Point(x=x, value=None))  # what lies between is no training
    return Series(label=f"panel {panel[:12]}", points=tuple(points))


def _short(label: str) -> str:
    return label if len(label) <= _MAX_NAME else "before"


def _has_trials(run: RunData) -> bool:
    return run.config.get("evaluation.num_trials", "0") != "0"


def _played(run: RunData, columns: Sequence[Evaluation]) -> str:
    if _has_trials(run):
        return _WITH_MEMORY
    num = max((one.num_training_tasks for one in columns), default=0)
    if not num:
        return _WITHOUT
    all_of_them = all(one.num_training_tasks >= one.num_tasks for one in columns)
    which = "training tasks" if all_of_them else f"tasks of which {num} are training tasks"
    return _WITHOUT.replace("held-out tasks", which)


def evaluation_tables(run: RunData) -> list[EvaluationTable]:
    """A table per split; of a label that was evaluated several times the last."""
    tables: list[EvaluationTable] = []
    for split in dict.fromkeys(one.split for one in run.evaluations):
        last = {one.label: one for one in run.evaluations if one.split == split}  # the curve has them all
        columns = list(last.values())
        names = dict.fromkeys(name for one in columns for name in one.metrics)
        rows = tuple((_row_name(name), tuple(_cell(one, name) for one in columns)) for name in names)
        if any(one.graded_return is not None for one in columns):
            rows += (("mean return (a number, no share)", tuple(map(_return_cell, columns))),)
        heads = tuple((one.label, _head(one)) for one in columns)
        differs = len({one.panel_hash for one in columns}) > 1
        warning = "The panels differ: these columns were not measured on the same tasks." if differs else ""
        played = _played(run, columns)
        tables.append(EvaluationTable(split=split, played=played, columns=heads, rows=rows, warning=warning))
    return tables


def _row_name(name: str) -> str:
    return f"{name} (share of tasks solved)" if name in SHARES else f"{name} (a number, no share)"


def _head(one: Evaluation) -> str:
    """Panel of an evaluation; faults are rollouts that are in none of its numbers."""
    faults = f", {one.num_faults} FAULTS in no score" if one.num_faults else ""
    return (
        f"step {one.step}, {one.num_tasks} tasks{faults}, temperature "
        f"{one.temperature:g}, panel {one.panel_hash[:12]}"
    )


def _cell(evaluation: Evaluation, name: str) -> str:
    found = evaluation.metrics.get(name)
    if found is None:
        return "not measured"
    return score(found.value, found.ci_low, found.ci_high, is_share=name in SHARES)


def _return_cell(evaluation: Evaluation) -> str:
    found = evaluation.mean_return
    return "not measured" if found is None else score(found, is_share=False)
