"""Settings: a pydantic tree with TOML files, dotted overrides and one-line error messages."""

import copy
import json
import logging
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from outrider.errors import ConfigError, DataError
from outrider.plugins.imports import add_search_folder, import_target
from outrider.suggestions import closest_match, did_you_mean

if TYPE_CHECKING:
    from outrider.plugins.imports import Origin
    from outrider.plugins.registry import Section


# Lookup of paths in settings, and messages for paths that do not exist.
#
# A relative path in a recipe is looked up in the recipe's folder first and then in the current folder; a path
# on the command line in the opposite order. A run stores absolute paths.


TreeT = TypeVar("TreeT")
Folders: TypeAlias = Callable[[str], Sequence[Path]]
"""Returns the folders in which the path of a dotted key is looked up, in order."""
_reported: set[tuple[str, Path]] = set()


def absolute_paths(settings: TreeT, folders: Folders, prefix: str = "") -> TreeT:
    """Return the settings with every relative path made absolute.

    An input that exists in none of the folders is unchanged, so that :func:`require_paths` reports it. Any
    other path that does not exist is resolved against the current folder.
    """
    tree: Any = settings  # not annotated as RunSettings: its module imports outrider.config
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
    """Check that all inputs exist, except in sections that the run does not read (``unread_sections``).

    Raises:
        DataError: if an input does not exist; names the setting, the path and the searched folders.
    """
    for key, path in _inputs(settings, prefix):
        if not path.exists() and shutil.which(path) is None:
            raise DataError(f"{key}: {no_such_file(path, folders)}")


def no_such_file(path: Path, folders: Sequence[Path]) -> str:
    """Format the error for a path that does not exist."""
    if path.is_absolute():
        return f"{path}: no such file or folder"
    searched = " and ".join(dict.fromkeys(os.path.abspath(folder) for folder in (*folders, Path.cwd())))
    return f"{path}: no such file or folder (searched: {searched})"


def shown_path(path: Path) -> str:
    """Format a path for messages: relative if it is below the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _inputs(settings: Any, prefix: str) -> Iterator[tuple[str, Path]]:
    unread = getattr(settings, "unread_sections", ())
    for name, value in settings:
        if name in unread:
            continue
        if name in settings.input_paths and value is not None:
            yield f"{prefix}{name}", Path(value)
        for number, item in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if hasattr(item, "names_path") and not getattr(item, "makes_tasks", False):
                yield from _inputs(item, f"{prefix}{name}{'' if number is None else f'.{number}'}.")


# One-line descriptions of configuration errors, with plain dotted paths and suggestions.
#
# Locations in pydantic's errors contain union tags or plug-in names (``algorithm.grpo.groupsize``), which
# are not part of the user's keys.


_NO_SECTION = {"model_attributes_type", "model_type", "dict_type"}
_NO_LIST = {"tuple_type", "list_type"}
_SAMPLING: Final = (
    ": rollouts of training are sampled from the policy's own distribution (temperature 1, without top_p, "
    "top_k and min_p), whose log-probs the update needs; evaluation.temperature is that of evaluations"
)
_SCHEDULE: Final = (
    ": the learning rate is optimizer.learning_rate, constant after a linear warm-up of "
    "optimizer.warmup_steps; in the cold start it falls linearly to a tenth of cold_start.learning_rate"
)
_EXPLAINED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "sampling_temperature"), _SAMPLING),
    **dict.fromkeys(
        (
            "lr_scheduler",
            "lr_scheduler_type",
            "lr_scheduler_kwargs",
            "lr_schedule",
            "lr_decay",
            "warmup_ratio",
        ),
        _SCHEDULE,
    ),
}
"""Keys of other libraries without a counterpart, with the reason."""
SIMILAR_KEYS: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "rollout_batch_size", "per_device_train_batch_size"),
        ("train.tasks_per_step",),
    ),
    **dict.fromkeys(
        ("n", "num_generations", "num_rollouts", "rollouts_per_prompt"), ("algorithm.group_size",)
    ),
    **dict.fromkeys(("lr",), ("optimizer.learning_rate",)),
    **dict.fromkeys(("kl_coef", "kl_coeff", "kl_loss_coef", "kl_beta"), ("algorithm.kl_weight",)),
    **dict.fromkeys(("beta",), ("algorithm.kl_weight", "optimizer.beta2")),
    **dict.fromkeys(("max_steps", "total_training_steps", "training_steps"), ("train.num_steps",)),
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_length"),
        ("rollout.max_turn_tokens", "rollout.max_response_tokens"),
    ),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_grad"), ("optimizer.max_grad_norm",)),
}
"""Common key names of other libraries, and the keys that are suggested for them."""
_SURE: Final = 0.8  # similarity from which a name is treated as a typing error before any other explanation


@dataclass(frozen=True, slots=True)
class _Choice:
    """A section with several types. ``depth`` is the length of its path; ``name`` is the type that the
    configuration selected, ``others`` are the sections of the other types.
    """

    depth: int
    name: str
    others: Mapping[str, type[BaseModel]]


def problem_line(kind: type[BaseModel], item: Mapping[str, Any], tree: Any = None) -> str:
    """Format one pydantic error about ``tree``, a tree of ``kind``, as ``path: message``."""
    path, sections, choices = _locate(kind, item["loc"])
    location, text = ".".join(path), item["msg"].removeprefix("Value error, ")
    discriminator = str(item.get("ctx", {}).get("discriminator")).strip("'")
    match item["type"]:
        case "extra_forbidden":
            is_owned = any(_describe_owner(choice, path) for choice in choices)  # another type has this key
            explained = None if is_owned else _EXPLAINED.get(path[-1])
            text = f"unknown key{explained or _suggest(kind, path, sections, choices, tree)}"
        case "union_tag_invalid":
            known = [name.strip(" '") for name in item["ctx"]["expected_tags"].split(",")]
            tag = item["ctx"]["tag"]
            text = f"there is no {tag!r}{did_you_mean(tag, known)} (one of {', '.join(known)})"
            location = f"{location}.{discriminator}"
        case "union_tag_not_found":
            text, location = "is missing", f"{location}.{discriminator}"
        case "literal_error" if isinstance(item["input"], str):
            text += did_you_mean(item["input"], re.findall(r"'([^']+)'", item["ctx"]["expected"]))
        case "plugin_name" if not isinstance(item["input"], str):
            location = f"{location}.type"
        case error_type if error_type in _NO_LIST and not isinstance(item["input"], Mapping):
            parts = [part.strip() for part in str(item["input"]).strip("[]").split(",")]
            text = f"needs a list, such as {location}={json.dumps(parts)} (in a shell, in single quotes)"
        case error_type if error_type in _NO_LIST:
            text = f"is a list and has no keys ({', '.join(map(str, item['input']))})"[:200]
        case error_type if error_type in _NO_SECTION and location:
            text = f"is a section with keys of its own, not {item['input']!r}"[:200]
        case "string_type" if isinstance(item["input"], Mapping):
            text = f"is a string and has no keys ({', '.join(map(str, item['input']))})"[:200]
    return f"{location}: {text}" if location else str(text)


def _locate(
    kind: type[BaseModel], loc: Sequence[str | int]
) -> tuple[list[str], list[type[BaseModel]], list[_Choice]]:
    """Return the path without tags, the sections in which its last key was looked up, and the selected types
    along the path.
    """
    path: list[str] = []
    parents: list[type[BaseModel]] = []
    choices: list[_Choice] = []
    sections = [kind]
    marker: Section | None = None
    for part in loc:
        if marker is not None and isinstance(part, str):  # the name of the plug-in, which is not a key
            others: dict[str, type[BaseModel]] = {
                _type_value(member): member
                for member in marker.builtin_classes()
                if _type_value(member) != part
            }
            choices.append(_Choice(len(path), part, others))
            sections, marker = [marker.settings_class(part)], None
            continue
        chosen = [  # the union members whose literals contain the tag
            section
            for section in sections
            if len(sections) > 1
            and any(
                get_origin(field.annotation) is Literal and part in get_args(field.annotation)
                for field in section.model_fields.values()
            )
        ]
        if chosen:
            others = {
                _type_value(member): member
                for member in sections
                if member not in chosen and _type_value(member)
            }
            choices.append(_Choice(len(path), str(part), others))
            sections = chosen
            continue
        path.append(str(part))
        if isinstance(part, str):
            parents = sections
            marker = next(
                (candidate for section in sections if (candidate := _marker(section, part)) is not None), None
            )
            sections = [member for section in sections for member in inner_classes(section, part)]
    return path, parents, choices


def _type_value(section: type[BaseModel]) -> str:
    """Return the value of ``type`` that selects a section; empty if it has no type."""
    field = section.model_fields.get("type")
    values = get_args(field.annotation) if field is not None else ()
    return str(values[0]) if len(values) == 1 else ""


def inner_classes(section: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """The settings classes of a key's tables: one per built-in plug-in or member of a union."""
    if (marker := _marker(section, key)) is not None:
        return list(marker.builtin_classes())
    field = section.model_fields.get(key)
    return [] if field is None else _members(field.annotation)


def _members(annotation: Any) -> list[type[BaseModel]]:
    """The section classes that a field accepts, directly or in a list."""
    parts = annotation_parts((annotation,))
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _marker(section: type[BaseModel], key: str) -> "Section | None":
    field = section.model_fields.get(key)
    parts = () if field is None else annotation_parts((*field.metadata, field.annotation))
    return next((part for part in parts if hasattr(part, "settings_class")), None)


def annotation_parts(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield parts of an annotation with the parts that they contain, at any depth."""
    for part in parts:
        yield part
        yield from annotation_parts(get_args(part))


def _suggest(
    kind: type[BaseModel],
    path: list[str],
    sections: Sequence[type[BaseModel]],
    choices: Sequence[_Choice],
    tree: Any,
) -> str:
    """Suggest replacements for an unknown key, all valid in this configuration.

    Candidates are a key of another type of the section, a key of the same section that is similar or contains
    it as a word (for example ``server_url`` for ``url``), or a key of the same name in another section.
    """
    *above, key = path
    names = {name for section in sections for name in section.model_fields}
    known = set(_paths(kind, tree, ""))
    similar = [other for other in SIMILAR_KEYS.get(key, ()) if other in known]
    if similar and not any(_describe_owner(choice, path) for choice in choices):
        return f", did you mean {' or '.join(similar)}?"
    # Other keys with this last part; keys of every run come before keys of one plug-in.
    same_name = sorted(
        (other for other in known if other.rpartition(".")[2] == key and other != ".".join(path)),
        key=lambda other: (other.count("."), other),
    )
    section = f"{'.'.join(path[: choices[-1].depth])}." if choices else ""
    if section and (siblings := [other for other in same_name if other.startswith(section)]):
        return f", did you mean {' or '.join(siblings[:2])}?"
    if owner_hint := next(
        (hint for choice in reversed(choices) if (hint := _describe_owner(choice, path))), ""
    ):
        return f": {owner_hint}{f'; did you mean {same_name[0]}?' if same_name else ''}"
    longer = sorted(name for name in names if key in name.split("_"))
    match = closest_match(key, names, cutoff=_SURE) or (longer[0] if len(longer) == 1 else None)
    if match is None and same_name:
        return f", did you mean {' or '.join(same_name[:2])}?"
    if (match := match or closest_match(key, names)) is not None:
        return f", did you mean {'.'.join([*above, match])}?"
    for choice in reversed(choices):  # a misspelled key of another type
        rest = path[choice.depth :]
        for name, other_section in choice.others.items():
            match = (
                closest_match(rest[-1], other_section.model_fields, cutoff=_SURE) if len(rest) == 1 else None
            )
            if match is not None:
                return f", did you mean {match}? It belongs to {_types([name])}, yours is {choice.name}"
    return ""


def _describe_owner(choice: _Choice, path: Sequence[str]) -> str:
    """Describe the other types of a section that have this key, at the same path or, if none has, at any
    other path of the section.
    """
    rest = [part for part in path[choice.depth :] if not part.isdigit()]
    if owners := [name for name, section in choice.others.items() if _has(section, rest)]:
        return f"{'.'.join(rest)} belongs to {_types(owners)}, yours is {choice.name}"
    deeper = {
        name: keys
        for name, section in choice.others.items()
        if (keys := sorted(key for key in _paths(section, None, "") if key.rpartition(".")[2] == rest[-1]))
    }
    if not deeper or len(rest) > 1:
        return ""
    name = min(deeper, key=lambda key: deeper[key][0].count("."))
    return f"{deeper[name][0]} belongs to {_types([name])}, yours is {choice.name}"


def _types(names: Sequence[str]) -> str:
    *first, last = names
    return f"types {', '.join(first)} and {last}" if first else f"type {last}"


def _has(section: type[BaseModel], keys: Sequence[str]) -> bool:
    """Return whether a dotted key exists below a section."""
    sections = [section]
    for number, key in enumerate(keys):
        if not any(key in candidate.model_fields for candidate in sections):
            return False
        if number + 1 < len(keys):
            sections = [inner for candidate in sections for inner in inner_classes(candidate, key)]
    return True


def _paths(section: type[BaseModel], tree: Any, prefix: str) -> Iterator[str]:
    """Yield every dotted key below a section. For a section with several types, yield the keys of the type
    that ``tree`` selects, or else of the default.
    """
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        inner = tree.get(name) if isinstance(tree, Mapping) else None
        for child in _chosen_sections(section, name, inner, field.default):
            yield from _paths(child, inner, f"{prefix}{name}.")


def _chosen_sections(
    section: type[BaseModel], name: str, tree: Any, default: Any
) -> Sequence[type[BaseModel]]:
    chosen = tree.get("type") if isinstance(tree, Mapping) else None
    marker = _marker(section, name)
    if marker is not None:
        if not isinstance(chosen, str):
            return [type(default)] if isinstance(default, BaseModel) else []
        try:
            return [marker.settings_class(chosen)]
        except ConfigError:  # an unknown name is reported by its own error
            return []
    members = inner_classes(section, name)
    if len(members) < 2:
        return members
    selected = chosen if isinstance(chosen, str) else getattr(default, "type", None)
    return [member for member in members if _type_value(member) == selected] or members


NONE: Final = "none"


def _takes_numbers_only(field: FieldInfo) -> bool:
    """Whether a field accepts a number and no boolean."""
    if any(isinstance(item, BeforeValidator) for item in field.metadata):
        return False
    parts: list[Any] = [field.annotation]
    if get_origin(field.annotation) in (Union, UnionType):
        parts = list(get_args(field.annotation))
    parts = [get_args(part)[0] if get_origin(part) is Annotated else part for part in parts]
    return bool({int, float} & {part for part in parts if isinstance(part, type)}) and not any(
        part in (bool, Any) or get_origin(part) is Literal for part in parts
    )


class Settings(BaseModel):
    """Base of every settings class: immutable, an unknown key is an error, and ``"none"`` stands for None."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    details: ClassVar[frozenset[str]] = frozenset()  # no longer used; plug-ins written for 0.3 extend it

    input_paths: ClassVar[frozenset[str]] = frozenset()
    """Fields that are paths of existing files or folders, as a Path or as text. Other fields of type Path may
    be created by the run.
    """

    def names_path(self, key: str) -> bool:
        """Return whether a field is the path of an input. Subclasses can decide by the field's value."""
        return key in self.input_paths

    def imported(self) -> Mapping[str, str]:
        """Return fields that contain the import path of a user function, with that path.

        The code of these functions influences a run like that of plug-ins, so runs record its origin too.
        """
        return {}

    def reference_checks(self) -> Mapping[str, Callable[[], object]]:
        """Return a check per field that refers to external code or services.

        A check raises ConfigError if the reference is invalid. ``--dry-run`` runs all checks; they may import
        modules but must not start anything.
        """
        return {key: partial(import_target, path) for key, path in self.imported().items()}

    def origins(self) -> "Mapping[str, Origin]":
        """Return the origins of other external components that influence a run, by name.

        For example, servers, which this method may query. Runs record them with the origins of plug-ins.
        """
        return {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, values: Any) -> Any:
        """Refuse true and false for numbers, which pydantic would read as 1 and 0."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key) if isinstance(value, bool) else None
            if field is not None and _takes_numbers_only(field):
                raise ValueError(f"{key} must be a number, not {str(value).lower()}")
        return values

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: Any) -> Any:
        """Convert ``"none"`` to None. TOML has no null, and leaving out a key selects its default."""
        if not isinstance(values, dict):
            return values
        optional = {
            name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)
        }
        return {key: None if value == NONE and key in optional else value for key, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _fill_sections(cls, values: Any) -> Any:
        """Merge a table with the default of its field, which may differ from the defaults of the section's
        class.
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
    """Merge ``table`` over the default section ``own``, recursively.

    Only fields that ``own`` sets explicitly are merged; the others keep the defaults of its class, which may
    depend on other fields. A table with another ``type`` or ``preset`` is not merged, nor is a table for a
    union whose members have no ``type``.
    """
    fields = type(own).model_fields
    choices = {"type", "preset"} & fields.keys()
    if any(table.get(key, getattr(own, key)) != getattr(own, key) for key in choices):
        return dict(table)
    if any(field.alias for field in fields.values()) or (
        "type" not in choices and len(_members(annotation)) > 1
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


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(
    kind: type[SettingsT],
    *,
    file: Path | None,
    overrides: Sequence[str] = (),
    sections: Mapping[str, Any] | None = None,
    respelled: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> SettingsT:
    """Load settings from a TOML file.

    Values are read as TOML (``1``, ``true``, ``[1, 2]``) or, if that fails, as plain strings. Relative paths
    become absolute. Nothing is written.

    Args:
        sections: replace the file's sections of the same name.
        overrides: ``section.key=value``, applied in order after ``sections``.
        respelled: converts the file's tree to today's keys before anything else is applied.

    Raises:
        ConfigError: with the key of the invalid setting.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        add_search_folder(file.parent)  # a recipe may name a class from a module in its own folder
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            advice = "; the recipe comes before the overrides" if "=" in file.name else ""
            raise ConfigError(f"cannot read {file}: {error.strerror}{advice}") from error
        # tomllib raises the errors of the number and date parsers unchanged
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from error
    if respelled is not None:
        tree = respelled(tree)
    tree.update(copy.deepcopy(dict(sections or {})))
    for override in overrides:
        apply_override(tree, override)
    return absolute_paths(validate(kind, tree), _folders(file, overrides, sections or {}))


def _folders(
    file: Path | None, overrides: Sequence[str], sections: Mapping[str, Any]
) -> Callable[[str], Sequence[Path]]:
    """Return a lookup of search folders by dotted key: paths from the recipe are searched in its folder
    first, paths from the command line or from Python in the current folder first.
    """
    current = Path.cwd()
    recipe_folder = current if file is None else file.absolute().parent
    manual_keys = {override.partition("=")[0].strip() for override in overrides} | sections.keys()

    def search_folders(key: str) -> Sequence[Path]:
        is_manual = any(key == prefix or key.startswith(f"{prefix}.") for prefix in manual_keys)
        return (current, recipe_folder) if is_manual else (recipe_folder, current)

    return search_folders


def validate(kind: type[SettingsT], tree: dict[str, Any]) -> SettingsT:
    """Validate a tree of plain values; the error reports all problems in one line."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(problem_line(kind, item, tree) for item in error.errors())) from error


def format_override(key: str, value: Any) -> str:
    """Format an override ``key=value`` that :func:`load_settings` parses to the plain value."""
    plain = NONE if value is None else value
    literal = to_toml({"v": [plain]}).removeprefix("v = [").removesuffix("]")  # in a list a table is inline
    return f"{key}={literal}"


def parse_value(raw: str) -> Any:
    """Parse the value of an override as TOML or, if that fails, as a plain string."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        return raw


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set ``section.key=value`` in a tree of plain values. Raises ConfigError."""
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


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a list is a value."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_toml(tree: dict[str, Any], *, prefix: str = "") -> str:
    """Format plain settings as TOML that :func:`load_settings` can read; None is written as ``"none"``.

    Raises:
        ConfigError: for a value that TOML cannot represent.
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
        # also escape control characters that a terminal could interpret, beyond what TOML requires
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
