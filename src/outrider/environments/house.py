"""Houses to search: a small text world of fixed layout, in pure Python.

A task is to find one thing in one house. The contents differ from house to house and are only visible when
the furniture is open, so a policy without experience must search. A house is the same in every episode of all
its tasks, so observations of one episode help in the next. The return is 1 if the thing is found, else 0.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.environments.base import (
    Environment,
    EpisodeResult,
    StepResult,
    known_split,
    require_tasks,
    split_size,
)
from outrider.environments.text_games import STOP, parse_action, render_action
from outrider.environments.window import WindowedSettings
from outrider.errors import ConfigError
from outrider.seeding import stream
from outrider.types import Task

HALL: Final = "hall"
ROOMS: Final = tuple(
    "attic cellar chapel garage kitchen library nursery pantry stable studio".split()  # noqa: SIM905
)
FURNITURE: Final = tuple(
    "barrel basket box cabinet chest crate cupboard drawer trunk wardrobe".split()  # noqa: SIM905
)
THINGS: Final = ("book", "candle", "coin", "flute", "knife", "lamp", "map", "mirror", "ring", "rope")
KEYS: Final = ("brass key", "copper key", "iron key", "silver key")
PROMPT: Final = (
    "You search a house. Write one command a turn: <action>go ROOM</action>, "
    "<action>open FURNITURE</action> or <action>take THING</action>.\n"
)


class HouseSettings(Settings):
    """Size of a house. ``num_things`` pieces of furniture contain something to look for: one task each.

    Rooms are at most ``depth`` doors away from the hall; with 1 all rooms are next to it. The doors of
    ``num_locked`` rooms need a key, which is in a room that is not locked.
    """

    num_rooms: Annotated[int, Field(ge=1, le=len(ROOMS))] = 6
    """Number of rooms besides the hall."""
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
            raise ValueError("num_locked must be below num_rooms: the keys are in rooms that are not locked")
        return self

    @property
    def name(self) -> str:
        """Part of the name of the houses in task keys."""
        return f"{self.num_rooms}-{self.num_things}-{self.depth}-{self.num_locked}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HousePlan:
    """A house. All mappings are in the order in which the house was made.

    Attributes:
        parent: from a room to the room that its one door leads back to.
        furniture: from a room to its piece of furniture.
        contents: from a room to the thing or key in its furniture.
        locks: from a room to the key that its door needs.
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
        """The room of a thing or key at the start of an episode."""
        return next(room for room, content in self.contents.items() if content == thing)

    def things(self) -> tuple[str, ...]:
        """The things without the keys, in alphabetical order."""
        return tuple(sorted(content for content in self.contents.values() if content not in KEYS))

    def way(self, start: str, goal: str) -> tuple[str, ...]:
        """The rooms on the way, without ``start``: up to the first common room, and down."""

        def to_hall(room: str) -> list[str]:
            return [room, *(to_hall(self.parent[room]) if room != HALL else ())]

        up, down = to_hall(start), to_hall(goal)
        common = next(room for room in up if room in down)
        return (*up[1 : up.index(common) + 1], *reversed(down[: down.index(common)]))


@lru_cache(maxsize=4096)
def make_house(settings: HouseSettings, seed: int, split: str, index: int) -> HousePlan:
    """House ``index`` of a split. Locked rooms are made last, so that no room is behind them and every key
    can be reached.
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


class HouseConfig(WindowedSettings):
    """Which houses there are. If you increase their number, the first ones stay the same."""

    reports_metrics: ClassVar[bool] = False  # calls and invalid actions have metrics of their own
    own_prompt: ClassVar[str] = "house"

    type: Literal["house"] = "house"
    house: HouseSettings = HouseSettings()
    num_train: Annotated[int, Field(ge=0)] = 8
    """Number of houses of the split, each with ``house.num_things`` tasks."""
    num_valid: Annotated[int, Field(ge=0)] = 2
    num_test: Annotated[int, Field(ge=0)] = 4
    house_seed: int = 0
    """Seed of the houses."""
    max_moves: Annotated[int, Field(ge=1)] = 8
    """Limit of commands per episode, whether executed or refused; text without a command does not count."""

    @model_validator(mode="after")
    def _validate(self) -> "HouseConfig":
        require_tasks(self)
        return self

    @property
    def name(self) -> str:
        """Name of these houses in task keys."""
        return f"{self.house.name}-{self.house_seed}"

    def find(self, task: Task) -> tuple[HousePlan, str]:
        """The house and the goal of a task. Raises ConfigError for a task of other houses."""
        if task.metadata.get("houses") != self.name:
            raise ConfigError(f"{task.key} is no task of the houses {self.name}")
        split, index, thing = (task.metadata[name] for name in ("split", "index", "thing"))
        return make_house(self.house, self.house_seed, str(split), int(str(index))), str(thing)


class HouseEnvironment(Environment):
    """One search. The observation ends with what the player sees."""

    Settings = HouseConfig
    name = "house"
    stop = (STOP,)

    @classmethod
    def tasks(cls, settings: HouseConfig, split: str) -> Sequence[Task]:
        """The tasks of a split: the first thing of every house, then the second ones, and so on, so that the
        first tasks are of as many houses as possible. ``metadata["world"]`` names the house.
        """
        plans = [
            make_house(settings.house, settings.house_seed, split, index)
            for index in range(split_size(settings, known_split(split, "house")) or 0)
        ]
        tasks = []
        for number in range(settings.house.num_things):
            for index, plan in enumerate(plans):
                thing, world = plan.things()[number], f"house/{settings.name}/{split}/{index}"
                tasks.append(
                    Task(
                        key=f"{world}/{thing}",
                        question=f"Find the {thing} in house {index} of {split}.",
                        metadata={
                            "houses": settings.name,
                            "world": world,
                            "split": split,
                            "index": index,
                            "thing": thing,
                        },
                    )
                )
        return tuple(tasks)

    def reset(self, task: Task, seed: int) -> str:
        """Start in the hall. ``seed`` is not used, because a task is one fixed house."""
        self.plan, self.goal = self.settings.find(task)
        self.room = HALL
        self.opened: frozenset[str] = frozenset()  # rooms whose furniture is open
        self.carried: frozenset[str] = frozenset()
        self.metrics = dict.fromkeys(("num_moves", "num_turns", "num_invalid", "num_refused"), 0.0)
        self.opening, self.task_text = self.view(), f"Find the {self.goal}."
        return f"{PROMPT}\n{self.opening}"

    def step(self, action: str) -> StepResult:
        """Execute the command between the tags."""
        command, problem = parse_action(action)
        return self._invalid(problem) if problem else self.act(command)

    def act(self, command: str) -> StepResult:
        """Execute ``go``, ``open`` or ``take``, each with a noun."""
        verb, _, noun = command.partition(" ")
        methods = {"go": self._go, "open": self._open, "take": self._take}
        if not (verb in methods and noun):
            return self._invalid("The commands are go ROOM, open FURNITURE and take THING.")
        text, refused = methods[verb](noun)
        self.metrics["num_turns"] += 1
        self.metrics["num_moves"] += 1
        self.metrics["num_refused"] += refused
        won = self.goal in self.carried
        truncated = not won and self.metrics["num_moves"] >= self.settings.max_moves
        return StepResult(
            message=text if won or truncated else f"{text}\n{self.view()}",
            reward=float(won),
            done=won or truncated,
            refused=refused,
            truncated=truncated,
        )

    def result(self) -> EpisodeResult:
        limit = self.settings.max_moves
        is_cut = self.metrics["num_moves"] >= limit
        reason = f"not found within max_moves = {limit}" if is_cut else "not found before the episode ended"
        reason = "found" if self.goal in self.carried else reason
        return replace(super().result(), reason=f"the {self.goal} was {reason}")

    def admitted(self) -> tuple[str, ...]:
        """The commands that are possible now, sorted."""
        furniture, thing = self.plan.furniture.get(self.room), self._visible()
        commands = [f"go {room}" for room in self.plan.doors(self.room)]
        commands += [f"open {furniture}"] if furniture else []
        return tuple(sorted([*commands, *([f"take {thing}"] if thing else ())]))

    def _invalid(self, problem: str) -> StepResult:
        self.metrics["num_turns"] += 1
        self.metrics["num_invalid"] += 1
        return StepResult(message=problem, invalid=True)

    def view(self) -> str:
        """What the player sees."""
        furniture = self.plan.furniture.get(self.room)
        seen = f" You see: {furniture}." if furniture else ""
        return (
            f"You are in the {self.room}. Doors: {', '.join(self.plan.doors(self.room))}.{seen} "
            f"You look for the {self.goal}."
        )

    def copy(self) -> Self:
        """A shallow copy: the plan never changes, and moves replace the other values."""
        twin = copy.copy(self)
        twin.metrics = dict(self.metrics)
        return twin

    def expert(self) -> Sequence[str]:
        return [render_action(command) for command in solution(self.plan, self.goal)]

    def _go(self, room: str) -> tuple[str, bool]:
        if room not in self.plan.doors(self.room):
            return f"No door leads from the {self.room} to the {room}.", True
        key = self.plan.locks.get(room)
        if key is not None and key not in self.carried:
            return f"The door to the {room} is locked, it needs the {key}.", True
        self.room = room
        return f"You go to the {room}.", False

    def _open(self, furniture: str) -> tuple[str, bool]:
        if self.plan.furniture.get(self.room) != furniture:
            return f"There is no {furniture} in the {self.room}.", True
        self.opened |= {self.room}
        thing = self._visible()
        return f"In the {furniture} in the {self.room} is {'the ' + thing if thing else 'nothing'}.", False

    def _take(self, thing: str) -> tuple[str, bool]:
        if self._visible() != thing:
            return f"You see no {thing} in the {self.room}.", True
        self.carried |= {thing}
        return f"You take the {thing}.", False

    def _visible(self) -> str | None:
        """The thing in the room's open furniture."""
        thing = self.plan.contents.get(self.room) if self.room in self.opened else None
        return None if thing in self.carried else thing


def solution(plan: HousePlan, goal: str) -> tuple[str, ...]:
    """The shortest commands that find a thing: first the key of its door if it is locked."""
    commands: list[str] = []
    here = HALL
    key = plan.locks.get(plan.find_room(goal))
    for thing in [goal] if key is None else [key, goal]:
        room = plan.find_room(thing)
        commands += [f"go {next_room}" for next_room in plan.way(here, room)]
        commands += [f"open {plan.furniture[room]}", f"take {thing}"]
        here = room
    return tuple(commands)
