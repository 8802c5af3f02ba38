"""Reference pages generated from the code when the site is built: settings and the command line."""

import argparse
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docsite.plugins import all_metrics_page, plugins_page
from outrider.cli import make_parser
from outrider.commands import all_parsers
from outrider.plugins.registry import Name, field_markers
from outrider.training.settings import RunSettings

_SETTINGS: Final = """# Settings

This page is generated when the site is built. A recipe is a TOML file of these sections; `section.key=value`
on the command line overrides it. `outrider train RECIPE --dry-run` prints every setting with its value, and
an unknown key is an error. `"none"` disables an optional setting.
"""
_CLI: Final = """# Command line

This page is generated when the site is built, from the output of `outrider COMMAND --help`.
"""


def settings_page() -> str:
    """Return a table for every settings class of recipes."""
    return _SETTINGS + "".join(_sections(RunSettings, ""))


def _sections(kind: type[BaseModel], prefix: str) -> Iterator[str]:
    own = {name: field for name, field in kind.model_fields.items() if name != "type"}
    title = prefix.rstrip(".") or "The top of a recipe"
    tag = kind.model_fields.get("type")
    chosen = f' with `type = "{tag.default}"`' if tag is not None and prefix else ""
    yield f"\n## {title if not prefix else f'`{title}`'}{chosen}\n\n{_about(kind)}\n\n"
    yield "| key | type | default | bounds |\n| --- | --- | --- | --- |\n"
    yield from (_row(name, field) for name, field in own.items())
    for name, field in own.items():
        plugins = [
            one
            for marker in field_markers(kind, name)
            if not isinstance(marker, Name)
            for one in marker.builtin_classes()
        ]
        for inner in plugins or _classes(field.annotation):
            yield from _sections(inner, f"{prefix}{name}.")


def _about(kind: type[BaseModel]) -> str:
    """A class without words of its own would show its base's."""
    return inspect.cleandoc(kind.__doc__ or "") if "__doc__" in vars(kind) else ""


def _classes(annotation: Any) -> list[type[BaseModel]]:
    """Return the settings classes in an annotation, in order, with members of unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [one for part in get_args(annotation) for one in _classes(part)]


def _row(name: str, field: FieldInfo) -> str:
    required = field.default is PydanticUndefined and field.default_factory is None
    value = field.get_default(call_default_factory=True) if not required else None
    is_table = isinstance(value, BaseModel) or bool(_classes(field.annotation))
    default = "needed" if required else "its own" if is_table and value is not None else f"`{_toml(value)}`"
    bounds = ", ".join(f"{name} {limit}" for one in field.metadata for name, limit in _bounds(one))
    return f"| `{name}` | {_kind(field.annotation)} | {default} | {bounds} |\n"


def _bounds(one: Any) -> Iterator[tuple[str, Any]]:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return (
        (sign, getattr(one, name)) for name, sign in signs.items() if getattr(one, name, None) is not None
    )


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    return (
        str(list(value) if isinstance(value, tuple) else value)
        if not isinstance(value, str)
        else f'"{value}"'
    )


def _kind(annotation: Any) -> str:
    """Describe a type in a few words for a table."""
    if annotation is NoneType:
        return '`"none"`'
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if _classes(annotation):
        return "table"
    parts = get_args(annotation)
    if "Literal" in str(get_origin(annotation)):
        return " or ".join(f"`{_toml(part)}`" for part in parts)
    if get_origin(annotation) in (tuple, list):
        return f"list of {_kind(parts[0])}"
    if isinstance(get_origin(annotation), type) and issubclass(get_origin(annotation), Mapping):
        return "table"
    if parts:
        return " or ".join(_kind(part) for part in parts)
    return str(getattr(annotation, "__name__", annotation)).replace("|", "or")


def cli_page() -> str:
    """The help of every command."""
    return _CLI + "".join(_commands(make_parser()))


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for inner in all_parsers(parser):
        if inner is not parser:
            inner.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=72)
            level = inner.prog.count(" ") + 1
            yield f"\n{'#' * level} `{inner.prog}`\n\n```text\n{inner.format_help().rstrip()}\n```\n"


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "reference/settings.md": settings_page,
    "reference/cli.md": cli_page,
    "reference/plugins.md": plugins_page,
    "metrics.md": all_metrics_page,
}
"""File names in the documents, and the functions that create the pages."""
