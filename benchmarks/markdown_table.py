"""Markdown tables; wide ones are short, with all columns in a folded block."""

from collections.abc import Sequence
from typing import Final, NamedTuple

_VERDICT: Final = "against GRPO"
_SCORE: Final = ("interquartile mean", "interquartile mean %")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Header, rule and rows; a bar in a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def folded(short: str, full: str, notes: str = "") -> str:
    """The short table, then the full table and its notes in a block that the reader opens."""
    block = "\n\n".join(part for part in (full, notes) if part)
    return f"{short}\n\n<details markdown><summary>All columns</summary>\n\n{block}\n\n</details>"


def with_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[str], notes: str = ""
) -> str:
    """A table of the columns ``shown``, with all columns and the notes folded. If no columns are named,
    tables of methods are short, too, and others complete and without notes. Raises KeyError for a column that
    does not exist.
    """
    full = MethodTable(header, rows)
    if not shown:
        is_method_table = header[-1] == _VERDICT and not set(_SCORE).isdisjoint(header)
        return full.short(notes) if is_method_table else full.text
    number = {name: header.index(name) for name in header}
    return folded(markdown(shown, [[row[number[name]] for name in shown] for row in rows]), full.text, notes)


class MethodTable(NamedTuple):
    """A row per method: its name, the number of seeds, costs and scores, and last its verdict.

    A row without a score has the reason in its second cell.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def text(self) -> str:
        """All columns."""
        return markdown(self.header, self.rows)

    def short(self, notes: str = "") -> str:
        """Method, score and verdict; all columns and the notes are folded."""
        score = next(number for number, name in enumerate(self.header) if name in _SCORE)
        seeds = {row[1] for row in self.rows if row[score]}
        header = ["method", f"{self.header[score]} [95 % interval]", _VERDICT]
        rows = [[row[0], row[score], short_verdict(row, is_scored=bool(row[score]))] for row in self.rows]
        if len(seeds) == 1:
            header[1] += f", {seeds.pop()} seeds"
        else:
            header.insert(1, "seeds")
            for row, full in zip(rows, self.rows, strict=True):
                row.insert(1, full[1] if full[score] else "")
        return folded(markdown(header, rows), self.text, notes)


def short_verdict(row: Sequence[str], *, is_scored: bool) -> str:
    """A verdict of at most two words, without its reasons."""
    if not is_scored:
        return row[1].partition(":")[0]
    if row[-1].startswith("**"):
        return "wins" if row[-1].startswith(f"**{row[0]}**") else "loses"
    return row[-1].partition(":")[0] or "baseline"
