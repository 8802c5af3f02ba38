"""Shows a comparison of runs: the command, the terminal, and Markdown."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from outrider.atomic_io import replace_file
from outrider.evals.compare.by_task import TaskComparison, compare_by_task
from outrider.evals.compare.by_task_tables import task_notes, task_tables
from outrider.evals.compare.compare import Comparison, compare
from outrider.evals.compare.page import html_page, html_tasks
from outrider.evals.compare.tables import TextTable, notes, tables, verdicts
from outrider.printing import one_line

_Shown = TypeVar("_Shown", Comparison, TaskComparison)


def compare_runs(paths: Sequence[Path], *, markdown: Path | None, html: Path | None, console: Console) -> int:
    """The command ``outrider compare``: print the comparison, write the files that are asked for, return the
    exit status.

    Raises what :func:`~outrider.evals.compare.compare.compare` raises, and ``OSError`` when a file cannot be
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

    Raises what :func:`~outrider.evals.compare.by_task.compare_by_task` raises, and ``OSError``.
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
