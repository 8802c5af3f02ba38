"""Houses to search: which rooms there are, what lies in which piece of furniture, which doors are locked.
Plain data, from a seed.

A house is fixed: every episode of every one of its tasks finds it the same. So what one episode has seen is
true in the next one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from outrider.config import Settings
from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.environments.episode import Episode
from outrider.environments.scienceworld import tasks as scienceworld_text
from outrider.errors import ConfigError
from outrider.seeding import stream
from outrider.types import Message, Step, Task

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


# Houses to search: a small text world of fixed layout, in pure Python. A task asks for one thing of one
# house.
#
# What lies where differs from house to house and is told only by looking, so a policy that has read nothing
# must search, and what earlier episodes saw is worth reading. The return is 1 for the thing in hand, else 0.
# ``max_moves`` cuts an episode.


SPLITS: Final = ("train", "valid", "test")
PROMPT: Final = (
    "You search a house. Write one command a turn: <action>go ROOM</action>, "
    "<action>open FURNITURE</action> or <action>take THING</action>.\n\n{state}"
)


class HouseConfig(EnvironmentSettings):
    """Which houses there are. More houses leave the first ones as they are."""

    reports_metrics: ClassVar[bool] = False  # calls and invalid actions have metrics of their own

    type: Literal["house"] = "house"
    house: HouseSettings = HouseSettings()
    num_train: Annotated[int, Field(ge=0)] = 8
    """Houses of the split, each with ``house.num_things`` tasks."""
    num_valid: Annotated[int, Field(ge=0)] = 2
    num_test: Annotated[int, Field(ge=0)] = 4
    house_seed: int = 0
    max_moves: Annotated[int, Field(ge=1)] = 8
    """Commands after which an episode is cut, done or refused; text without a command costs none."""

    @model_validator(mode="after")
    def _not_empty(self) -> "HouseConfig":
        if self.num_train + self.num_valid + self.num_test == 0:
            raise ValueError("num_train, num_valid and num_test are all 0: there is nothing to search")
        return self

    @property
    def name(self) -> str:
        """Name of these houses in task keys."""
        return f"{self.house.name}-{self.house_seed}"


@dataclass(slots=True, kw_only=True)
class _Episode:
    room: str = HALL
    opened: set[str] = field(default_factory=set)  # rooms whose furniture is open
    carried: set[str] = field(default_factory=set)
    num_moves: int = 0
    num_turns: int = 0
    num_invalid: int = 0
    num_refused: int = 0
    done: bool = False


class HouseEnvironment:
    """One episode. Chat protocol: the command in ``<action>...</action>``, what happened and what is seen as
    a user message.
    """

    def __init__(self, *, plan: HousePlan, goal: str, max_moves: int) -> None:
        """``goal`` is a thing of the house."""
        self._plan = plan
        self._goal = goal
        self._max_moves = max_moves
        self._episode = _Episode()

    def reset(self, seed: int) -> Sequence[Message]:
        """Back into the hall, with everything in its place. ``seed`` changes nothing: a house is fixed."""
        self._episode = _Episode()
        return (Message(role="user", content=PROMPT.format(state=self._state())),)

    def step(self, message: Message) -> StepResult:
        """Do the one command of the message; unreadable text changes nothing and is answered in words."""
        episode = self._episode
        if episode.done:
            raise RuntimeError("the search has ended")
        episode.num_turns += 1
        parsed = scienceworld_text.parse_action(message.content)
        verb, _, noun = parsed.action.partition(" ")
        known = {"go": self._go, "open": self._open, "take": self._take}
        if parsed.problem or verb not in known or not noun:
            episode.num_invalid += 1
            problem = parsed.problem or "The commands are go ROOM, open FURNITURE and take THING."
            return StepResult(message=Message(role="user", content=problem), invalid=True)
        episode.num_moves += 1
        refused, text = known[verb](noun)
        episode.num_refused += refused
        is_found = self._goal in episode.carried
        cut = not is_found and episode.num_moves >= self._max_moves
        episode.done = is_found or cut
        content = text if episode.done else f"{text}\n{self._state()}"
        return StepResult(
            message=Message(role="user", content=content),
            reward=float(is_found),
            done=episode.done,
            refused=refused,
            truncated=cut,
        )

    def result(self) -> EpisodeResult:
        """1 with the thing in hand."""
        episode, is_found = self._episode, self._goal in self._episode.carried
        counts = ("num_moves", "num_turns", "num_invalid", "num_refused")
        return EpisodeResult(
            episode_return=float(is_found),
            success=is_found,
            metrics={name: float(getattr(episode, name)) for name in counts},
        )

    def copy(self) -> "HouseEnvironment":
        """The same episode at the same point; neither sees what the other does from then on."""
        twin = HouseEnvironment(plan=self._plan, goal=self._goal, max_moves=self._max_moves)
        own = self._episode
        twin._episode = replace(own, opened=set(own.opened), carried=set(own.carried))
        return twin

    def close(self) -> None:
        """Nothing is held."""

    def _go(self, room: str) -> tuple[bool, str]:
        plan, here = self._plan, self._episode.room
        if room not in plan.doors(here):
            return True, f"No door leads from the {here} to the {room}."
        key = plan.locks.get(room)
        if key is not None and key not in self._episode.carried:
            return True, f"The door to the {room} is locked, it needs the {key}."
        self._episode.room = room
        return False, f"You go to the {room}."

    def _open(self, furniture: str) -> tuple[bool, str]:
        here = self._episode.room
        if self._plan.furniture.get(here) != furniture:
            return True, f"There is no {furniture} in the {here}."
        self._episode.opened.add(here)
        thing = self._visible()
        return False, f"In the {furniture} in the {here} is {'the ' + thing if thing else 'nothing'}."

    def _take(self, thing: str) -> tuple[bool, str]:
        if self._visible() != thing:
            return True, f"You see no {thing} in the {self._episode.room}."
        self._episode.carried.add(thing)
        return False, f"You take the {thing}."

    def _visible(self) -> str | None:
        """Things in the room's open furniture."""
        here = self._episode.room
        thing = self._plan.contents.get(here) if here in self._episode.opened else None
        return None if thing in self._episode.carried else thing

    def _state(self) -> str:
        here = self._episode.room
        furniture = self._plan.furniture.get(here)
        seen = f" You see: {furniture}." if furniture else ""
        return (
            f"You are in the {here}. Doors: {', '.join(self._plan.doors(here))}.{seen} "
            f"You look for the {self._goal}."
        )


class HouseFactory:
    """Makes environments; nothing is shared but plans, which do not change."""

    def __init__(self, config: HouseConfig) -> None:
        self._config = config

    def __call__(self, task: Task) -> HouseEnvironment:
        """A fresh episode of the task. Raises :class:`ConfigError` for a task of other houses."""
        plan, goal = _plan(task, self._config)
        return HouseEnvironment(plan=plan, goal=goal, max_moves=self._config.max_moves)

    def close(self) -> None:
        """Nothing is held."""


class HouseTaskSet:
    """The houses of a config."""

    Settings = HouseConfig
    name = "house"
    stop: tuple[str, ...] = (scienceworld_text.STOP,)
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: HouseConfig) -> None:
        self.config = config

    def tasks(self, split: str) -> Sequence[Task]:
        """The frozen list of ``train``, ``valid`` or ``test``: the things of its houses, a house's first
        things first.

        The first tasks of a split are so of as many houses as there are. ``metadata["world"]`` names the
        house.
        """
        sizes = dict(
            zip(SPLITS, (self.config.num_train, self.config.num_valid, self.config.num_test), strict=True)
        )
        if split not in sizes:
            raise ConfigError(f"unknown split {split!r}; houses have {', '.join(SPLITS)}")
        plans = [
            make_house(self.config.house, self.config.house_seed, split, index)
            for index in range(sizes[split])
        ]
        return tuple(
            self._task(split, index, plan.things()[number])
            for number in range(self.config.house.num_things)
            for index, plan in enumerate(plans)
        )

    def _task(self, split: str, index: int, thing: str) -> Task:
        world = f"house/{self.config.name}/{split}/{index}"
        return Task(
            key=f"{world}/{thing}",
            question=f"Find the {thing} in house {index} of {split}.",
            metadata={
                "houses": self.config.name,
                "world": world,
                "split": split,
                "index": index,
                "thing": thing,
            },
        )

    def make(self) -> HouseFactory:
        """Needs nothing."""
        return HouseFactory(self.config)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The shortest way to the thing, by one who knows the house; None where it needs more than
        ``max_moves``.
        """
        plan, goal = _plan(task, self.config)
        environment = HouseEnvironment(plan=plan, goal=goal, max_moves=self.config.max_moves)
        environment.reset(seed)
        steps = Episode(environment).play(
            [scienceworld_text.render_action(command) for command in solution(plan, goal)]
        )
        return steps if environment.result().success else None

    def close(self) -> None:
        """Nothing is held."""


def solution(plan: HousePlan, goal: str) -> tuple[str, ...]:
    """The shortest commands that bring a thing: its door's key first, where it has one."""
    commands: list[str] = []
    here = HALL
    key = plan.locks.get(plan.find_room(goal))
    for thing in [goal] if key is None else [key, goal]:
        room = plan.find_room(thing)
        commands += [f"go {next_room}" for next_room in plan.way(here, room)]
        commands += [f"open {plan.furniture[room]}", f"take {thing}"]
        here = room
    return tuple(commands)


def _plan(task: Task, config: HouseConfig) -> tuple[HousePlan, str]:
    if task.metadata.get("houses") != config.name:
        raise ConfigError(f"{task.key} is no task of the houses {config.name}")
    split, index, thing = (task.metadata[name] for name in ("split", "index", "thing"))
    return make_house(config.house, config.house_seed, str(split), int(str(index))), str(thing)
