"""What a tool's JSON schema says of its arguments. Whatever JSON stands where a schema should be, nothing
raises: what cannot be understood decides nothing.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import unquote

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
        ) or any(value == choice and is_bool == isinstance(choice, bool) for choice in self.choices)

    def describe(self) -> str:
        """In words, behind "must be"."""
        names = ", ".join(
            choice if isinstance(choice, str) else json.dumps(choice) for choice in self.choices
        )
        parts = [f"one of {names}"] if self.choices else []
        return " or ".join([*parts, *([f"of type {' or '.join(self.types)}"] if self.types else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a tool, wherever its schema declares them: in ``properties``, or behind ``$ref``,
    ``allOf``, ``anyOf``, ``oneOf``, ``if``/``then``/``else`` and ``dependentSchemas``.

    ``is_closed``: it takes no others. ``alternatives`` are the arguments that the branches of ``anyOf`` or
    ``oneOf`` need, one tuple per branch; empty if there are no branches that differ in them. Which
    combinations a schema allows is left to the tool itself.
    """

    properties: Mapping[str, Any]
    required: tuple[str, ...]
    is_closed: bool
    root: Mapping[str, Any]
    alternatives: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def from_schema(cls, tool: ToolSchema) -> Self:
        """Those of a tool's schema."""
        parameters = tool.get("parameters")
        root: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}
        whole = _collect(root, root, _Budget(), frozenset(), depth=0)
        return cls(
            properties=whole.properties,
            required=tuple(whole.required),
            is_closed=whole.is_declared and not whole.is_open,
            root=root,
            alternatives=whole.alternatives,
        )

    def accepted(self, name: str) -> Accepted | None:
        """What the argument takes; None where the schema does not say."""
        return accepted_values(self.schema(name), self.root)

    def schema(self, name: str) -> Any:
        """That of one argument, which may be any JSON."""
        return self.properties.get(name, self.root.get("additionalProperties"))

    def accepts_any(self, name: str) -> bool:
        """Whether the schema says of an argument that any JSON is taken."""
        if name in self.properties:
            return self.accepted(name) is None
        has_rest = "additionalProperties" in self.root
        return self.root["additionalProperties"] == {} if has_rest else not self.is_closed


_MAX_NESTED: Final = 16
_MAX_SCHEMAS: Final = 512


@dataclass(slots=True)
class _Budget:
    """The number of schemas that are still read: definitions may double at every level."""

    left: int = _MAX_SCHEMAS


@dataclass(slots=True, kw_only=True)
class _Collected:
    """The arguments that a part of a schema declares."""

    properties: dict[str, Any] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    is_declared: bool = False
    is_open: bool = False
    alternatives: tuple[tuple[str, ...], ...] = ()

    def add(self, other: "_Collected", *, needs: bool) -> None:
        """Join a part that applies too; ``needs``: its required arguments are required."""
        for name, schema in other.properties.items():
            self.properties.setdefault(name, schema)
        if needs:
            self.required |= other.required
        self.is_declared |= other.is_declared
        self.is_open |= other.is_open
        self.alternatives = self.alternatives or other.alternatives


def _collect(
    schema: Any, root: Mapping[str, Any], budget: _Budget, seen: frozenset[str], *, depth: int
) -> _Collected:
    collected = _Collected()
    if not isinstance(schema, Mapping):
        return collected
    budget.left -= 1
    if depth > _MAX_NESTED or budget.left < 0:
        collected.is_open = True
        return collected
    properties, required, rest = (
        schema.get(key) for key in ("properties", "required", "additionalProperties")
    )
    if isinstance(properties, Mapping):
        collected.properties |= properties
        collected.is_declared = True
    if isinstance(required, list | tuple):
        collected.required |= dict.fromkeys(item for item in required if isinstance(item, str))
    collected.is_open = rest not in (None, False) or bool(schema.get("patternProperties"))

    def inside(part: Any, *, seen: frozenset[str] = seen) -> _Collected:
        return _collect(part, root, budget, seen, depth=depth + 1)

    if isinstance(ref := schema.get("$ref"), str) and ref not in seen:
        target = _resolve_ref(ref, root)
        collected.is_open |= not isinstance(target, Mapping)
        collected.add(inside(target, seen=seen | {ref}), needs=True)
    for part in _get_list(schema, "allOf"):
        collected.add(inside(part), needs=True)
    for key in ("anyOf", "oneOf"):
        if branches := [inside(item) for item in _get_list(schema, key) if item is not False]:
            collected.add(_union(branches), needs=True)
    for key in ("then", "else"):
        collected.add(inside(schema.get(key)), needs=False)
    dependent = schema.get("dependentSchemas")
    for part in dependent.values() if isinstance(dependent, Mapping) else ():
        collected.add(inside(part), needs=False)
    return collected


def _union(branches: Sequence[_Collected]) -> _Collected:
    """One of the branches applies: what all of them need is required."""
    schemas: dict[str, list[Any]] = {}
    for branch in branches:
        for name, schema in branch.properties.items():
            known = schemas.setdefault(name, [])
            if schema not in known:
                known.append(schema)
    needed = [tuple(branch.required) for branch in branches]
    return _Collected(
        properties={
            name: entry[0] if len(entry) == 1 else {"anyOf": entry} for name, entry in schemas.items()
        },
        required={name: None for name in needed[0] if all(name in entry for entry in needed)},
        is_declared=any(branch.is_declared for branch in branches),
        is_open=any(branch.is_open for branch in branches),
        alternatives=tuple(dict.fromkeys(needed)) if len(set(needed)) > 1 else (),
    )


def _get_list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def accepted_values(schema: Any, root: Mapping[str, Any]) -> Accepted | None:
    """What a schema takes; None where it does not say. ``root`` holds the definitions that it refers to.

    Followed are ``anyOf``, ``oneOf``, an ``allOf`` of one, and references into ``root``; ``nullable`` is
    OpenAPI's. Beside a type or choices they only say more of the same values.
    """
    types: list[str] = []
    choices: list[Any] = []
    last: list[str] = []
    queue, seen = deque([schema]), set[str]()  # no recursion: how deep it goes, a stranger decides
    while queue:
        node = queue.popleft()
        if not isinstance(node, Mapping):
            return None
        if node.get("nullable") is True:
            last = ["null"]
        if isinstance(enum := node.get("enum"), list) and enum:
            choices += enum
        elif "const" in node:
            choices.append(node["const"])
        elif (names := _types(node.get("type"))) is not None:
            types += names
        elif isinstance(ref := node.get("$ref"), str):
            if ref not in seen:
                seen.add(ref)
                queue.append(_resolve_ref(ref, root))
        elif (inner := _alternatives(node)) is not None:
            queue += inner
        else:
            return None
    if not types and not choices:  # it refers to itself only
        return None
    return Accepted(types=tuple(dict.fromkeys(types + last)), choices=tuple(choices))


def find_schema_flaw(parameters: Any) -> str:
    """Why a tool's arguments cannot be told to a model, in words; empty where they can.

    A template goes through names, and some through types; a schema deeper inside is shown as it is.
    """
    if not isinstance(parameters, Mapping):
        return "it is no object"
    if not isinstance(properties := parameters.get("properties", {}), Mapping):
        return "its properties are no object"
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(schema, str) for schema in required):
        return "required is no list of names"
    for name, schema in properties.items():
        if not isinstance(schema, Mapping | bool):
            return f"the schema of {name!r} is no object"
        kind = schema.get("type", []) if isinstance(schema, Mapping) else []
        if not isinstance(kind, str) and not _is_name_list(kind):
            return f"the type of {name!r} is no name"
    return ""


def _is_name_list(kind: Any) -> bool:
    return isinstance(kind, list) and all(isinstance(item, str) for item in kind)


def _types(kind: Any) -> list[str] | None:
    names = [kind] if isinstance(kind, str) else kind
    is_known = _is_name_list(names) and names and all(name in TYPES for name in names)
    return list(names) if is_known else None


def _alternatives(schema: Mapping[str, Any]) -> list[Any] | None:
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches and (key != "allOf" or len(branches) == 1):
            return list(branches)
    return None


def _resolve_ref(ref: str, root: Mapping[str, Any]) -> Any:
    """What a reference such as ``#/$defs/Unit`` stands for; None where there is nothing."""
    if not ref.startswith("#"):
        return None
    node: Any = root
    for part in _parts(ref):
        if isinstance(node, list) and part.isdecimal() and int(part[:9]) < len(node):
            node = node[int(part[:9])]
        else:
            node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _parts(ref: str) -> Iterator[str]:
    for part in ref.removeprefix("#").split("/")[1:]:
        yield unquote(part).replace("~1", "/").replace("~0", "~")
