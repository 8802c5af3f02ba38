"""The tools that a recipe names: their tags, their lines of the system prompt, and the tools themselves."""

import re
from collections.abc import Sequence
from typing import Annotated, TypeAlias, cast

from outrider.config import Settings
from outrider.environments.base import EnvironmentSettings
from outrider.environments.tool_qa.tag_protocol import ANSWER
from outrider.plugins.fields import Entry
from outrider.plugins.registry import build_named, resolve
from outrider.tools.base import Tool, ToolContext

ToolName: TypeAlias = Annotated[str | Settings, Entry("tools")]
"""A tool by name, with its default settings, or a table with its ``type`` and settings."""
_TAG = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = ("think", "result", "retrieve", ANSWER)


def tool_tags(tools: Sequence[ToolName]) -> tuple[str, ...]:
    """Tag names, in the recipe's order. Raises ValueError for one that occurs twice or is no tag."""
    names = tuple(str(getattr(resolve("tools", plugin_name(one)), "name", "")) for one in tools)
    if len(set(names)) != len(names):
        raise ValueError("tools must name at least one tool, each once")
    if wrong := [name for name in names if not _TAG.fullmatch(name) or name in _TAKEN]:
        raise ValueError(
            f"a tool cannot have the tag name {wrong[0]!r}: lower-case letters, "
            f"and none of {', '.join(_TAKEN)}"
        )
    return names


def load_tools(tools: Sequence[ToolName], environment: EnvironmentSettings) -> list[Tool]:
    """The tools themselves, for an environment with these settings. Raises ToolUnavailable or DataError where
    one cannot work here; none is left open then.
    """
    loaded: list[Tool] = []
    try:
        for one in tools:
            settings = None if isinstance(one, str) else one
            context = ToolContext(environment=environment)
            loaded.append(cast(Tool, build_named("tools", plugin_name(one), settings, context)))
    except BaseException:
        for tool in loaded:
            tool.close()
        raise
    return loaded


def plugin_name(tool: str | Settings) -> str:
    """The plug-in's name of an entry of ``tools``."""
    return tool if isinstance(tool, str) else str(tool.type)  # type: ignore[attr-defined]


def usage(tool: type) -> str:
    """The line of a tool's class for the system prompt; a plain one where it has none."""
    name = getattr(tool, "name", "")
    return str(getattr(tool, "usage", f"Write <{name}>input</{name}> to use {name}."))


def usages(tools: Sequence[ToolName]) -> list[str]:
    """The lines of all tools, in the recipe's order."""
    return [usage(resolve("tools", plugin_name(one))) for one in tools]
