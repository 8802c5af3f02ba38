"""Python functions as tools: type hints and docstring become the JSON schema.

In a recipe ``tools = ["my_tools:add"]`` names a function ``add`` of the module ``my_tools``.
"""

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from outrider.errors import ConfigError, ToolFault
from outrider.tools.base import ToolOutput
from outrider.types import Json, ToolSchema


class CalledByText(ABC):
    """A tool with a schema, which a call by tag reaches too."""

    name: str
    usage: str
    schema: ToolSchema

    def run_text(self, text: str) -> ToolOutput:
        """A call by tag: the one text argument, or a JSON object of arguments."""
        if (only := _text_argument(self.schema)) is not None:
            return self.run_call({only: text})
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return ToolOutput(text=f"Write the arguments as a JSON object: {self.usage}", failed=True)
        return self.run_call(arguments)

    @abstractmethod
    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """One call with named arguments. Raises ToolFault."""


class FunctionTool(CalledByText):
    """A tool around a function, called in this process and from several threads at once.

    What it returns is shown (text as it is, all else as JSON); what it raises is told to the policy in one
    line, except ToolFault, which is nobody's turn.
    """

    function: ClassVar[Callable[..., Any]]

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
    described = {"name": name, "description": schema["description"], "parameters": parameters}
    fields = {
        "function": staticmethod(function),
        "name": name,
        "usage": usage_line(described),
        "schema": described,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
    }
    return type(name, (FunctionTool,), fields)


def usage_line(schema: ToolSchema) -> str:
    """What the system prompt says of a tool that is called by tag."""
    name, properties = schema["name"], schema["parameters"]["properties"]
    example = _text_argument(schema) or json.dumps(dict.fromkeys(properties, "..."))
    first = " ".join(str(schema["description"]).split()).rstrip(".")
    return f"Write <{name}>{example}</{name}> for this: {first}."


def _text_argument(schema: ToolSchema) -> str | None:
    """The name of the one argument of a tool that has no other, where it is a text."""
    properties = schema["parameters"]["properties"]
    only = next(iter(properties)) if len(properties) == 1 else None
    return only if only is not None and properties[only].get("type") == "string" else None
