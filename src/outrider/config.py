"""Settings: one pydantic tree, TOML files, dotted overrides, and errors that fit on one line."""

import copy
import logging
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
)

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from outrider.errors import ConfigError, DataError
from outrider.plugins.imports import add_search_folder, import_target
from outrider.suggestions import closest_match, did_you_mean

if TYPE_CHECKING:
    from outrider.plugins.imports import Origin


# Paths in settings: where a relative path is looked up, and what is reported when nothing is there.
#
# A path in a recipe is relative to the recipe's folder and, if nothing is there, to the current folder; a
# path on the command line the other way round. A run stores absolute paths.


TreeT = TypeVar("TreeT")
Folders: TypeAlias = Callable[[str], Sequence[Path]]
"""The folders in which the path of a dotted key is looked up, the first one first."""
_reported: set[tuple[str, Path]] = set()


def absolute_paths(settings: TreeT, folders: Folders, prefix: str = "") -> TreeT:
    """The settings with every relative path made absolute. An input that is in none of the folders stays as
    it is, for :func:`require_paths`; any other path that does not exist is one below the current folder.
    """
    tree: Any = settings  # outrider.config needs this module, so that its class cannot be named here
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
    """Raise DataError, which names the setting, the path and the searched folders, if an input does not
    exist. Sections that the run does not read (``unread_sections``) are not checked.
    """
    for key, path in _inputs(settings, prefix):
        if not path.exists() and shutil.which(path) is None:
            raise DataError(f"{key}: {no_such_file(path, folders)}")


def no_such_file(path: Path, folders: Sequence[Path]) -> str:
    """What is reported of a path that does not exist."""
    if path.is_absolute():
        return f"{path}: no such file or folder"
    searched = " and ".join(dict.fromkeys(str(folder.absolute()) for folder in (*folders, Path.cwd())))
    return f"{path}: no such file or folder (searched: {searched})"


def shown_path(path: Path) -> str:
    """A path for people: relative if it is below the current folder."""
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


# Describes problems of a configuration in one line each: plain dotted paths and near matches.
#
# Locations of pydantic's errors contain the tag of a union's member, or the name of a section's plug-in
# (``algorithm.grpo.groupsize``), which the user did not write.


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
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "lr_schedule"), _SCHEDULE),
}
"""Keys of other libraries that have no counterpart, and why."""
_SIMILAR: Final[Mapping[str, Sequence[str]]] = {
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
"""Common names of other libraries, and the keys of ours that are suggested for them."""
_SURE: Final = 0.8  # similarity above which a name is a typing error before it is anything else


@dataclass(frozen=True, slots=True)
class _Choice:
    """A section of which there are several types. ``depth`` is the length of its path; ``name`` is the type
    that the configuration chose, ``others`` are the sections of the other types.
    """

    depth: int
    name: str
    others: Mapping[str, type[BaseModel]]


def problem_line(kind: type[BaseModel], item: Mapping[str, Any], tree: Any = None) -> str:
    """One error of pydantic about ``tree``, a tree of ``kind``, as ``path: what is wrong``."""
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
            text = f'needs a list, such as {location}=["{item["input"]}"]'
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
    """The path without tags, the sections in which its last key was looked up, and the types that were chosen
    on the way.
    """
    path: list[str] = []
    parents: list[type[BaseModel]] = []
    choices: list[_Choice] = []
    sections = [kind]
    marker: _Marker | None = None
    for part in loc:
        if marker is not None and isinstance(part, str):  # the plug-in's name, which is no key
            others = {
                _type_value(member): member
                for member in marker.builtin_classes()
                if _type_value(member) != part
            }
            choices.append(_Choice(len(path), part, others))
            sections, marker = [marker.settings_class(part)], None
            continue
        chosen = [  # the members of a union whose literals have the tag
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
            sections = [member for section in sections for member in _child_sections(section, part)]
    return path, parents, choices


def _type_value(section: type[BaseModel]) -> str:
    """The value of ``type`` that selects a section; empty if nothing does."""
    field = section.model_fields.get("type")
    values = get_args(field.annotation) if field is not None else ()
    return str(values[0]) if len(values) == 1 else ""


def _child_sections(section: type[BaseModel], key: str) -> list[type[BaseModel]]:
    if (marker := _marker(section, key)) is not None:
        return list(marker.builtin_classes())
    field = section.model_fields.get(key)
    return [] if field is None else list(_members(field.annotation))


def _members(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold, one by one or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _members(argument)


class _Marker(Protocol):
    """Mark of :mod:`outrider.plugins.registry` on a field whose class the recipe names."""

    def settings_class(self, name: str) -> type[BaseModel]: ...

    def builtin_classes(self) -> Sequence[type[BaseModel]]: ...


def _marker(section: type[BaseModel], key: str) -> _Marker | None:
    field = section.model_fields.get(key)
    return None if field is None else next(_markers((*field.metadata, field.annotation)), None)


def _markers(parts: Iterable[Any]) -> Iterator[_Marker]:
    for part in parts:
        if hasattr(part, "settings_class"):
            yield part
        yield from _markers(get_args(part))


def _suggest(
    kind: type[BaseModel],
    path: list[str],
    sections: Sequence[type[BaseModel]],
    choices: Sequence[_Choice],
    tree: Any,
) -> str:
    """What an unknown key may mean, every suggestion valid in this configuration: a key of another type of
    the section, a key of the same section that is like this one or contains it as a word (``url``:
    ``server_url``), or one of this very name in another section.
    """
    *above, key = path
    names = {name for section in sections for name in section.model_fields}
    known = set(_paths(kind, tree, ""))
    similar = [other for other in _SIMILAR.get(key, ()) if other in known]
    if similar and not any(_describe_owner(choice, path) for choice in choices):
        return f", did you mean {' or '.join(similar)}?"
    # Other keys with this last part, those of every run before those of one plug-in.
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
    for choice in reversed(choices):  # a mistyped key of another type
        rest = path[choice.depth :]
        for name, other_section in choice.others.items():
            match = (
                closest_match(rest[-1], other_section.model_fields, cutoff=_SURE) if len(rest) == 1 else None
            )
            if match is not None:
                return f", did you mean {match}? It belongs to {_types([name])}, yours is {choice.name}"
    return ""


def _describe_owner(choice: _Choice, path: Sequence[str]) -> str:
    """The other types of a section that have this key: at the same place or, if none has, elsewhere in the
    section.
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
    """Whether a dotted key leads somewhere below a section."""
    sections = [section]
    for number, key in enumerate(keys):
        if not any(key in candidate.model_fields for candidate in sections):
            return False
        if number + 1 < len(keys):
            sections = [inner for candidate in sections for inner in _child_sections(candidate, key)]
    return True


def _paths(section: type[BaseModel], tree: Any, prefix: str) -> Iterator[str]:
    """Every dotted key below a section; of a section with several types, those of the type that ``tree``
    chooses, else that of the default.
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
        except ConfigError:  # an unknown name is an error of its own
            return []
    members = _child_sections(section, name)
    if len(members) < 2:
        return members
    selected = chosen if isinstance(chosen, str) else getattr(default, "type", None)
    return [member for member in members if _type_value(member) == selected] or members


NONE: Final = "none"


class Settings(BaseModel):
    """Base of every settings class: immutable, an unknown key is an error, and ``"none"`` stands for None."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    details: ClassVar[frozenset[str]] = frozenset()  # without effect; plug-ins of 0.3 extend it

    input_paths: ClassVar[frozenset[str]] = frozenset()
    """Fields that name a file or folder that has to exist, as a path or as text. Other fields of the type
    Path name what may be made.
    """

    def names_path(self, key: str) -> bool:
        """Whether a field of this instance names a file or folder that exists, or nothing that exists."""
        return key in self.input_paths

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
        "type" not in choices and len(list(_members(annotation))) > 1
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
    """Read a TOML file, put ``sections`` in the place of its own, apply ``section.key=value`` overrides in
    order, and validate. ``respelled`` gives the file's tree today's keys before that. Relative paths become
    absolute (:mod:`outrider.config`).

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
