"""Text output: sanitizing untrusted text for a terminal, and the format of scores in commands and pages."""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

_SAME: Final = 1e-9


def one_line(text: str) -> str:
    """The text with every control character, line breaks and terminal escapes included, replaced by a
    space.
    """
    return "".join(char if char.isprintable() else " " for char in text)


def print_lines(*lines: str, to_stderr: bool = False) -> None:
    """Print each text on one line, without its control characters. Use :class:`Terminal` for tables."""
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is None:  # its file descriptor is closed (``>&-``)
        return
    encoding = stream.encoding or "utf-8"
    for line in lines:
        print(one_line(line).encode(encoding, "replace").decode(encoding), file=stream)


def shell_command(*arguments: str | Path) -> str:
    """Format an ``outrider`` command that the user can paste, with the program that started this process.

    For example, ``.venv/bin/outrider view runs/demo`` if the environment is not activated. In a program or a
    notebook that imports Outrider, the program is ``outrider``.
    """
    return shlex.join([*_program(), *map(str, arguments)])


def _program() -> list[str]:
    started = Path(sys.argv[0])
    if started.name == "outrider":
        return [_typed_name(started)]
    if sys.executable and started.parts[-2:] == ("outrider", "__main__.py"):
        return [_typed_name(Path(sys.executable)), "-m", "outrider"]
    return ["outrider"]


def _typed_name(program: Path) -> str:
    """The name if the shell finds this program by it, else the shortest path from the current folder."""
    path = os.path.abspath(program)  # not resolved: a venv's python is a link to another environment's
    if os.path.abspath(shutil.which(program.name) or os.sep) == path:
        return program.name
    if not Path(path).is_relative_to(Path.cwd()):
        return path
    relative = os.path.relpath(path)
    return relative if os.sep in relative else os.path.join(os.curdir, relative)


def plural(num: float, noun: str, nouns: str = "") -> str:
    """Format a count with its noun: ``1 rollout``, ``3 rollouts``. ``nouns`` is the plural of a noun without
    a plain -s, or of a noun with its verb: ``plural(num, "rollout was lost", "rollouts were lost")``.
    """
    return f"{num:.0f} {noun if num == 1 else nouns or noun + 's'}"


def score(value: float, low: float = math.nan, high: float = math.nan, *, is_share: bool = True) -> str:
    """Format a score with its interval, if it has one.

    A share of solved tasks, or a mean of task set scores from 0 to 1, is written in per cent: ``35.0 % [25.5,
    45.9]``. Other numbers, for example returns, have four digits: ``1.25 [0.9, 1.6]``.
    """
    if not math.isfinite(value):
        return "not measured"
    scale, form = (100.0, ".1f") if is_share else (1.0, ".4g")
    unit = " %" if is_share else ""
    return f"{scale * value:{form}}{unit}{_interval(scale * low, scale * high, form)}"


def is_graded(share: float, mean_return: float | None) -> bool:
    """Whether the mean return differs from the share of solved tasks, so that both should be printed."""
    return mean_return is not None and math.isfinite(mean_return) and abs(mean_return - share) > _SAME


def format_mean_return(share: float, mean_return: float | None) -> str:
    """The mean return to print after a share of solved tasks, if it differs: with graded rewards, a share of
    0 % can hide progress.
    """
    if mean_return is None or not is_graded(share, mean_return):
        return ""
    return f", mean return {score(mean_return, is_share=False)},"


def points(difference: float, low: float = math.nan, high: float = math.nan) -> str:
    """Format a difference (-1 to 1) of two shares in percentage points: ``+28.7 points [+16.0, +40.1]``."""
    if not math.isfinite(difference):
        return "not measured"
    return f"{100 * difference:+.1f} points{_interval(100 * low, 100 * high, '+.1f')}"


def _interval(low: float, high: float, form: str) -> str:
    return f" [{low:{form}}, {high:{form}}]" if math.isfinite(low) and math.isfinite(high) else ""


# A console for tables. Text from files, servers and models is untrusted and must not control the terminal.


class Terminal(Console):
    """A rich console that replaces every control character except line breaks by a space, so that only rich's
    own styles reach the terminal.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Clean the text here, because tables render their cells with this method before measuring them."""
        for segment in super().render(renderable, options):
            is_clean = segment.control is not None or segment.text.isprintable()
            yield segment if is_clean else segment._replace(text=_clean(segment.text))


def _clean(text: str) -> str:
    return "\n".join(map(one_line, text.split("\n")))


class FittedTable:
    """A table that breaks no word: with borders, without them in a narrow terminal, or as one block of
    ``column: cell`` lines per row if even that does not fit.
    """

    def __init__(self, *columns: str, title: str = "", caption: str = "") -> None:
        self._columns, self._title, self._caption = columns, Text(one_line(title)), Text(one_line(caption))
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row with a cell per column."""
        self._rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for style, has_edge in ((box.HEAVY_HEAD, True), (box.SIMPLE_HEAD, False)):
            widths = self._widths(options.max_width - (3 if has_edge else 2) * len(self._columns) - has_edge)
            if widths:
                columns = [
                    Column(Text(one_line(name)), width=width, overflow="fold")
                    for name, width in zip(self._columns, widths, strict=True)
                ]
                table = Table(
                    *columns, title=self._title or None, caption=self._caption or None, box=style,
                    caption_justify="left", show_edge=has_edge, padding=(0, 1) if has_edge else (0, 1, 0, 0),
                )  # fmt: skip
                for row in self._rows:
                    table.add_row(*row)
                yield table
                return
        yield Text(self._title.plain, style="bold")
        for row in self._rows:
            yield row[0]
            for name, cell in zip(self._columns[1:], row[1:], strict=True):
                if cell.plain:
                    yield Padding(Text.assemble(f"{one_line(name)}: ", cell), (0, 0, 0, 4), expand=False)
        if self._caption:
            yield self._caption

    def _widths(self, room: int) -> list[int]:
        """Return the widths of the columns in ``room`` characters, [] if a word would be broken."""
        cells = [[name, *(row[n].plain for row in self._rows)] for n, name in enumerate(self._columns)]
        widths = [
            max((cell_len(word) for text in column for word in text.split()), default=1) for column in cells
        ]
        natural = [max(cell_len(line) for text in column for line in text.split("\n")) for column in cells]
        if sum(widths) > room:
            return []
        while sum(widths) < room and (short := [n for n, width in enumerate(widths) if width < natural[n]]):
            widths[max(short, key=lambda n: natural[n] / widths[n])] += 1
        return widths
