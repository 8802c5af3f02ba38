"""``outrider new``: a small package with a plug-in of one's own, a test that runs the contract checks, and a
recipe."""

import importlib.util
import keyword
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from outrider import __version__
from outrider.errors import ConfigError
from outrider.files import replace_file
from outrider.plugins.registry import BUILT_IN, Kind
from outrider.printing import plural, print_lines, shell_command

_KINDS: Final[Mapping[str, Kind]] = {
    "environment": "environments",
    "gym": "environments",
    "agent": "environments",
    "tool": "tools",
    "functions": "tools",
    "algorithm": "algorithms",
}
_UNREGISTERED_KINDS: Final = ("gym", "agent")  # no plug-ins, but settings of built-in environments
_NEEDS: Final[Mapping[str, str]] = {"agent": ', "openai"'}
_QUESTIONS: Final = {"tool": "questions.j2", "functions": "questions.j2", "agent": "questions_agent.j2"}
_FUNCTION: Final = "count_words"  # the function that the short name of the package selects
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")


def write_package(kind: str, name: str, folder: Path | None = None) -> int:
    """Write the package into a new folder and print the next commands.

    Raises ConfigError, before writing any file, if the name is invalid or taken, or the folder is not empty.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a plug-in: lower-case words, joined by - or _")
    if name in BUILT_IN[_KINDS[kind]]:
        raise ConfigError(f"{name!r} is a built-in name: choose another one")
    if kind == "tool":
        from outrider.environments.tool_qa.environment import RESERVED_TAGS  # slow to import

        if name in RESERVED_TAGS:
            raise ConfigError(f"{name!r} is a tag of the protocol: choose another name")
    folder = folder or Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: choose a new folder")
    package = name.replace("-", "_")
    if keyword.iskeyword(package):
        raise ConfigError(f"{name!r} is a keyword of Python: choose another name")
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"the module {package!r} exists already: choose another name")
    files = render(kind, name=name, package=package, folder=folder)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(folder / path, text.encode())
    print_lines(
        f"{folder}: {plural(len(files), 'file')}. Next:",
        f"  pip install -e {shlex.quote(str(folder))}",
        f"  pytest {shlex.quote(str(folder))}",
        f"  {shell_command('train', folder / 'recipe.toml', '--run', f'runs/{name}')}",
    )
    return 0


def render(kind: str, *, name: str, package: str, folder: Path) -> dict[str, str]:
    """Return the texts of the files by their paths in the package."""
    words = [word for word in re.split(r"[-_]", name) if word]
    values = {
        "name": name,
        "package": package,
        "class_name": _FUNCTION
        if kind == "functions"
        else "".join(word.capitalize() for word in words) + kind.capitalize(),
        "tag": package,
        "group": "" if kind in _UNREGISTERED_KINDS else _KINDS[kind],
        "kind": "environment" if kind == "gym" else kind,
        "extra": f"[{kind}]" if kind in _UNREGISTERED_KINDS else "",
        "needs": _NEEDS.get(kind, ""),
        "version": __version__,
        "folder": folder.as_posix(),
    }
    loader = PackageLoader("outrider.scaffold", "templates")
    templates = Environment(
        loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    chosen = {
        "pyproject.toml": "pyproject.j2",
        f"src/{package}/__init__.py": f"{kind}.j2",
        f"tests/test_{package}.py": f"test_{kind}.j2",
        "recipe.toml": f"recipe_{kind}.j2",
    }
    if kind in _QUESTIONS:
        chosen["questions.jsonl"] = _QUESTIONS[kind]
    return {path: templates.get_template(template).render(values) for path, template in chosen.items()}
