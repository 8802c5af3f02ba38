"""``outrider verify``: is the pack what was packed, and does it say what its results say."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from outrider.errors import PackError
from outrider.evaluation.packs import (
    CHECKSUM,
    TABLES,
    EvalTasksCheck,
    Manifest,
    check_eval_tasks,
    first_difference,
    make_tables,
    read_bytes,
    read_json,
    read_manifest,
)
from outrider.printing import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A pack that holds. ``sha256`` is its manifest's, hence the pack's."""

    manifest: Manifest
    tables: Mapping[str, Any]
    eval_tasks: tuple[EvalTasksCheck, ...]
    sha256: str


def verify(pack: Path, *, local_paths: Mapping[str, Path]) -> Verified:
    """Check files, tables and panels, in this order. ``local_paths`` are paths of files that recipes name
    outside of the pack.

    Raises PackError, in one line that names the file, for the first thing that does not hold.
    """
    manifest, tables = verified_tables(pack)
    eval_tasks = tuple(check_eval_tasks(pack, manifest, local_paths))
    return Verified(
        manifest=manifest,
        tables=tables,
        eval_tasks=eval_tasks,
        sha256=read_bytes(pack / CHECKSUM).decode().split()[0],
    )


def verified_tables(pack: Path) -> tuple[Manifest, dict[str, Any]]:
    """Manifest and tables of a pack whose files are untouched and whose tables follow from its results.
    Raises PackError.
    """
    manifest = read_manifest(pack)
    if TABLES not in manifest.files:
        raise PackError(f"{TABLES} is missing")
    tables = make_tables(pack, manifest)
    if difference := first_difference(read_json(pack / TABLES), tables):
        raise PackError(f"{TABLES}: {difference}")
    return manifest, tables


def print_checks(pack: Path, verified: Verified, console: Console) -> None:
    """Prints what was checked, and every panel that could not be made again."""
    tables = verified.tables
    table = Table(
        "check",
        Column("result", overflow="fold"),
        title=Text(one_line(f"{pack.name}, {verified.sha256[:12]}")),
    )
    table.add_row("files", f"{len(verified.manifest.files)} unchanged, none missing, none added")
    counts = {"evaluations": "evaluations", "panels": "scores of task sets", "exact": "rows of exact returns",
              "comparisons": "comparisons", "costs": "runs' costs"}  # fmt: skip
    table_counts = ", ".join(f"{len(tables[key])} {name}" for key, name in counts.items() if tables[key])
    table.add_row("tables", f"computed again from the results, the same: {table_counts or 'nothing in them'}")
    for check in verified.eval_tasks:
        state = "made again, the same" if check.rebuilt else f"not made again: {check.reason}"
        table.add_row(f"panel {check.panel_hash[:12]}", Text(one_line(f"{check.num_tasks} tasks; {state}")))
    console.print(table)
