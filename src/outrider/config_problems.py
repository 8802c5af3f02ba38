"""Tells somebody what is wrong with the configuration they wrote: plain dotted paths and near matches.

Places hold the tag of the member of a union, or the name of a section's plug-in
(``algorithm.grpo.groupsize``), which nobody has written there.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, get_args, get_origin

from pydantic import BaseModel

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


def problem_line(kind: type[BaseModel], item: Mapping[str, Any]) -> str:
    """One error of pydantic about a tree of ``kind`` as ``path: what is wrong``."""
    path, sections = _place(kind, item["loc"])
    where, text = ".".join(path), item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "extra_forbidden":
            text = f"unknown key{_EXPLAINED.get(path[-1]) or _meant(kind, path, sections)}"
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
        case kind_of_error if kind_of_error in _NO_LIST:
            text = f'needs a list, such as {where}=["{item["input"]}"]'
        case kind_of_error if kind_of_error in _NO_SECTION and where:
            text = f"is a section with keys of its own, not {item['input']!r}"[:200]
    return f"{where}: {text}" if where else str(text)


def _discriminator(item: Mapping[str, Any]) -> str:
    return str(item["ctx"]["discriminator"]).strip("'")


def _place(kind: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[str], list[type[BaseModel]]]:
    """The path without tags, and the sections that its last key was looked for in."""
    path: list[str] = []
    parents: list[type[BaseModel]] = []
    sections = [kind]
    marker: _Marker | None = None
    for part in loc:
        if marker is not None and isinstance(part, str):
            sections, marker = [marker.class_of(part)], None  # the plug-in's name, which is no key
            continue
        chosen = [section for section in sections if part in _tags(section)] if len(sections) > 1 else []
        if chosen:
            sections = chosen
            continue
        path.append(str(part))
        if isinstance(part, str):
            parents = sections
            marker = next(
                (found for section in sections if (found := _marker(section, part)) is not None), None
            )
            sections = [one for section in sections for one in _sections_of(section, part)]
    return path, parents


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


def _meant(kind: type[BaseModel], path: list[str], sections: Sequence[type[BaseModel]]) -> str:
    """A key of the same section that is like this one or has it for a word (``url``: ``server_url``), or one
    of this very name in another section.
    """
    *above, key = path
    names = {name for section in sections for name in section.model_fields}
    longer = sorted(name for name in names if key in name.split("_"))
    found = near_match(key, names) or (longer[0] if len(longer) == 1 else None)
    if found is not None:
        return f", did you mean {'.'.join([*above, found])}?"
    elsewhere = sorted(
        (
            other
            for other in set(_paths(kind, ""))
            if other.rpartition(".")[2] == key and other != ".".join(path)
        ),
        key=lambda other: (other.count("."), other),  # what every run has before what one plug-in has
    )
    return f", did you mean {' or '.join(elsewhere[:2])}?" if elsewhere else ""


def _paths(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Every dotted key below a section, those of all members of a union among them."""
    for name in section.model_fields:
        yield f"{prefix}{name}"
        for inner in _sections_of(section, name):
            yield from _paths(inner, f"{prefix}{name}.")
