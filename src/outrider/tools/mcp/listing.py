"""What a server says of itself: its name, its version and its tools. Fixed over a run."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from outrider.errors import ConfigError, ToolUnavailable
from outrider.plugins.origin import Origin
from outrider.tokens.calls import find_schema_flaw
from outrider.tokens.calls.schemas import Arguments
from outrider.tools.described import usage_line
from outrider.types import ToolSchema

if TYPE_CHECKING:
    from outrider.tools.mcp.settings import McpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """A tool: ``listed_name`` is the server's own name, the schema has the tag's name."""

    listed_name: str
    schema: ToolSchema

    @property
    def name(self) -> str:
        """The tag name."""
        return str(self.schema["name"])

    @property
    def usage(self) -> str:
        """The line of the system prompt."""
        return usage_line(self.schema)

    def digest(self) -> str:
        """SHA-256 (hex) of all that a policy is told."""
        return hashlib.sha256(json.dumps(self.schema, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The tools that a run takes of a server, by tag name and in order."""

    server: str
    version: str
    tools: Mapping[str, ListedTool]


def select_tools(settings: "McpConfig", *, server: str, version: str, tools: Mapping[str, Any]) -> Listing:
    """What a run takes of all ``tools`` (the client's own objects, by name)."""
    names = settings.only or tuple(tools)
    if missing := [name for name in names if name not in tools]:
        raise ToolUnavailable(
            f"MCP server {settings.name} has no tool {missing[0]!r}: it has {', '.join(tools) or 'none'}"
        )
    if not names:
        raise ToolUnavailable(f"MCP server {settings.name} has no tool")
    listed = [ListedTool(listed_name=name, schema=_schema(settings, name, tools[name])) for name in names]
    tools_by_tag = {tool.name: tool for tool in listed}
    if len(tools_by_tag) < len(listed):
        duplicate = next(tool for tool in listed if tools_by_tag[tool.name] is not tool)
        raise ConfigError(
            f"MCP server {settings.name}: {duplicate.listed_name!r} and {tools_by_tag[duplicate.name].listed_name!r} are "
            f"both the tag {duplicate.name!r}: choose one of them with only"
        )
    return Listing(server=server, version=version, tools=tools_by_tag)


def tool_tag(settings: "McpConfig", name: str) -> str:
    """The tag of a server's tool: lower case, and ``_`` for what a tag cannot have."""
    return settings.prefix + re.sub(r"[^a-z0-9_]", "_", name.lower())


def _schema(settings: "McpConfig", name: str, tool: Any) -> ToolSchema:
    """What is told of a tool. Raises ConfigError for arguments of which no template can tell."""
    # a server may write null for what is not there; of $schema a policy has no use
    parameters = {
        key: value for key, value in tool.input_schema.items() if value is not None and key != "$schema"
    }
    if flaw := find_schema_flaw(parameters):
        raise ConfigError(
            f"MCP server {settings.name}: the schema of {name!r} cannot be told to a model: {flaw}: "
            "leave the tool out with only"
        )
    parameters.setdefault("type", "object")
    declared = Arguments.from_schema({"parameters": parameters})
    properties, required = declared.properties, list(declared.required)
    if "$ref" in parameters and properties:  # they are listed below
        del parameters["$ref"]
    if "properties" not in tool.input_schema and not properties and not declared.is_closed:
        parameters.setdefault("additionalProperties", {})
    if required and required != parameters.get("required"):
        parameters["required"] = required
    # Templates list the properties at the top. A schema may also be true or false: anything, nothing.
    parameters["properties"] = {
        key: value if isinstance(value, dict) else {} for key, value in properties.items()
    }
    description = tool.description or tool.title or f"The tool {tool.name}."
    text = " ".join(description.split())
    return {"name": tool_tag(settings, name), "description": text, "parameters": parameters}


def origins(settings: "McpConfig", listing: Listing) -> dict[str, Origin]:
    """For a run's record: the server and its list in words, its script and each tool as digests."""
    target = settings.url or settings.script or settings.command or ""
    label = f"{listing.server} {listing.version}".strip()
    records = {
        settings.name: Origin(
            target=target, package=f"MCP server {listing.server}", version=listing.version, digest=label
        ),
        f"{settings.name}.tools": Origin(target=target, digest=", ".join(listing.tools)),
    }
    if settings.script is not None:
        path, script = settings.script_path().absolute(), PurePath(settings.script)
        num_up = 0 if script.is_absolute() else len(script.parts) - 1
        records[f"{settings.name}.script"] = Origin(
            target=settings.script,
            file=str(path),
            folder=str(path.parents[num_up]),
            digest=hashlib.sha256(path.read_bytes()).hexdigest(),
        )
    tools = listing.tools.items()
    return records | {
        f"{settings.name}.{tag}": Origin(target=target, digest=tool.digest()) for tag, tool in tools
    }
