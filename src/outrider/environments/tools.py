r"""The ``tools`` environment: questions answered with search and Python in the papers' tag protocol (ARPO, RAPO)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from outrider.environments.datasets import DatasetConfig, load_tasks
from outrider.environments.tag_protocol import stop_strings
from outrider.environments.tool_episode import EpisodeConfig, ToolEnvironmentFactory
from outrider.errors import DataError, ToolUnavailable
from outrider.tools.base import Tool, ToolOutput
from outrider.tools.python import PythonTool, PythonToolConfig
from outrider.tools.search import SearchConfig, SearchTool, load_passages
from outrider.types import Step, Task

ToolName = Literal["search", "python"]

_TOOL_LINES: dict[ToolName, str] = {
    "search": "Write <search>a query</search> to search a text collection.",
    "python": "Write <python>code</python> to run Python; what the code prints comes back.",
}


class ToolsConfig(EpisodeConfig):
    """Tasks from your own data, with the tools that you name."""

    type: Literal["tools"] = "tools"
    train: DatasetConfig | None = None
    valid: DatasetConfig | None = None
    test: DatasetConfig | None = None
    tools: tuple[ToolName, ...] = ("search", "python")
    """Tag names of the tools in use."""
    corpus: Path | None = None
    """Passages to search: JSONL or Parquet with the columns id, title, text. Needed by the tool search."""
    search: SearchConfig = SearchConfig()
    python: PythonToolConfig = PythonToolConfig()
    prompt: Literal["full", "short", "none"] = "full"
    """The system prompt: with the whole format explained, one line for small models, or none at all."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """Your own system prompt in place of that choice."""

    @model_validator(mode="after")
    def _possible(self) -> "ToolsConfig":
        if not self.tools or len(set(self.tools)) != len(self.tools):
            raise ValueError("tools must name at least one tool, each once")
        if "search" in self.tools and self.corpus is None:
            raise ValueError("the tool search needs a corpus")
        return self


class ToolsFamily:
    """Data-set tasks with tools. Showing a step is the same as doing it: tools change nothing."""

    name = "tools"
    protocol = "inline"
    stateful = False

    def __init__(self, config: ToolsConfig) -> None:
        self.config = config
        self.stop = stop_strings(config.tools)

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split in file order; raises DataError when none is configured or the data are bad."""
        dataset = {"train": self.config.train, "valid": self.config.valid, "test": self.config.test}.get(split)
        if dataset is None:
            raise DataError(f"tools: no data set is configured for the split {split!r}")
        return load_tasks(dataset)

    def make(self) -> ToolEnvironmentFactory:
        """Load every configured tool; raises ToolUnavailable or DataError when one cannot work here."""
        tools: list[Tool] = []
        try:
            for name in self.config.tools:
                tools.append(self._load(name))
        except (ToolUnavailable, DataError):
            for tool in tools:
                tool.close()
            raise
        return ToolEnvironmentFactory(tools=tools, config=self.config, system_prompt=system_prompt(self.config))

    def close(self) -> None:
        """Nothing is held."""

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """None: data sets come without solutions."""
        return None

    def _load(self, name: ToolName) -> Tool:
        if name == "python":
            tool = PythonTool(self.config.python)
            try:
                tool.check()  # before the first rollout, and not when a program walks through an open door
            except BaseException:
                tool.close()
                raise
            return PythonAdapter(tool)
        if self.config.corpus is None:
            raise ToolUnavailable("search: no corpus is configured")
        try:
            return SearchTool(load_passages(self.config.corpus), self.config.search)
        except DataError as error:
            raise ToolUnavailable(f"search: {error}") from error


class PythonAdapter:
    """The sandboxed Python tool behind the tool contract."""

    name = "python"

    def __init__(self, tool: PythonTool) -> None:
        self._tool = tool

    def run_text(self, text: str) -> ToolOutput:
        """Run the code once. A program that prints nothing is no failure; the text says so."""
        result = self._tool.run(text)
        return ToolOutput(text=result.output or "(no output)", failed=result.status != "ok")

    def close(self) -> None:
        """Stop the tool's processes; may be called twice."""
        self._tool.close()


def system_prompt(config: ToolsConfig) -> str:
    """The system prompt that the settings choose; empty for none."""
    if config.system_prompt is not None:
        return config.system_prompt
    if config.prompt == "none":
        return ""
    box = r"\boxed{...}" if config.reward.require_boxed else "..."
    if config.prompt == "short":
        calls = " or ".join(f"<{name}>...</{name}>" for name in config.tools)
        return f"Think, use {calls}, then end with <answer>{box}</answer>."
    lines = [
        "Solve the question step by step. Put your thoughts in <think> and </think> before each action.",
        *(_TOOL_LINES[name] for name in config.tools),
        f"What a tool returns appears between <result> and </result>; never write that yourself. You have {config.max_calls} calls.",
        f"End with <answer>{box}</answer>, which holds the final answer and nothing else.",
    ]
    return "\n".join(lines)
