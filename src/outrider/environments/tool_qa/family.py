r"""The ``tools`` environment: questions answered with search and Python in the papers' tag protocol (ARPO,
RAPO).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from outrider.environments.tool_qa.datasets import DatasetConfig, load_tasks
from outrider.environments.tool_qa.episode import ToolEnvironmentFactory
from outrider.environments.tool_qa.named_tools import (
    ToolName,
    argument_lines,
    load_tools,
    tool_tags,
    usages,
    validate_tools,
    waiting_s,
)
from outrider.environments.tool_qa.tag_protocol import stop_strings
from outrider.environments.tool_qa.tool_episode import EpisodeConfig
from outrider.errors import DataError
from outrider.tokens.calls import ProtocolName
from outrider.tools.python import PythonToolConfig
from outrider.tools.search import SearchConfig
from outrider.types import Step, Task


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
        """See :class:`outrider.environments.base.EnvironmentSettings`."""
        return False

    @property
    def call_format(self) -> str | None:
        """See :class:`outrider.environments.base.EnvironmentSettings`."""
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
