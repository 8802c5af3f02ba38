"""``outrider compare``: a comparison on the terminal, as Markdown, and as one HTML file without scripts.

Names and settings are untrusted: the terminal and Markdown get escaped text, and HTML passes through Jinja2's
autoescape.
"""

import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

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

AnyComparison: TypeAlias = Comparison | TaskComparison
_TEMPLATE: Final = Path(__file__).with_name("page.html.j2")
_LEGEND_WIDTH: Final = 400  # units of the drawing
_SCORE_CAPTION: Final = (
    "Straight lines between evaluations, from the policy that training began with; played without retrieval."
)
_REWARD_CAPTION: Final = (
    "Means over bins of equal cost, every rollout counted, those with retrieved steps too, as the "
    "environment pays: no share of solved tasks, and no fair measure between algorithms."
)
_TRIALS_CAPTION: Final = "Trials with a memory that fills, no weight moves; the first has nothing to read."


def compare_runs(paths: Sequence[Path], *, markdown: Path | None, html: Path | None, console: Console) -> int:
    """The command ``outrider compare``: print the comparison, write the requested files, return the exit
    status.

    Raises the errors of :func:`~outrider.evaluation.compare.compare`, and OSError if a file cannot be
    written.
    """
    return _show(compare(paths), markdown=markdown, html=html, console=console)


def compare_tasks(
    run_args: Sequence[str],
    *,
    markdown: Path | None,
    html: Path | None,
    console: Console,
    depth: int | None = None,
) -> int:
    """``outrider compare --by-task``: the same with one row per task and one column per method.

    Raises the errors of :func:`~outrider.evaluation.compare_tables.compare_by_task`, and OSError.
    """
    return _show(compare_by_task(run_args, depth=depth), markdown=markdown, html=html, console=console)


def _show(comparison: AnyComparison, *, markdown: Path | None, html: Path | None, console: Console) -> int:
    shown_tables, sentences, note_lines = _contents(comparison)
    for table in shown_tables:
        rich_table = Table(
            *(Column(Text(one_line(name)), overflow="fold") for name in table.columns),
            title=Text(one_line(table.title)),
            caption=Text(one_line(table.caption)),
            caption_justify="left",
        )
        for row in table.rows:
            rich_table.add_row(*(Text(one_line(cell)) for cell in row))
        console.print(rich_table)
    for line in (*sentences, *(f"note: {note}" for note in note_lines)):
        console.print(Text(one_line(line)))
    for path, page in ((markdown, markdown_page), (html, html_page)):
        if path is not None:
            replace_file(path, page(comparison).encode("utf-8", "replace"))
            console.print(Text(str(path)))
    return 0


def _contents(comparison: AnyComparison) -> tuple[list[TextTable], list[str], list[str]]:
    """Tables, verdicts and notes."""
    if isinstance(comparison, TaskComparison):
        return task_tables(comparison), [], task_notes(comparison)
    return tables(comparison), verdicts(comparison), notes(comparison)


def markdown_page(comparison: AnyComparison) -> str:
    """The tables, verdicts and notes as Markdown."""
    shown_tables, sentences, note_lines = _contents(comparison)
    by_task = isinstance(comparison, TaskComparison)
    parts = ["# Runs by task"] if by_task else ["# Comparison of runs", _items(sentences)]
    for table in shown_tables:
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


def html_page(comparison: AnyComparison) -> str:
    """The tables and the figures of the curves as one self-contained HTML file."""
    shown_tables, sentences, note_lines = _contents(comparison)
    if isinstance(comparison, TaskComparison):
        labels = [list(curves.bands)[:MAX_SERIES] for curves in comparison.curves]
    else:
        labels = [[group.label for group in comparison.groups][:MAX_SERIES]]
    # A legend without room for the labels has letters, which are the same in all figures.
    has_room = all(sum(44 + 7 * len(label) for label in figure) <= _LEGEND_WIDTH for figure in labels)
    every = dict.fromkeys(label for figure in labels for label in figure)
    names = {label: label if has_room else _letter(index) for index, label in enumerate(every)}
    figures = [_figure(curves, names) for curves in comparison.curves]
    return page_template(_TEMPLATE).render(
        num_styles=MAX_SERIES,
        verdicts=sentences,
        tables=shown_tables,
        letters=[(name, label) for label, name in names.items() if name != label],
        figures=[figure for figure in figures if figure is not None],
        notes=note_lines,
    )


def _letter(index: int) -> str:
    again, offset = divmod(index, len(string.ascii_uppercase))
    return string.ascii_uppercase[offset] + (str(again) if again else "")


def _figure(curves: Curves | TrialCurves, names: dict[str, str]) -> tuple[Markup, str] | None:
    """A chart and its caption; None if no curve has a known value."""
    series = tuple(
        Series(label=name, points=_points(curves.x, curves.bands[label]))
        for label, name in names.items()
        if label in curves.bands
    )[:MAX_SERIES]
    if not any(item.values for item in series):
        return None
    if isinstance(curves, TrialCurves):
        title = f"{curves.task}: mean return over trials"
        chart = Chart(title=title, x_label="trial", y_label="return", series=series)
        return svg_chart(chart), _TRIALS_CAPTION
    is_share = curves.quantity == SCORE
    chart = Chart(
        title=f"{curves.quantity.capitalize()} over {curves.axis}", x_label=curves.axis,
        y_label="score, %" if is_share else "reward", series=series, is_share=is_share,
    )  # fmt: skip
    return svg_chart(chart), _SCORE_CAPTION if is_share else _REWARD_CAPTION


def _points(x: Scores, band: Band) -> tuple[Point, ...]:
    def known(value: float) -> float | None:
        return float(value) if math.isfinite(value) else None

    return tuple(
        Point(x=float(position), value=known(value), low=known(low), high=known(high))
        for position, value, low, high in zip(x, band.value, band.low, band.high, strict=True)
    )
