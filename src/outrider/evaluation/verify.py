"""``outrider verify``: check that a pack is unmodified and that its tables follow from its results."""

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
    Manifest,
    first_difference,
    make_tables,
    read_bytes,
    read_json,
    read_manifest,
)
from outrider.printing import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A verified pack; ``sha256`` is that of its manifest."""

    manifest: Manifest
    tables: Mapping[str, Any]
    sha256: str


def verify(pack: Path) -> Verified:
    """Check files and tables. Raises PackError, in one line that names the file, for the first error."""
    manifest, tables = verified_tables(pack)
    sha256 = read_bytes(pack / CHECKSUM).decode().split()[0]
    return Verified(manifest=manifest, tables=tables, sha256=sha256)


def verified_tables(pack: Path) -> tuple[Manifest, dict[str, Any]]:
    """Manifest and tables of a pack whose files are untouched and whose tables follow from its results.
    Raises PackError.
    """
    manifest = read_manifest(pack)
    if TABLES not in manifest.files:
        raise PackError(f"{TABLES} is missing")
    tables = make_tables(pack, manifest)
    written = read_json(pack / TABLES)
    if isinstance(written, dict):
        written.pop("comparisons", None)  # in packs of version 0.3 and earlier
    if difference := first_difference(written, tables):
        raise PackError(f"{TABLES}: {difference}")
    return manifest, tables


def print_checks(pack: Path, verified: Verified, console: Console) -> None:
    """Print the result of each check."""
    tables = verified.tables
    table = Table(
        "check",
        Column("result", overflow="fold"),
        title=Text(one_line(f"{pack.name}, {verified.sha256[:12]}")),
    )
    table.add_row("files", f"{len(verified.manifest.files)} unchanged, none missing, none added")
    counts = {"evaluations": "evaluations", "panels": "scores of task sets", "exact": "rows of exact returns",
              "costs": "runs' costs"}  # fmt: skip
    table_counts = ", ".join(f"{len(tables[key])} {name}" for key, name in counts.items() if tables[key])
    table.add_row("tables", f"computed again from the results, the same: {table_counts or 'nothing in them'}")
    console.print(table)
