"""Distributions of the working tree, and an environment that has it and nothing else of the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SOURCES = ("pyproject.toml", "README.pypi.md", "LICENSE")
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
_LEFT_BEHIND = shutil.ignore_patterns(".*", "runs", "build", "dist", "mutants", "*.egg-info", "__pycache__")


def build_wheel(folder: Path) -> Path:
    """The wheel, built from a copy below ``folder``: what an earlier build left in the working tree must not
    get in.
    """
    copied = folder / "source"
    shutil.copytree(ROOT / "src", copied / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in _SOURCES:
        shutil.copy(ROOT / name, copied)
    return _build("build_wheel", copied, folder)


def build_sdist(folder: Path) -> Path:
    """The source distribution, built from a copy below ``folder`` of the whole tree."""
    shutil.copytree(ROOT, folder / "tree", ignore=_LEFT_BEHIND, symlinks=True)
    return _build("build_sdist", folder / "tree", folder)


def build_wheel_from_sdist(sdist: Path, folder: Path) -> Path:
    """The wheel that an installer builds if an index has the source distribution only."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return _build("build_wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def _build(kind: str, source: Path, folder: Path) -> Path:
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, kind, str(folder)],
        cwd=source, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return folder / built.stdout.splitlines()[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment in ``folder`` with the wheel; commands run in ``empty``, a folder with nothing in it at
    first.
    """

    folder: Path
    empty: Path

    def run(self, *command: str | Path, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """``command`` (a program of the environment and its arguments) to its end, without the repository on
        any path.
        """
        program, *arguments = map(str, command)
        return subprocess.run(
            [str(self.folder / "bin" / program), *arguments], cwd=self.empty, capture_output=True, text=True,
            timeout=timeout, env={**_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip


def _environment() -> dict[str, str]:
    """Without ``PYTHONPATH`` and the like."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def install_wheel(wheel: Path, folder: Path) -> Installed:
    """Without its dependencies: they come from this environment, whose editable Outrider is not seen from
    there.
    """
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], timeout=60, check=True
    )
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder / "venv"), "install", "--quiet", "--no-deps",
         "--no-index", str(wheel)],
        timeout=120, check=True, env=_environment(),
    )  # fmt: skip
    relative = Path(sysconfig.get_path("purelib", vars={"base": ""})).relative_to("/")
    # A line of a .pth file is one folder: the .pth files in that folder, the editable installation's, are not
    # read.
    (folder / "venv" / relative / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "empty").mkdir()
    return Installed(folder=folder / "venv", empty=folder / "empty")
