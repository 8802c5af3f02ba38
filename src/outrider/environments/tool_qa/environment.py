"""The tools that a recipe names: their tags, their lines of the system prompt, and the tools themselves."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, cast

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.environments.base import EnvironmentSettings
from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.environments.tool_qa.episodes import EpisodeConfig, ToolEnvironmentFactory
from outrider.environments.tool_qa.tag_protocol import ANSWER, stop_strings
from outrider.errors import ConfigError, DataError
from outrider.plugins.registry import Entry, build_by_name, load_settings_class, resolve
from outrider.tokens.call_formats import ProtocolName
from outrider.tools.base import Tool, ToolContext, ToolGroup, ToolSettings
from outrider.tools.python.tool import PythonToolConfig
from outrider.tools.search import SearchConfig
from outrider.types import Step, Task

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


# The ``tools`` environment: questions answered with search and Python in the papers' tag protocol (ARPO,
# RAPO).


class ToolsConfig(EpisodeConfig):
    """Tasks from your own data, with the tools that you name."""

    input_paths: ClassVar[frozenset[str]] = frozenset({"corpus", "pages"})

    type: Literal["tools"] = "tools"
    train: DatasetConfig | None = None
    valid: DatasetConfig | None = None
    test: DatasetConfig | None = None
    tools: tuple[ToolName, ...] = ("search", "python")
    """The tools in use: names of plug-ins, Python functions (``"my_module:add"``), or tables such as
    ``{type = "my_module:MyTool", digits = 3}``.
    """
    protocol: ProtocolName = "tags"
    """How tools are called: by the papers' tags inside one message, or natively in one of the forms that
    model families write, with a message of the role ``tool`` for every result.
    """
    corpus: Path | None = None
    """Passages to search: JSONL or Parquet with the columns id, title, text. Needed by the tool search."""
    pages: Path | None = None
    """Pages that the tool browser opens: JSONL or Parquet with ``title``, ``text`` and, where they have any,
    ``url`` and ``id``. None takes the corpus. Rows of one url (without urls: of one title) are one page.
    """
    search: SearchConfig = SearchConfig()
    python: PythonToolConfig = PythonToolConfig()
    prompt: Literal["full", "short", "none"] = "full"
    """The system prompt: with the whole format explained, one line for small models, or none at all."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """Your own system prompt in place of that choice."""

    @model_validator(mode="after")
    def _validate(self) -> "ToolsConfig":
        if not self.tools:
            raise ValueError("tools must name at least one tool, each once")
        validate_tools(self.tools)
        if "search" in self.tools and self.corpus is None:
            raise ValueError("the tool search needs a corpus")
        return self

    @property
    def has_experts(self) -> bool:
        return False

    @property
    def call_format(self) -> str | None:
        return None if self.protocol == "tags" else self.protocol

    def tool_names(self) -> tuple[str, ...]:
        """Tag names, in the recipe's order."""
        return tool_tags(self.tools)

    def waiting_s(self, num_concurrent: int) -> float:
        """Python runs so many calls at a time, and other tools say themselves; the others wait."""
        own = waiting_s(self.tools, num_concurrent)
        if "python" not in self.tools:
            return own
        return max(own, self.python.wall_seconds * math.ceil(num_concurrent / self.python.num_servers))


class ToolsTaskSet:
    """Questions of your own, with tools. Showing a step is the same as doing it: tools change nothing."""

    Settings = ToolsConfig
    name = "tools"
    protocol = "inline"
    stateful = False

    def __init__(self, config: ToolsConfig) -> None:
        self.config = config
        # a native turn ends where the policy closes its message
        self.stop = stop_strings(config.tool_names()) if config.call_format is None else ()

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split in file order; raises DataError when none is configured or the data are bad."""
        dataset = {"train": self.config.train, "valid": self.config.valid, "test": self.config.test}.get(
            split
        )
        if dataset is None:
            raise DataError(f"tools: no data set is configured for the split {split!r}")
        return load_tasks(dataset, setting=f"environment.{split}")

    def make(self) -> ToolEnvironmentFactory:
        """Load every configured tool; raises ToolUnavailable or DataError when one cannot work here."""
        return ToolEnvironmentFactory(
            tools=load_tools(self.config.tools, self.config),
            config=self.config,
            system_prompt=system_prompt(self.config),
        )

    def close(self) -> None:
        """Nothing is held."""

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """None: data sets come without solutions."""
        return None


def system_prompt(config: ToolsConfig) -> str:
    """The system prompt that the settings choose; empty for none."""
    if config.system_prompt is not None:
        return config.system_prompt
    if config.prompt == "none":
        return ""
    box = r"\boxed{...}" if config.reward.require_boxed else "..."
    if config.call_format is not None:
        return _native_prompt(config)
    if config.prompt == "short":
        calls = " or ".join(f"<{name}>...</{name}>" for name in config.tool_names())
        arguments = "".join(f" {line}" for line in argument_lines(config.tools))
        return f"Think, use {calls}, then end with <answer>{box}</answer>.{arguments}"
    lines = [
        "Solve the question step by step. Put your thoughts in <think> and </think> before each action.",
        *usages(config.tools),
        (
            "What a tool returns appears between <result> and </result>; never write that yourself. "
            f"You have {config.max_calls} calls."
        ),
        f"End with <answer>{box}</answer>, which holds the final answer and nothing else.",
    ]
    return "\n".join(lines)


def _native_prompt(config: ToolsConfig) -> str:
    """The same without the tools, which the chat template describes."""
    boxed = config.reward.require_boxed
    if config.prompt == "short":
        return r"Use the tools, then answer with \boxed{...}." if boxed else "Use the tools, then answer."
    thinking = "Put your thoughts in <think> and </think>. " if config.reward.require_think else ""
    return f"Solve the question step by step. {thinking}You have {config.max_calls} tool calls. " + (
        r"Then answer without a call; write the final answer as \boxed{...}."
        if boxed
        else "Then answer without a call; write the final answer and nothing else."
    )
