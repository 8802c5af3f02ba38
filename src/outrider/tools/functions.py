"""Python functions as tools. Type hints give the types of the JSON schema, docstrings the descriptions.

Docstrings in the styles of Google, NumPy, reST and Epydoc are supported, with or without types. JSON types
(text, numbers, lists, dictionaries, ``Literal``) become the schema that chat templates know from
transformers. Other types (an ``Enum``, a dataclass, a pydantic model, a date) become pydantic's schema, and
pydantic converts the arguments.
"""

import asyncio
import copy
import dataclasses
import functools
import inspect
import json
import os
import re
import threading
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, Union, get_args, get_origin, overload

import docstring_parser
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, to_jsonable_python

from outrider.errors import ConfigError, ToolFault, unwrap_group
from outrider.tokens.call_formats import find_call_error
from outrider.tokens.tool_calls import Arguments, accepted_values, list_branches
from outrider.tools.base import SingleFlightCache, ToolOutput, text_argument, usage_line
from outrider.types import Json, ToolCall, ToolSchema

_NEEDS: Final = "it needs type hints and a docstring with Args:"
_JSON: Final = (str, int, float, bool, type(None), Any, list, dict)
_SCALARS: Final = (str, int, float, bool, type(None))
_MAX_INLINED: Final = 8
_TOOL_NAME: Final = "_outrider_tool_name"  # attribute of a function with another name as a tool
_HEADING: Final = re.compile(r"(?:Args|Arguments|Param(?:eter)?s):?[ \t]*(?:\n|$)")

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Undescribed(Exception):
    """Hints and docstring of a function do not describe its arguments."""


def describe_function(
    function: Callable[..., Any], name: str
) -> tuple[ToolSchema, Mapping[str, TypeAdapter[Any]]]:
    """Return the schema of a function, and converters for arguments of other types than JSON.

    Raises Undescribed, with the name of the argument, if hints or docstring are incomplete.
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
    """Describe an invalid argument for the policy, in one line."""
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
    # One by one, because the type of the return value may be an undefined name.
    for name, parameter in parameters.items():
        holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
        try:
            hints[name] = typing.get_type_hints(holder, globalns=scope, include_extras=True)[name]
        except Exception as error:  # an annotation in quotes may raise anything
            raise Undescribed(
                f"the type hint {parameter.annotation!r} of {name!r} cannot be resolved: {_line(error)}"
            ) from error
    return hints


def _try_transformers_schema(function: Callable[..., Any], name: str) -> ToolSchema | None:
    """Return the schema of transformers, which supports Google's style only, or None."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)["function"]
    except Exception:  # unusual hints raise arbitrary exceptions; the other parser reports the reason
        return None
    parameters: dict[str, Any] = dict(schema.get("parameters") or {})
    # A decorator may have removed an argument that the hints and the docstring of the function still have.
    known = inspect.signature(function).parameters
    properties = parameters.get("properties", {})
    parameters["properties"] = {key: value for key, value in properties.items() if key in known}
    return {"name": name, "description": schema["description"], "parameters": parameters}


def _transformers_hint_schema(hint: Any) -> dict[str, Any] | None:
    """Return the schema of one hint by transformers, or None if it refuses the hint."""
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


def _is_json(hint: Any, *, with_others: bool = False) -> bool:
    """Whether an argument is JSON and needs no conversion. ``with_others``: also Enum and tuples, whose
    schema transformers provides.
    """
    origin, inner = get_origin(hint), get_args(hint)
    is_inner = functools.partial(_is_json, with_others=with_others)
    if origin is Literal:
        return all(type(item) in _SCALARS for item in inner)
    if origin in (Union, types.UnionType, list):
        return all(map(is_inner, inner))
    if origin is dict:
        return not inner or (inner[0] in (str, Any) and is_inner(inner[1]))
    if with_others and origin is tuple:
        return len(inner) > 1 and all(map(is_inner, inner))
    if with_others and (hint is tuple or (isinstance(hint, type) and issubclass(hint, Enum))):
        return True
    return any(hint is item for item in _JSON)


_is_known_to_transformers: Final = functools.partial(_is_json, with_others=True)


def element_checks(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """Return adapters for the lists and dictionaries of JSON among the arguments, whose schema is checked
    without their elements.
    """
    hints = _hints(function, inspect.signature(function).parameters)
    return {key: TypeAdapter(hint) for key, hint in hints.items() if _is_json(hint) and _has_elements(hint)}


def _has_elements(hint: Any) -> bool:
    """Whether the hint says what a list or dictionary contains."""
    inner = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(map(_has_elements, inner))
    return get_origin(hint) in (list, dict) and any(item is not Any for item in inner)


def _docstring(function: Callable[..., Any], hints: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the descriptions of the function and of its arguments."""
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
    """Return the converter and schema of an argument; recursive definitions are added to ``definitions``."""
    if odd := next((item for item in _literals(hint) if not isinstance(item, _SCALARS)), None):
        raise Undescribed(f"Literal[{odd!s}], which {key!r} takes, is no text or number: write the values")
    for item in _enums(hint):
        # JSON can contain the value of a member or, for StrEnum and IntEnum, the member itself.
        if wrong := [
            member.name
            for member in item
            if type(member.value) not in _SCALARS and not isinstance(member, str | int | float)
        ]:
            raise Undescribed(
                f"the value of {item.__name__}.{wrong[0]}, which {key!r} takes, is no text or number: a "
                "model has to write it"
            )
        if not len(item):
            raise Undescribed(f"the Enum {item.__name__}, which {key!r} takes, has no members")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        schema = adapter.json_schema()
    except Exception as error:  # a class with its own schema may raise anything
        type_name = hint.__qualname__ if isinstance(hint, type) and not get_args(hint) else str(hint)
        raise Undescribed(
            f"the type hint {type_name} of {key!r} cannot be made from JSON ({_line(error)}): use "
            "text, numbers, lists, an Enum, Literal, a dataclass or a pydantic model"
        ) from error
    own = schema.pop("$defs", {})
    inlined = _inline(schema, own, ())
    names = _referenced_names(inlined, own)
    definitions |= {name: _inline(own[name], own, (name,)) for name in names}
    return adapter, inlined


def _literals(hint: Any) -> Sequence[Any]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return [value for inner in get_args(hint) for value in _literals(inner)]


def _enums(hint: Any) -> Sequence[type[Enum]]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return (hint,)
    return [enum_type for inner in get_args(hint) for enum_type in _enums(inner)]


def _inline(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """Replace references by their definitions unless a definition is recursive, and remove titles, which
    repeat names.
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
    """Names of the definitions that a schema refers to, directly or through others."""
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


def _line(error: Exception) -> str:
    line = " ".join(str(error).split())
    return line.partition(" Set `arbitrary_types_allowed")[0].partition(" For further")[0]


# --- Tools ---


class CalledByText(ABC):
    """A tool with a schema that calls by tag can use, too."""

    name: str
    usage: str
    schema: ToolSchema

    def run_text(self, text: str) -> ToolOutput:
        """Execute a call by tag: the text is the only text argument, or a JSON object of arguments."""
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if (only := text_argument(self.schema)) is not None:
            is_named = isinstance(arguments, dict) and isinstance(arguments.get(only), str)
            # more names are arguments only if the schema accepts others than the one that it declares
            if is_named and (len(arguments) == 1 or Arguments.from_schema(self.schema).is_open):
                return self.run_call(arguments)
            return self.run_call({only: text})
        if not isinstance(arguments, dict):
            return ToolOutput(text=f"Write the arguments as a JSON object: {self.usage}", failed=True)
        return self.run_call(arguments)

    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """Execute a call with named arguments; invalid arguments are reported. Raises ToolFault."""
        if problem := find_call_error(ToolCall(name=self.name, arguments=arguments), [self.schema]):
            return ToolOutput(text=problem, failed=True)
        return self._run(arguments)

    @abstractmethod
    def _run(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """Execute a call whose arguments match the schema. Raises ToolFault."""


class FunctionTool(CalledByText):
    """A tool around a function, which is called in this process and from several threads.

    Coroutines of all tools share one event loop, so that they may share clients and locks. Arguments are
    converted to the types of the hints. The result is the returned text, other values as JSON, or one line
    about an exception; ToolFault is raised.
    """

    function: ClassVar[Callable[..., Any]]
    converters: ClassVar[Mapping[str, TypeAdapter[Any]]] = {}
    element_checks: ClassVar[Mapping[str, TypeAdapter[Any]]] = {}

    def _run(self, arguments: Mapping[str, Json]) -> ToolOutput:
        try:
            values = copy.deepcopy(dict(arguments))  # the function may change its lists
            for name in values:
                try:
                    values[name] = self._convert(name, values[name])
                except ValidationError as error:
                    text = f"The argument {name!r} of {self.name}: {error_line(error)}"
                    return ToolOutput(text=text, failed=True)
            result = _await_result(type(self).function(**values))
            result = result.decode(errors="replace") if isinstance(result, bytes) else result
            text = (
                result
                if isinstance(result, str)
                else json.dumps(_with_text_keys(result), ensure_ascii=False, default=_as_json)
            )
        except (Exception, SystemExit) as raised:
            cause = unwrap_group(raised, ToolFault)
            if isinstance(cause, ToolFault):
                raise cause from cause.__cause__  # which may be a time-out
            reason = " ".join(str(cause).split())
            return ToolOutput(text=f"{type(cause).__name__}: {reason}".rstrip(": "), failed=True)
        return ToolOutput(text=text)

    def _convert(self, name: str, value: Json) -> Any:
        """Convert an argument to the type of its hint. Raises ValidationError, or what the type raises."""
        parameters = self.schema["parameters"]
        value = _with_integers(value, parameters["properties"].get(name), parameters)
        if name in self.converters:
            return self.converters[name].validate_python(value)
        if name in self.element_checks:
            self.element_checks[name].validate_python(value, strict=True)
        return value

    def close(self) -> None:
        """Nothing to release."""


def _with_integers(
    value: Any, schema: Any, root: Mapping[str, Any], location: tuple[int | str, ...] = ()
) -> Any:
    """Convert 2.0 to 2 in a value and its elements where the schema accepts integers but no other numbers.

    Raises ValidationError for a text or a boolean in place of a number, which pydantic would convert.
    """
    accepted = accepted_values(schema, root)
    if accepted is None:
        return value
    if isinstance(value, list | dict):
        branches = list_branches(schema, root)
        items = enumerate(value) if isinstance(value, list) else value.items()
        typed = [
            (key, _with_integers(item, _element_schema(branches, key), root, (*location, key)))
            for key, item in items
        ]
        return dict(typed) if isinstance(value, dict) else [item for _, item in typed]
    kinds = {*accepted.types, *map(type, accepted.choices)}
    if (
        isinstance(value, str | bool)
        and kinds & {"integer", "number", int, float}
        and not accepted.fits(value)
    ):
        kind: Literal["int_type", "float_type"] = "float_type" if kinds & {"number", float} else "int_type"
        error = InitErrorDetails(type=kind, loc=location, input=value)
        raise ValidationError.from_exception_data("arguments", [error])
    return accepted.as_integer(value)


def _element_schema(branches: Sequence[Mapping[str, Any]], key: int | str) -> dict[str, Any]:
    """The schema of an element of a list or dictionary that one of the branches describes."""
    kind = "object" if isinstance(key, str) else "array"
    schemas: list[Any] = []
    for branch in branches:
        if kind not in branch.get("type", kind):
            continue
        if isinstance(key, str):
            if key in (properties := branch.get("properties", {})):
                schemas.append(properties[key])
            else:
                schemas += branch.get("patternProperties", {}).values() or [
                    branch.get("additionalProperties")
                ]
        else:
            first = branch.get("prefixItems", [])
            schemas.append(first[key] if key < len(first) else branch.get("items"))
    return {"anyOf": schemas}


_NUMBER_KINDS: Final = ("b", "i", "u", "f")  # numpy's


def _as_json(value: Any) -> Any:
    """Convert a value for ``json.dumps``: an Enum member, a model or dataclass with its fields, a set in a
    fixed order, numbers of numpy, pandas and tensors, else text. Raises TypeError for what has no text of its
    own.
    """
    if isinstance(value, Enum):
        return value.value
    if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "to_dict"):
        return _labelled(value)
    if not isinstance(value, type) and getattr(getattr(value, "dtype", None), "kind", None) in _NUMBER_KINDS:
        values = value.tolist()  # of numpy and pandas
        return float(values) if type(values) is type(value) else values
    if isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return to_jsonable_python(_with_lists(value), fallback=_as_json)
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if isinstance(value, set | frozenset):  # the order of a set differs between processes
        try:
            return sorted(value)
        except TypeError:  # of several kinds
            return sorted(value, key=lambda item: (type(item).__name__, str(item)))
    kind: Any = type(value)
    has_no_text = kind.__repr__ is object.__repr__ and kind.__str__ is object.__str__
    if isinstance(value, Iterator) or has_no_text:
        raise TypeError(f"the tool returned a {kind.__name__}: return a text, a number or a list")
    if hasattr(value, "dtype") and not hasattr(value.dtype, "kind") and hasattr(value, "tolist"):
        return value.tolist()  # a tensor
    return str(value)


def _labelled(value: Any) -> Any:
    """A Series or DataFrame of pandas with its labels, unless these are only numbers of rows. If labels occur
    twice, a Series is a list and a DataFrame the text of its table.
    """
    is_numbered = type(value.index).__name__ == "RangeIndex"
    if not hasattr(value, "columns"):  # a Series
        has_labels = value.index.is_unique and not is_numbered
        return _with_text_keys(value.to_dict()) if has_labels else value.tolist()
    rows = value if is_numbered else value.reset_index(allow_duplicates=True)
    return _with_text_keys(rows.to_dict("records")) if rows.columns.is_unique else value.to_string()


def _with_text_keys(value: Any) -> Any:
    """Convert the keys that JSON does not have: a member of an Enum to its value, others to text."""
    if isinstance(value, dict):
        texts = {_text_key(key): _with_text_keys(item) for key, item in value.items()}
        if len(texts) < len(value):
            raise TypeError("two keys of the result have the same text")
        return texts
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


def _text_key(key: Any) -> Any:
    key = key.value if isinstance(key, Enum) else key
    return key if isinstance(key, str | int | float | None) else str(key)


def _with_lists(value: Any) -> Any:
    """Return the fields of a model or dataclass, with sets and bytes in them as :func:`_as_json` converts
    them.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(by_alias=True)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _with_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_lists(item) for item in value]
    return _as_json(value) if isinstance(value, bytes | bytearray | set | frozenset | Iterator) else value


def tool_class(function: Callable[..., Any]) -> type[FunctionTool]:
    """Return the tool class of a function or of a wrapper of one.

    Raises ConfigError if the function cannot be called with named arguments, or if type hints or docstring do
    not describe its arguments.
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
        "element_checks": element_checks(function),
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
    """Describe why the function cannot be called with named arguments and what to do, or return ""."""
    if not name:
        return "it has no name: write a function (def) that calls it"
    if isinstance(function, functools.partial):
        return "it is a partial: write a function (def) that calls it"
    wrapped = inspect.unwrap(function)
    if inspect.isgeneratorfunction(wrapped) or inspect.isasyncgenfunction(wrapped):
        return "it is a generator: return a text or a list instead of yield"
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return "it has no signature: write a function (def) that calls it"
    for parameter in parameters:
        if isinstance(parameter.default, FieldInfo):
            return f"the default of {parameter.name} is a Field: write Annotated[..., Field(...)] = default"
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
    """Wait for the result if it is a coroutine. It runs in the loop of this process, which has a thread of
    its own, so the caller may have a running loop, for example in a notebook.
    """
    if not inspect.isawaitable(result):
        return result

    async def finish() -> tuple[Any, BaseException | None]:
        try:
            return await result, None
        # raised in the task, the last two would end the loop
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return None, error

    loop, thread = _loops.get(os.getpid(), _start_loop)
    if threading.current_thread() is thread:  # a coroutine that calls another tool blocks the loop
        with ThreadPoolExecutor(1) as pool:
            value, error = pool.submit(asyncio.run, finish()).result()
    else:
        value, error = asyncio.run_coroutine_threadsafe(finish(), loop).result()
    if error is not None:
        raise error
    return value


def _start_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="async tools")
    thread.start()
    return loop, thread


# By process, because a forked one has no threads of its parent.
_loops: SingleFlightCache[tuple[asyncio.AbstractEventLoop, threading.Thread]] = SingleFlightCache(2)
