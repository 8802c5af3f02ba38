"""Agent programs that speak to an OpenAI endpoint: ``environment.type = "agent"``."""

from collections.abc import Sequence
from typing import Literal

from outrider.environments.agent.factory import ProgramFactory
from outrider.environments.agent.programs import Programs
from outrider.environments.agent.settings import AgentConfig
from outrider.environments.tool_qa.datasets import load_tasks
from outrider.errors import DataError
from outrider.types import Step, Task


class AgentFactory(ProgramFactory):
    """Episodes of the program that a recipe names."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ToolUnavailable where the agent cannot be loaded, or the server's packages are not there."""
        super().__init__(
            config,
            lambda: Programs(function=config.function, command=config.command, reward=config.reward),
        )


class AgentFamily:
    """The rows of your data sets, which programs work on."""

    Settings = AgentConfig
    name = "agent"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: AgentConfig) -> None:
        """Start nothing."""
        self.config = config
        self.stop: tuple[str, ...] = ()

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split in file order. Raises DataError when none is configured or the data are bad."""
        dataset = {"train": self.config.train, "valid": self.config.valid, "test": self.config.test}.get(
            split
        )
        if dataset is None:
            raise DataError(f"agent: no data set is configured for the split {split!r}")
        return load_tasks(dataset)

    def make(self) -> AgentFactory:
        """Load the agent and start the server. Raises ToolUnavailable."""
        return AgentFactory(self.config)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """None: nobody knows what a program would have to be told."""
        return None

    def close(self) -> None:
        """Nothing is held."""
