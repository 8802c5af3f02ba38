"""ALFWorld: household tasks as text games (Shridhar et al. 2021, arXiv 2010.03768).

There are six task types: put an object somewhere, examine it under a lamp, put it somewhere clean, hot or
cool, or put two there. A game that is won has the return 1, any other 0. Games made offline use the package's
floor plans, rules and texts; the published ones run in the package's engine.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.alfworld import play as published
from outrider.environments.alfworld.made_games import (
    TASK_TYPES,
    VERBS,
    Scene,
    TaskType,
    make_scene,
    shortest_plan,
)
from outrider.environments.alfworld.play import OfflineGame
from outrider.environments.base import (
    SPLITS,
    EnvironmentFactory,
    EnvironmentSettings,
    Split,
    known_split,
    require_tasks,
    split_size,
)
from outrider.environments.text_games import Game, GameEnvironment, GameTaskSet, Reply
from outrider.errors import ConfigError, DataError, EnvironmentFault, ToolUnavailable
from outrider.types import Message, Task

# Seconds that the package's engine may take to load a kitchen; loads and steps wait for one another.
_LOAD_S: Final = 20.0
FOLDERS: Final[dict[Split, str]] = {"train": "train", "valid": "valid_seen", "test": "valid_unseen"}
"""Folder of each split: published scores are those of ``valid_seen`` and ``valid_unseen``."""
GAME: Final = "game.tw-pddl"
_TASK: Final = re.compile(r"Your task is to: (.+?)\.?\"")
PROMPT: Final = (
    "You do a task in a room by typing commands, one a turn.\n"
    "You may think first. Then write exactly one command between <action> and </action>, for example "
    "<action>look</action>. The next message tells what happened.\n"
    "Commands, where RECEPTACLE and OBJECT stand for what you see, with its number (for example: open "
    "fridge 1): go to RECEPTACLE, open RECEPTACLE, close RECEPTACLE, take OBJECT from RECEPTACLE, move "
    "OBJECT to RECEPTACLE, examine RECEPTACLE, examine OBJECT, use OBJECT, heat OBJECT with RECEPTACLE, "
    "clean OBJECT with RECEPTACLE, cool OBJECT with RECEPTACLE, slice OBJECT with OBJECT, inventory, look.\n"
    "You can carry one object.\n\n"
)


class AlfworldConfig(EnvironmentSettings):
    """Which games are played, and by which rules. Without ``data`` the games are made offline, and their
    scores are not comparable with published ones.
    """

    starts_quickly: ClassVar[bool] = False
    input_paths: ClassVar[frozenset[str]] = frozenset({"data"})

    type: Literal["alfworld"] = "alfworld"
    task_types: Annotated[tuple[TaskType, ...], Field(min_length=1)] = TASK_TYPES
    """Types of the games. Games made offline alternate between them in this order."""
    data: Path | None = None
    """Folder of the published games (``json_2.1.1``, which ``alfworld-download`` fetches); needs the extra
    ``alfworld``. The files contain code that is executed: use only files from a source that you trust.
    """
    num_train: Annotated[int, Field(ge=0)] | None = 120
    """Number of games of the split: so many are made, or taken from the published ones (None: all)."""
    num_valid: Annotated[int, Field(ge=0)] | None = 24
    num_test: Annotated[int, Field(ge=0)] | None = 60
    game_seed: int = 0
    """Seed of the games made offline. If you increase the number of games, the first ones stay the same."""
    max_moves: Annotated[int, Field(ge=1)] = 50
    """Limit of commands per episode, whether executed or not; text without a command does not count."""
    reward_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Reward and return of a game that is won; GiGPO's released code uses 10."""
    show_admissible: bool = False
    """Append the list of possible commands to every observation, as often done for published scores."""
    num_shown_actions: Annotated[int, Field(ge=1)] = 100

    @model_validator(mode="after")
    def _validate(self) -> "AlfworldConfig":
        unlimited = [f"num_{split}" for split in SPLITS if split_size(self, split) is None]
        if unlimited and self.data is None:
            raise ValueError(f"{', '.join(unlimited)}: none means all published games; set data")
        require_tasks(self)
        if len(set(self.task_types)) < len(self.task_types):
            raise ValueError("task_types contains a type twice")
        return self

    def waiting_s(self, num_concurrent: int) -> float:
        """The package's engines take turns; games made offline do not wait."""
        return 0.0 if self.data is None else _LOAD_S * num_concurrent

    @property
    def name(self) -> str:
        """Name of these games in task keys. Sizes and rules of play do not change a game."""
        return "published" if self.data is not None else f"offline-{self.game_seed}"

    def task_split(self, task: Task) -> Split:
        """The split of a task of these games. Raises ConfigError for a task of other games."""
        if task.metadata.get("games") != self.name:
            raise ConfigError(f"{task.key} is no task of the ALFWorld games {self.name}")
        return known_split(str(task.metadata["split"]), "ALFWorld")


class OfflineGames:
    """Games made from floor plans, in pure Python. Methods raise ConfigError for a task of other games."""

    def __init__(self, config: AlfworldConfig) -> None:
        self._config = config

    def tasks(self, split: Split) -> tuple[Task, ...]:
        """The tasks of a split. ``digest`` in the metadata is a hash of the whole game."""
        types, name = self._config.task_types, self._config.name
        tasks = []
        for number in range(split_size(self._config, split) or 0):
            task_type, index = types[number % len(types)], number // len(types)
            scene = make_scene(self._config.game_seed, split, task_type, index)
            tasks.append(
                Task(
                    key=f"alfworld/{name}/{split}/{task_type}/{index}",
                    question=scene.goal.text,
                    metadata={
                        "games": name, "split": split, "task_type": task_type, "index": index,
                        "floor_plan": scene.floor_plan, "digest": scene.digest,
                    },
                )
            )  # fmt: skip
        return tuple(tasks)

    def check(self) -> None:
        """Raises ToolUnavailable if a game cannot be started on this machine."""

    def opener(self, task: Task) -> Callable[[], Game]:
        """A function that starts the game of a task."""
        return partial(OfflineGame, self._scene(task))

    def plan(self, task: Task) -> tuple[str, ...]:
        """Commands that win the game."""
        return shortest_plan(self._scene(task))

    def _scene(self, task: Task) -> Scene:
        split, index = self._config.task_split(task), task.metadata.get("index")
        task_type = next(
            (known for known in self._config.task_types if known == task.metadata["task_type"]), None
        )
        if task_type is None or not isinstance(index, int):
            raise ConfigError(f"{task.key} is of no type in environment.task_types")
        scene = make_scene(self._config.game_seed, split, task_type, index)
        if scene.digest != task.metadata.get("digest"):
            raise ConfigError(f"{task.key} is another game than the one that is made here")
        return scene


class PublishedGames:
    """Game files below a folder, played by the package, with the methods of :class:`OfflineGames`.
    ``new_engine`` replaces the package in tests.
    """

    def __init__(
        self, config: AlfworldConfig, data: Path, new_engine: Callable[[], Any] | None = None
    ) -> None:
        self._config = config
        self._data = data
        self._substitute = new_engine
        self._players = published.Engines(new_engine or published.new_engine)
        self._planners = published.Engines(new_engine or partial(published.new_engine, with_plan=True))

    def tasks(self, split: Split) -> tuple[Task, ...]:
        """The first games of a split, sorted by folder name. As in the package, games that are not marked as
        solvable and those with a movable receptacle or a slice are left out. Raises DataError if none is
        left.
        """
        limit = split_size(self._config, split)
        root = self._data / FOLDERS[split]
        tasks: list[Task] = []
        for file in sorted(root.rglob("traj_data.json")):
            if limit is not None and len(tasks) >= limit:
                break
            name = file.parent.relative_to(root).as_posix()
            if "movable" in name or "Sliced" in name or not file.with_name(GAME).is_file():
                continue
            if task := self._read_task(file, split, name):
                tasks.append(task)
        if not tasks and limit != 0:
            raise DataError(
                f"{root} contains no solvable ALFWorld game of these types; run alfworld-download"
            )
        return tuple(tasks)

    def _read_task(self, file: Path, split: Split, name: str) -> Task | None:
        try:
            task_type = json.loads(file.read_bytes())["task_type"]
            content = file.with_name(GAME).read_bytes()
            game = json.loads(content)
            goal = _TASK.search(game["grammar"])
            is_match = task_type in self._config.task_types and bool(game.get("solvable"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file.parent} is no ALFWorld game: {type(error).__name__}: {error}") from error
        if not is_match:
            return None
        return Task(
            key=f"alfworld/published/{split}/{name}",
            question=goal[1] if goal else name,
            metadata={
                "games": self._config.name, "split": split, "task_type": task_type, "name": name,
                "digest": hashlib.sha256(content).hexdigest(),
            },
        )  # fmt: skip

    def check(self) -> None:
        if self._substitute is None:
            published.check_package()
        split = next(split for split in SPLITS if split_size(self._config, split) != 0)
        try:
            self.opener(self.tasks(split)[0])().close()
        except EnvironmentFault as error:
            raise ToolUnavailable(f"ALFWorld does not run here: {error}") from error

    def opener(self, task: Task) -> Callable[[], Game]:
        return partial(published.PublishedGame, self._path(task), self._players)

    def plan(self, task: Task) -> tuple[str, ...]:
        return published.plan_game(self._path(task), self._planners)

    def _path(self, task: Task) -> Path:
        return self._data / FOLDERS[self._config.task_split(task)] / str(task.metadata["name"]) / GAME


class AlfworldEnvironment(GameEnvironment):
    """One episode. The return is ``reward_scale`` for a game that is won, else 0."""

    name = "ALFWorld"
    metrics = ("num_moves", "num_turns", "num_invalid", "num_refused", "cut_by_moves")

    def __init__(self, *, config: AlfworldConfig, open_game: Callable[[], Game]) -> None:
        num_shown = config.num_shown_actions if config.show_admissible else 0
        super().__init__(open_game, max_moves=config.max_moves, num_shown=num_shown)
        self._config = config

    def reset(self, seed: int) -> Sequence[Message]:
        (message,) = super().reset(seed)
        return (Message(role="user", content=PROMPT + message.content),)

    @property
    def _value(self) -> float:
        return self._config.reward_scale * self._record.won

    def _classify(self, command: str, reply: Reply) -> tuple[bool, bool]:
        """The game gives the same reply to an unknown verb and to a command that is not possible now."""
        invalid = reply.refused and command.partition(" ")[0] not in VERBS
        return invalid, reply.refused and not invalid


class AlfworldTaskSet(GameTaskSet):
    """The ALFWorld games of a config. ``new_engine`` replaces the package in tests."""

    Settings = AlfworldConfig
    name = "alfworld"

    def __init__(self, config: AlfworldConfig, *, new_engine: Callable[[], Any] | None = None) -> None:
        self.config = config
        self._games = (
            OfflineGames(config) if config.data is None else PublishedGames(config, config.data, new_engine)
        )
        self._tasks: dict[Split, tuple[Task, ...]] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split. Raises DataError if the published games are missing."""
        known = known_split(split, "ALFWorld")
        if known not in self._tasks:
            self._tasks[known] = self._games.tasks(known)
        return self._tasks[known]

    def make(self) -> EnvironmentFactory:
        """Start one of the published games as a check. Raises ToolUnavailable."""
        self._games.check()
        return super().make()

    def environment(self, task: Task) -> AlfworldEnvironment:
        return AlfworldEnvironment(config=self.config, open_game=self._games.opener(task))

    def solution(self, task: Task) -> Sequence[str]:
        return self._games.plan(task)
