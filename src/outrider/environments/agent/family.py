"""Agent programs that speak to an OpenAI endpoint: ``environment.type = "agent"``."""

from collections.abc import Sequence
from typing import Literal

from outrider.environments.agent.environment import AgentEnvironment
from outrider.environments.agent.programs import Programs
from outrider.environments.agent.settings import AgentConfig
from outrider.environments.tool_qa.datasets import load_tasks
from outrider.errors import DataError, ToolUnavailable
from outrider.types import Step, Task


class AgentFactory:
    """Owns the server that programs speak to and the process that runs them."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ToolUnavailable where the agent cannot be loaded, or the server's packages are not there."""
        try:
            from outrider.environments.agent.gateway import Gateway
        except ImportError as error:
            raise ToolUnavailable("agent programs need a server: pip install 'outrider[agent]'") from error
        self._config = config
        self._programs = Programs(function=config.function, command=config.command, reward=config.reward)
        try:
            self._gateway = Gateway()
        except BaseException:
            self._programs.close()
            raise

    def __call__(self, task: Task) -> AgentEnvironment:
        """A fresh episode of the task."""
        return AgentEnvironment(
            gateway=self._gateway, programs=self._programs, config=self._config, task=task
        )

    def close(self) -> None:
        """End every program and the server; may be called twice."""
        self._programs.close()
        self._gateway.close()


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
