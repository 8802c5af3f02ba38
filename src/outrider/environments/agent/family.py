"""Agent programs that speak to an OpenAI endpoint: ``environment.type = "agent"``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from outrider.environments.agent.factory import ProgramFactory
from outrider.environments.agent.named import load_function
from outrider.environments.agent.programs import Programs
from outrider.environments.agent.settings import AgentConfig
from outrider.environments.tool_qa.datasets import load_tasks
from outrider.errors import DataError, EnvironmentFault
from outrider.types import Message, Step, Task

_MAX_EXPERT_TURNS: Final = 1000


class AgentFactory(ProgramFactory):
    """Episodes of the program that a recipe names."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ToolUnavailable where the agent cannot be loaded, or the server's packages are not there."""
        super().__init__(
            config,
            lambda: Programs(function=config.function, command=config.command, reward=config.reward),
        )


class AgentTaskSet:
    """The rows of your data sets, which programs work on."""

    Settings = AgentConfig
    name = "agent"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: AgentConfig) -> None:
        """Start nothing."""
        self.config = config
        self.stop: tuple[str, ...] = ()
        self._factory: AgentFactory | None = None
        self._answer: Callable[[Task, Sequence[Mapping[str, str]]], str] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split in file order. Raises DataError when none is configured or the data are bad."""
        dataset = {"train": self.config.train, "valid": self.config.valid, "test": self.config.test}.get(
            split
        )
        if dataset is None:
            raise DataError(f"agent: no data set is configured for the split {split!r}")
        return load_tasks(dataset, setting=f"environment.{split}")

    def make(self) -> AgentFactory:
        """Load the agent and start the server. Raises ToolUnavailable."""
        return AgentFactory(self.config)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The turns of ``expert``, played; None without one, or where they are no success. Raises
        EnvironmentFault where the function raises, or a program breaks.
        """
        if self.config.expert is None:
            return None
        if self._factory is None:
            self._factory = self.make()
        environment = self._factory(task)
        try:
            environment.reset(seed)
            steps: list[Step] = []
            while not steps or not steps[-1].is_terminal:
                text = self._expert_answer(task, environment.request.messages)
                result = environment.step(environment.read(text))
                steps.append(Step(text=text, observation=result.text, is_terminal=result.done))
                if len(steps) > _MAX_EXPERT_TURNS:
                    return None
            return steps if environment.result().success else None
        finally:
            environment.close()

    def close(self) -> None:
        """End the programs that experts were asked for; may be called twice."""
        factory, self._factory = self._factory, None
        if factory is not None:
            factory.close()

    def _expert_answer(self, task: Task, messages: Sequence[Message]) -> str:
        if self._answer is None:
            self._answer = load_function("expert", str(self.config.expert))
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self._answer(task, conversation))
        except Exception as error:  # somebody else's code
            raise EnvironmentFault(f"{self.config.expert} raised {type(error).__name__}: {error}") from error
