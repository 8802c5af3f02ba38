"""Which TextWorld games can be made (Côté et al. 2018, arXiv 1806.11532): the settings of the four kinds."""

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from outrider.config import Settings

MAX_ROOMS: Final = 100

Split = Literal["train", "valid", "test"]


class QuestGame(Settings):
    """A random house with a random quest: TextWorld's own generator."""

    type: Literal["quest"] = "quest"
    num_rooms: Annotated[int, Field(ge=1, le=MAX_ROOMS)] = 2
    num_objects: Annotated[int, Field(ge=1)] = 4
    """Things in the house; a quest that needs more gets more."""
    quest_length: Annotated[int, Field(ge=1)] = 3
    """Commands that the quest is made from; with several goals the shortest way can be shorter."""
    quest_breadth: Annotated[int, Field(ge=1)] = 1
    """Goals that the quest consists of, each a point."""
    goal_only: bool = False
    """Tell only the last command of the quest, neither the way there nor other goals."""

    @model_validator(mode="after")
    def _validate(self) -> "QuestGame":
        if self.quest_breadth > self.quest_length:
            raise ValueError(
                "quest_breadth cannot be more than quest_length: a goal takes at least one command"
            )
        return self


class CoinCollector(Settings):
    """A chain of rooms with a coin at its end. Level 1-100 is its length; 101-150 the same with as many dead
    ends, 201-233 with twice as many.
    """

    type: Literal["coin_collector"] = "coin_collector"
    level: Annotated[int, Field(ge=1, le=300)] = 5
    goal_only: bool = True
    """Tell only to take the coin and not the way there."""

    @model_validator(mode="after")
    def _validate(self) -> "CoinCollector":
        shape, length = divmod(self.level - 1, 100)
        if (shape + 1) * (length + 1) > MAX_ROOMS:
            raise ValueError(
                f"level {self.level} has {(shape + 1) * (length + 1)} rooms, more than a game's {MAX_ROOMS}"
            )
        return self


class TreasureHunter(Settings):
    """A maze with one thing to take and one that loses the game; level 11 adds closed doors, level 21 locked
    ones.
    """

    type: Literal["treasure_hunter"] = "treasure_hunter"
    level: Annotated[int, Field(ge=1, le=30)] = 5
    goal_only: bool = True
    """Tell only the thing to take and not the way there."""


class Cooking(Settings):
    """Find a recipe, fetch and prepare its ingredients, eat (the First TextWorld Problems). Wrong preparation
    loses.

    The splits differ in foods and preparations, as in the competition.
    """

    type: Literal["cooking"] = "cooking"
    num_ingredients: Annotated[int, Field(ge=1, le=5)] = 1
    num_to_find: Annotated[int, Field(ge=0, le=5)] = 1
    """Ingredients that are not in the inventory at the start."""
    num_rooms: Literal[1, 6, 9, 12] = 1
    open: bool = False
    """Whether doors and containers start closed."""
    cook: bool = False
    cut: bool = False
    drop: bool = False
    """Whether the inventory is limited."""

    @model_validator(mode="after")
    def _validate(self) -> "Cooking":
        if self.num_to_find > self.num_ingredients:
            raise ValueError("num_to_find cannot be more than num_ingredients")
        return self


GameSettings = Annotated[QuestGame | CoinCollector | TreasureHunter | Cooking, Field(discriminator="type")]
