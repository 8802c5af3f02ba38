"""A comparison as one HTML file with figures that needs nothing beside it.

The page has no scripts and loads nothing; names and settings are untrusted and pass through Jinja2's
autoescape.
"""

import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from markupsafe import Markup

from outrider.evals.compare.by_task import TaskComparison, TrialCurves
from outrider.evals.compare.by_task_tables import task_notes, task_tables
from outrider.evals.compare.compare import Comparison
from outrider.evals.compare.curves import SCORE, Curves
from outrider.evals.compare.tables import MAX_SERIES, notes, tables, verdicts
from outrider.evals.statistics import Band, Scores
from outrider.watch.curves import Chart, Point, Series, svg_chart
from outrider.watch.templates import page_template

_TEMPLATE: Final = Path(__file__).with_name("page.html.j2")
_LEGEND_WIDTH: Final = 400  # units of the drawing
_TRIALS: Final = "Trials with a memory that fills, no weight moves; the first has nothing to read."


def html_page(comparison: Comparison) -> str:
    """The tables and the figures as one HTML file that needs nothing beside it; a pure function."""
    names = _figure_names(comparison)
    return page_template(_TEMPLATE).render(
        num_styles=MAX_SERIES,
        verdicts=verdicts(comparison),
        tables=tables(comparison),
        letters=[(name, label) for label, name in names.items() if name != label],
        figures=[
            (svg, _caption(curves))
            for curves in comparison.curves
            if (svg := _figure(curves, names)) is not None
        ],
        notes=notes(comparison),
    )


def html_tasks(comparison: TaskComparison) -> str:
    """Tables by task and the curves over trials as one HTML file that needs nothing beside it; a pure
    function.
    """
    names = _names([_plotted_labels(curves) for curves in comparison.curves])
    return page_template(_TEMPLATE).render(
        num_styles=MAX_SERIES,
        verdicts=[],
        tables=task_tables(comparison),
        letters=[(name, label) for label, name in names.items() if name != label],
        figures=[
            (svg, _TRIALS) for curves in comparison.curves if (svg := _trials(curves, names)) is not None
        ],
        notes=task_notes(comparison),
    )


def _trials(curves: TrialCurves, names: dict[str, str]) -> Markup | None:
    series = tuple(
        Series(label=names[label], points=_points(curves.x, curves.bands[label]))
        for label in _plotted_labels(curves)
    )
    if not any(item.values for item in series):
        return None
    title = f"{curves.task}: mean return over trials"
    return svg_chart(Chart(title=title, x_label="trial", y_label="return", series=series))


def _plotted_labels(curves: TrialCurves) -> list[str]:
    """As many as there are styles of lines."""
    return list(curves.bands)[:MAX_SERIES]


def _names(figures: Sequence[Sequence[str]]) -> dict[str, str]:
    """For the labels of the figures of a page: themselves where each legend has room for its own, else
    letters, which are the same in all figures.
    """
    fits = all(sum(44 + 7 * len(label) for label in labels) <= _LEGEND_WIDTH for labels in figures)
    every = dict.fromkeys(label for labels in figures for label in labels)
    return {label: label if fits else _letter(index) for index, label in enumerate(every)}


def _letter(index: int) -> str:
    again, offset = divmod(index, len(string.ascii_uppercase))
    return string.ascii_uppercase[offset] + (str(again) if again else "")


def _figure_names(comparison: Comparison) -> dict[str, str]:
    """Names of groups in a figure."""
    return _names([[group.label for group in comparison.groups][:MAX_SERIES]])


def _figure(curves: Curves, names: dict[str, str]) -> Markup | None:
    is_share = curves.quantity == SCORE
    series: list[Series] = []
    for label, name in names.items():
        series.append(Series(label=name, points=_points(curves.x, curves.bands[label])))
    if not any(item.values for item in series):
        return None
    unit = "score, %" if is_share else "reward"
    title = f"{curves.quantity.capitalize()} over {curves.axis}"
    return svg_chart(
        Chart(title=title, x_label=curves.axis, y_label=unit, series=tuple(series), is_share=is_share)
    )


def _points(x: Scores, band: Band) -> tuple[Point, ...]:
    return tuple(
        Point(x=float(position), value=_known(value), low=_known(low), high=_known(high))
        for position, value, low, high in zip(x, band.value, band.low, band.high, strict=True)
    )


def _caption(curves: Curves) -> str:
    if curves.quantity == SCORE:
        return (
            "Straight lines between evaluations, from the policy that training began "
            "with; played without retrieval."
        )
    counted = "Means over bins of equal cost, every rollout counted, those with retrieved steps too, "
    return (
        f"{counted}as the environment pays: no share of solved tasks, and no fair measure between algorithms."
    )


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
