"""The two sources of games: those that are made here and those on disk. Which tasks there are, and how one is
started and solved.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from outrider.environments.alfworld import published, published_files
from outrider.environments.alfworld.floor_plans import SPLITS, Split
from outrider.environments.alfworld.making import make_scene
from outrider.environments.alfworld.planner import shortest_plan
from outrider.environments.alfworld.play import Game, OfflineGame
from outrider.environments.alfworld.scene import Scene
from outrider.environments.alfworld.settings import AlfworldConfig
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Json, Task


class Games(Protocol):
    """A source. Raises ConfigError for a task that is not of it."""

    def tasks(self, split: Split) -> tuple[Task, ...]:
        """The frozen list of a split. ``digest`` in the metadata is that of the whole game."""
        ...

    def check(self) -> None:
        """Raises ToolUnavailable where a game cannot be started here."""
        ...

    def opener(self, task: Task) -> Callable[[], Game]:
        """What starts the task's game anew."""
        ...

    def plan(self, task: Task) -> tuple[str, ...]:
        """Commands that win it."""
        ...


class OfflineGames:
    """Games made from floor plans, in pure Python."""

    def __init__(self, config: AlfworldConfig) -> None:
        """Make nothing."""
        self._config = config

    def tasks(self, split: Split) -> tuple[Task, ...]:
        """The types take turns."""
        types = self._config.task_types
        return tuple(
            self._task(split, index % len(types), index // len(types))
            for index in range(self._config.num_tasks(split) or 0)
        )

    def check(self) -> None:
        """They need nothing."""

    def opener(self, task: Task) -> Callable[[], Game]:
        """The scene is made once."""
        return partial(OfflineGame, self._scene(task))

    def plan(self, task: Task) -> tuple[str, ...]:
        """No plan is shorter."""
        return shortest_plan(self._scene(task))

    def _task(self, split: Split, number: int, index: int) -> Task:
        task_type = self._config.task_types[number]
        scene = make_scene(self._config.game_seed, split, task_type, index)
        scene_fields: dict[str, Json] = {
            "index": index,
            "floor_plan": scene.floor_plan,
            "digest": scene.digest,
        }
        return Task(
            key=f"alfworld/{self._config.name}/{split}/{task_type}/{index}",
            question=scene.goal.text,
            metadata={"games": self._config.name, "split": split, "task_type": task_type} | scene_fields,
        )

    def _scene(self, task: Task) -> Scene:
        split, index = task_split(task, self._config), task.metadata.get("index")
        task_type = next(
            (known for known in self._config.task_types if known == task.metadata["task_type"]), None
        )
        if task_type is None or not isinstance(index, int):
            raise ConfigError(f"{task.key} is of no type of environment.task_types")
        scene = make_scene(self._config.game_seed, split, task_type, index)
        if scene.digest != task.metadata.get("digest"):
            raise ConfigError(f"{task.key} is another game than the one that is made here")
        return scene


class PublishedGames:
    """Game files below a folder, played by the package. ``new_engine`` replaces it in tests."""

    def __init__(
        self, config: AlfworldConfig, data: Path, new_engine: Callable[[], published.Engine] | None
    ) -> None:
        """Read nothing."""
        self._config = config
        self._data = data
        self._substitute = new_engine
        self._players = published.Engines(new_engine or published.new_engine)
        self._planners = published.Engines(new_engine or partial(published.new_engine, with_plan=True))

    def tasks(self, split: Split) -> tuple[Task, ...]:
        """In the order of their folders' names. Raises DataError where there is none."""
        config = self._config
        games = published_files.find_games(self._data, split, config.task_types, config.num_tasks(split))
        return tuple(
            Task(
                key=f"alfworld/published/{split}/{game.name}",
                question=game.task,
                metadata={
                    "games": config.name, "split": split, "task_type": game.task_type,
                    "name": game.name, "digest": game.digest,
                },
            )
            for game in games
        )  # fmt: skip

    def check(self) -> None:
        """Load one game."""
        if self._substitute is None:
            published.check_package()
        split = next(split for split in SPLITS if self._config.num_tasks(split) != 0)
        try:
            self.opener(self.tasks(split)[0])().close()
        except EnvironmentFault as error:
            raise ToolUnavailable(f"ALFWorld does not run here: {error}") from error

    def opener(self, task: Task) -> Callable[[], Game]:
        """Every game that is played has an engine of its own."""
        return partial(published.PublishedGame, self._path(task), self._players)

    def plan(self, task: Task) -> tuple[str, ...]:
        """By the engine's planner."""
        return published.planned(self._path(task), self._planners)

    def _path(self, task: Task) -> Path:
        folder = self._data / published_files.FOLDERS[task_split(task, self._config)]
        return folder / str(task.metadata["name"]) / published_files.GAME


def task_split(task: Task, config: AlfworldConfig) -> Split:
    """The split of a task of these games. Raises ConfigError for one of others."""
    if task.metadata.get("games") != config.name:
        raise ConfigError(f"{task.key} is no task of the ALFWorld games {config.name}")
    return known_split(str(task.metadata["split"]))


def known_split(name: str) -> Split:
    """``name``, where it is a split. Raises ConfigError."""
    for known in SPLITS:
        if known == name:
            return known
    raise ConfigError(f"unknown split {name!r}; ALFWorld has {', '.join(SPLITS)}")
