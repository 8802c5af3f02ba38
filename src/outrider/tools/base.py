"""The contract of a tool: a name, text in, text out."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from outrider.config import Settings
from outrider.tokens.tool_calls import Accepted, Arguments, accepted_values
from outrider.types import Json, ToolCall, ToolSchema


class ToolSettings(Settings):
    """Base of the settings of tools that have more to say than their keys."""

    def waiting_s(self, num_concurrent: int) -> float:
        """Seconds that a call may wait for those of so many other episodes."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutput:
    """Result of one executed call. ``failed`` marks that the call ran and reported an error of the caller's
    making (a Python exception, say); the text then says which. An error of the infrastructure is a ToolFault
    instead.
    """

    text: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """Facts for building a tool beside its own settings: those of the environment that has it."""

    environment: Any


class Tool(Protocol):
    """A tool that the policy calls by writing ``<name>input</name>``. Called from several threads at once.

    As a plug-in, a class with the tag ``name`` and the line ``usage``, which tells the policy in the system
    prompt what to write. For native calls it may say what it does (``description``) and name its one
    argument (``argument``). A Python function is a plug-in too (:mod:`outrider.tools.functions`).
    """

    @property
    def name(self) -> str:
        """The tag name, lower case."""
        ...

    def run_text(self, text: str) -> ToolOutput:
        """Execute one call. Raises ToolFault when the infrastructure broke, never for bad input."""
        ...

    def close(self) -> None:
        """Release what the tool holds; may be called twice."""
        ...


@runtime_checkable
class SchemaTool(Tool, Protocol):
    """A tool with named arguments."""

    @property
    def schema(self) -> ToolSchema:
        """Name, description and the JSON schema of its arguments."""
        ...

    def run_call(self, arguments: Mapping[str, Json]) -> ToolOutput:
        """Execute one native call, whose arguments fit the schema at the top level. Raises as
        :meth:`run_text`.
        """
        ...


class ToolGroup(ABC):
    """A plug-in that brings several tools, known only from its settings: those of an MCP server, say."""

    @classmethod
    @abstractmethod
    def lines(cls, settings: Any) -> Mapping[str, str]:
        """The line of the system prompt of every tool by its tag name, in order. May ask a server.

        Raises ToolUnavailable where that cannot be told.
        """

    @classmethod
    def names(cls, settings: Any) -> tuple[str, ...]:
        """The tag names alone, for which a recipe may be enough."""
        return tuple(cls.lines(settings))

    @property
    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """The tools, in that order. Each is closed by whoever has it."""


# What a policy is told of a tool that it calls by tag, out of the tool's schema; and arguments to try it.


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


# The tools of one environment under their names: one registry for calls by tag and native calls.


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
