"""ALFWorld: household tasks as text games (Shridhar et al. 2021, arXiv 2010.03768), made offline or
published.

Six types: put a thing somewhere, look at it under a lamp, put it there clean, hot or cool, or put two there.
A game that is won pays 1 at its end, else 0. Games made offline come from the package's floor plans, rules
and texts; the published ones are played by the package itself.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from outrider.environments.alfworld.environment import AlfworldEnvironment
from outrider.environments.alfworld.floor_plans import Split
from outrider.environments.alfworld.games import Games, OfflineGames, PublishedGames, known_split
from outrider.environments.alfworld.published import Engine
from outrider.environments.alfworld.settings import AlfworldConfig
from outrider.environments.base import play_steps
from outrider.environments.scienceworld import text as scienceworld_text
from outrider.types import Step, Task


class AlfworldFactory:
    """Makes environments; what they share (floor plans, made games) does not change."""

    def __init__(self, config: AlfworldConfig, games: Games) -> None:
        """``games`` starts those of tasks."""
        self._config = config
        self._games = games

    def __call__(self, task: Task) -> AlfworldEnvironment:
        """A fresh episode of the task. Raises :class:`ConfigError` for a task of other games."""
        return AlfworldEnvironment(config=self._config, open_game=self._games.opener(task))

    def close(self) -> None:
        """Nothing is held."""


class AlfworldTaskSet:
    """The ALFWorld games of a config. ``new_engine`` replaces the package in tests."""

    Settings = AlfworldConfig
    name = "alfworld"
    stop: tuple[str, ...] = (scienceworld_text.STOP,)
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: AlfworldConfig, *, new_engine: Callable[[], Engine] | None = None) -> None:
        """Make and read nothing."""
        self.config = config
        self._games: Games = (
            OfflineGames(config) if config.data is None else PublishedGames(config, config.data, new_engine)
        )
        self._listed: dict[Split, tuple[Task, ...]] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of ``train``, ``valid`` or ``test``. A task's ``digest`` is that of its whole game,
        so that the hash of a panel freezes the games. Raises DataError where published games are missing.
        """
        known = known_split(split)
        if known not in self._listed:
            self._listed[known] = self._games.tasks(known)
        return self._listed[known]

    def make(self) -> AlfworldFactory:
        """Start one of the published games, where they are played. Raises :class:`ToolUnavailable`."""
        self._games.check()
        return AlfworldFactory(self.config, self._games)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The planner's commands, played in the episode that ``reset(seed)`` starts; None where they need
        more than ``max_moves``. On games made offline no plan is shorter.
        """
        environment = AlfworldEnvironment(config=self.config, open_game=self._games.opener(task))
        try:
            environment.reset(seed)
            texts = [scienceworld_text.render_action(command) for command in self._games.plan(task)]
            steps = play_steps(environment, texts)
        finally:
            environment.close()
        return steps if environment.result().success else None

    def close(self) -> None:
        """Nothing is held."""
