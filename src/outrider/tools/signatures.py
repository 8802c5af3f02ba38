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


def describe_function(
    function: Callable[..., Any], name: str
) -> tuple[ToolSchema, Mapping[str, TypeAdapter[Any]]]:
    """The schema of a function, and converters for the arguments whose hints are more than JSON.

    Raises Undescribed, naming the argument, when hints or docstring lack something.
    """
    parameters = inspect.signature(function).parameters
    hints = _hints(function, parameters)
    definitions: dict[str, Any] = {}
    adapted = {key: _adapt(key, hint, definitions) for key, hint in hints.items() if not _is_json(hint)}
    converters = {key: adapter for key, (adapter, _) in adapted.items()}
    is_known = all(map(_is_known_to_transformers, hints.values()))
    if is_known and (schema := _try_transformers_schema(function, name)) is not None:
        return schema, converters
    summary, descriptions = _docstring(function, hints)
    properties: dict[str, Any] = {}
    for key, hint in hints.items():
        property_schema = _transformers_hint_schema(hint) if _is_known_to_transformers(hint) else None
        if property_schema is None:
            property_schema = adapted[key][1] if key in adapted else _adapt(key, hint, definitions)[1]
        properties[key] = {**property_schema, "description": descriptions[key]}
    required = [key for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    schema_of_arguments: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema_of_arguments["required"] = required
    if definitions:
        schema_of_arguments["$defs"] = definitions
    return {"name": name, "description": summary, "parameters": schema_of_arguments}, converters


def error_line(error: ValidationError) -> str:
    """What is wrong with an argument, in one line for the policy."""
    messages = []
    for detail in error.errors(include_url=False, include_input=False)[:3]:
        location = ".".join(str(part) for part in detail["loc"])
        message = " ".join(str(detail["msg"]).split()).rstrip(".")
        messages.append(f"{location}: {message}" if location else message)
    return "; ".join(messages) + "."


def _hints(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.annotation is inspect.Parameter.empty:
            raise Undescribed(f"the argument {name!r} has no type hint; {_NEEDS}")
    scope = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__globals__", {})
    for (
        name,
        parameter,
    ) in parameters.items():  # one by one: what it returns may be a name that exists nowhere
        holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
        try:
            hints[name] = typing.get_type_hints(holder, globalns=scope, include_extras=True)[name]
        except Exception as error:  # whatever an annotation in quotes raises
            raise Undescribed(
                f"the type hint {parameter.annotation!r} of {name!r} cannot be resolved: {_line(error)}"
            ) from error
    return hints


def _try_transformers_schema(function: Callable[..., Any], name: str) -> ToolSchema | None:
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


def _transformers_hint_schema(hint: Any) -> dict[str, Any] | None:
    """A hint alone, as transformers has it; None for the few that it refuses."""
    from transformers.utils.chat_template_utils import get_json_schema

    def probe() -> None: ...

    probe.__doc__ = "Hold one argument.\n\nArgs:\n    value: any"
    probe.__annotations__ = {"value": hint}
    parameter = inspect.Parameter("value", inspect.Parameter.KEYWORD_ONLY, annotation=hint)
    probe.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    try:
        schema = dict(get_json_schema(probe)["function"]["parameters"]["properties"]["value"])
    except Exception:
        return None
    del schema["description"]
    return schema


def _is_json(hint: Any) -> bool:
    """Whether an argument is JSON that a function takes as it is."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(type(item) in _SCALARS for item in inner)
    if origin in (Union, types.UnionType, list):
        return all(map(_is_json, inner))
    if origin is dict:
        return inner[0] in (str, Any) and _is_json(inner[1])
    return any(hint is item for item in _JSON)


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
    documented = {
        name.strip("* "): item.description or ""
        for item in parsed.params
        for name in item.arg_name.split(",")  # NumPy's "x, y : int"
    }
    descriptions = {
        name: " ".join((documented.get(name) or _annotation_text(hint)).split())
        for name, hint in hints.items()
    }
    if missing := [name for name, item in descriptions.items() if not item]:
        known = f" (it describes {', '.join(documented)})" if documented else ""
        raise Undescribed(f"its docstring does not describe the argument {missing[0]!r}{known}; {_NEEDS}")
    return summary, descriptions


def _annotation_text(hint: Any) -> str:
    """The description in ``Annotated[int, "how many"]`` or in ``Annotated[int, Field(description=...)]``."""
    for annotation in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        text = annotation if isinstance(annotation, str) else getattr(annotation, "description", None)
        text = text or getattr(annotation, "documentation", None)  # typing_extensions.Doc
        if isinstance(text, str):
            return text
    return ""


def _adapt(key: str, hint: Any, definitions: dict[str, Any]) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """The converter of an argument and its schema; definitions that refer to themselves join the others."""
    if odd := next((item for item in _literals(hint) if not isinstance(item, _SCALARS)), None):
        raise Undescribed(f"Literal[{odd!s}], which {key!r} takes, is no text or number: write the values")
    for item in _enums(hint):
        if wrong := [member.name for member in item if not _is_scalar(member)]:
            raise Undescribed(
                f"the value of {item.__name__}.{wrong[0]}, which {key!r} takes, is no text or number: a model "
                "has to write it"
            )
        if not len(item):
            raise Undescribed(f"the Enum {item.__name__}, which {key!r} takes, has no members")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        schema = adapter.json_schema()
    except Exception as error:  # its own exceptions, and those of a class that brings its own schema
        raise Undescribed(
            f"the type hint {_type_name(hint)} of {key!r} cannot be made from JSON ({_line(error)}): use text, "
            "numbers, lists, an Enum, Literal, a dataclass or a pydantic model"
        ) from error
    own = schema.pop("$defs", {})
    inlined = _inline(schema, own, ())
    names = _referenced_names(inlined, own)
    definitions |= {name: _inline(own[name], own, (name,)) for name in names}
    return adapter, inlined


def _is_scalar(member: Enum) -> bool:
    """Whether JSON can have the value of a member, or the member itself, as of StrEnum and IntEnum."""
    return type(member.value) in _SCALARS or isinstance(member, str | int | float)


def _literals(hint: Any) -> Sequence[Any]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return [value for inner in get_args(hint) for value in _literals(inner)]


def _enums(hint: Any) -> Sequence[type[Enum]]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return (hint,)
    return [enum_type for inner in get_args(hint) for enum_type in _enums(inner)]


def _inline(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """References replaced by what they stand for, except where a definition is inside itself. Titles, which
    repeat names, are left out.
    """
    if isinstance(schema, list):
        return [_inline(child, definitions, inside) for child in schema]
    if not isinstance(schema, dict):
        return schema
    ref = schema.get("$ref")
    name = ref.removeprefix("#/$defs/") if isinstance(ref, str) else ""
    if name in definitions and name not in inside and len(inside) < _MAX_INLINED:
        target = _inline(definitions[name], definitions, (*inside, name))
        return {**target, **{key: child for key, child in schema.items() if key != "$ref"}}
    result = {}
    for key, child in schema.items():
        if key == "title" and isinstance(child, str):
            continue
        if key == "properties" and isinstance(child, dict):
            result[key] = {inner: _inline(value, definitions, inside) for inner, value in child.items()}
        elif key in ("enum", "const", "default", "examples"):
            result[key] = child
        else:
            result[key] = _inline(child, definitions, inside)
    return result


def _referenced_names(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Names of the definitions that a schema still refers to, and those that these refer to."""
    names: set[str] = set()
    queue = [schema]
    while queue:
        node = queue.pop()
        if isinstance(node, list):
            queue += node
        elif isinstance(node, dict):
            queue += node.values()
            name = str(node.get("$ref", "")).removeprefix("#/$defs/")
            if name in definitions and name not in names:
                names.add(name)
                queue.append(_inline(definitions[name], definitions, (name,)))
    return names


def _type_name(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _line(error: Exception) -> str:
    return (
        " ".join(str(error).split())
        .partition(" Set `arbitrary_types_allowed")[0]
        .partition(" For further")[0]
    )
