"""Imports a plug-in's module: from what is installed, from beside the recipe, or from the current folder. One
line where that fails."""

import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from outrider.errors import ConfigError
from outrider.near import did_you_mean

ORIGINS_FILE: Final = "plugins.json"  # of a run directory: where the code of its plug-ins lay
_LONGEST: Final = 300  # characters of somebody else's message
_folders: list[Path] = []


def search_in(folder: Path) -> None:
    """Let import paths be found in this folder, before those of earlier calls, and where the run in it found
    them."""
    for one in (*_recorded_folders(folder / ORIGINS_FILE), folder.absolute()):
        if one in _folders:
            _folders.remove(one)
        _folders.insert(0, one)


def searched() -> tuple[Path, ...]:
    """The folders in which import paths are looked for, the first one first."""
    return tuple(_folders)


def _recorded_folders(file: Path) -> list[Path]:
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        return [Path(one["folder"]) for one in recorded.values() if one.get("folder")]
    except (OSError, ValueError, AttributeError, TypeError):
        return []  # no run directory, or a damaged one: a module that is then not found is named anyway


def import_target(target: str) -> Any:
    """The object of ``module:Class``. Raises ConfigError, which says which name, from where and why."""
    name, _, attribute = target.partition(":")
    module = _import_module(name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [one for one in dir(found) if not one.startswith("_")]
            raise ConfigError(
                f"{name} ({_place(module)}) has no {attribute!r}{did_you_mean(part, known)}",
            )
        found = getattr(found, part)
    return found


def import_function(target: str, *arguments: str) -> Callable[..., Any]:
    """A function that is called with these arguments, in their order, and gives what it returns. Raises
    ConfigError where nothing of the kind is there.
    """
    named = import_target(target)
    if isinstance(named, type):
        raise ConfigError(f"{target} is a class: name a function, or an object that can be called")
    if not callable(named):
        raise ConfigError(f"{target} is a {type(named).__name__}, which cannot be called")
    found: Callable[..., Any] = named
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise ConfigError(f"{target} yields: it has to return")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # one that is compiled may not say how it is called
        return found
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{target} is called with ({', '.join(arguments)}) and takes {signature}: {error}"
        ) from error
    return found


def _import_module(name: str) -> ModuleType:
    if not name.startswith("outrider."):  # what is built in looks at no folder of a recipe
        _require_no_namesake(name)
        _extend_path()
    importlib.invalidate_caches()  # a file may have been written since its folder was last looked at
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            looked = ", ".join(str(folder) for folder in (*_folders, Path.cwd()))
            raise ConfigError(
                f"there is no module {error.name!r}, neither among the installed packages nor in {looked}",
            ) from error
        raise ConfigError(f"the module {name!r} cannot be imported{told_of(error)}") from error
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        raise ConfigError(f"the module {name!r} cannot be imported{told_of(error)}") from error


def _extend_path() -> None:
    """At the end: a file of the recipe's folder never takes the place of an installed package."""
    wanted = [str(folder) for folder in (*_folders, Path.cwd())]
    kept = [entry for entry in sys.path if entry not in wanted or entry in _before_us]
    sys.path[:] = kept + [folder for folder in dict.fromkeys(wanted) if folder not in kept]


_before_us: Final = frozenset(sys.path)


def _require_no_namesake(name: str) -> None:
    """Two recipes of one process may each have a ``mine.py``: Python would give the second one the module of
    the first."""
    top = name.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if loaded is None:
        return
    ours = [file for folder in _folders for file in (folder / f"{top}.py", folder / top / "__init__.py")]
    wanted = [file for file in ours if file.is_file()]
    if wanted and Path(loaded) in ours and Path(loaded) != wanted[0]:
        raise ConfigError(
            f"the module {top!r} of this process is {loaded}, not {wanted[0]}: give one of them another name",
        )


def told_of(error: BaseException) -> str:
    """The end of a line about somebody else's exception: where in their code, and what."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own[1:] else ""
    why = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
    return f"{where}: {why}"


def _place(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or "no file")
