"""Houses to search: which rooms there are, what lies in which piece of furniture, which doors are locked.
Plain data, from a seed.

A house is fixed: every episode of every one of its tasks finds it the same. So what one episode has seen is
true in the next one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.seeding import stream

HALL: Final = "hall"
ROOMS: Final = (
    "attic",
    "cellar",
    "chapel",
    "garage",
    "kitchen",
    "library",
    "nursery",
    "pantry",
    "stable",
    "studio",
)
FURNITURE: Final = (
    "barrel",
    "basket",
    "box",
    "cabinet",
    "chest",
    "crate",
    "cupboard",
    "drawer",
    "trunk",
    "wardrobe",
)
THINGS: Final = ("book", "candle", "coin", "flute", "knife", "lamp", "map", "mirror", "ring", "rope")
KEYS: Final = ("brass key", "copper key", "iron key", "silver key")


class HouseSettings(Settings):
    """How large a house is. ``num_things`` of its pieces of furniture hold something to look for: one task
    each.

    ``depth`` 1: all rooms open off the hall; larger: rooms lie behind rooms, up to so many doors from the
    hall. The doors of ``num_locked`` rooms need a key that lies in an open room.
    """

    num_rooms: Annotated[int, Field(ge=1, le=len(ROOMS))] = 6
    num_things: Annotated[int, Field(ge=1, le=len(THINGS))] = 6
    depth: Annotated[int, Field(ge=1)] = 1
    num_locked: Annotated[int, Field(ge=0, le=len(KEYS))] = 0

    @model_validator(mode="after")
    def _validate(self) -> "HouseSettings":
        if self.num_things + self.num_locked > self.num_rooms:
            raise ValueError(
                "every room has one piece of furniture: num_things + num_locked must not exceed num_rooms"
            )
        if self.num_locked >= self.num_rooms:
            raise ValueError("num_locked must be below num_rooms: a key lies in an open room")
        return self

    @property
    def name(self) -> str:
        """Name of houses of these settings in task keys."""
        return f"{self.num_rooms}-{self.num_things}-{self.depth}-{self.num_locked}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HousePlan:
    """``parent``: the room that a room's one door leads back to. ``furniture``: of each room. ``contents``:
    thing or key by room.

    ``locks``: the key that a room's door needs. All mappings keep the order in which the house was made.
    """

    parent: Mapping[str, str]
    furniture: Mapping[str, str]
    contents: Mapping[str, str]
    locks: Mapping[str, str]

    def doors(self, room: str) -> tuple[str, ...]:
        """The rooms next to ``room``, in alphabetical order."""
        back = [self.parent[room]] if room in self.parent else []
        return tuple(sorted([*back, *(inner for inner, outer in self.parent.items() if outer == room)]))

    def find_room(self, thing: str) -> str:
        """Where a thing or key lies at the start of an episode."""
        return next(room for room, content in self.contents.items() if content == thing)

    def things(self) -> tuple[str, ...]:
        """Things that can be looked for, in alphabetical order; keys are not among them."""
        return tuple(sorted(content for content in self.contents.values() if content not in KEYS))

    def way(self, start: str, goal: str) -> tuple[str, ...]:
        """The rooms to walk through, without ``start``: up to the first common room, and down."""
        up, down = self._to_hall(start), self._to_hall(goal)
        common = next(room for room in up if room in down)
        return (*up[1 : up.index(common) + 1], *reversed(down[: down.index(common)]))

    def _to_hall(self, room: str) -> list[str]:
        rooms = [room]
        while rooms[-1] != HALL:
            rooms.append(self.parent[rooms[-1]])
        return rooms


@lru_cache(maxsize=4096)
def make_house(settings: HouseSettings, seed: int, split: str, index: int) -> HousePlan:
    """The house of a split and number. Locked rooms are made last, so that nothing lies behind them and every
    key is within reach.
    """
    random = stream(seed, "house", settings.name, split, index)

    def draw(names: tuple[str, ...], number: int) -> list[str]:
        return [names[i] for i in random.permutation(len(names))[:number]]

    rooms, keys = draw(ROOMS, settings.num_rooms), draw(KEYS, settings.num_locked)
    num_open = settings.num_rooms - settings.num_locked
    level, parent = {HALL: 0}, {}
    for number, room in enumerate(rooms):
        outer = [
            candidate
            for candidate in (HALL, *rooms[: min(number, num_open)])
            if level[candidate] < settings.depth
        ]
        parent[room] = outer[int(random.integers(len(outer)))]
        level[room] = level[parent[room]] + 1
    key_rooms = [rooms[i] for i in random.permutation(num_open)]
    contents = dict(zip(key_rooms, keys, strict=False))
    free = [room for room in rooms if room not in contents]
    hidden = [free[i] for i in random.permutation(len(free))[: settings.num_things]]
    contents |= dict(zip(hidden, draw(THINGS, settings.num_things), strict=True))
    return HousePlan(
        parent=parent,
        furniture=dict(zip(rooms, draw(FURNITURE, settings.num_rooms), strict=True)),
        contents=contents,
        locks=dict(zip(rooms[num_open:], keys, strict=True)),
    )
