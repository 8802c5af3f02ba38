"""TextWorld: small generated text adventures (Côté et al. 2018, arXiv 1806.11532)."""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.base import (
    SPLITS,
    Split,
    known_split,
    require_tasks,
    split_size,
)
from outrider.environments.text_games import Game, Reply, TextGame
from outrider.environments.textworld.games import (
    PACKAGE_VERSION,
    GameSettings,
    GameShelf,
    QuestGame,
    StoryGame,
    walkthrough,
)
from outrider.environments.window import WindowedSettings
from outrider.errors import ConfigError, EnvironmentFault, ToolUnavailable
from outrider.types import Task


class TextWorldConfig(WindowedSettings):
    """Which games are made, and by which rules they are played."""

    starts_quickly: ClassVar[bool] = False
    own_prompt: ClassVar[str] = "textworld"

    type: Literal["textworld"] = "textworld"
    game: GameSettings = QuestGame()
    """Kind of game: ``quest``, ``coin_collector``, ``treasure_hunter`` or ``cooking``, with its sizes."""
    num_train: Annotated[int, Field(ge=0)] = 8
    """Number of games of the split. All have different seeds, but tiny games can still be equal, also across
    splits.
    """
    num_valid: Annotated[int, Field(ge=0)] = 2
    num_test: Annotated[int, Field(ge=0)] = 4
    game_seed: int = 0
    """Seed of the games. If you increase the number of games, the first ones stay the same."""
    max_moves: Annotated[int, Field(ge=1)] = 50
    """Limit of commands per episode, whether understood or not; text without a command does not count."""
    show_admissible: bool = False
    """Append the list of possible commands to every observation (halves the speed)."""
    num_shown_actions: Annotated[int, Field(ge=1)] = 100
    """Most commands in the list of ``show_admissible``."""
    cache: Path | None = None
    """Folder of made games; processes may share it. The default is ``$OUTRIDER_CACHE/textworld`` or
    ``~/.cache/outrider/textworld``.
    """
    make_ahead: bool = True
    """Make all games before the first rollout (2 to 5 s per game, once), so that impossible settings stop the
    run at its start and no episode waits. Otherwise a game is made when it is first played; the rollout's
    time limit of a step must then include that.
    """
    num_makers: Annotated[int, Field(ge=1)] = 2
    """Number of processes that make games; more than one per core has no benefit."""
    make_limit_s: Annotated[float, Field(gt=0)] = 120.0
    """Time limit for making one game, in seconds."""

    @model_validator(mode="after")
    def _validate(self) -> "TextWorldConfig":
        require_tasks(self)
        return self

    def shelf(self) -> GameShelf:
        """The folder with the games of these settings."""
        return GameShelf(
            root=self.cache
            or Path(os.environ.get("OUTRIDER_CACHE", Path.home() / ".cache" / "outrider")) / "textworld",
            game=self.game,
            game_seed=self.game_seed,
            num_makers=self.num_makers,
            make_limit_s=self.make_limit_s,
        )


def identity(task: Task, config: TextWorldConfig) -> tuple[Split, int]:
    """Split and index of the task's game. Raises ConfigError for a task of other games."""
    games, split, index = (task.metadata.get(name) for name in ("games", "split", "index"))
    if games != config.shelf().name or not isinstance(index, int):
        raise ConfigError(f"{task.key} is not a task of these TextWorld games")
    return known_split(str(split), "TextWorld"), index


MAX_COMMAND_CHARACTERS: Final = 100
"""The interpreter truncates longer lines."""
_READABLE: Final = re.compile(r"[a-z0-9' -]+")
_UNREADABLE: Final = (
    "That's not a verb I recognise",
    "I didn't understand",
    "I only understood you",
    "I beg your pardon",
)
# Commands to the interpreter: they write files, restart or end it, change its output, or repeat hidden
# commands of the package. Its dictionary has the first nine letters of a word.
_OUTSIDE: Final = frozenset(
    word[:9]
    for word in (
        "again", "brief", "g", "long", "normal", "noscript", "notify", "nouns", "o", "oops", "pronouns",
        "q", "quit", "record", "recording", "replay", "restart", "restore", "save", "script", "short",
        "superbrief", "transcript", "undo", "unscript", "verbose", "verify", "version",
    )
)  # fmt: skip


def refusal(command: str) -> str:
    """Why a command must not reach the game, in words for the policy; empty if it may.

    Several commands in one line are rejected, as are commands to the interpreter: for example, ``save`` would
    write a file.
    """
    if len(command) > MAX_COMMAND_CHARACTERS:
        return f"The command is longer than {MAX_COMMAND_CHARACTERS} characters; nothing was done."
    if not _READABLE.fullmatch(command):
        return "A command holds only letters, digits, spaces, hyphens and apostrophes; nothing was done."
    words = command.split()
    if "then" in words:
        return "Found several commands; nothing was done. Write exactly one command."
    if words[0][:9] in _OUTSIDE or words[0].startswith("tw-"):
        return f"'{words[0]}' is not part of the game; nothing was done."
    return ""


class TextWorldEnvironment(TextGame):
    """One episode of one game. The return is the score divided by the maximum score.

    Every environment has an interpreter of its own, so several may run in threads.
    """

    Settings = TextWorldConfig
    name = "textworld"
    title = "TextWorld"
    reported = ("score", "max_score", "num_moves", "num_turns", "num_invalid", "lost", "cut_by_moves")

    @classmethod
    def tasks(cls, settings: TextWorldConfig, split: str) -> Sequence[Task]:
        """The tasks of a split; needs no package and makes no game."""
        known = known_split(split, "TextWorld")
        name, game = settings.shelf().name, settings.game.type.replace("_", " ")
        return tuple(
            Task(
                key=f"textworld/{name}/{known}/{index}",
                question=f"TextWorld {game} {index} of {known}",
                metadata={"games": name, "split": known, "index": index},
            )
            for index in range(split_size(settings, known) or 0)
        )

    @classmethod
    def open_shared(cls, settings: TextWorldConfig) -> None:
        """Make the games (all or one, see ``make_ahead``) and start one.

        Raises ToolUnavailable, or ConfigError if the settings allow no game.
        """
        check_package()
        keys = [(split, index) for split in SPLITS for index in range(split_size(settings, split) or 0)]
        try:
            settings.shelf().ensure(keys if settings.make_ahead else keys[:1])
            start_game(settings, *keys[0]).close()
        except EnvironmentFault as error:
            raise ToolUnavailable(f"TextWorld does not run here: {error}") from error

    def reset(self, task: Task, seed: int) -> str:
        """Start the game. The opening is the game's text without the instructions of a chat."""
        prompt = super().reset(task, seed)
        self.opening = self.opening.partition("\n\n")[2]
        return prompt

    @property
    def task_text(self) -> str:
        """The text before the first room, in one line."""
        return " ".join(self.opening.partition("-= ")[0].split())

    def open_game(self) -> Game:
        return start_game(self.settings, *identity(self.task, self.settings))

    def solution(self) -> Sequence[str]:
        """The game's walkthrough."""
        return walkthrough(self.settings.shelf().story(*identity(self.task, self.settings)))

    def find_problem(self, command: str) -> str:
        return refusal(command)

    def classify(self, command: str, reply: Reply) -> tuple[bool, bool]:
        return reply.text.startswith(_UNREADABLE), reply.refused


def start_game(settings: TextWorldConfig, split: Split, index: int) -> StoryGame:
    """Make a game if necessary, and start it. Raises EnvironmentFault."""
    shelf = settings.shelf()
    shelf.ensure([(split, index)])
    with_commands = settings.show_admissible or settings.needs_commands
    return StoryGame.start(shelf.story(split, index), with_commands=with_commands)


def check_package() -> None:
    """Raises ToolUnavailable if the package is missing or has another version, which makes other games."""
    if importlib.util.find_spec("textworld") is None:
        raise ToolUnavailable("TextWorld is not installed: pip install 'outrider[textworld]'")
    version = importlib.metadata.version("textworld")
    if version != PACKAGE_VERSION:
        raise ToolUnavailable(f"TextWorld {version} found, but the games need version {PACKAGE_VERSION}")
