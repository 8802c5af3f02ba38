"""What a tool's JSON schema says of its arguments. Whatever JSON stands where a schema should be, nothing
raises: what cannot be understood decides nothing.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from outrider.types import ToolSchema

TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""Of JSON schemas, and what has them in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The values that an argument takes, as far as their top level says: those of some types, and some that
    are named.
    """

    types: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()

    def fits(self, value: Any) -> bool:
        """Whether the value is one of them."""
        # a bool is an int to Python, and none to JSON
        is_bool = isinstance(value, bool)
        return any(
            isinstance(value, TYPES[name]) and (name == "boolean" or not is_bool) for name in self.types
        ) or any(value == one and is_bool == isinstance(one, bool) for one in self.choices)

    def told(self) -> str:
        """In words, behind "must be"."""
        named = ", ".join(one if isinstance(one, str) else json.dumps(one) for one in self.choices)
        parts = [f"one of {named}"] if self.choices else []
        return " or ".join([*parts, *([f"of type {' or '.join(self.types)}"] if self.types else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a tool. ``is_closed``: it takes no others."""

    properties: Mapping[str, Any]
    required: tuple[str, ...]
    is_closed: bool
    root: Mapping[str, Any]

    @classmethod
    def of(cls, tool: ToolSchema) -> Self:
        """Those of a tool's schema."""
        found = tool.get("parameters")
        root: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        properties, required = root.get("properties"), root.get("required")
        named = required if isinstance(required, list | tuple) else ()
        return cls(
            properties=properties if isinstance(properties, Mapping) else {},
            required=tuple(one for one in named if isinstance(one, str)),
            is_closed=isinstance(properties, Mapping)
            and root.get("additionalProperties") in (None, False)
            and not root.get("patternProperties"),
            root=root,
        )

    def accepted(self, name: str) -> Accepted | None:
        """What the argument takes; None where the schema does not say."""
        return accepted_by(self.schema(name), self.root)

    def schema(self, name: str) -> Any:
        """That of one argument, which may be any JSON."""
        return self.properties.get(name, self.root.get("additionalProperties"))


def accepted_by(schema: Any, root: Mapping[str, Any]) -> Accepted | None:
    """What a schema takes; None where it does not say. ``root`` holds the definitions that it refers to.

    Followed are ``anyOf``, ``oneOf``, an ``allOf`` of one, and references into ``root``; ``nullable`` is
    OpenAPI's. Beside a type or choices they only say more of the same values.
    """
    types: list[str] = []
    choices: list[Any] = []
    last: list[str] = []
    waiting, seen = deque([schema]), set[str]()  # no recursion: how deep it goes, a stranger decides
    while waiting:
        one = waiting.popleft()
        if not isinstance(one, Mapping):
            return None
        if one.get("nullable") is True:
            last = ["null"]
        if isinstance(enum := one.get("enum"), list) and enum:
            choices += enum
        elif "const" in one:
            choices.append(one["const"])
        elif (named := _types(one.get("type"))) is not None:
            types += named
        elif isinstance(place := one.get("$ref"), str):
            if place not in seen:
                seen.add(place)
                waiting.append(_at(place, root))
        elif (inner := _alternatives(one)) is not None:
            waiting += inner
        else:
            return None
    if not types and not choices:  # it refers to itself only
        return None
    return Accepted(types=tuple(dict.fromkeys(types + last)), choices=tuple(choices))


def flaw_of(parameters: Any) -> str:
    """Why a tool's arguments cannot be told to a model, in words; empty where they can.

    A template goes through names, and some through types; a schema deeper inside is shown as it is.
    """
    if not isinstance(parameters, Mapping):
        return "it is no object"
    if not isinstance(properties := parameters.get("properties", {}), Mapping):
        return "its properties are no object"
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        return "required is no list of names"
    for name, one in properties.items():
        if not isinstance(one, Mapping | bool):
            return f"the schema of {name!r} is no object"
        kind = one.get("type", []) if isinstance(one, Mapping) else []
        if not isinstance(kind, str) and not _is_of_names(kind):
            return f"the type of {name!r} is no name"
    return ""


def _is_of_names(kind: Any) -> bool:
    return isinstance(kind, list) and all(isinstance(one, str) for one in kind)


def _types(kind: Any) -> list[str] | None:
    named = [kind] if isinstance(kind, str) else kind
    is_known = _is_of_names(named) and named and all(one in TYPES for one in named)
    return list(named) if is_known else None


def _alternatives(schema: Mapping[str, Any]) -> list[Any] | None:
    for key in ("anyOf", "oneOf", "allOf"):
        found = schema.get(key)
        if isinstance(found, list) and found and (key != "allOf" or len(found) == 1):
            return list(found)
    return None


def _at(place: str, root: Mapping[str, Any]) -> Any:
    """What a reference such as ``#/$defs/Unit`` stands for; None where there is nothing."""
    if not place.startswith("#"):
        return None
    found: Any = root
    for part in _parts(place):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _parts(place: str) -> Iterator[str]:
    for part in place.removeprefix("#").split("/")[1:]:
        yield part.replace("~1", "/").replace("~0", "~")
