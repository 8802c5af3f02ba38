"""The tools that a recipe names: their tags, their lines of the system prompt, and the tools themselves."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias, cast

from outrider.config import Settings
from outrider.environments.base import EnvironmentSettings
from outrider.environments.tool_qa.tag_protocol import ANSWER
from outrider.errors import ConfigError
from outrider.plugins.fields import Entry
from outrider.plugins.registry import build_by_name, load_settings_class, resolve
from outrider.tools.base import Tool, ToolContext, ToolGroup, ToolSettings

ToolName: TypeAlias = Annotated[str | Settings, Entry("tools")]
"""A tool by name, with its default settings, or a table with its ``type`` and settings."""
_TAG = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = ("think", "result", "retrieve", ANSWER)


def validate_tools(tools: Sequence[ToolName]) -> None:
    """Raises ValueError for a tag name that occurs twice or is no tag, as far as that is known without asking
    a server.
    """
    plain = [entry for entry in tools if not issubclass(_tool_class(entry), ToolGroup)]
    _require_tags(tuple(name for entry in plain for name in _lines(entry)))


def tool_tags(tools: Sequence[ToolName]) -> tuple[str, ...]:
    """Tag names, in the recipe's order; a server is asked for its own. Raises ConfigError for one that occurs
    twice or is no tag, ToolUnavailable where a server cannot be asked.
    """
    names: list[str] = []
    try:
        for entry in tools:
            cls = _tool_class(entry)
            names += cls.names(_settings(entry)) if issubclass(cls, ToolGroup) else _lines(entry)
        _require_tags(names)
    except ValueError as error:
        raise ConfigError(f"environment.tools: {error}") from error
    return tuple(names)


def _require_tags(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"tools must name at least one tool, each once: {twice!r} is there twice")
    if wrong := [name for name in names if not _TAG.fullmatch(name) or name in _RESERVED]:
        raise ValueError(
            f"a tool cannot have the tag name {wrong[0]!r}: lower-case letters, "
            f"and none of {', '.join(_RESERVED)}"
        )


def load_tools(tools: Sequence[ToolName], environment: EnvironmentSettings) -> list[Tool]:
    """The tools themselves, for an environment with these settings. Raises ToolUnavailable or DataError where
    one cannot work here; none is left open then.
    """
    loaded: list[Tool] = []
    try:
        for entry in tools:
            settings = None if isinstance(entry, str) else entry
            context = ToolContext(environment=environment)
            built = build_by_name("tools", plugin_name(entry), settings, context)
            loaded += built.tools if isinstance(built, ToolGroup) else [cast(Tool, built)]
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
    """The lines of all tools, in the recipe's order; a server is asked for its own."""
    return [line for entry in tools for line in _lines(entry).values()]


def argument_lines(tools: Sequence[ToolName]) -> list[str]:
    """The lines of the tools that take arguments by name (a JSON object inside the tag), which a tag alone
    does not describe.
    """
    lines = [item for entry in tools for item in _lines(entry).items()]
    return [line for name, line in lines if f"<{name}>{{" in line]


def waiting_s(tools: Sequence[ToolName], num_concurrent: int) -> float:
    """Seconds that a call may wait for those of other episodes, whatever tool it is of."""
    own = [entry.waiting_s(num_concurrent) for entry in tools if isinstance(entry, ToolSettings)]
    return max(own, default=0.0)


def _lines(entry: ToolName) -> Mapping[str, str]:
    """The line of each tool of an entry, by tag name. Raises ValueError for a class that has none."""
    cls = _tool_class(entry)
    if issubclass(cls, ToolGroup):
        return cls.lines(_settings(entry))
    name = getattr(cls, "name", None)
    if not isinstance(name, str):
        raise ValueError(
            f"{plugin_name(entry)} is no tool: a class of one has its tag in the attribute name; a function "
            "with type hints and a docstring needs none"
        )
    return {name: usage(cls)}


def _tool_class(entry: ToolName) -> type:
    return resolve("tools", plugin_name(entry))


def _settings(entry: ToolName) -> Settings:
    return load_settings_class("tools", entry)() if isinstance(entry, str) else entry
