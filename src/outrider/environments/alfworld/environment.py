"""ALFWorld: household tasks as text games (Shridhar et al. 2021, arXiv 2010.03768).

There are six task types: put an object somewhere, examine it under a lamp, put it somewhere clean, hot or
cool, or put two there. A game that is won has the return 1, any other 0. Games made offline use the package's
floor plans, rules and texts; the published ones run in the package's engine.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.alfworld import made_games as texts
from outrider.environments.alfworld.made_games import (
    PUT,
    TASK_TYPES,
    VERBS,
    Scene,
    State,
    TaskType,
    apply,
    commands,
    is_reached,
    make_scene,
    put_command,
    shortest_plan,
)
from outrider.environments.base import (
    SPLITS,
    Split,
    known_split,
    require_tasks,
    split_size,
)
from outrider.environments.text_games import Game, Reply, TextGame
from outrider.environments.window import WindowedSettings
from outrider.errors import ConfigError, DataError, EnvironmentFault, ToolUnavailable
from outrider.types import Task

PACKAGE_VERSION: Final = "0.4.2"
# The package's text parsers are shared by all games of a process and are not re-entrant. While its translator
# reads a game, it redirects the process's output and replaces its arguments.
_ENGINE: Final = threading.Lock()


class OfflineGame:
    """A game of :mod:`outrider.environments.alfworld.made_games`, in pure Python."""

    max_score = 1

    def __init__(self, scene: Scene, state: State | None = None) -> None:
        self.scene = scene
        self.state = state or State(locations=dict(scene.locations))
        self.opening = texts.opening(scene)

    def act(self, command: str) -> Reply:
        known_command = commands(self.scene, self.state).get(command)
        if known_command is None:
            return Reply(text=texts.NOTHING_HAPPENS, refused=True)
        apply(self.scene, self.state, known_command)
        return Reply(
            text=texts.feedback(self.scene, self.state, known_command), won=is_reached(self.scene, self.state)
        )

    def commands(self) -> tuple[str, ...]:
        return tuple(commands(self.scene, self.state))

    def copy(self) -> "OfflineGame":
        return OfflineGame(self.scene, self.state.copy())

    def close(self) -> None:
        """Nothing to release."""


class Engines:
    """A pool of engines: TextWorld's environments for PDDL games, with ``load``, ``reset`` and ``step``. Each
    loads its own copy of the planner's library, which a process never unloads, so engines are reused.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        """``make`` takes ``with_plan``: whether the engine also plans."""
        self._make = make
        self._free: dict[bool, list[Any]] = {False: [], True: []}

    def borrow(self, *, with_plan: bool = False) -> Any:
        try:
            return self._free[with_plan].pop()
        except IndexError:
            return self._make(with_plan=with_plan)

    def release(self, engine: Any, *, with_plan: bool = False) -> None:
        self._free[with_plan].append(engine)


class PublishedGame:
    """A game file in an engine of its own. All engines of a process take turns."""

    max_score = 1

    def __init__(self, path: Path, engines: Engines) -> None:
        """Load and start the game. Raises EnvironmentFault."""
        self._path = path
        self._engines = engines
        self._acted: list[str] = []
        with _turn(f"cannot start the game {path}"):
            self._engine: Any = engines.borrow()
            self._engine.load(str(path))
            state = self._engine.reset()
            self.opening = str(state["feedback"])
            self._commands = tuple(sorted(state["admissible_commands"]))

    def act(self, command: str) -> Reply:
        refused = command not in self._commands
        with _turn("the game broke"):
            # Checked inside the lock: another thread may have closed the game while this one waited.
            engine, self._engine = self._engine, None
            if engine is None:
                raise RuntimeError("it is closed")
            state, _, _ = engine.step(command)
            reply = Reply(text=str(state["feedback"]), won=bool(state["won"]), refused=refused)
            self._commands = tuple(sorted(state["admissible_commands"]))
            self._engine = engine
        self._acted.append(command)
        return reply

    def commands(self) -> tuple[str, ...]:
        return self._commands

    def copy(self) -> "PublishedGame":
        """Replay the commands in another engine: the games are deterministic."""
        twin = PublishedGame(self._path, self._engines)
        for command in self._acted:
            twin.act(command)
        return twin

    def close(self) -> None:
        """Return the engine to the pool, unless it broke or a thread is using it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._engines.release(engine)


def plan_game(path: Path, engines: Engines) -> tuple[str, ...]:
    """The plan of the engine's own planner; empty if it finds none. Raises EnvironmentFault."""
    with _turn(f"cannot plan the game {path}"):
        engine = engines.borrow(with_plan=True)
        engine.load(str(path))
        plan = tuple(engine.reset()["policy_commands"])
        engines.release(engine, with_plan=True)
        return plan


def new_engine(*, with_plan: bool = False) -> Any:
    """The package's engine, with object names as players see them. Raises ToolUnavailable."""
    check_package()
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld import EnvInfos
    from textworld.envs import PddlEnv

    infos = EnvInfos(feedback=True, won=True, admissible_commands=True, policy_commands=with_plan)
    return AlfredDemangler(PddlEnv(infos))


def check_package() -> None:
    """Raises ToolUnavailable if the package or its planner is missing or has another version."""
    missing = [
        name for name in ("alfworld", "textworld", "fast_downward") if not importlib.util.find_spec(name)
    ]
    if missing:
        raise ToolUnavailable(
            f"the published ALFWorld games need {', '.join(missing)}: pip install 'outrider[alfworld]'"
        )
    version = importlib.metadata.version("alfworld")
    if version != PACKAGE_VERSION:
        raise ToolUnavailable(f"ALFWorld {version} found, but its games need version {PACKAGE_VERSION}")


@contextmanager
def _turn(operation: str) -> Iterator[None]:
    with _ENGINE:
        argv = sys.argv  # replaced by the planner's translator
        try:
            yield
        except ToolUnavailable:
            raise
        # The packages raise all kinds of exceptions; the run must survive each of them.
        except Exception as error:
            raise EnvironmentFault(f"ALFWorld: {operation}: {type(error).__name__}: {error}") from error
        finally:
            sys.argv = argv


_LOG: Final = logging.getLogger(__name__)
# Seconds that the package's engine may take to load a kitchen; loads and steps wait for one another.
_LOAD_S: Final = 20.0
_ENGINES: Final[dict[Callable[..., Any], Engines]] = {}  # the pools of this process, by what makes an engine
FOLDERS: Final[dict[Split, str]] = {"train": "train", "valid": "valid_seen", "test": "valid_unseen"}
"""Folder of each split: published scores are those of ``valid_seen`` and ``valid_unseen``."""
GAME: Final = "game.tw-pddl"
_GOAL: Final = "Your task is to: "
_TASK: Final = re.compile(rf"{_GOAL}(.+?)\.?\"")
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


class AlfworldConfig(WindowedSettings):
    """Which games are played, and by which rules. Without ``data`` the games are made offline, and their
    scores are not comparable with published ones.
    """

    starts_quickly: ClassVar[bool] = False
    own_prompt: ClassVar[str] = "alfworld"
    input_paths: ClassVar[frozenset[str]] = frozenset({"data"})

    type: Literal["alfworld"] = "alfworld"
    task_types: Annotated[tuple[TaskType, ...], Field(min_length=1)] = TASK_TYPES
    """Types of the games. Games made offline alternate between them in this order."""
    data: Path | None = None
    """Folder of the published games (``json_2.1.1``; ``outrider data get alfworld`` downloads it); needs the
    extra ``alfworld``. The files contain code that is executed: use only files from a source that you trust.
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
    """Most commands in the list of ``show_admissible``."""

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

    def game_file(self, task: Task) -> Path:
        """The file of a published game."""
        assert self.data is not None
        return self.data / FOLDERS[self.task_split(task)] / str(task.metadata["name"]) / GAME


class AlfworldEnvironment(TextGame):
    """One episode. The return is ``reward_scale`` for a game that is won, else 0. ``shared`` are the engines
    of published games.
    """

    Settings = AlfworldConfig
    name = "alfworld"
    title = "ALFWorld"
    prompt = PROMPT
    reported = ("num_moves", "num_turns", "num_invalid", "num_refused", "cut_by_moves")
    new_engine: ClassVar[Callable[..., Any]] = staticmethod(new_engine)
    """Makes an engine; tests replace it."""

    @classmethod
    def tasks(cls, settings: AlfworldConfig, split: str) -> Sequence[Task]:
        """The tasks of a split. Raises DataError if the published games are missing."""
        known = known_split(split, "ALFWorld")
        size = split_size(settings, known)
        if settings.data is None:
            return tuple(made_task(settings, known, number) for number in range(size or 0))
        tasks = tuple(islice(published_tasks(settings, known), size))
        if not tasks and size != 0:
            raise DataError(
                f"{settings.data / FOLDERS[known]} contains no solvable ALFWorld game of these types; run "
                "outrider data get alfworld"
            )
        return tasks

    @classmethod
    def open_shared(cls, settings: AlfworldConfig) -> Engines | None:
        """The engines of published games, after one of the games was started. Raises ToolUnavailable."""
        if settings.data is None:
            return None
        split = next(split for split in SPLITS if split_size(settings, split) != 0)
        one = settings.model_copy(update={f"num_{split}": 1})
        # Task sets come and go, but a process never unloads an engine.
        engines = _ENGINES.setdefault(cls.new_engine, Engines(cls.new_engine))
        try:
            PublishedGame(settings.game_file(cls.tasks(one, split)[0]), engines).close()
        except EnvironmentFault as error:
            raise ToolUnavailable(f"ALFWorld does not run here: {error}") from error
        return engines

    def open_game(self) -> Game:
        if self.settings.data is None:
            return OfflineGame(made_scene(self.settings, self.task))
        return PublishedGame(self.settings.game_file(self.task), self.shared)

    def solution(self) -> Sequence[str]:
        if self.settings.data is None:
            return shortest_plan(made_scene(self.settings, self.task))
        return plan_game(self.settings.game_file(self.task), self.shared)

    @property
    def task_text(self) -> str:
        """The goal, as the opening names it."""
        return self.opening.partition(_GOAL)[2].strip()

    @property
    def value(self) -> float:
        return float(self.settings.reward_scale * self._reply.won)

    def classify(self, command: str, reply: Reply) -> tuple[bool, bool]:
        """The game gives the same reply to an unknown verb and to a command that is not possible now."""
        invalid = reply.refused and command.partition(" ")[0] not in VERBS
        return invalid, reply.refused and not invalid


def made_task(settings: AlfworldConfig, split: Split, number: int) -> Task:
    """Task ``number`` of the games made offline. ``digest`` in the metadata is a hash of the whole game."""
    types, name = settings.task_types, settings.name
    task_type, index = types[number % len(types)], number // len(types)
    scene = make_scene(settings.game_seed, split, task_type, index)
    return Task(
        key=f"alfworld/{name}/{split}/{task_type}/{index}",
        question=scene.goal.text,
        metadata={
            "games": name, "split": split, "task_type": task_type, "index": index,
            "floor_plan": scene.floor_plan, "digest": scene.digest,
        },
    )  # fmt: skip


def made_scene(settings: AlfworldConfig, task: Task) -> Scene:
    """The game of a task. Raises ConfigError for a task of other games."""
    split, index = settings.task_split(task), task.metadata.get("index")
    task_type = next((known for known in settings.task_types if known == task.metadata["task_type"]), None)
    if task_type is None or not isinstance(index, int):
        raise ConfigError(f"{task.key} is of no type in environment.task_types")
    scene = make_scene(settings.game_seed, split, task_type, index)
    if scene.digest != task.metadata.get("digest"):
        raise ConfigError(f"{task.key} is another game than the one that is made here")
    return scene


def published_tasks(settings: AlfworldConfig, split: Split) -> Iterator[Task]:
    """The published games of a split, sorted by folder name. As in the package, games that are not marked as
    solvable and those with a movable receptacle or a slice are left out.
    """
    assert settings.data is not None
    root = settings.data / FOLDERS[split]
    is_reported = False
    for file in sorted(root.rglob("traj_data.json")):
        name = file.parent.relative_to(root).as_posix()
        if "movable" in name or "Sliced" in name or not file.with_name(GAME).is_file():
            continue
        try:
            task_type = json.loads(file.read_bytes())["task_type"]
            content = file.with_name(GAME).read_bytes()
            game = json.loads(content)
            goal = _TASK.search(game["grammar"])
            is_match = task_type in settings.task_types and bool(game.get("solvable"))
            put = put_command(game["grammar"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file.parent} is no ALFWorld game: {type(error).__name__}: {error}") from error
        if put not in (None, PUT) and not is_reported:
            is_reported = True
            _LOG.warning(
                "%s: games of this release put a thing down with %r, and the prompt names %r: examples "
                "and prompts for one release fail in the other (outrider data check)",
                root, put, PUT,
            )  # fmt: skip
        if is_match:
            yield Task(
                key=f"alfworld/published/{split}/{name}",
                question=goal[1] if goal else name,
                metadata={
                    "games": settings.name, "split": split, "task_type": task_type, "name": name,
                    "digest": hashlib.sha256(content).hexdigest(),
                },
            )  # fmt: skip
