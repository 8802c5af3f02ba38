"""A comparison as one HTML file with figures that needs nothing beside it.

The page has no scripts and loads nothing; names and settings are untrusted and pass through Jinja2's
autoescape.
"""

import math
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from markupsafe import Markup
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from outrider.evaluation.compare import SCORE, Comparison, Curves, compare
from outrider.evaluation.compare_tables import (
    MAX_SERIES,
    TaskComparison,
    TextTable,
    TrialCurves,
    compare_by_task,
    notes,
    tables,
    task_notes,
    task_tables,
    verdicts,
)
from outrider.evaluation.statistics import Band, Scores
from outrider.files import replace_file
from outrider.printing import one_line
from outrider.viewer.report import page_template
from outrider.viewer.report_parts import Chart, Point, Series, svg_chart

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


# Shows a comparison of runs: the command, the terminal, and Markdown.


_Shown = TypeVar("_Shown", Comparison, TaskComparison)


def compare_runs(paths: Sequence[Path], *, markdown: Path | None, html: Path | None, console: Console) -> int:
    """The command ``outrider compare``: print the comparison, write the files that are asked for, return the
    exit status.

    Raises what :func:`~outrider.evaluation.compare.compare` raises, and ``OSError`` when a file cannot be
    written.
    """
    comparison = compare(paths)
    print_comparison(comparison, console)
    _write(((markdown, markdown_page), (html, html_page)), comparison, console)
    return 0


def compare_tasks(
    run_args: Sequence[str],
    *,
    markdown: Path | None,
    html: Path | None,
    console: Console,
    depth: int | None = None,
) -> int:
    """``outrider compare --by-task``: the same with a row a task and a column a method.

    Raises what :func:`~outrider.evaluation.compare_tables.compare_by_task` raises, and ``OSError``.
    """
    comparison = compare_by_task(run_args, depth=depth)
    _print(task_tables(comparison), [f"note: {note}" for note in task_notes(comparison)], console)
    _write(((markdown, markdown_tasks), (html, html_tasks)), comparison, console)
    return 0


def _write(
    files: Sequence[tuple[Path | None, Callable[[_Shown], str]]], comparison: _Shown, console: Console
) -> None:
    for path, page in files:
        if path is not None:
            replace_file(path, page(comparison).encode("utf-8", "replace"))
            console.print(Text(str(path)))


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Tables, verdicts and notes on a terminal, which no name can steer."""
    lines = (*verdicts(comparison), *(f"note: {note}" for note in notes(comparison)))
    _print(tables(comparison), lines, console)


def _print(text_tables: Sequence[TextTable], lines: Sequence[str], console: Console) -> None:
    for table in text_tables:
        rich_table = Table(
            *(Column(_to_text(name), overflow="fold") for name in table.columns),
            title=_to_text(table.title),
            caption=_to_text(table.caption),
            caption_justify="left",
        )
        for row in table.rows:
            rich_table.add_row(*map(_to_text, row))
        console.print(rich_table)
    for line in lines:
        console.print(_to_text(line))


def _to_text(text: str) -> Text:
    return Text(one_line(text))


def markdown_page(comparison: Comparison) -> str:
    """The tables, verdicts and notes as Markdown; a pure function."""
    begin = ["# Comparison of runs", _items(verdicts(comparison))]
    return _markdown(begin, tables(comparison), notes(comparison))


def markdown_tasks(comparison: TaskComparison) -> str:
    """The tables by task and the notes as Markdown; a pure function."""
    return _markdown(["# Runs by task"], task_tables(comparison), task_notes(comparison))


def _markdown(parts: list[str], text_tables: Sequence[TextTable], note_lines: Sequence[str]) -> str:
    for table in text_tables:
        rows = [table.columns, ("---",) * len(table.columns), *table.rows]
        lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in rows]
        parts += [f"## {_escaped(table.title)}", "\n".join(lines), _escaped(table.caption)]
    if note_lines:
        parts += ["## Notes", _items(note_lines)]
    return "\n\n".join(parts) + "\n"


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    """Text that can neither leave its table cell nor become HTML, a link or a picture."""
    bare = " ".join(one_line(text).split())
    return bare.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")
