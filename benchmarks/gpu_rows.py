"""Rows of a measurement: name, figure and reference. The process of a stage writes each row at once, so that
a stopped stage keeps its rows.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the page; ``beside`` is the reference of the figure."""

    what: str
    measured: str
    beside: str = ""


@dataclass(frozen=True, slots=True)
class RowFile:
    """JSON lines."""

    path: Path

    def add(self, what: str, measured: str, beside: str = "") -> None:
        """Write it now, and print it."""
        row = Row(what=what, measured=measured, beside=beside)
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(row)) + "\n")
        print(f"{what}: {measured}{f' ({beside})' if beside else ''}", flush=True)

    def read(self) -> list[Row]:
        """Return all complete rows."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [Row(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]
