"""What the episodes of one run share: the server that programs ask, and whoever starts them."""

from collections.abc import Callable

from outrider.environments.agent.environment import AgentEnvironment
from outrider.environments.agent.launched import ProgramRunner
from outrider.environments.agent.settings import ProgramConfig
from outrider.errors import ToolUnavailable
from outrider.types import Task


class ProgramFactory:
    """Owns the server that programs speak to and the process that runs them."""

    def __init__(self, config: ProgramConfig, launch: Callable[[], ProgramRunner]) -> None:
        """Raises ToolUnavailable where the server's packages are not there, and what ``launch`` raises."""
        try:
            from outrider.environments.agent.gateway import Gateway
        except ImportError as error:
            raise ToolUnavailable("agent programs need a server: pip install 'outrider[agent]'") from error
        self._config = config
        self._programs = launch()
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
