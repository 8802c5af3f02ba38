"""Which TextWorld games there are, and by which rules they are played."""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.environments.base import EnvironmentSettings
from outrider.environments.textworld.games import GameShelf
from outrider.environments.textworld.kinds import GameSettings, QuestGame, Split
from outrider.errors import ConfigError
from outrider.types import Task


class TextWorldConfig(EnvironmentSettings):
    """Which games are made and by which rules they are played."""

    starts_quickly: ClassVar[bool] = False

    type: Literal["textworld"] = "textworld"
    game: GameSettings = QuestGame()
    """Kind of game: ``quest``, ``coin_collector``, ``treasure_hunter`` or ``cooking``, each with its own
    sizes.
    """
    num_train: Annotated[int, Field(ge=0)] = 8
    """Games of the split. All differ in their seeds; of tiny games some can still be equal, across splits
    too.
    """
    num_valid: Annotated[int, Field(ge=0)] = 2
    num_test: Annotated[int, Field(ge=0)] = 4
    game_seed: int = 0
    """Decides the games, together with ``game``. More games leave the first ones as they are."""
    max_moves: Annotated[int, Field(ge=1)] = 50
    """Commands given to the game after which an episode is cut, understood or not; text without a command
    costs none.
    """
    show_admissible: bool = False
    """Append the list of commands that change or show something now to every observation (halves the
    speed).
    """
    num_shown_actions: Annotated[int, Field(ge=1)] = 100
    cache: Path | None = None
    """Folder of made games; None is ``$OUTRIDER_CACHE/textworld`` or ``~/.cache/outrider/textworld``.
    Processes may share it.
    """
    make_ahead: bool = True
    """Make all games before the first rollout, so that impossible settings stop the run at its start and no
    episode waits (2-5 s per game, once). Otherwise one game is made then and each other one, in turn, when it
    is first played: the rollout's limit of a step must leave time for that.
    """
    num_makers: Annotated[int, Field(ge=1)] = 2
    """Processes that make games; more than one per core gains nothing."""
    make_limit_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds a game, after which its making counts as broken."""

    @model_validator(mode="after")
    def _not_empty(self) -> "TextWorldConfig":
        if self.num_train + self.num_valid + self.num_test == 0:
            raise ValueError("num_train, num_valid and num_test are all 0: there is nothing to play")
        return self

    def shelf(self) -> GameShelf:
        """Where the games of these settings are kept."""
        return GameShelf(
            root=self.cache or cache_folder(),
            game=self.game,
            game_seed=self.game_seed,
            num_makers=self.num_makers,
            make_limit_s=self.make_limit_s,
        )


def cache_folder() -> Path:
    """Where games lie by default: ``$OUTRIDER_CACHE/textworld`` or ``~/.cache/outrider/textworld``."""
    return Path(os.environ.get("OUTRIDER_CACHE", Path.home() / ".cache" / "outrider")) / "textworld"


def identity(task: Task, config: TextWorldConfig) -> tuple[Split, int]:
    """Split and number of the task's game. Raises ConfigError for a task of other games."""
    games, split, index = (task.metadata.get(name) for name in ("games", "split", "index"))
    if games != config.shelf().name or not isinstance(index, int):
        raise ConfigError(f"{task.key} is not a task of these TextWorld games")
    for known in ("train", "valid", "test"):
        if known == split:
            return known, index
    raise ConfigError(f"{task.key} is of no split")
