"""Python functions as tools: type hints and docstring become the JSON schema.

In a recipe ``tools = ["my_tools:add"]`` names a function ``add`` of the module ``my_tools``.
"""

import asyncio
import dataclasses
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, ClassVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from outrider.errors import ConfigError, ToolFault
from outrider.tokens.calls import find_call_error
from outrider.tools.base import ToolOutput
from outrider.tools.described import text_argument, usage_line
from outrider.tools.signatures import Undescribed, describe_function, error_line
from outrider.types import Json, ToolCall, ToolSchema


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
    name = str(getattr(function, "__name__", ""))
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
