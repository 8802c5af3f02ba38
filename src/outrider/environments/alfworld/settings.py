"""Which ALFWorld games there are, and by which rules they are played."""

from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.environments.alfworld.floor_plans import TASK_TYPES, Split, TaskType
from outrider.environments.base import EnvironmentSettings

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
