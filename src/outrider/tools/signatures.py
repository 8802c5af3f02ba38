"""Signatures of functions as JSON schemas: type hints give the types, docstrings the descriptions.

Docstrings in the styles of Google, NumPy, reST and Epydoc are read, with or without types. Hints that are
JSON already (text, numbers, lists, dictionaries, ``Literal``) become the schema that chat templates know from
transformers; all others (an ``Enum``, a dataclass, a pydantic model, a date) become pydantic's schema, and
pydantic converts their arguments.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import docstring_parser
from pydantic import TypeAdapter, ValidationError

from outrider.types import ToolSchema

_NEEDS: Final = "it needs type hints and a docstring with Args:"
_JSON: Final = (str, int, float, bool, type(None), Any, list, dict)
_SCALARS: Final = (str, int, float, bool, type(None))
_MAX_INLINED: Final = 8
_HEADING: Final = re.compile(r"(?:Args|Arguments|Param(?:eter)?s):?[ \t]*(?:\n|$)")


class Undescribed(Exception):
    """Why hints and docstring of a function do not describe its arguments."""


def described_function(
    function: Callable[..., Any], name: str
) -> tuple[ToolSchema, Mapping[str, TypeAdapter[Any]]]:
    """The schema of a function, and converters for the arguments whose hints are more than JSON.

    Raises Undescribed, naming the argument, when hints or docstring lack something.
    """
    parameters = inspect.signature(function).parameters
    hints = _hints(function, parameters)
    definitions: dict[str, Any] = {}
    adapted = {key: _adapted(key, hint, definitions) for key, hint in hints.items() if not _is_json(hint)}
    converters = {key: adapter for key, (adapter, _) in adapted.items()}
    is_known = all(map(_is_known_to_transformers, hints.values()))
    if is_known and (schema := _as_transformers_reads_it(function, name)) is not None:
        return schema, converters
    summary, descriptions = _docstring(function, hints)
    properties: dict[str, Any] = {}
    for key, hint in hints.items():
        found = _schema_of_transformers(hint) if _is_known_to_transformers(hint) else None
        if found is None:
            found = adapted[key][1] if key in adapted else _adapted(key, hint, definitions)[1]
        properties[key] = {**found, "description": descriptions[key]}
    required = [key for key, one in parameters.items() if one.default is inspect.Parameter.empty]
    schema_of_arguments: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema_of_arguments["required"] = required
    if definitions:
        schema_of_arguments["$defs"] = definitions
    return {"name": name, "description": summary, "parameters": schema_of_arguments}, converters


def error_line(error: ValidationError) -> str:
    """What is wrong with an argument, in one line for the policy."""
    told = []
    for one in error.errors(include_url=False, include_input=False)[:3]:
        place = ".".join(str(part) for part in one["loc"])
        message = " ".join(str(one["msg"]).split()).rstrip(".")
        told.append(f"{place}: {message}" if place else message)
    return "; ".join(told) + "."


def _hints(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for name, one in parameters.items():
        if one.annotation is inspect.Parameter.empty:
            raise Undescribed(f"the argument {name!r} has no type hint; {_NEEDS}")
    scope = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__globals__", {})
    for name, one in parameters.items():  # one by one: what it returns may be a name that exists nowhere
        holder = types.SimpleNamespace(__annotations__={name: one.annotation})
        try:
            hints[name] = typing.get_type_hints(holder, globalns=scope, include_extras=True)[name]
        except Exception as error:  # whatever an annotation in quotes raises
            raise Undescribed(
                f"the type hint {one.annotation!r} of {name!r} cannot be resolved: {_line(error)}"
            ) from error
    return hints


def _as_transformers_reads_it(function: Callable[..., Any], name: str) -> ToolSchema | None:
    """The schema where transformers' own reading of Google's style is enough; else None."""
    # needs no model
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)["function"]
    except Exception:  # its own exceptions and whatever odd hints raise: the other reading gives the reason
        return None
    parameters: dict[str, Any] = dict(schema.get("parameters") or {})
    parameters.setdefault("properties", {})
    return {"name": name, "description": schema["description"], "parameters": parameters}


def _schema_of_transformers(hint: Any) -> dict[str, Any] | None:
    """A hint alone, as transformers has it; None for the few that it refuses."""
    from transformers.utils.chat_template_utils import get_json_schema

    def alone() -> None: ...

    alone.__doc__ = "Hold one argument.\n\nArgs:\n    value: any"
    alone.__annotations__ = {"value": hint}
    parameter = inspect.Parameter("value", inspect.Parameter.KEYWORD_ONLY, annotation=hint)
    alone.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    try:
        found = dict(get_json_schema(alone)["function"]["parameters"]["properties"]["value"])
    except Exception:
        return None
    del found["description"]
    return found


def _is_json(hint: Any) -> bool:
    """Whether an argument is JSON that a function takes as it is."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(type(one) in _SCALARS for one in inner)
    if origin in (Union, types.UnionType, list):
        return all(map(_is_json, inner))
    if origin is dict:
        return inner[0] in (str, Any) and _is_json(inner[1])
    return any(hint is one for one in _JSON)


def _is_known_to_transformers(hint: Any) -> bool:
    """Whether its schema is transformers': JSON, and members of an Enum and tuples beside it."""
    if _is_json(hint) or hint is tuple or (isinstance(hint, type) and issubclass(hint, Enum)):
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple:
        return len(inner) > 1 and all(map(_is_known_to_transformers, inner))
    if origin in (Union, types.UnionType, list):
        return all(map(_is_known_to_transformers, inner))
    return origin is dict and inner[0] in (str, Any) and _is_known_to_transformers(inner[1])


def _docstring(function: Callable[..., Any], hints: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """What the function does, and what its arguments are."""
    text = inspect.getdoc(function) or ""
    if not text.strip():
        raise Undescribed(f"it has no docstring; {_NEEDS}")
    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError as error:
        raise Undescribed(f"its docstring cannot be read: {_line(error)}; {_NEEDS}") from error
    summary = (parsed.description or "").strip()
    if not summary or _HEADING.match(summary):
        raise Undescribed("its docstring does not say what it does: write a line above the arguments")
    written = {
        name.strip("* "): one.description or ""
        for one in parsed.params
        for name in one.arg_name.split(",")  # NumPy's "x, y : int"
    }
    found = {name: " ".join((written.get(name) or _annotated(hint)).split()) for name, hint in hints.items()}
    if missing := [name for name, one in found.items() if not one]:
        known = f" (it describes {', '.join(written)})" if written else ""
        raise Undescribed(f"its docstring does not describe the argument {missing[0]!r}{known}; {_NEEDS}")
    return summary, found


def _annotated(hint: Any) -> str:
    """The description in ``Annotated[int, "how many"]`` or in ``Annotated[int, Field(description=...)]``."""
    for one in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        found = one if isinstance(one, str) else getattr(one, "description", None)
        found = found or getattr(one, "documentation", None)  # typing_extensions.Doc
        if isinstance(found, str):
            return found
    return ""


def _adapted(key: str, hint: Any, definitions: dict[str, Any]) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """The converter of an argument and its schema; definitions that refer to themselves join the others."""
    if odd := next((one for one in _literals(hint) if not isinstance(one, _SCALARS)), None):
        raise Undescribed(f"Literal[{odd!s}], which {key!r} takes, is no text or number: write the values")
    for one in _enums(hint):
        if wrong := [member.name for member in one if not _is_scalar(member)]:
            raise Undescribed(
                f"the value of {one.__name__}.{wrong[0]}, which {key!r} takes, is no text or number: a model "
                "has to write it"
            )
        if not len(one):
            raise Undescribed(f"the Enum {one.__name__}, which {key!r} takes, has no members")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        schema = adapter.json_schema()
    except Exception as error:  # its own exceptions, and those of a class that brings its own schema
        raise Undescribed(
            f"the type hint {_name_of(hint)} of {key!r} cannot be made from JSON ({_line(error)}): use text, "
            "numbers, lists, an Enum, Literal, a dataclass or a pydantic model"
        ) from error
    own = schema.pop("$defs", {})
    inlined = _inlined(schema, own, ())
    kept = _referred(inlined, own)
    definitions |= {name: _inlined(own[name], own, (name,)) for name in kept}
    return adapter, inlined


def _is_scalar(member: Enum) -> bool:
    """Whether JSON can have the value of a member, or the member itself, as of StrEnum and IntEnum."""
    return type(member.value) in _SCALARS or isinstance(member, str | int | float)


def _literals(hint: Any) -> Sequence[Any]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return [one for inner in get_args(hint) for one in _literals(inner)]


def _enums(hint: Any) -> Sequence[type[Enum]]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return (hint,)
    return [one for inner in get_args(hint) for one in _enums(inner)]


def _inlined(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """References replaced by what they stand for, except where a definition is inside itself. Titles, which
    repeat names, are left out.
    """
    if isinstance(schema, list):
        return [_inlined(one, definitions, inside) for one in schema]
    if not isinstance(schema, dict):
        return schema
    place = schema.get("$ref")
    name = place.removeprefix("#/$defs/") if isinstance(place, str) else ""
    if name in definitions and name not in inside and len(inside) < _MAX_INLINED:
        target = _inlined(definitions[name], definitions, (*inside, name))
        return {**target, **{key: one for key, one in schema.items() if key != "$ref"}}
    found = {}
    for key, one in schema.items():
        if key == "title" and isinstance(one, str):
            continue
        if key == "properties" and isinstance(one, dict):
            found[key] = {inner: _inlined(value, definitions, inside) for inner, value in one.items()}
        elif key in ("enum", "const", "default", "examples"):
            found[key] = one
        else:
            found[key] = _inlined(one, definitions, inside)
    return found


def _referred(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Names of the definitions that a schema still refers to, and those that these refer to."""
    names: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
            name = str(one.get("$ref", "")).removeprefix("#/$defs/")
            if name in definitions and name not in names:
                names.add(name)
                waiting.append(_inlined(definitions[name], definitions, (name,)))
    return names


def _name_of(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _line(error: Exception) -> str:
    return (
        " ".join(str(error).split())
        .partition(" Set `arbitrary_types_allowed")[0]
        .partition(" For further")[0]
    )
