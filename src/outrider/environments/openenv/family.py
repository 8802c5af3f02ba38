"""Environments behind OpenEnv servers: ``environment.type = "openenv"``."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from outrider.environments.expert_turns import ExpertTurns
from outrider.environments.openenv.settings import OpenEnvConfig
from outrider.environments.scienceworld.text import STOP
from outrider.environments.seeds import seed_of
from outrider.errors import ToolUnavailable
from outrider.types import Step, Task

if TYPE_CHECKING:
    from outrider.environments.openenv.asking import Described
    from outrider.environments.openenv.environment import Contact, OpenEnvEnvironment
    from outrider.environments.openenv.server import Server


class OpenEnvFactory:
    """Makes environments, and owns the server where it was started here."""

    def __init__(self, contact: "Contact") -> None:
        self._contact = contact

    def __call__(self, task: Task) -> "OpenEnvEnvironment":
        """A fresh episode of the task. Raises :class:`ConfigError` for a task of another environment."""
        from outrider.environments.openenv.environment import OpenEnvEnvironment

        return OpenEnvEnvironment(contact=self._contact, seed=seed_of(task, self._contact.name))

    def close(self) -> None:
        """Kill the server that was started here; may be called twice."""
        self._contact.server.close()


class OpenEnvFamily:
    """The seeds of one server."""

    Settings = OpenEnvConfig
    name = "openenv"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True
    stop = (STOP,)

    def __init__(self, config: OpenEnvConfig) -> None:
        """Start and ask nothing."""
        self.config = config
        self._described: Described | None = None
        self._asked: Server | None = None  # started to ask it; the next factory takes it over
        self._expert: ExpertTurns[OpenEnvEnvironment] = ExpertTurns(
            config.expert, self.make, lambda environment, solve, seed: environment.solved(solve)
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed of ``train``, ``valid`` or ``test``. They name the server and its version, which
        may play other games: a resumed run refuses another one. Raises :class:`ToolUnavailable` where the
        server does not answer.
        """
        if self._described is None:
            self._described = self._ask()
        found = self._described
        return self.config.seed_tasks(split, found.name, {"server_version": found.version})

    def make(self) -> OpenEnvFactory:
        """Try the server. Raises :class:`ToolUnavailable` or :class:`ConfigError`."""
        from outrider.environments.openenv.server import server_of
        from outrider.environments.openenv.trying import tried

        _require_package()
        server, self._asked = self._asked or server_of(self.config), None
        try:
            return OpenEnvFactory(tried(server, self.config))
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
        server, self._asked = self._asked, None
        if server is not None:
            server.close()

    def _ask(self) -> "Described":
        from outrider.environments.openenv.server import server_of
        from outrider.environments.openenv.trying import asked

        _require_package()
        if self._asked is None:
            self._asked = server_of(self.config)
        return asked(self._asked, self.config)


def _require_package() -> None:
    if importlib.util.find_spec("websockets") is None:
        raise ToolUnavailable("OpenEnv servers are spoken to by websockets: pip install 'outrider[openenv]'")
