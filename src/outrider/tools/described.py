"""What a policy is told of a tool that it calls by tag, out of the tool's schema; and arguments to try it."""

import json
from collections.abc import Mapping
from typing import Any, Final

from outrider.tokens.calls.schemas import Accepted, Arguments, accepted_values
from outrider.types import Json, ToolSchema

_TRIAL_VALUES: Final[Mapping[str, tuple[Json, ...]]] = {
    "string": ("...", "", "1"),
    "integer": (1, 0, -1),
    "number": (1.5, 0, -1),
    "boolean": (True, False),
    "array": ([],),
    "object": ({},),
    "null": (None,),
}
"""Values of a type; the first one is shown."""
_MAX_DEPTH: Final = 3


def usage_line(schema: ToolSchema) -> str:
    """What the system prompt says of a tool: what to write, what for, and what its arguments are."""
    name, spec = schema["name"], Arguments.from_schema(schema)
    first = spec.alternatives[0] if spec.alternatives else None
    omitted = set() if first is None else {key for item in spec.alternatives for key in item} - {*first}
    example_arguments = {
        key: _values(spec.schema(key), spec.root)[0] for key in spec.properties if key not in omitted
    }
    example = text_argument(schema) or json.dumps(example_arguments, ensure_ascii=False)
    purpose = _sentence(str(schema["description"]))
    arguments = "; ".join(_argument(spec, key) for key in spec.properties)
    sentences = [
        f"Write <{name}>{example}</{name}> for this: {purpose}",
        f"{arguments}." if arguments else "",
    ]
    if spec.alternatives:
        sets = [" and ".join(item) or "none of these" for item in spec.alternatives]
        sentences.append(f"Give {' or '.join(sets)}.")
    if not spec.properties and not spec.is_closed:
        sentences.append("It takes a JSON object with any arguments.")
    return " ".join(item for item in sentences if item)


def text_argument(schema: ToolSchema) -> str | None:
    """The name of the one argument of a tool that has no other, where it is a text."""
    spec = Arguments.from_schema(schema)
    only = next(iter(spec.properties)) if len(spec.properties) == 1 else None
    accepted = None if only is None else spec.accepted(only)
    return only if accepted is not None and _is_text(accepted) else None


def trial_arguments(schema: ToolSchema) -> list[dict[str, Json]]:
    """Arguments that a tool takes by its schema: those that it needs alone, and all of them, with several
    values.
    """
    spec = Arguments.from_schema(schema)
    values = {key: _values(spec.schema(key), spec.root) for key in spec.properties}
    rows = range(max((len(item) for item in values.values()), default=1))
    full_sets: list[dict[str, Json]] = [
        {key: item[row % len(item)] for key, item in values.items()} for row in rows
    ]
    needed = [dict.fromkeys((*spec.required, *item)) for item in spec.alternatives or ((),)]
    return [*({key: values[key][0] for key in keys if key in values} for keys in needed), *full_sets]


def _argument(spec: Arguments, key: str) -> str:
    schema, accepted = spec.schema(key), spec.accepted(key)
    kinds = [] if accepted is None else [accepted.describe().removeprefix("of type ")]
    if key not in spec.required:
        kinds.append("may be left out")
    description = schema.get("description") if isinstance(schema, Mapping) else None
    detail = (
        f": {_sentence(description).removesuffix('.')}"
        if isinstance(description, str) and description
        else ""
    )
    return key + (f" ({', '.join(kinds)})" if kinds else "") + detail


def _sentence(text: str) -> str:
    """In one line."""
    return " ".join(text.split()).rstrip(".") + "."


def _is_text(accepted: Accepted) -> bool:
    return not set(accepted.types) - {"string"} and all(
        isinstance(choice, str) for choice in accepted.choices
    )


def _values(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Json]:
    """Some values that a schema takes, the plainest one first."""
    accepted = accepted_values(schema, root)
    if accepted is None:
        return ["..."]
    values: list[Json] = list(accepted.choices)
    for kind in accepted.types:
        inner = _inner_value(kind, schema, root, depth)
        values += _TRIAL_VALUES[kind] if inner is None else (inner,)
    return values


def _inner_value(kind: str, schema: Any, root: Mapping[str, Any], depth: int) -> Json:
    """A list or an object that is not empty, where the schema itself says what is inside; else None."""
    if kind == "array" and depth < _MAX_DEPTH and isinstance(schema.get("items"), Mapping):
        return [_values(schema["items"], root, depth + 1)[0]]
    if kind == "object" and depth < _MAX_DEPTH and isinstance(schema.get("properties"), Mapping):
        return {
            key: _values(property_schema, root, depth + 1)[0]
            for key, property_schema in schema["properties"].items()
        }
    return None
