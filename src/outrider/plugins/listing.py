"""``outrider list``: every plug-in with its origin and one line; nothing is built and torch is not needed."""

import inspect
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from outrider.errors import ConfigError
from outrider.plugins.names import BUILT_IN, Kind, known_names, package_label, registered
from outrider.plugins.presets import PAPER, preset_keys, preset_types
from outrider.plugins.registry import origin, resolve
from outrider.terminal import Terminal


def print_plugins(kinds: Sequence[Kind], console: Console | None = None) -> int:
    """Print one table per kind; 1 where a plug-in cannot be imported, else 0."""
    console = console or Terminal()
    status = 0
    for kind in kinds:
        table = Table(
            Column("name", no_wrap=True),
            Column("from", no_wrap=True),
            "what",
            title=kind,
            title_justify="left",
        )
        for name, source, line, is_broken in rows(kind):
            status |= is_broken
            table.add_row(Text(name), Text(source), Text(line, style="red" if is_broken else ""))
        console.print(table)
    console.print(
        "A recipe may also name a class by its import path: package.module:Class (docs/plugins.md).",
    )
    return int(status)


def rows(kind: Kind) -> Iterator[tuple[str, str, str, bool]]:
    """Name, origin, one line and whether it is broken, of every plug-in of a kind."""
    for name in known_names(kind):
        try:
            yield name, str(origin(kind, name)), summary(resolve(kind, name)), False
            yield from _preset_rows(kind, name)
        except ConfigError as error:
            points = registered(kind).get(name, ())
            yield name, " and ".join(package_label(point) for point in points) or "built in", str(error), True
    for name, points in sorted(registered(kind).items()):
        if name in BUILT_IN[kind]:
            packages = " and ".join(package_label(point) for point in points)
            yield name, packages, f"hidden by the one that is built in: name it {points[0].value}", False


def _preset_rows(kind: Kind, name: str) -> Iterator[tuple[str, str, str, bool]]:
    """The presets of a built-in plug-in that may be a ``type``, by their short names, and what they set."""
    for short, (owner, preset) in preset_types(kind).items():
        is_known_shorter = short.endswith(PAPER) and short.removesuffix(PAPER) in preset_types(kind)
        if owner == name and not is_known_shorter:
            keys = preset_keys(kind, name, preset)
            yield short, f"of {name}", f"Sets {', '.join(keys)}." if keys else "The default.", False


def summary(cls: type) -> str:
    """The first sentence of a class's docstring."""
    text = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".") + "." if text else "no docstring"
