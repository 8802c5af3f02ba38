"""Imports a plug-in's module: from what is installed, from beside the recipe, or from the current folder. One
line where that fails.
"""

import hashlib
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from outrider import __version__
from outrider.errors import ConfigError
from outrider.suggestions import did_you_mean

ORIGINS_FILE: Final = "plugins.json"  # of a run directory: where the code of its plug-ins lay
_LONGEST: Final = 300  # characters of somebody else's message
_folders: list[Path] = []


def add_search_folder(folder: Path) -> None:
    """Let import paths be found in this folder, before those of earlier calls, and where the run in it found
    them."""
    for path in (*_recorded_folders(folder / ORIGINS_FILE), folder.absolute()):
        if path in _folders:
            _folders.remove(path)
        _folders.insert(0, path)


def search_folders() -> tuple[Path, ...]:
    """The folders in which import paths are looked for, the first one first."""
    return tuple(_folders)


def _recorded_folders(file: Path) -> list[Path]:
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        return [Path(entry["folder"]) for entry in recorded.values() if entry.get("folder")]
    except (OSError, ValueError, AttributeError, TypeError):
        return []  # no run directory, or a damaged one: a module that is then not found is named anyway


def import_target(target: str) -> Any:
    """The object of ``module:Class``. Raises ConfigError, which says which name, from where and why."""
    name, _, attribute = target.partition(":")
    module = _import_module(name)
    loaded: Any = module
    for part in attribute.split("."):
        if not hasattr(loaded, part):
            known = [member for member in dir(loaded) if not member.startswith("_")]
            raise ConfigError(
                f"{name} ({_module_file(module)}) has no {attribute!r}{did_you_mean(part, known)}",
            )
        loaded = getattr(loaded, part)
    return loaded


def import_function(target: str, *arguments: str) -> Callable[..., Any]:
    """A function that is called with these arguments, in their order, and gives what it returns. Raises
    ConfigError where nothing of the kind is there.
    """
    loaded = import_target(target)
    if isinstance(loaded, type):
        raise ConfigError(f"{target} is a class: name a function, or an object that can be called")
    if not callable(loaded):
        raise ConfigError(f"{target} is a {type(loaded).__name__}, which cannot be called")
    function: Callable[..., Any] = loaded
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{target} yields: it has to return")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one that is compiled may not say how it is called
        return function
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{target} is called with ({', '.join(arguments)}) and takes {signature}: {error}"
        ) from error
    return function


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
        raise ConfigError(f"the module {name!r} cannot be imported{describe_exception(error)}") from error
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        raise ConfigError(f"the module {name!r} cannot be imported{describe_exception(error)}") from error


def _extend_path() -> None:
    """At the end: a file of the recipe's folder never takes the place of an installed package."""
    folders = [str(folder) for folder in (*_folders, Path.cwd())]
    entries = [entry for entry in sys.path if entry not in folders or entry in _before_us]
    sys.path[:] = entries + [folder for folder in dict.fromkeys(folders) if folder not in entries]


_before_us: Final = frozenset(sys.path)


def _require_no_namesake(name: str) -> None:
    """Two recipes of one process may each have a ``mine.py``: Python would give the second one the module of
    the first."""
    top = name.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if loaded is None:
        return
    ours = [file for folder in _folders for file in (folder / f"{top}.py", folder / top / "__init__.py")]
    existing = [file for file in ours if file.is_file()]
    if existing and Path(loaded) in ours and Path(loaded) != existing[0]:
        raise ConfigError(
            f"the module {top!r} of this process is {loaded}, not {existing[0]}: give one of them another "
            "name",
        )


def describe_exception(error: BaseException) -> str:
    """The end of a line about somebody else's exception: where in their code, and what."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    location = f" at {own[-1].filename}:{own[-1].lineno}" if own[1:] else ""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
    return f"{location}: {reason}"


def _module_file(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or "no file")


# Where a plug-in's code comes from: the package with its version, or the file, and a digest of what lies
# there.


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Of a class. ``package`` is the installed distribution, with its ``version``; ``file`` the module's own.

    ``folder`` is where the import began: that of the top-level module. ``digest`` (SHA-256, hex) is over all
    Python files of the top-level package, or over the one file. What is built in has none: its version is in
    every checkpoint.
    """

    target: str
    package: str | None = None
    version: str | None = None
    file: str | None = None
    folder: str | None = None
    digest: str | None = None

    @property
    def is_built_in(self) -> bool:
        """Whether Outrider itself brings it."""
        return self.package == "outrider"

    def __str__(self) -> str:
        if self.is_built_in:
            return "built in"
        if self.package is not None:
            return f"{self.package} {self.version}"
        return self.file or "the running program"


@cache
def find_origin(cls: type) -> Origin:
    """Read once per class: a file that changes while its code runs is not the code that runs."""
    target = f"{cls.__module__}:{cls.__qualname__}"
    top = cls.__module__.partition(".")[0]
    if top == "outrider":
        return Origin(target=target, package="outrider", version=__version__)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return Origin(target=target)
    root = _root(Path(file).absolute(), cls.__module__)
    distribution = _distribution(root, top)
    return Origin(
        target=target,
        package=None if distribution is None else distribution.name,
        version=None if distribution is None else distribution.version,
        file=file,
        folder=str(root),
        digest=_digest(root, top, Path(file)),
    )


def _root(file: Path, module: str) -> Path:
    """The folder that holds the top-level module."""
    num_up = module.count(".") + (file.stem == "__init__")
    return file.parents[num_up]


def _distribution(root: Path, top: str) -> Distribution | None:
    """The one that installed ``top`` into ``root``. An editable one is elsewhere: its files count, not its
    version."""
    for distribution in distributions(path=[str(root)]):
        names = {file.parts[0].removesuffix(".py") for file in distribution.files or ()}
        if top in names:
            return distribution
    return None


def _digest(root: Path, top: str, file: Path) -> str:
    total = hashlib.sha256()
    for source in _sources(root, top, file):
        label = source.relative_to(root).as_posix() if source.is_relative_to(root) else source.name
        total.update(f"{label}\0".encode())
        total.update(hashlib.sha256(source.read_bytes()).digest())
    return total.hexdigest()


def _sources(root: Path, top: str, file: Path) -> Iterator[Path]:
    package = root / top
    if package.is_dir() and file.is_relative_to(package):
        yield from sorted(package.rglob("*.py"))
    else:
        yield file
