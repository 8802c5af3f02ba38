"""A comparison as one HTML file with figures that needs nothing beside it.

The page has no scripts and loads nothing; names and settings are untrusted and pass through Jinja2's
autoescape.
"""

import math
import string
from pathlib import Path
from typing import Final

from markupsafe import Markup

from outrider.evals.compare.compare import Comparison
from outrider.evals.compare.curves import SCORE, Curves
from outrider.evals.compare.tables import MAX_SERIES, notes, tables, verdicts
from outrider.watch.curves import Chart, Point, Series, svg_chart
from outrider.watch.templates import page_template

_TEMPLATE: Final = Path(__file__).with_name("page.html.j2")
_LEGEND_WIDTH: Final = 400  # units of the drawing


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


def _figure_names(comparison: Comparison) -> dict[str, str]:
    """Names of groups in a figure: the label where all labels fit into the legend, else a letter."""
    labels = [group.label for group in comparison.groups][:MAX_SERIES]
    fits = sum(44 + 7 * len(label) for label in labels) <= _LEGEND_WIDTH
    return {label: label if fits else string.ascii_uppercase[index] for index, label in enumerate(labels)}


def _figure(curves: Curves, names: dict[str, str]) -> Markup | None:
    is_share = curves.quantity == SCORE
    series: list[Series] = []
    for label, name in names.items():
        band = curves.bands[label]
        places = zip(curves.x, band.value, band.low, band.high, strict=True)
        points = tuple(
            Point(x=float(x), value=_known(v), low=_known(low), high=_known(high))
            for x, v, low, high in places
        )
        series.append(Series(label=name, points=points))
    if not any(one.values for one in series):
        return None
    unit = "score, %" if is_share else "reward"
    title = f"{curves.quantity.capitalize()} over {curves.axis}"
    return svg_chart(
        Chart(title=title, x_label=curves.axis, y_label=unit, series=tuple(series), is_share=is_share)
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
