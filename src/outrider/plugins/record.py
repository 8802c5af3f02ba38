"""Which plug-ins a run uses and where their code came from: written down beside its settings, and digested
into its checkpoints."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

from outrider.atomic_io import replace_file
from outrider.config import Settings
from outrider.errors import ConfigError
from outrider.plugins.fields import markers_of
from outrider.plugins.imports import ORIGINS_FILE, import_target
from outrider.plugins.names import Kind, is_import_path, is_known, registered
from outrider.plugins.origin import Origin, origin_of
from outrider.plugins.registry import origin, require_kind

PREFIX: Final = "plug-in "
_NO_FILE: Final = "defined in the running program"


def used(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Kind, Origin]]:
    """Dotted key, kind and origin of every plug-in, function and server that the settings name."""
    for key, path in settings.imported().items():
        yield f"{prefix}{key}", "environments", origin_of(cast(type, import_target(path)))
    for key, found in settings.origins().items():
        yield f"{prefix}{key}", "tools", found
    for key, value in settings:
        for marker in markers_of(type(settings), key):
            for name in _names(value):
                if is_known(marker.kind, name):
                    place = f"{prefix}{key}.{name}" if isinstance(value, tuple) else f"{prefix}{key}"
                    yield place, marker.kind, origin(marker.kind, name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Settings):
                yield from used(one, f"{prefix}{key}.")


def require_named(settings: Settings, prefix: str = "") -> None:
    """Look at all that the settings name and that is imported in a run only, and at the classes of plug-ins.
    Raises ConfigError with the dotted key.
    """
    if not prefix:
        require_kinds(settings)
    for key, look in settings.named().items():
        try:
            look()
        except ConfigError as error:
            raise ConfigError(f"{prefix}{key}: {error}") from error
    for key, value in settings:
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Settings):
                require_named(one, f"{prefix}{key}.")


def require_kinds(settings: Settings, prefix: str = "") -> None:
    """Raises ConfigError, with the dotted key, for a plug-in's class that lacks a method of its kind."""
    for key, value in settings:
        for marker in markers_of(type(settings), key):
            for name in _names(value):
                try:
                    if is_import_path(name) or name in registered(marker.kind):
                        require_kind(marker.kind, name)
                except ConfigError as error:
                    raise ConfigError(f"{prefix}{key}: {error}") from error
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Settings):
                require_kinds(one, f"{prefix}{key}.")


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, tuple):
        for one in value:
            yield from _names(one)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, Settings):
        yield str(value.type)  # type: ignore[attr-defined]


def plugin_digests(settings: Settings) -> dict[str, str]:
    """Digest of the code of each plug-in that is not built in, by the name under which a checkpoint holds it.
    A tracker decides no number, so it is not among them."""
    return {
        f"{PREFIX}{key}": found.digest or _NO_FILE
        for key, kind, found in used(settings)
        if not found.is_built_in and kind != "trackers"
    }


def server_digests(settings: Settings, prefix: str = "") -> dict[str, str]:
    """What the servers that the settings name say of themselves now, by dotted key: a process that starts its
    own may find another version."""
    found = {f"{prefix}{key}": one.digest or "" for key, one in settings.origins().items()}
    for key, value in settings:
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Settings):
                found |= server_digests(one, f"{prefix}{key}.")
    return found


def write_origins(settings: Settings, folder: Path) -> None:
    """``plugins.json`` in ``folder``, where any plug-in is not built in: package and version, or file, each
    with its digest."""
    found = {key: asdict(one) for key, _, one in used(settings) if not one.is_built_in}
    if found:
        replace_file(folder / ORIGINS_FILE, (json.dumps(found, indent=1) + "\n").encode())
