"""All settings of a recipe with type, default, bounds and a description: for ``outrider explain`` and the
pages of settings.

The description of a setting is the docstring below its field or, without one, the sentences of the class's
docstring that mention it.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outrider.config import NONE, inner_classes
from outrider.training.settings import RunSettings

_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_MAX_PARENTS: Final = 3  # types that a title names
_ROLE: Final = re.compile(r":\w+:`~?\.?([^`]*)`")


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a settings class."""

    name: str
    kind: type[BaseModel]
    owner: type[BaseModel]
    """The base class that declares the key first."""

    @property
    def field(self) -> FieldInfo:
        """The field of the class."""
        return self.kind.model_fields[self.name]

    @property
    def is_section(self) -> bool:
        """Whether the value is a table with keys of its own."""
        return bool(inner_classes(self.kind, self.name)) and not self.type_text.startswith("list")

    @property
    def type_text(self) -> str:
        """Type and bounds in words."""
        bounds = dict.fromkeys(_bounds(self.field.metadata, self.field.annotation))
        return ", ".join([_type_words(self.field.annotation), *bounds])

    @property
    def default(self) -> str:
        """The default as TOML, ``required``, or "" for a table with defaults of its own."""
        if self.field.is_required():
            return "required"
        value = self.field.get_default(call_default_factory=True)
        return "" if isinstance(value, BaseModel) or is_dataclass(value) else as_toml(value)

    @property
    def description(self) -> str:
        """One paragraph; that of the section's class for a section without one of its own."""
        first = re.sub("^num_(valid|test)", "num_train", self.name)  # documents all three splits
        for name in (self.name, first):
            for base in self.kind.__mro__:
                if text := _field_docstrings(base).get(name):
                    return text
        for base in self.kind.__mro__:
            if text := _sentences_with(self.name, _own_docstring(base)):
                text = text.removeprefix(f"`{self.name}`: ")
                return text[0].upper() + text[1:]
        inner = inner_classes(self.kind, self.name)
        return " ".join(about(inner[0]).partition("\n\n")[0].split()) if len(inner) == 1 else ""


@dataclass(frozen=True, slots=True)
class Section:
    """A settings class and the dotted keys of the tables that it describes ("" for the top of a recipe)."""

    kind: type[BaseModel]
    paths: tuple[str, ...]
    parents: tuple[str, ...] = ()
    """The types of the sections that contain the tables, if they have types."""

    @property
    def type_name(self) -> str:
        """The value of ``type`` that selects the class; "" if there is no choice."""
        field = self.kind.model_fields.get("type")
        return "" if field is None or not self.paths[0] else str(field.default)

    @property
    def title(self) -> str:
        """The tables, and the ``type`` that selects the class."""
        names = ", ".join(f"`{path}`" for path in self.paths)
        if 0 < len(self.parents) <= _MAX_PARENTS:
            names += f" of {', '.join(f'`{parent}`' for parent in self.parents)}"
        return names + (f' with `type = "{self.type_name}"`' if self.type_name else "")

    @property
    def summary(self) -> str:
        """The first sentence of the class's docstring, unless it begins with a key."""
        sentence = re.split(r"(?<=[.;]) (?=[A-Z`])", " ".join(about(self.kind).split()))[0]
        return "" if sentence.startswith("`") else sentence

    def settings(self) -> list[Setting]:
        """The keys, except ``type``."""
        return [
            Setting(name, self.kind, _declaring_class(self.kind, name))
            for name in self.kind.model_fields
            if name != "type"
        ]


@cache
def sections(top: str = "") -> tuple[Section, ...]:
    """All sections in the order of a recipe, each class once; only those of one top-level table if it is
    named.
    """
    paths: dict[type[BaseModel], dict[str, None]] = {}
    parents: dict[type[BaseModel], dict[str, None]] = {}

    def visit(kind: type[BaseModel], path: str, parent: str) -> None:
        parents.setdefault(kind, {}).update({parent: None} if parent else {})
        if path in paths.setdefault(kind, {}):
            return
        paths[kind][path] = None
        own_type = Section(kind, (path,)).type_name
        for name in kind.model_fields:
            if path or not top or name == top:
                for inner in inner_classes(kind, name):
                    visit(inner, f"{path}.{name}".lstrip("."), own_type)

    visit(RunSettings, "", "")
    return tuple(Section(kind, tuple(found), tuple(parents[kind])) for kind, found in paths.items())


def about(kind: type[BaseModel]) -> str:
    """The docstring of a settings class without markup; "" if it has only its base's."""
    return _plain(_own_docstring(kind))


def as_toml(value: Any) -> str:
    """Format a default as TOML."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str | Path | bool):
        return json.dumps(value if isinstance(value, bool) else str(value), ensure_ascii=False)
    return str(value)


def _declaring_class(kind: type[BaseModel], name: str) -> type[BaseModel]:
    return next(base for base in reversed(kind.__mro__) if name in vars(base).get("__annotations__", {}))


def _bounds(metadata: Any, annotation: Any) -> Iterator[str]:
    """Yield the bounds of a field or of the elements of a union; those of a list's items are left out."""
    for item in (*metadata, *getattr(annotation, "__metadata__", ())):
        yield from _bounds(getattr(item, "metadata", ()), None)
        for sign, words in _BOUNDS.items():
            if not isinstance(item, FieldInfo) and (limit := getattr(item, sign, None)) is not None:
                yield f"{words} {limit:,}"
    if get_origin(annotation) not in (tuple, list):
        for part in get_args(annotation) if annotation is not None else ():
            yield from _bounds((), part)


def _type_words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if is_dataclass(annotation):
        return "table"
    if annotation is NoneType:
        return f'"{NONE}"'
    if origin is Annotated:
        return _type_words(parts[0])
    if origin in (tuple, list):
        return f"list of {_type_words(parts[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "table"
    if origin is Literal:
        return " or ".join(map(as_toml, parts))
    if parts:
        return " or ".join(dict.fromkeys(map(_type_words, parts)))
    names = {"str": "string", "Path": "path", "bool": "boolean", "float": "number", "int": "integer"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, name)


@cache
def _field_docstrings(kind: type) -> Mapping[str, str]:
    """The docstrings below the fields of a class, from its source."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError):  # built in C, or made at run time
        return {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    return {
        field.target.id: " ".join(_plain(inspect.cleandoc(text.value.value)).split())
        for field, text in pairwise(statements)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _own_docstring(kind: type) -> str:
    is_own = kind is not BaseModel and kind.__module__.partition(".")[0] != "pydantic"
    return inspect.cleandoc(vars(kind).get("__doc__") or "") if is_own else ""


def _plain(text: str) -> str:
    return re.sub(r"\bNone\b", f"`{NONE}`", _ROLE.sub(r"`\1`", text).replace("``", "`"))


def _sentences_with(name: str, docstring: str) -> str:
    """The sentences, or their parts between semicolons, that mention a key."""
    text = " ".join(_plain(docstring).split())
    parts = re.split(r"(?<=[.;]) (?=[A-Z`])", text)
    joined: list[str] = []
    for part in parts:
        # not the end of a part: an abbreviation, or a semicolon inside parentheses
        is_open = joined and (joined[-1].endswith("Dr.") or joined[-1].count("(") > joined[-1].count(")"))
        if is_open:
            joined[-1] += f" {part}"
        else:
            joined.append(part)
    return " ".join(f"{part[:-1]}." if part[-1:] == ";" else part for part in joined if f"`{name}`" in part)
