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
from outrider.near import did_you_mean, near_match

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
    where, text = ".".join(path), item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "extra_forbidden":
            is_owned = any(_owned(choice, path) for choice in choices)  # another type has this key
            explained = None if is_owned else _EXPLAINED.get(path[-1])
            text = f"unknown key{explained or _meant(kind, path, sections, choices, tree)}"
        case "union_tag_invalid":
            known = [name.strip(" '") for name in item["ctx"]["expected_tags"].split(",")]
            tag = item["ctx"]["tag"]
            text = f"there is no {tag!r}{did_you_mean(tag, known)} (one of {', '.join(known)})"
            where = f"{where}.{_discriminator(item)}"
        case "union_tag_not_found":
            text, where = "is missing", f"{where}.{_discriminator(item)}"
        case "literal_error" if isinstance(item["input"], str):
            text += did_you_mean(item["input"], re.findall(r"'([^']+)'", item["ctx"]["expected"]))
        case "plugin_name" if not isinstance(item["input"], str):
            where = f"{where}.type"
        case kind_of_error if kind_of_error in _NO_LIST and not isinstance(item["input"], Mapping):
            text = f'needs a list, such as {where}=["{item["input"]}"]'
        case kind_of_error if kind_of_error in _NO_LIST:
            text = f"is a list and has no keys ({', '.join(map(str, item['input']))})"[:200]
        case kind_of_error if kind_of_error in _NO_SECTION and where:
            text = f"is a section with keys of its own, not {item['input']!r}"[:200]
        case "string_type" if isinstance(item["input"], Mapping):
            text = f"is a string and has no keys ({', '.join(map(str, item['input']))})"[:200]
    return f"{where}: {text}" if where else str(text)


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
            others = {_type_of(one): one for one in marker.built_in() if _type_of(one) != part}
            choices.append(_Choice(len(path), part, others))
            sections, marker = [marker.class_of(part)], None
            continue
        chosen = [section for section in sections if part in _tags(section)] if len(sections) > 1 else []
        if chosen:
            others = {_type_of(one): one for one in sections if one not in chosen and _type_of(one)}
            choices.append(_Choice(len(path), str(part), others))
            sections = chosen
            continue
        path.append(str(part))
        if isinstance(part, str):
            parents = sections
            marker = next(
                (found for section in sections if (found := _marker(section, part)) is not None), None
            )
            sections = [one for section in sections for one in _sections_of(section, part)]
    return path, parents, choices


def _type_of(section: type[BaseModel]) -> str:
    """The value of ``type`` that selects a section; empty if nothing does."""
    field = section.model_fields.get("type")
    values = get_args(field.annotation) if field is not None else ()
    return str(values[0]) if len(values) == 1 else ""


def _sections_of(section: type[BaseModel], key: str) -> list[type[BaseModel]]:
    if (marker := _marker(section, key)) is not None:
        return list(marker.built_in())
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

    def class_of(self, name: str) -> type[BaseModel]: ...

    def built_in(self) -> Sequence[type[BaseModel]]: ...


def _marker(section: type[BaseModel], key: str) -> _Marker | None:
    field = section.model_fields.get(key)
    return None if field is None else next(_markers((*field.metadata, field.annotation)), None)


def _markers(parts: Iterable[Any]) -> Iterator[_Marker]:
    for part in parts:
        if hasattr(part, "class_of"):
            yield part
        yield from _markers(get_args(part))


def _meant(
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
    elsewhere = _of_that_name(kind, path, tree)
    section = f"{'.'.join(path[: choices[-1].depth])}." if choices else ""
    if section and (near := [other for other in elsewhere if other.startswith(section)]):
        return f", did you mean {' or '.join(near[:2])}?"
    if owned := next((told for choice in reversed(choices) if (told := _owned(choice, path))), ""):
        return f": {owned}{f'; did you mean {elsewhere[0]}?' if elsewhere else ''}"
    longer = sorted(name for name in names if key in name.split("_"))
    found = near_match(key, names, cutoff=_SURE) or (longer[0] if len(longer) == 1 else None)
    if found is None and elsewhere:
        return f", did you mean {' or '.join(elsewhere[:2])}?"
    if (found := found or near_match(key, names)) is not None:
        return f", did you mean {'.'.join([*above, found])}?"
    return next((f", {told}" for choice in reversed(choices) if (told := _near_owned(choice, path))), "")


def _similar(kind: type[BaseModel], path: Sequence[str], choices: Sequence[_Choice], tree: Any) -> list[str]:
    """Keys of this configuration for a common name of other libraries; none if another type of the section
    has a key of this name.
    """
    if path[-1] not in _SIMILAR or any(_owned(choice, path) for choice in choices):
        return []
    known = set(_paths(kind, tree, ""))
    return [one for one in _SIMILAR[path[-1]] if one in known]


def _of_that_name(kind: type[BaseModel], path: Sequence[str], tree: Any) -> list[str]:
    """Other keys with the same last part, those of every run before those of one plug-in."""
    found = {
        other
        for other in _paths(kind, tree, "")
        if other.rpartition(".")[2] == path[-1] and other != ".".join(path)
    }
    return sorted(found, key=lambda other: (other.count("."), other))


def _owned(choice: _Choice, path: Sequence[str]) -> str:
    """The other types of a section that have this key: at the same place or, if none has, elsewhere in the
    section.
    """
    rest = [part for part in path[choice.depth :] if not part.isdigit()]
    if owners := [name for name, section in choice.others.items() if _has(section, rest)]:
        return f"{'.'.join(rest)} belongs to {_types(owners)}, yours is {choice.name}"
    deeper = {
        name: found
        for name, section in choice.others.items()
        if (found := sorted(one for one in _paths(section, None, "") if one.rpartition(".")[2] == rest[-1]))
    }
    if not deeper or len(rest) > 1:
        return ""
    name = min(deeper, key=lambda one: deeper[one][0].count("."))
    return f"{deeper[name][0]} belongs to {_types([name])}, yours is {choice.name}"


def _near_owned(choice: _Choice, path: Sequence[str]) -> str:
    """A mistyped key of another type."""
    rest = path[choice.depth :]
    for name, section in choice.others.items():
        found = near_match(rest[-1], section.model_fields, cutoff=_SURE) if len(rest) == 1 else None
        if found is not None:
            return f"did you mean {found}? It belongs to {_types([name])}, yours is {choice.name}"
    return ""


def _types(names: Sequence[str]) -> str:
    *first, last = names
    return f"types {', '.join(first)} and {last}" if first else f"type {last}"


def _has(section: type[BaseModel], keys: Sequence[str]) -> bool:
    """Whether a dotted key leads somewhere below a section."""
    sections = [section]
    for number, key in enumerate(keys):
        if not any(key in one.model_fields for one in sections):
            return False
        if number + 1 < len(keys):
            sections = [inner for one in sections for inner in _sections_of(one, key)]
    return True


def _paths(section: type[BaseModel], tree: Any, prefix: str) -> Iterator[str]:
    """Every dotted key below a section; of a section with several types, those of the type that ``tree``
    chooses, else that of the default.
    """
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        inner = tree.get(name) if isinstance(tree, Mapping) else None
        for one in _chosen_sections(section, name, inner, field.default):
            yield from _paths(one, inner, f"{prefix}{name}.")


def _chosen_sections(
    section: type[BaseModel], name: str, tree: Any, default: Any
) -> Sequence[type[BaseModel]]:
    chosen = tree.get("type") if isinstance(tree, Mapping) else None
    marker = _marker(section, name)
    if marker is not None:
        if not isinstance(chosen, str):
            return [type(default)] if isinstance(default, BaseModel) else []
        try:
            return [marker.class_of(chosen)]
        except ConfigError:  # an unknown name is an error of its own
            return []
    members = _sections_of(section, name)
    if len(members) < 2:
        return members
    wanted = chosen if isinstance(chosen, str) else getattr(default, "type", None)
    return [one for one in members if _type_of(one) == wanted] or members
