"""``outrider list``: every plug-in with its origin and one line; nothing is built and torch is not needed."""

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

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
    is_import_path,
    is_known,
    known_names,
    origin,
    package_label,
    preset_keys,
    preset_types,
    registered,
    require_kind,
    resolve,
)
from outrider.printing import Terminal


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


# Which plug-ins a run uses and where their code came from: written down beside its settings, and digested
# into its checkpoints.


PREFIX: Final = "plug-in "
_NO_FILE: Final = "defined in the running program"


def used_plugins(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Kind, Origin]]:
    """Dotted key, kind and origin of every plug-in, function and server that the settings name."""
    for key, path in settings.imported().items():
        yield f"{prefix}{key}", "environments", find_origin(cast(type, import_target(path)))
    for key, plugin_origin in settings.origins().items():
        yield f"{prefix}{key}", "tools", plugin_origin
    for key, value in settings:
        for marker in field_markers(type(settings), key):
            for name in _names(value):
                if is_known(marker.kind, name):
                    dotted_key = f"{prefix}{key}.{name}" if isinstance(value, tuple) else f"{prefix}{key}"
                    yield dotted_key, marker.kind, origin(marker.kind, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Settings):
                yield from used_plugins(item, f"{prefix}{key}.")


def validate_references(settings: Settings, prefix: str = "") -> None:
    """Look at all that the settings name and that is imported in a run only, and at the classes of plug-ins.
    Raises ConfigError with the dotted key.
    """
    if not prefix:
        require_kinds(settings)
    for key, check in settings.reference_checks().items():
        try:
            check()
        except ConfigError as error:
            raise ConfigError(f"{prefix}{key}: {error}") from error
    for key, value in settings:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Settings):
                validate_references(item, f"{prefix}{key}.")


def require_kinds(settings: Settings, prefix: str = "") -> None:
    """Raises ConfigError, with the dotted key, for a plug-in's class that lacks a method of its kind."""
    for key, value in settings:
        for marker in field_markers(type(settings), key):
            for name in _names(value):
                try:
                    if is_import_path(name) or name in registered(marker.kind):
                        require_kind(marker.kind, name)
                except ConfigError as error:
                    raise ConfigError(f"{prefix}{key}: {error}") from error
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Settings):
                require_kinds(item, f"{prefix}{key}.")


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, tuple):
        for item in value:
            yield from _names(item)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, Settings):
        yield str(value.type)  # type: ignore[attr-defined]


def plugin_digests(settings: Settings) -> dict[str, str]:
    """Digest of the code of each plug-in that is not built in, by the name under which a checkpoint holds it.
    A tracker decides no number, so it is not among them."""
    return {
        f"{PREFIX}{key}": plugin_origin.digest or _NO_FILE
        for key, kind, plugin_origin in used_plugins(settings)
        if not plugin_origin.is_built_in and kind != "trackers"
    }


def server_digests(settings: Settings, prefix: str = "") -> dict[str, str]:
    """What the servers that the settings name say of themselves now, by dotted key: a process that starts its
    own may find another version."""
    digests = {f"{prefix}{key}": item.digest or "" for key, item in settings.origins().items()}
    for key, value in settings:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Settings):
                digests |= server_digests(item, f"{prefix}{key}.")
    return digests


def write_origins(settings: Settings, folder: Path) -> None:
    """``plugins.json`` in ``folder``, where any plug-in is not built in: package and version, or file, each
    with its digest."""
    origins = {
        key: asdict(plugin_origin)
        for key, _, plugin_origin in used_plugins(settings)
        if not plugin_origin.is_built_in
    }
    if origins:
        replace_file(folder / ORIGINS_FILE, (json.dumps(origins, indent=1) + "\n").encode())
