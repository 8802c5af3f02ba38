"""What a policy is told of a tool that it calls by tag, out of the tool's schema; and arguments to try it."""

import json
from collections.abc import Mapping
from typing import Any, Final

from outrider.tokens.calls.schemas import Accepted, Arguments, accepted_by
from outrider.types import Json, ToolSchema

_TRIED: Final[Mapping[str, tuple[Json, ...]]] = {
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
    name, taken = schema["name"], Arguments.of(schema)
    first = taken.alternatives[0] if taken.alternatives else None
    left_out = set() if first is None else {key for one in taken.alternatives for key in one} - {*first}
    shown = {
        key: _values(taken.schema(key), taken.root)[0] for key in taken.properties if key not in left_out
    }
    example = text_argument(schema) or json.dumps(shown, ensure_ascii=False)
    what = _sentence(str(schema["description"]))
    arguments = "; ".join(_argument(taken, key) for key in taken.properties)
    said = [f"Write <{name}>{example}</{name}> for this: {what}", f"{arguments}." if arguments else ""]
    if taken.alternatives:
        sets = [" and ".join(one) or "none of these" for one in taken.alternatives]
        said.append(f"Give {' or '.join(sets)}.")
    if not taken.properties and not taken.is_closed:
        said.append("It takes a JSON object with any arguments.")
    return " ".join(one for one in said if one)


def text_argument(schema: ToolSchema) -> str | None:
    """The name of the one argument of a tool that has no other, where it is a text."""
    taken = Arguments.of(schema)
    only = next(iter(taken.properties)) if len(taken.properties) == 1 else None
    accepted = None if only is None else taken.accepted(only)
    return only if accepted is not None and _is_text(accepted) else None


def tried_arguments(schema: ToolSchema) -> list[dict[str, Json]]:
    """Arguments that a tool takes by its schema: those that it needs alone, and all of them, with several
    values.
    """
    taken = Arguments.of(schema)
    values = {key: _values(taken.schema(key), taken.root) for key in taken.properties}
    rows = range(max((len(one) for one in values.values()), default=1))
    all_of_them: list[dict[str, Json]] = [
        {key: one[row % len(one)] for key, one in values.items()} for row in rows
    ]
    needed = [dict.fromkeys((*taken.required, *one)) for one in taken.alternatives or ((),)]
    return [*({key: values[key][0] for key in keys if key in values} for keys in needed), *all_of_them]


def _argument(taken: Arguments, key: str) -> str:
    schema, accepted = taken.schema(key), taken.accepted(key)
    kinds = [] if accepted is None else [accepted.told().removeprefix("of type ")]
    if key not in taken.required:
        kinds.append("may be left out")
    described = schema.get("description") if isinstance(schema, Mapping) else None
    what = f": {_sentence(described).removesuffix('.')}" if isinstance(described, str) and described else ""
    return key + (f" ({', '.join(kinds)})" if kinds else "") + what


def _sentence(text: str) -> str:
    """In one line."""
    return " ".join(text.split()).rstrip(".") + "."


def _is_text(accepted: Accepted) -> bool:
    return not set(accepted.types) - {"string"} and all(isinstance(one, str) for one in accepted.choices)


def _values(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Json]:
    """Some values that a schema takes, the plainest one first."""
    accepted = accepted_by(schema, root)
    if accepted is None:
        return ["..."]
    values: list[Json] = list(accepted.choices)
    for kind in accepted.types:
        inside = _inside(kind, schema, root, depth)
        values += _TRIED[kind] if inside is None else (inside,)
    return values


def _inside(kind: str, schema: Any, root: Mapping[str, Any], depth: int) -> Json:
    """A list or an object that is not empty, where the schema itself says what is inside; else None."""
    if kind == "array" and depth < _MAX_DEPTH and isinstance(schema.get("items"), Mapping):
        return [_values(schema["items"], root, depth + 1)[0]]
    if kind == "object" and depth < _MAX_DEPTH and isinstance(schema.get("properties"), Mapping):
        return {key: _values(one, root, depth + 1)[0] for key, one in schema["properties"].items()}
    return None
