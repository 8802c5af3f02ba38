"""Settings: one pydantic tree, TOML files, dotted overrides, and errors that fit on one line."""

import copy
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from outrider.config_paths import absolute_paths
from outrider.config_problems import problem_line
from outrider.errors import ConfigError
from outrider.plugins.imports import add_search_folder, import_target

if TYPE_CHECKING:
    from outrider.plugins.origin import Origin

NONE: Final = "none"


class Settings(BaseModel):
    """Base of every settings class: immutable, an unknown key is an error, and ``"none"`` stands for None."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    details: ClassVar[frozenset[str]] = frozenset()
    """Fields, or dotted keys below them, that hardly anybody sets: at their default ``--dry-run`` names them
    below the others.
    """

    input_paths: ClassVar[frozenset[str]] = frozenset()
    """Fields that name a file or folder that has to exist, as a path or as text. Other fields of the type
    Path name what may be made.
    """

    def names_path(self, key: str) -> bool:
        """Whether a field of this instance names a file or folder that exists, or nothing that exists."""
        return key in self.input_paths

    def idle(self) -> frozenset[str]:
        """Fields, or dotted keys below them, that have no effect as the others stand (a kind of KL without a
        KL); ``--dry-run`` leaves them out.
        """
        return frozenset()

    def imported(self) -> Mapping[str, str]:
        """Fields that name a function of the user's by its import path, with the path: its code decides a run
        as a plug-in's does, and is recorded with theirs.
        """
        return {}

    def reference_checks(self) -> Mapping[str, Callable[[], object]]:
        """Fields that name what others have made, each with what raises ConfigError unless that is there.
        ``--dry-run`` calls them: they import, and start nothing.
        """
        return {key: partial(import_target, path) for key, path in self.imported().items()}

    def origins(self) -> "Mapping[str, Origin]":
        """What else decides a run and comes from others, by name, with where it comes from: servers, which
        this may ask. It is recorded with plug-ins.
        """
        return {}

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: Any) -> Any:
        """``"none"`` switches an optional setting off: TOML has no null, and leaving a key out means its
        default.
        """
        if not isinstance(values, dict):
            return values
        optional = {
            name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)
        }
        return {key: None if value == NONE and key in optional else value for key, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _fill_sections(cls, values: Any) -> Any:
        """A section sets what it names: the rest is the default of this field, which may differ from that of
        the section's class.
        """
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        for name, field in cls.model_fields.items():
            table, default = values.get(name), field.default
            if isinstance(table, Mapping) and isinstance(default, Settings):
                filled[name] = _merged(default, table, field.annotation)
        return filled


def _merged(own: "Settings", table: Mapping[str, Any], annotation: Any) -> dict[str, Any]:
    """``table`` over what the default ``own`` sets, section by section.

    Only what ``own`` names itself: the rest are defaults of its class, which may follow from others. A
    section of another ``type`` or ``preset`` is taken as it is, and so is one of a union that nothing tells
    apart.
    """
    fields = type(own).model_fields
    choices = {"type", "preset"} & fields.keys()
    if any(table.get(key, getattr(own, key)) != getattr(own, key) for key in choices):
        return dict(table)
    if any(field.alias for field in fields.values()) or (
        "type" not in choices and len(list(_sections(annotation))) > 1
    ):
        return dict(table)
    merged = {key: getattr(own, key) for key in own.model_fields_set}
    if "type" in choices:
        merged["type"] = getattr(own, "type")  # noqa: B009 a field that not every section has
    for key, value in table.items():
        inner = getattr(own, key, None) if key in fields else None
        if isinstance(value, Mapping) and isinstance(inner, Settings):
            merged[key] = _merged(inner, value, fields[key].annotation)
        else:
            merged[key] = value
    return merged


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings classes that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(
    kind: type[SettingsT],
    *,
    file: Path | None,
    overrides: Sequence[str] = (),
    sections: Mapping[str, Any] | None = None,
    respelled: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> SettingsT:
    """Read a TOML file, put ``sections`` in the place of its own, apply ``section.key=value`` overrides in
    order, and validate. ``respelled`` gives the file's tree today's keys before that. Relative paths become
    absolute (:mod:`outrider.config_paths`).

    A value is read as TOML (``1``, ``true``, ``[1, 2]``) and, where that fails, as a plain string.
    Raises ConfigError naming the key; nothing is written.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        add_search_folder(file.parent)  # a recipe may name a class of a module beside it
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        # tomllib passes on those of the numbers and dates that it reads
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from error
    if respelled is not None:
        tree = respelled(tree)
    tree.update(copy.deepcopy(dict(sections or {})))
    for override in overrides:
        _apply(tree, override)
    return absolute_paths(validate(kind, tree), _folders(file, overrides, sections or {}))


def _folders(
    file: Path | None, overrides: Sequence[str], sections: Mapping[str, Any]
) -> Callable[[str], Sequence[Path]]:
    """Where a path is looked up, by its dotted key: what the recipe wrote beside the recipe first, what came
    by command or from Python in the current folder first.
    """
    current = Path.cwd()
    recipe_folder = current if file is None else file.absolute().parent
    manual_keys = {override.partition("=")[0].strip() for override in overrides} | sections.keys()

    def search_folders(key: str) -> Sequence[Path]:
        is_manual = any(key == prefix or key.startswith(f"{prefix}.") for prefix in manual_keys)
        return (current, recipe_folder) if is_manual else (recipe_folder, current)

    return search_folders


def validate(kind: type[SettingsT], tree: dict[str, Any]) -> SettingsT:
    """Validate a tree of plain values; all problems in one line."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(problem_line(kind, item, tree) for item in error.errors())) from error


def parse_value(raw: str) -> Any:
    """The value of an override: TOML, and where that fails a plain string."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        return raw


def _apply(tree: dict[str, Any], override: str) -> None:
    path, separator, raw = override.partition("=")
    parts = path.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    value = parse_value(raw)
    for part in parts[:-1]:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {path}: {part} is a value, not a section")
        tree = child
    tree[parts[-1]] = value


def to_toml(tree: dict[str, Any], *, prefix: str = "") -> str:
    """Plain settings as TOML text that :func:`load_settings` reads back; None is written as ``"none"`` (TOML
    has no null).

    Raises ConfigError for what TOML cannot hold.
    """
    lines = [
        f"{_key(key)} = {_literal(NONE if value is None else value)}"
        for key, value in tree.items()
        if not isinstance(value, dict)
    ]
    for key, value in tree.items():
        if isinstance(value, dict):
            name = f"{prefix}{_key(key)}"
            body = to_toml(value, prefix=f"{name}.")
            lines += ["", f"[{name}]", body] if body else ["", f"[{name}]"]
    return "\n".join(lines)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _literal(key)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, str):
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise ConfigError(f"cannot write {value!r} as TOML: it is not valid Unicode")
        # what a terminal might obey is spelled out, not only what TOML asks for
        escaped = "".join(
            c if c.isprintable() else f"\\u{ord(c):04x}" if ord(c) < 2**16 else f"\\U{ord(c):08x}"
            for c in value.replace("\\", "\\\\").replace('"', '\\"')
        )
        return f'"{escaped}"'
    if isinstance(value, dict):
        plain = {key: NONE if item is None else item for key, item in value.items()}
        return "{" + ", ".join(f"{_key(key)} = {_literal(item)}" for key, item in plain.items()) + "}"
    if isinstance(value, int | float):
        return repr(value)
    raise ConfigError(f"cannot write {type(value).__name__} as TOML")
