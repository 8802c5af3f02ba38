"""TextWorld: small text adventures made on the spot (Côté et al. 2018, arXiv 1806.11532), with forks through
the package itself.

The return is the game's score over its largest; a step's reward is what the step added, so rewards add up to
the return. A game that is won or lost ends; ``max_moves`` cuts the others.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Literal

from outrider.environments.base import play_steps
from outrider.environments.scienceworld import text as scienceworld_text
from outrider.environments.textworld import games as textworld_games
from outrider.environments.textworld.environment import TextWorldEnvironment
from outrider.environments.textworld.kinds import Split
from outrider.environments.textworld.play import Game, StoryGame, walkthrough
from outrider.environments.textworld.settings import TextWorldConfig, identity
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Step, Task


class TextWorldFactory:
    """Makes environments; each owns its interpreter, so there is nothing to share but the folder of games."""

    def __init__(self, *, config: TextWorldConfig, open_game: Callable[[Split, int], Game]) -> None:
        """``open_game`` starts the game of a split and number."""
        self._config = config
        self._open_game = open_game

    def __call__(self, task: Task) -> TextWorldEnvironment:
        """A fresh environment for one episode of the task."""
        return TextWorldEnvironment(task=task, config=self._config, open_game=self._open_game)

    def close(self) -> None:
        """Nothing is held."""


class TextWorldTaskSet:
    """The TextWorld games of a config. ``open_game`` replaces the package in tests."""

    Settings = TextWorldConfig
    name = "textworld"
    stop: tuple[str, ...] = (scienceworld_text.STOP,)
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(
        self, config: TextWorldConfig, *, open_game: Callable[[Split, int], Game] | None = None
    ) -> None:
        """Make nothing."""
        self.config = config
        self._substitute = open_game

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of ``train``, ``valid`` or ``test``; needs no package and makes no game."""
        name, game = self.config.shelf().name, self.config.game.type.replace("_", " ")
        return tuple(
            Task(
                key=f"textworld/{name}/{known}/{index}",
                question=f"TextWorld {game} {index} of {known}",
                metadata={"games": name, "split": known, "index": index},
            )
            for known, index in self._keys(split)
        )

    def make(self) -> TextWorldFactory:
        """Make the games (all, or one: ``make_ahead``) and start one. Raises :class:`ToolUnavailable` or
        :class:`ConfigError`.
        """
        open_game = self._substitute or self._open
        keys = [key for split in ("train", "valid", "test") for key in self._keys(split)]
        if self._substitute is None:
            check_package()
        try:
            if self._substitute is None:
                self.config.shelf().ensure(keys if self.config.make_ahead else keys[:1])
            open_game(*keys[0]).close()
        except EnvironmentFault as error:
            raise ToolUnavailable(f"TextWorld does not run here: {error}") from error
        return TextWorldFactory(config=self.config, open_game=open_game)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The game's walkthrough, played in the episode that ``reset(seed)`` starts; None where it needs more
        than ``max_moves``.
        """
        check_package()
        shelf, key = self.config.shelf(), identity(task, self.config)
        shelf.ensure([key])
        environment = TextWorldEnvironment(task=task, config=self.config, open_game=self._open)
        try:
            environment.reset(seed)
            commands = walkthrough(shelf.story(*key))
            steps = play_steps(
                environment, [scienceworld_text.render_action(command) for command in commands]
            )
        finally:
            environment.close()
        return steps if environment.result().success else None

    def close(self) -> None:
        """Nothing is held."""

    def _keys(self, split: str) -> list[tuple[Split, int]]:
        sizes: dict[Split, int] = {
            "train": self.config.num_train,
            "valid": self.config.num_valid,
            "test": self.config.num_test,
        }
        for name, size in sizes.items():
            if name == split:
                return [(name, index) for index in range(size)]
        raise ConfigError(f"unknown split {split!r}; TextWorld has {', '.join(sizes)}")

    def _open(self, split: Split, index: int) -> Game:
        shelf = self.config.shelf()
        shelf.ensure([(split, index)])
        return StoryGame.start(shelf.story(split, index), with_commands=self.config.show_admissible)


def check_package() -> None:
    """Raises :class:`ToolUnavailable` where the package is missing or of another version, which would make
    other games.
    """
    if importlib.util.find_spec("textworld") is None:
        raise ToolUnavailable("TextWorld is not installed: pip install 'outrider[textworld]'")
    version = importlib.metadata.version("textworld")
    if version != textworld_games.PACKAGE_VERSION:
        raise ToolUnavailable(
            f"TextWorld {version} found, the games are of {textworld_games.PACKAGE_VERSION}"
        )
