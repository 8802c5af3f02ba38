"""Which ALFWorld games there are, and by which rules they are played."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Protocol

from pydantic import Field, model_validator

from outrider.environments.alfworld import play as published
from outrider.environments.alfworld.made_games import (
    SPLITS,
    TASK_TYPES,
    Scene,
    Split,
    TaskType,
    make_scene,
    shortest_plan,
)
from outrider.environments.alfworld.play import Game, OfflineGame
from outrider.environments.base import EnvironmentSettings
from outrider.errors import ConfigError, DataError, EnvironmentFault, ToolUnavailable
from outrider.types import Json, Task

# Seconds that the package's engine may take to load a kitchen; loads and steps wait for one another.
_LOAD_S: Final = 20.0


class AlfworldConfig(EnvironmentSettings):
    """Which games are played, and by which rules. Without ``data`` they are made offline, and their scores
    compare with no published one.
    """

    starts_quickly: ClassVar[bool] = False
    input_paths: ClassVar[frozenset[str]] = frozenset({"data"})

    type: Literal["alfworld"] = "alfworld"
    task_types: Annotated[tuple[TaskType, ...], Field(min_length=1)] = TASK_TYPES
    """Games of these types; those made offline take turns in this order."""
    data: Path | None = None
    """Folder of the published games (``json_2.1.1``, which ``alfworld-download`` fetches); needs the extra
    ``alfworld``. Their texts are made by code that stands in the files: take them from nobody else.
    """
    num_train: Annotated[int, Field(ge=0)] | None = 120
    """Games of the split: so many are made, or so many of the published ones are taken (None: all)."""
    num_valid: Annotated[int, Field(ge=0)] | None = 24
    num_test: Annotated[int, Field(ge=0)] | None = 60
    game_seed: int = 0
    """Decides the games made offline. More games leave the first ones as they are."""
    max_moves: Annotated[int, Field(ge=1)] = 50
    """Commands given to the game after which an episode is cut, done or not; text without a command costs
    none.
    """
    reward_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Reward and return of a game that is won; GiGPO's released code pays 10."""
    show_admissible: bool = False
    """Append the list of commands that do something now to every observation, as agents of published scores
    are often given.
    """
    num_shown_actions: Annotated[int, Field(ge=1)] = 100

    @model_validator(mode="after")
    def _validate(self) -> "AlfworldConfig":
        sizes = {"num_train": self.num_train, "num_valid": self.num_valid, "num_test": self.num_test}
        endless = [name for name, size in sizes.items() if size is None]
        if endless and self.data is None:
            raise ValueError(f"{', '.join(endless)} none: all games there are only of published ones (data)")
        if not any(size is None or size for size in sizes.values()):
            raise ValueError("num_train, num_valid and num_test are all 0: there is nothing to play")
        if len(set(self.task_types)) < len(self.task_types):
            raise ValueError("task_types holds a type twice")
        return self

    def waiting_s(self, num_concurrent: int) -> float:
        """Steps of the package's engine take turns; those of games made offline do not wait."""
        return 0.0 if self.data is None else _LOAD_S * num_concurrent

    def num_tasks(self, split: Split) -> int | None:
        """Games of a split; None for all that there are."""
        return {"train": self.num_train, "valid": self.num_valid, "test": self.num_test}[split]

    @property
    def name(self) -> str:
        """Name of these games in task keys. Sizes and rules of play change no game."""
        return "published" if self.data is not None else f"offline-{self.game_seed}"


# Which published games lie in a folder (``json_2.1.1``, which ``alfworld-download`` fetches).


FOLDERS: Final[dict[Split, str]] = {"train": "train", "valid": "valid_seen", "test": "valid_unseen"}
"""Folder of each split: published scores are those of ``valid_seen`` and ``valid_unseen``."""
GAME: Final = "game.tw-pddl"
_TASK: Final = re.compile(r"Your task is to: (.+?)\.?\"")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """One game on disk. ``name``: its folder below that of its split; ``digest``: SHA-256 of the file."""

    path: Path
    name: str
    task_type: TaskType
    task: str
    digest: str


def find_games(
    data: Path, split: Split, task_types: Sequence[TaskType], limit: int | None
) -> tuple[PublishedFile, ...]:
    """The first ``limit`` games of a split, by name. As in the package, those count that are marked solvable
    and neither need a movable receptacle nor a slice. Raises DataError where there is none.
    """
    root = data / FOLDERS[split]
    games: list[PublishedFile] = []
    for file in sorted(root.rglob("traj_data.json")):
        if limit is not None and len(games) >= limit:
            break
        name = file.parent.relative_to(root).as_posix()
        if "movable" in name or "Sliced" in name or not file.with_name(GAME).is_file():
            continue
        if game := _read(file, name, task_types):
            games.append(game)
    if not games and limit != 0:
        raise DataError(
            f"{root} holds no solvable ALFWorld game of these types (alfworld-download brings them)"
        )
    return tuple(games)


def _read(file: Path, name: str, task_types: Sequence[TaskType]) -> PublishedFile | None:
    path = file.with_name(GAME)
    try:
        task_type = json.loads(file.read_bytes())["task_type"]
        content = path.read_bytes()
        game = json.loads(content)
        task = _TASK.search(game["grammar"])
        is_match = task_type in task_types and bool(game.get("solvable"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file.parent} is no ALFWorld game: {type(error).__name__}: {error}") from error
    if not is_match:
        return None
    return PublishedFile(
        path=path,
        name=name,
        task_type=task_type,
        task=task[1] if task else name,
        digest=hashlib.sha256(content).hexdigest(),
    )


# The two sources of games: those that are made here and those on disk. Which tasks there are, and how one is
# started and solved.


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
        games = find_games(self._data, split, config.task_types, config.num_tasks(split))
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
        folder = self._data / FOLDERS[task_split(task, self._config)]
        return folder / str(task.metadata["name"]) / GAME


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
