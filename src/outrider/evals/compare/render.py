"""Shows a comparison of runs: the command, the terminal, and Markdown."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from outrider.atomic_io import replace_file
from outrider.evals.compare.compare import Comparison, compare
from outrider.evals.compare.page import html_page
from outrider.evals.compare.tables import notes, tables, verdicts
from outrider.printing import one_line


def compare_runs(paths: Sequence[Path], *, markdown: Path | None, html: Path | None, console: Console) -> int:
    """The command ``outrider compare``: print the comparison, write the files that are asked for, return the
    exit status.

    Raises what :func:`~outrider.evals.compare.compare.compare` raises, and ``OSError`` when a file cannot be
    written.
    """
    comparison = compare(paths)
    print_comparison(comparison, console)
    for path, page in ((markdown, markdown_page), (html, html_page)):
        if path is not None:
            replace_file(path, page(comparison).encode("utf-8", "replace"))
            console.print(Text(str(path)))
    return 0


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Tables, verdicts and notes on a terminal, which no name can steer."""
    for table in tables(comparison):
        drawn = Table(
            *(Column(_shown(name), overflow="fold") for name in table.columns),
            title=_shown(table.title),
            caption=_shown(table.caption),
            caption_justify="left",
        )
        for row in table.rows:
            drawn.add_row(*map(_shown, row))
        console.print(drawn)
    for line in (*verdicts(comparison), *(f"note: {note}" for note in notes(comparison))):
        console.print(_shown(line))


def _shown(text: str) -> Text:
    return Text(one_line(text))


def markdown_page(comparison: Comparison) -> str:
    """The tables, verdicts and notes as Markdown; a pure function."""
    parts = ["# Comparison of runs", _items(verdicts(comparison))]
    for table in tables(comparison):
        rows = [table.columns, ("---",) * len(table.columns), *table.rows]
        lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in rows]
        parts += [f"## {table.title}", "\n".join(lines), _escaped(table.caption)]
    if said := notes(comparison):
        parts += ["## Notes", _items(said)]
    return "\n\n".join(parts) + "\n"


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    """Text that can neither leave its table cell nor become HTML, a link or a picture."""
    bare = " ".join(one_line(text).split())
    return bare.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")
