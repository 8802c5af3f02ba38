"""Signatures of functions as JSON schemas: type hints give the types, docstrings the descriptions.

Docstrings in the styles of Google, NumPy, reST and Epydoc are read, with or without types. Hints that are
JSON already (text, numbers, lists, dictionaries, ``Literal``) become the schema that chat templates know from
transformers; all others (an ``Enum``, a dataclass, a pydantic model, a date) become pydantic's schema, and
pydantic converts their arguments.
"""

import asyncio
import dataclasses
import inspect
import json
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, Union, get_args, get_origin, overload

import docstring_parser
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from outrider.errors import ConfigError, ToolFault
from outrider.tokens.call_formats import find_call_error
from outrider.tools.base import ToolOutput, text_argument, usage_line
from outrider.types import Json, ToolCall, ToolSchema

_NEEDS: Final = "it needs type hints and a docstring with Args:"
_JSON: Final = (str, int, float, bool, type(None), Any, list, dict)
_SCALARS: Final = (str, int, float, bool, type(None))
_MAX_INLINED: Final = 8
_TOOL_NAME: Final = "_outrider_tool_name"  # attribute of a function with another name as a tool
_HEADING: Final = re.compile(r"(?:Args|Arguments|Param(?:eter)?s):?[ \t]*(?:\n|$)")

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


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
                f"the value of {item.__name__}.{wrong[0]}, which {key!r} takes, is no text or "
                "number: a model "
                ""
                "has to write it"
            )
        if not len(item):
            raise Undescribed(f"the Enum {item.__name__}, which {key!r} takes, has no members")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        schema = adapter.json_schema()
    except Exception as error:  # its own exceptions, and those of a class that brings its own schema
        raise Undescribed(
            f"the type hint {_type_name(hint)} of {key!r} cannot be made from JSON ({_line(error)}): use "
            "text, "
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


# Python functions as tools: type hints and docstring become the JSON schema.
#
# In a recipe ``tools = ["my_tools:add"]`` names a function ``add`` of the module ``my_tools``.


class CalledByText(ABC):
    """A tool with a schema, which a call by tag reaches too."""

    name: str
    usage: str
    schema: ToolSchema

    def run_text(self, text: str) -> ToolOutput:
        """A call by tag: the one text argument, or a JSON object of arguments."""
        if (only := text_argument(self.schema)) is not None:
            return self.run_call({only: text})
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return ToolOutput(text=f"Write the arguments as a JSON object: {self.usage}", failed=True)
        return self.run_call(arguments)

    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """One call with named arguments; those that the schema does not take are told. Raises ToolFault."""
        if problem := find_call_error(ToolCall(name=self.name, arguments=arguments), [self.schema]):
            return ToolOutput(text=problem, failed=True)
        return self._run(arguments)

    @abstractmethod
    def _run(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """The call with arguments that the schema takes. Raises ToolFault."""


class FunctionTool(CalledByText):
    """A tool around a function, called in this process and from several threads at once. A coroutine runs in
    an event loop of that call.

    Arguments whose hints are more than JSON (an Enum, a dataclass, a date) are converted to what the hints
    say. What the function returns is shown (text as it is, all else as JSON); what it raises is told to the
    policy in one line, except ToolFault, which is nobody's turn.
    """

    function: ClassVar[Callable[..., Any]]
    converters: ClassVar[Mapping[str, TypeAdapter[Any]]] = {}

    def _run(self, arguments: Mapping[str, Json]) -> ToolOutput:
        values: dict[str, Any] = dict(arguments)
        for name in self.converters.keys() & values.keys():
            try:
                values[name] = self.converters[name].validate_python(values[name])
            except ValidationError as error:
                return ToolOutput(
                    text=f"The argument {name!r} of {self.name}: {error_line(error)}", failed=True
                )
        try:
            result = _await_result(type(self).function(**values))
            text = (
                result
                if isinstance(result, str)
                else json.dumps(result, ensure_ascii=False, default=_as_json)
            )
        except ToolFault:
            raise
        except (Exception, SystemExit) as error:  # wrong values, nothing found, a result that JSON lacks
            reason = " ".join(str(error).split())
            return ToolOutput(text=f"{type(error).__name__}: {reason}".rstrip(": "), failed=True)
        return ToolOutput(text=text)

    def close(self) -> None:
        """A function holds nothing."""


def _as_json(value: Any) -> Any:
    """What JSON lacks: models and dataclasses with their fields, members of an Enum as their values, all
    else as text.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return to_jsonable_python(value, fallback=str)
    return str(value)


def tool_class(function: Callable[..., Any]) -> type[FunctionTool]:
    """The plug-in's class of a function, or of what wraps one.

    Raises ConfigError where no call by arguments' names can reach it, and where type hints or docstring do
    not say what its arguments are.
    """
    name = str(getattr(function, _TOOL_NAME, getattr(function, "__name__", "")))
    label = f"{function.__module__}:{function.__qualname__}" if name else f"a {type(function).__qualname__}"
    if refusal := _refusal(function, name):
        raise ConfigError(f"{label} cannot be a tool: {refusal}")
    try:
        schema, converters = describe_function(function, name)
    except Undescribed as error:
        raise ConfigError(f"{label} cannot be a tool: {error}") from error
    fields = {
        "function": staticmethod(function),
        "converters": converters,
        "name": name,
        "usage": usage_line(schema),
        "schema": schema,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
    }
    return type(name, (FunctionTool,), fields)


@overload
def tool(function: FunctionT) -> FunctionT: ...
@overload
def tool(*, name: str) -> Callable[[FunctionT], FunctionT]: ...
def tool(function: Any = None, *, name: str | None = None) -> Any:
    """Mark a function as a tool that the policy can call, and optionally give the tool another name.

    A recipe names the function by its import path, for example ``tools = ["my_tools:find_population"]``. Type
    hints and docstring become the description of the tool and its JSON schema; without the decorator a
    function is a tool, too::

        @outrider.tool(name="population")
        def find_population(country: str) -> int:
            \"\"\"Return the population of a country.

            Args:
                country: its English name
            \"\"\"
            return POPULATIONS[country]

    The policy sees what the function returns (text as it is, everything else as JSON), or one line about the
    exception that it raised. Raise :class:`~outrider.errors.ToolFault` if infrastructure breaks. The function
    is called from several threads.
    """

    def mark(function: Any) -> Any:
        setattr(function, _TOOL_NAME, name or function.__name__)
        return function

    return mark if function is None else mark(function)


def _refusal(function: Callable[..., Any], name: str) -> str:
    """Why a call by arguments' names cannot reach it, with what to do; empty where one can."""
    if not name:
        return "it has no name: write a function (def) that calls it"
    wrapped = inspect.unwrap(function)
    if inspect.isgeneratorfunction(wrapped) or inspect.isasyncgenfunction(wrapped):
        return "it is a generator: return a text or a list instead of yield"
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return "it has no signature: write a function (def) that calls it"
    for parameter in parameters:
        match parameter.kind:
            case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.VAR_KEYWORD:
                stars = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "**"
                return (
                    f"{stars}{parameter.name} is no argument with a name: take a list, or name each argument"
                )
            case inspect.Parameter.POSITIONAL_ONLY:
                return f"{parameter.name} is positional only, and calls name their arguments: leave the / out"
    return ""


def _await_result(result: Any) -> Any:
    """What a function returned, at its end where it is a coroutine."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as pool:  # the caller's own loop, a notebook's say, waits for this call
        return pool.submit(asyncio.run, wait()).result()
