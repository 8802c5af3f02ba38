"""``outrider list``, and the plug-ins that the settings of a run name: their checks, origins and digests."""

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, cast

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from outrider.config import Settings
from outrider.errors import ConfigError
from outrider.files import replace_file
from outrider.plugins.imports import ORIGINS_FILE, Origin, find_origin, import_target
from outrider.plugins.registry import (
    BUILT_IN,
    PAPER,
    Kind,
    field_markers,
    is_known,
    known_names,
    package_labels,
    preset_keys,
    preset_types,
    registered,
    resolve,
)
from outrider.printing import Terminal

PREFIX: Final = "plug-in "  # prefix of a digest's name in a checkpoint


def print_plugins(kinds: Sequence[Kind], console: Console | None = None) -> int:
    """Print one table per kind. Returns 1 if a plug-in cannot be imported, else 0."""
    console = console or Terminal()
    status = 0
    for kind in kinds:
        columns = Column("name", no_wrap=True), Column("from", no_wrap=True), "what"
        table = Table(*columns, title=kind, title_justify="left")
        for name, source, line, is_broken in rows(kind):
            status |= is_broken
            table.add_row(Text(name), Text(source), Text(line, style="red" if is_broken else ""))
        console.print(table)
    console.print(
        "A recipe may also name a class by its import path: package.module:Class (docs/plugins.md)."
    )
    return int(status)


def rows(kind: Kind) -> Iterator[tuple[str, str, str, bool]]:
    """Yield name, origin, summary and whether it is broken, for every plug-in of a kind."""
    for name in known_names(kind):
        try:
            cls = resolve(kind, name)
            yield name, str(find_origin(cls)), summary(cls), False
        except ConfigError as error:
            yield name, package_labels(registered(kind).get(name, ())) or "built in", str(error), True
            continue
        presets = preset_types(kind)
        for short, (owner, preset) in presets.items():
            has_shorter_name = short.endswith(PAPER) and short.removesuffix(PAPER) in presets
            if owner == name and not has_shorter_name:
                keys = preset_keys(kind, name, preset)
                yield short, f"of {name}", f"Sets {', '.join(keys)}." if keys else "The default.", False
    for name, points in sorted(registered(kind).items()):
        if name in BUILT_IN[kind]:
            line = f"hidden by the one that is built in: name it {points[0].value}"
            yield name, package_labels(points), line, False


def summary(cls: type) -> str:
    """Return the first sentence of a class's docstring."""
    text = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".") + "." if text else "no docstring"


def _sections(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Settings]]:
    """Yield the settings and all nested sections, each with the prefix of its dotted keys."""
    yield prefix, settings
    for key, value in settings:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Settings):
                yield from _sections(item, f"{prefix}{key}.")


def used_plugins(settings: Settings) -> Iterator[tuple[str, Kind, Origin]]:
    """Yield dotted key, kind and origin of every plug-in, function and server that the settings name."""
    for prefix, section in _sections(settings):
        for key, path in section.imported().items():
            yield f"{prefix}{key}", "environments", find_origin(cast(type, import_target(path)))
        for key, origin in section.origins().items():
            yield f"{prefix}{key}", "tools", origin
        for key, value in section:
            for marker in field_markers(type(section), key):
                for item in value if isinstance(value, tuple) else (value,):
                    name = str(item.type) if isinstance(item, Settings) else item  # type: ignore[attr-defined]
                    if isinstance(name, str) and is_known(marker.kind, name):
                        dotted = f"{prefix}{key}.{name}" if isinstance(value, tuple) else f"{prefix}{key}"
                        yield dotted, marker.kind, find_origin(resolve(marker.kind, name))


def validate_references(settings: Settings) -> None:
    """Check the references that only a run imports. Raises ConfigError with the dotted key."""
    for prefix, section in _sections(settings):
        for key, check in section.reference_checks().items():
            try:
                check()
            except ConfigError as error:
                raise ConfigError(f"{prefix}{key}: {error}") from error


def plugin_digests(settings: Settings) -> dict[str, str]:
    """Return digests of the plug-ins' code by their names in a checkpoint. Built-in plug-ins have none, and
    trackers are excluded because they do not influence results.
    """
    return {
        f"{PREFIX}{key}": origin.digest or "defined in the running program"
        for key, kind, origin in used_plugins(settings)
        if not origin.is_built_in and kind != "trackers"
    }


def server_digests(settings: Settings) -> dict[str, str]:
    """Return digests of what the configured servers currently report about themselves, by dotted key.

    Compared on resume, because a process that starts its own server may get another version.
    """
    return {
        f"{prefix}{key}": origin.digest or ""
        for prefix, section in _sections(settings)
        for key, origin in section.origins().items()
    }


def write_origins(settings: Settings, folder: Path) -> None:
    """Write ``plugins.json`` into ``folder``, if any plug-in is not built in: origins and digests."""
    origins = {key: asdict(origin) for key, _, origin in used_plugins(settings) if not origin.is_built_in}
    if origins:
        replace_file(folder / ORIGINS_FILE, (json.dumps(origins, indent=1) + "\n").encode())
