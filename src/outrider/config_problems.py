"""Describes problems of a configuration in one line each: plain dotted paths and near matches.

Locations of pydantic's errors contain the tag of a union's member, or the name of a section's plug-in
(``algorithm.grpo.groupsize``), which the user did not write.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, get_args, get_origin

from pydantic import BaseModel

from outrider.errors import ConfigError
from outrider.near import closest_match, did_you_mean

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
    match item["type"]:
        case "extra_forbidden":
            is_owned = any(_describe_owner(choice, path) for choice in choices)  # another type has this key
            explained = None if is_owned else _EXPLAINED.get(path[-1])
            text = f"unknown key{explained or _suggest(kind, path, sections, choices, tree)}"
        case "union_tag_invalid":
            known = [name.strip(" '") for name in item["ctx"]["expected_tags"].split(",")]
            tag = item["ctx"]["tag"]
            text = f"there is no {tag!r}{did_you_mean(tag, known)} (one of {', '.join(known)})"
            location = f"{location}.{_discriminator(item)}"
        case "union_tag_not_found":
            text, location = "is missing", f"{location}.{_discriminator(item)}"
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


def _discriminator(item: Mapping[str, Any]) -> str:
    return str(item["ctx"]["discriminator"]).strip("'")


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
        chosen = [section for section in sections if part in _tags(section)] if len(sections) > 1 else []
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


def _tags(section: type[BaseModel]) -> set[str]:
    """Values of fields that tell the members of a union apart."""
    literals = (
        field.annotation for field in section.model_fields.values() if get_origin(field.annotation) is Literal
    )
    return {value for annotation in literals for value in get_args(annotation)}


class _Marker(Protocol):
    """Mark of :mod:`outrider.plugins.fields` on a field whose class the recipe names."""

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
    if similar := _similar(kind, path, choices, tree):
        return f", did you mean {' or '.join(similar)}?"
    same_name = _same_name_keys(kind, path, tree)
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
    return next(
        (f", {hint}" for choice in reversed(choices) if (hint := _describe_similar_key(choice, path))), ""
    )


def _similar(kind: type[BaseModel], path: Sequence[str], choices: Sequence[_Choice], tree: Any) -> list[str]:
    """Keys of this configuration for a common name of other libraries; none if another type of the section
    has a key of this name.
    """
    if path[-1] not in _SIMILAR or any(_describe_owner(choice, path) for choice in choices):
        return []
    known = set(_paths(kind, tree, ""))
    return [one for one in _SIMILAR[path[-1]] if one in known]


def _same_name_keys(kind: type[BaseModel], path: Sequence[str], tree: Any) -> list[str]:
    """Other keys with the same last part, those of every run before those of one plug-in."""
    keys = {
        other
        for other in _paths(kind, tree, "")
        if other.rpartition(".")[2] == path[-1] and other != ".".join(path)
    }
    return sorted(keys, key=lambda other: (other.count("."), other))


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


def _describe_similar_key(choice: _Choice, path: Sequence[str]) -> str:
    """A mistyped key of another type."""
    rest = path[choice.depth :]
    for name, section in choice.others.items():
        match = closest_match(rest[-1], section.model_fields, cutoff=_SURE) if len(rest) == 1 else None
        if match is not None:
            return f"did you mean {match}? It belongs to {_types([name])}, yours is {choice.name}"
    return ""


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
