"""Paths in settings: where a relative path is looked up, and what is reported when nothing is there.

A path in a recipe is relative to the recipe's folder and, if nothing is there, to the current folder; a path
on the command line the other way round. A run stores absolute paths.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from outrider.errors import DataError

TreeT = TypeVar("TreeT")
Folders: TypeAlias = Callable[[str], Sequence[Path]]
"""The folders in which the path of a dotted key is looked up, the first one first."""
_reported: set[tuple[str, Path]] = set()


def absolute_paths(settings: TreeT, folders: Folders, prefix: str = "") -> TreeT:
    """The settings with every relative path made absolute. An input that is in none of the folders stays as
    it is, for :func:`require_paths`; any other path that does not exist is one below the current folder.
    """
    tree: Any = settings  # outrider.config needs this module, so that its class cannot be named here
    changed: dict[str, Any] = {}
    for name, value in tree:
        absolute = _absolute(value, f"{prefix}{name}", folders, is_input=tree.names_path(name))
        if absolute is not value:
            changed[name] = absolute
    return tree.model_copy(update=changed) if changed else settings


def _absolute(value: Any, key: str, folders: Folders, *, is_input: bool) -> Any:
    if hasattr(value, "names_path"):
        return absolute_paths(value, folders, f"{key}.")
    if isinstance(value, tuple):
        items = [_absolute(item, f"{key}.{n}", folders, is_input=False) for n, item in enumerate(value)]
        return tuple(items) if any(item is not old for item, old in zip(items, value, strict=True)) else value
    if is_dataclass(value) and not isinstance(value, type):
        paths = {item.name: getattr(value, item.name) for item in fields(value)}
        located = {
            name: _absolute(path, f"{key}.{name}", folders, is_input=False)
            for name, path in paths.items()
            if isinstance(path, Path)
        }
        return replace(value, **located) if any(located[name] != paths[name] for name in located) else value
    if isinstance(value, Path):
        return _located(value, key, folders, is_input=is_input)
    if is_input and isinstance(value, str):
        located_path = _located(Path(value), key, folders, is_input=True)
        return str(located_path) if located_path.is_absolute() else value
    return value


def _located(path: Path, key: str, folders: Folders, *, is_input: bool) -> Path:
    if str(path).startswith("~"):
        path = path.expanduser()
    if path.is_absolute():
        return path
    existing = [folder.absolute() / path for folder in folders(key) if (folder / path).exists()]
    if not existing:
        return path if is_input else Path.cwd() / path
    others = [other for other in existing[1:] if not other.samefile(existing[0])]
    if others and (key, existing[0]) not in _reported:
        _reported.add((key, existing[0]))
        logging.getLogger(__name__).warning("%s: %s is used, not %s", key, existing[0], others[0])
    return existing[0]


def require_paths(settings: Any, folders: Sequence[Path], *, prefix: str = "") -> None:
    """Raises DataError, which names the setting, the path and the folders that were searched, for an input
    that does not exist. Sections that the run does not read are not checked.
    """
    for key, path in _inputs(settings, prefix):
        if not path.exists() and shutil.which(path) is None:
            raise DataError(f"{key}: {no_such_file(path, folders)}")


def no_such_file(path: Path, folders: Sequence[Path]) -> str:
    """What is reported of a path that does not exist."""
    if path.is_absolute():
        return f"{path}: no such file or folder"
    searched = " and ".join(dict.fromkeys(str(folder.absolute()) for folder in (*folders, Path.cwd())))
    return f"{path}: no such file or folder (searched: {searched})"


def shown_path(path: Path) -> str:
    """A path for people: relative if it is below the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _inputs(settings: Any, prefix: str) -> Iterator[tuple[str, Path]]:
    unused = settings.idle()
    for name, value in settings:
        if name in unused:
            continue
        if name in settings.input_paths and value is not None:
            yield f"{prefix}{name}", Path(value)
        for number, item in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if hasattr(item, "names_path") and not getattr(item, "makes_tasks", False):
                yield from _inputs(item, f"{prefix}{name}{'' if number is None else f'.{number}'}.")
