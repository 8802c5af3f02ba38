"""Import of plug-ins by path (``package.module:Class``), and where their code comes from."""

import hashlib
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from outrider import __version__
from outrider.errors import ConfigError
from outrider.suggestions import did_you_mean

ORIGINS_FILE: Final = "plugins.json"  # in a run directory: the origins of its plug-ins
_MAX_CHARS: Final = 300  # maximum length of an exception's text in messages
_folders: list[Path] = []
_initial_path: Final = frozenset(sys.path)


def add_search_folder(folder: Path) -> None:
    """Search import paths in ``folder`` first, then in the plug-in folders recorded by the run in it."""
    try:
        recorded = json.loads((folder / ORIGINS_FILE).read_text(encoding="utf-8"))
        folders = [Path(entry["folder"]) for entry in recorded.values() if entry.get("folder")]
    except (OSError, ValueError, AttributeError, TypeError):
        folders = []  # no run directory, or a damaged file; missing modules are reported on import
    for path in (*folders, folder.absolute()):
        if path in _folders:
            _folders.remove(path)
        _folders.insert(0, path)


def search_folders() -> tuple[Path, ...]:
    """The folders in which import paths are searched, in order."""
    return tuple(_folders)


def import_target(target: str) -> Any:
    """Import the object ``module:attribute``. Raises ConfigError with the name, location and reason."""
    name, _, attribute = target.partition(":")
    module = loaded = _import_module(name)
    for part in attribute.split("."):
        if not hasattr(loaded, part):
            known = [member for member in dir(loaded) if not member.startswith("_")]
            file = getattr(module, "__file__", None) or "no file"
            raise ConfigError(f"{name} ({file}) has no {attribute!r}{did_you_mean(part, known)}")
        loaded = getattr(loaded, part)
    return loaded


def import_function(target: str, *arguments: str) -> Callable[..., Any]:
    """Import a function that accepts these positional arguments (none: any) and returns a value.

    Raises ConfigError for anything else.
    """
    loaded = import_target(target)
    if isinstance(loaded, type):
        raise ConfigError(f"{target} is a class: name a function, or an object that can be called")
    if not callable(loaded):
        raise ConfigError(f"{target} is a {type(loaded).__name__}, which cannot be called")
    function: Callable[..., Any] = loaded
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{target} yields: it has to return")
    if not arguments:
        return function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a compiled function may have no signature
        return function
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{target} is called with ({', '.join(arguments)}) and accepts {signature}: {error}"
        ) from error
    return function


def _import_module(name: str) -> ModuleType:
    folders = (*_folders, Path.cwd())
    if not name.startswith("outrider."):
        _require_no_namesake(name)
        # Append, so that a file in a recipe's folder never replaces an installed package.
        added = [str(folder) for folder in folders]
        entries = [entry for entry in sys.path if entry not in added or entry in _initial_path]
        sys.path[:] = entries + [folder for folder in dict.fromkeys(added) if folder not in entries]
    importlib.invalidate_caches()  # a file may be newer than the last search of its folder
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing a module can raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            raise ConfigError(
                f"there is no module {missing!r}, neither among the installed packages nor in "
                f"{', '.join(map(str, dict.fromkeys(folders)))}"
            ) from error
        raise ConfigError(f"the module {name!r} cannot be imported{describe_exception(error)}") from error


def _require_no_namesake(name: str) -> None:
    """Raise if another folder's module of this name is loaded, which Python would return instead."""
    top = name.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    files = [file for folder in _folders for file in (folder / f"{top}.py", folder / top / "__init__.py")]
    first = next((file for file in files if file.is_file()), None)
    if loaded is not None and first is not None and Path(loaded) in files and Path(loaded) != first:
        raise ConfigError(
            f"the module {top!r} of this process is {loaded}, not {first}: give one of them another name"
        )


def describe_exception(error: BaseException) -> str:
    """Format an exception in a plug-in's code for the end of a message: its location and text."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename
    ]
    location = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames[1:] else ""
    return f"{location}: " + " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_CHARS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of a plug-in's code.

    Attributes:
        target: import path.
        package, version: the installed distribution, if any.
        file: the module's file.
        folder: the folder that contains the top-level module.
        digest: SHA-256 (hex) over all Python files of the top-level package, or over the single file.
            Built-in plug-ins have none, because checkpoints contain Outrider's version.
    """

    target: str
    package: str | None = None
    version: str | None = None
    file: str | None = None
    folder: str | None = None
    digest: str | None = None

    @property
    def is_built_in(self) -> bool:
        """Whether the plug-in is part of Outrider."""
        return self.package == "outrider"

    def __str__(self) -> str:
        if self.is_built_in:
            return "built in"
        return (
            self.file or "the running program" if self.package is None else f"{self.package} {self.version}"
        )


@cache  # computed once, because later changes of the file do not affect the loaded code
def find_origin(cls: type) -> Origin:
    """Return the origin of the code of a class."""
    target = f"{cls.__module__}:{cls.__qualname__}"
    top = cls.__module__.partition(".")[0]
    if top == "outrider":
        return Origin(target=target, package="outrider", version=__version__)
    name = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if name is None:
        return Origin(target=target)
    file = Path(name)
    root = file.absolute().parents[cls.__module__.count(".") + (file.stem == "__init__")]
    # The distribution that installed `top` into `root`. An editable install has another location, so that
    # the digest of its files is used.
    package = next(
        (
            distribution
            for distribution in distributions(path=[str(root)])
            if top in {path.parts[0].removesuffix(".py") for path in distribution.files or ()}
        ),
        None,
    )
    is_package = (root / top).is_dir() and file.is_relative_to(root / top)
    digest = hashlib.sha256()
    for source in sorted((root / top).rglob("*.py")) if is_package else [file]:
        label = source.relative_to(root).as_posix() if source.is_relative_to(root) else source.name
        digest.update(f"{label}\0".encode() + hashlib.sha256(source.read_bytes()).digest())
    return Origin(
        target=target,
        package=None if package is None else package.name,
        version=None if package is None else package.version,
        file=name,
        folder=str(root),
        digest=digest.hexdigest(),
    )
