"""Where a plug-in's code comes from: the package with its version, or the file, and a digest of what lies
there."""

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path

from outrider import __version__


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
        total.update(
            f"{source.relative_to(root).as_posix() if source.is_relative_to(root) else source.name}\0".encode(),
        )
        total.update(hashlib.sha256(source.read_bytes()).digest())
    return total.hexdigest()


def _sources(root: Path, top: str, file: Path) -> Iterator[Path]:
    package = root / top
    if package.is_dir() and file.is_relative_to(package):
        yield from sorted(package.rglob("*.py"))
    else:
        yield file
