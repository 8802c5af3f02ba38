"""Environments behind OpenEnv servers: ``environment.type = "openenv"``."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from outrider.environments.expert_turns import ExpertTurns
from outrider.environments.openenv.settings import OpenEnvConfig
from outrider.environments.scienceworld.text import STOP
from outrider.environments.seeds import task_seed
from outrider.errors import ToolUnavailable
from outrider.types import Step, Task

if TYPE_CHECKING:
    from outrider.environments.openenv.asking import ServerDescription
    from outrider.environments.openenv.environment import Contact, OpenEnvEnvironment
    from outrider.environments.openenv.server import Server


class OpenEnvFactory:
    """Makes environments, and owns the server where it was started here."""

    def __init__(self, contact: "Contact") -> None:
        self._contact = contact

    def __call__(self, task: Task) -> "OpenEnvEnvironment":
        """A fresh episode of the task. Raises :class:`ConfigError` for a task of another environment."""
        from outrider.environments.openenv.environment import OpenEnvEnvironment

        return OpenEnvEnvironment(contact=self._contact, seed=task_seed(task, self._contact.name))

    def close(self) -> None:
        """Kill the server that was started here; may be called twice."""
        self._contact.server.close()


class OpenEnvTaskSet:
    """The seeds of one server."""

    Settings = OpenEnvConfig
    name = "openenv"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True
    stop = (STOP,)

    def __init__(self, config: OpenEnvConfig) -> None:
        """Start and ask nothing."""
        self.config = config
        self._described: ServerDescription | None = None
        self._server: Server | None = None  # started to ask it; the next factory takes it over
        self._expert: ExpertTurns[OpenEnvEnvironment] = ExpertTurns(
            config.expert, self.make, lambda environment, solve, seed: environment.solved(solve)
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed of ``train``, ``valid`` or ``test``. They name the server and its version, which
        may play other games: a resumed run refuses another one. Raises :class:`ToolUnavailable` where the
        server does not answer.
        """
        if self._described is None:
            self._described = self._describe_server()
        description = self._described
        return self.config.seed_tasks(split, description.name, {"server_version": description.version})

    def make(self) -> OpenEnvFactory:
        """Try the server. Raises :class:`ToolUnavailable` or :class:`ConfigError`."""
        from outrider.environments.openenv.server import make_server
        from outrider.environments.openenv.trying import check_server

        _require_package()
        server, self._server = self._server or make_server(self.config), None
        try:
            return OpenEnvFactory(check_server(server, self.config))
        except BaseException:
            server.close()
            raise

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The turns of ``expert``, played on a server of their own where one is started. See
        :class:`outrider.environments.expert_turns.ExpertTurns`.
        """
        return self._expert.steps(task, seed)

    def close(self) -> None:
        """Kill the servers that were started to ask them and for experts; may be called twice."""
        self._expert.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _describe_server(self) -> "ServerDescription":
        from outrider.environments.openenv.server import make_server
        from outrider.environments.openenv.trying import describe_server

        _require_package()
        if self._server is None:
            self._server = make_server(self.config)
        return describe_server(self._server, self.config)


def _require_package() -> None:
    if importlib.util.find_spec("websockets") is None:
        raise ToolUnavailable("OpenEnv servers are spoken to by websockets: pip install 'outrider[openenv]'")
