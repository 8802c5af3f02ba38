"""The tools of one environment under their names: one registry for calls by tag and native calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.tools.base import SchemaTool, Tool, ToolOutput
from outrider.types import ToolCall, ToolSchema

_INPUT = "input"


class Toolset:
    """Tools by name, each called with text (a tag's inside) or with named arguments (a native call).

    A tool that knows text only has one argument: its class may name it (``argument``) and say what the tool
    does (``description``).
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.names: tuple[str, ...] = tuple(self._tools)

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """What a policy is told of them, in order."""
        return tuple(tool_schema(tool) for tool in self._tools.values())

    def run_text(self, name: str, text: str) -> ToolOutput:
        """One call by tag. Raises ToolFault when the infrastructure broke."""
        return self._tools[name].run_text(text)

    def run_call(self, call: ToolCall) -> ToolOutput:
        """One native call, whose arguments were checked against the schema. Raises ToolFault when the
        infrastructure broke.
        """
        tool = self._tools[call.name]
        if isinstance(tool, SchemaTool):
            return tool.run_call(call.arguments)
        text = str(call.arguments[argument_name(tool)])
        if not text.strip():
            return ToolOutput(text=f"The argument {argument_name(tool)!r} is empty.", failed=True)
        return tool.run_text(text)

    def call_key(self, call: ToolCall) -> tuple[str, str]:
        """What makes two native calls the same one."""
        return call.name, repr(_sorted(call.arguments))

    def close(self) -> None:
        """Close the tools; may be called twice."""
        for tool in self._tools.values():
            tool.close()


def argument_name(tool: Tool) -> str:
    """The name of the one argument of a tool that knows text only."""
    return str(getattr(tool, "argument", _INPUT))


def tool_schema(tool: Tool) -> ToolSchema:
    """What a policy is told of a tool."""
    if isinstance(tool, SchemaTool):
        return tool.schema
    description = getattr(tool, "description", f"The tool {tool.name}.")
    argument = {"type": "string", "description": "What the tool is given."}
    return {
        "name": tool.name,
        "description": str(description),
        "parameters": {
            "type": "object",
            "properties": {argument_name(tool): argument},
            "required": [argument_name(tool)],
        },
    }


def _sorted(value: Any) -> object:
    if isinstance(value, Mapping):
        return sorted((key, _sorted(item)) for key, item in value.items())
    return [_sorted(item) for item in value] if isinstance(value, list) else value
