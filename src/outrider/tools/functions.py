"""Python functions as tools: type hints and docstring become the JSON schema.

In a recipe ``tools = ["my_tools:add"]`` names a function ``add`` of the module ``my_tools``.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from outrider.errors import ConfigError, ToolFault
from outrider.tools.base import ToolOutput
from outrider.types import Json, ToolSchema


class FunctionTool:
    """A tool around a function, called in this process and from several threads at once.

    What it returns is shown (text as it is, all else as JSON); what it raises is told to the policy in one
    line, except ToolFault, which is nobody's turn.
    """

    function: ClassVar[Callable[..., Any]]
    name: ClassVar[str]
    usage: ClassVar[str]
    schema: ClassVar[ToolSchema]

    def run_text(self, text: str) -> ToolOutput:
        """A call by tag: the one text argument, or a JSON object of arguments."""
        properties = self.schema["parameters"]["properties"]
        only = next(iter(properties)) if len(properties) == 1 else None
        if only is not None and properties[only].get("type") == "string":
            return self.run_call({only: text})
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return ToolOutput(text=f"Write the arguments as a JSON object: {self.usage}", failed=True)
        return self.run_call(arguments)

    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """One call with named arguments. Raises ToolFault where the function does."""
        try:
            inspect.signature(type(self).function).bind(**arguments)
        except TypeError as error:
            return ToolOutput(text=f"{self.name}: {error}.", failed=True)
        try:
            found = type(self).function(**arguments)
            text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
        except ToolFault:
            raise
        except Exception as error:  # wrong values, nothing found, a result that JSON does not have
            reason = " ".join(str(error).split())
            return ToolOutput(text=f"{type(error).__name__}: {reason}".rstrip(": "), failed=True)
        return ToolOutput(text=text)

    def close(self) -> None:
        """A function holds nothing."""


def tool_class(function: Callable[..., Any]) -> type[FunctionTool]:
    """The plug-in's class of a function.

    Raises ConfigError where type hints or docstring do not say what its arguments are.
    """
    # The library's reading of hints and docstrings; it needs no model.
    from transformers.utils.chat_template_utils import get_json_schema

    label = f"{function.__module__}:{function.__qualname__}"
    try:
        schema = get_json_schema(function)["function"]
    except Exception as error:  # its own exceptions and whatever odd hints raise
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{label} cannot be a tool: {reason}; it needs type hints and a docstring with Args:"
        ) from error
    name = function.__name__
    parameters: dict[str, Any] = dict(schema.get("parameters") or {})
    parameters.setdefault("properties", {})
    fields = {
        "function": staticmethod(function),
        "name": name,
        "usage": _usage(name, str(schema["description"]), parameters),
        "schema": {"name": name, "description": schema["description"], "parameters": parameters},
        "__module__": function.__module__,
        "__doc__": function.__doc__,
    }
    return type(name, (FunctionTool,), fields)


def _usage(name: str, description: str, parameters: Mapping[str, Any]) -> str:
    properties = parameters["properties"]
    is_text = len(properties) == 1 and next(iter(properties.values())).get("type") == "string"
    example = next(iter(properties)) if is_text else json.dumps(dict.fromkeys(properties, "..."))
    first = " ".join(description.split()).rstrip(".")
    return f"Write <{name}>{example}</{name}> for this: {first}."
