"""ALFWorld games made offline (Shridhar et al. 2021, arXiv 2010.03768).

``floor_plans.json`` contains the 120 floor plans, the tables and the goal texts. It is made from the package
``alfworld`` by ``python -m benchmarks.alfworld_floor_plans`` and includes the package's licence (MIT). A
floor plan lists kinds of receptacles and of things; the package does not record where each thing is, so this
is drawn here.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib import resources
from itertools import permutations
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np

from outrider.environments.base import Split
from outrider.seeding import stream

TaskType = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
TASK_TYPES: Final[tuple[TaskType, ...]] = get_args(TaskType)
"""The six types, by the names and in the order of the original."""
# Of the 24 plans of a room that the original trains on, the last four are the validation split here.
_VALID: Final = range(27, 31)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FloorPlan:
    """One room. ``receptacles``: number of each kind; ``things``: kinds that can be in them. Compared and
    hashed by identity.
    """

    number: int
    room: str
    receptacles: Mapping[str, int]
    things: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Properties of kinds. ``can_hold``: from a receptacle to its possible things; ``vessels``: things that
    look like receptacles; ``goal_rooms`` and ``goal_texts``: of each task type.
    """

    can_hold: Mapping[str, frozenset[str]]
    openable: frozenset[str]
    vessels: frozenset[str]
    heatable: frozenset[str]
    coolable: frozenset[str]
    cleanable: frozenset[str]
    sliceable: frozenset[str]
    goal_rooms: Mapping[str, frozenset[str]]
    goal_texts: Mapping[str, tuple[str, ...]]


@cache
def tables() -> Tables:
    """The tables of ``floor_plans.json``."""
    data = _load_data()
    properties = {name: frozenset(kinds) for name, kinds in data["properties"].items()}
    return Tables(
        can_hold={kind: frozenset(contents) for kind, contents in data["can_hold"].items()},
        openable=frozenset(data["openable"]),
        vessels=frozenset(data["vessels"]),
        goal_rooms={name: frozenset(task_type["rooms"]) for name, task_type in data["task_types"].items()},
        goal_texts={name: tuple(task_type["texts"]) for name, task_type in data["task_types"].items()},
        **properties,
    )


@cache
def floor_plans() -> tuple[FloorPlan, ...]:
    """All 120, by number."""
    data = _load_data()
    rooms = {room: range(first, last + 1) for room, (first, last) in data["rooms"].items()}
    return tuple(
        FloorPlan(
            number=int(number),
            room=next(room for room, numbers in rooms.items() if int(number) in numbers),
            receptacles=plan["receptacles"],
            things=tuple(plan["things"]),
        )
        for number, plan in data["plans"].items()
    )


@cache
def split_plans(split: Split) -> tuple[FloorPlan, ...]:
    """The floor plans of a split. ``test`` has those that the original holds out (six of each room),
    ``valid`` the last four of the others; splits share no plan.
    """
    held_out = frozenset(_load_data()["held_out"])

    def find_split(number: int) -> Split:
        if number in held_out:
            return "test"
        return "valid" if number % 100 in _VALID else "train"

    return tuple(plan for plan in floor_plans() if find_split(plan.number) == split)


@cache
def _load_data() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("floor_plans.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


# A game as plain data.


LAMP: Final = "DeskLamp"
TOOLS: Final[Mapping[TaskType, tuple[str, str]]] = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge"),
}
"""The verb that a task type needs, and the kind of receptacle that does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """``thing`` and ``receptacle`` are kinds; ``receptacle`` is empty for ``look_at_obj_in_light``."""

    task_type: TaskType
    thing: str
    receptacle: str
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """A game. ``receptacles`` and ``things``: kind of each name, in the order of the original's listings
    (``cabinet 2`` before ``cabinet 1``). ``locations``: receptacle of each thing at the start.
    """

    floor_plan: int
    receptacles: Mapping[str, str]
    things: Mapping[str, str]
    locations: Mapping[str, str]
    goal: Goal

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole game (64 hex digits)."""
        parts = [str(self.floor_plan), repr(self.goal)]
        parts += [f"{name}={kind}" for name, kind in self.receptacles.items()]
        parts += [f"{name}={kind}@{self.locations[name]}" for name, kind in self.things.items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(slots=True, kw_only=True)
class State:
    """State of an episode. ``here`` is None in the middle of the room; ``locations`` does not contain the
    carried thing.
    """

    locations: dict[str, str]
    here: str | None = None
    carried: str | None = None
    opened: set[str] = field(default_factory=set)
    clean: set[str] = field(default_factory=set)
    hot: set[str] = field(default_factory=set)
    cool: set[str] = field(default_factory=set)
    sliced: set[str] = field(default_factory=set)
    toggled: set[str] = field(default_factory=set)

    def copy(self) -> "State":
        return copy.deepcopy(self)


def contents(scene: Scene, state: State, receptacle: str) -> tuple[str, ...]:
    """Things that are there now, visible or not, in the scene's order."""
    return tuple(name for name in scene.things if state.locations.get(name) == receptacle)


def is_reached(scene: Scene, state: State) -> bool:
    """Whether the goal is reached, by the formulas of the original's goal library."""
    goal = scene.goal
    if goal.task_type == "look_at_obj_in_light":
        lit = any(
            scene.things[name] == LAMP and state.locations[name] == state.here for name in state.toggled
        )
        return lit and state.carried is not None and scene.things[state.carried] == goal.thing
    things = [name for name, kind in scene.things.items() if kind == goal.thing and name in state.locations]
    if goal.task_type in TOOLS:
        done = {"clean": state.clean, "heat": state.hot, "cool": state.cool}[TOOLS[goal.task_type][0]]
        things = [name for name in things if name in done]
    receptacles = [
        receptacle
        for receptacle in map(state.locations.__getitem__, things)
        if scene.receptacles[receptacle] == goal.receptacle
    ]
    if goal.task_type == "pick_two_obj_and_place":
        return len(receptacles) > len(set(receptacles))  # two in one receptacle
    return bool(receptacles)


# The actions of ALFWorld's PDDL domain (``alfred.pddl``), with their preconditions and effects, and the
# commands of its grammar (``alfred.twl2``). As there, a microwave and a fridge work when closed, and a thing
# can be examined only in the hand, because the domain's precondition for a visible one names a type without
# members (``location,``).


KNIVES: Final = frozenset({"Knife", "ButterKnife"})
VERBS: Final = (
    "go", "open", "close", "take", "move", "put", "examine", "use", "heat", "clean", "cool", "slice",
    "inventory", "look", "help",
)  # fmt: skip
"""First words of commands; ``put`` occurs in older game files."""
_TOOLS_BY_VERB: Final[Mapping[str, str]] = dict(TOOLS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One action. ``text`` is what the player types; ``thing`` and ``receptacle`` are names, or empty."""

    verb: str
    thing: str = ""
    receptacle: str = ""
    text: str


def commands(scene: Scene, state: State) -> dict[str, Command]:
    """All possible commands by their text, in the original's order."""
    by_text = {
        command.text: command
        for command in (*_anywhere(scene, state), *_here(scene, state), *_carried(scene, state))
    }
    return dict(sorted(by_text.items()))


def is_accessible(scene: Scene, state: State, receptacle: str) -> bool:
    """Whether the inside is visible and can be reached: it is open, or cannot be closed."""
    return scene.receptacles[receptacle] not in tables().openable or receptacle in state.opened


def apply(scene: Scene, state: State, command: Command) -> None:
    """Execute a command of :func:`commands`; changes ``state`` in place."""
    thing, receptacle = command.thing, command.receptacle
    match command.verb:
        case "go":
            state.here = receptacle
        case "open":
            state.opened.add(receptacle)
        case "close":
            state.opened.remove(receptacle)
        case "take":
            state.carried = thing
            del state.locations[thing]
        case "move":
            state.carried = None
            state.locations[thing] = receptacle
        case "use":
            state.toggled.add(thing)
        case "slice":
            state.sliced.add(thing)
        case "clean":
            state.clean.add(thing)
        case "heat":
            state.hot.add(thing)
            state.cool.discard(thing)
        case "cool":
            state.cool.add(thing)
            state.hot.discard(thing)


def _anywhere(scene: Scene, state: State) -> Iterator[Command]:
    for verb in ("look", "inventory", "help"):
        yield Command(verb=verb, text=verb)
    for name in scene.receptacles:
        if name != state.here:
            yield Command(verb="go", receptacle=name, text=f"go to {name}")


def _here(scene: Scene, state: State) -> Iterator[Command]:
    """Commands for the receptacle in front of the player and for its contents."""
    here = state.here
    if here is None:
        return
    yield Command(verb="examine", receptacle=here, text=f"examine {here}")
    if scene.receptacles[here] in tables().openable:
        verb = "close" if here in state.opened else "open"
        yield Command(verb=verb, receptacle=here, text=f"{verb} {here}")
    is_seen = is_accessible(scene, state, here)
    for thing in contents(scene, state, here):
        is_lamp = scene.things[thing] == LAMP
        if is_lamp:
            yield Command(verb="use", thing=thing, text=f"use {thing}")
        if is_seen and not is_lamp and state.carried is None:
            yield Command(verb="take", thing=thing, receptacle=here, text=f"take {thing} from {here}")


def _carried(scene: Scene, state: State) -> Iterator[Command]:
    """Commands for the carried thing."""
    thing, here, known = state.carried, state.here, tables()
    if thing is None:
        return
    yield Command(verb="examine", thing=thing, text=f"examine {thing}")
    if here is None:
        return
    kind, receptacle = scene.things[thing], scene.receptacles[here]
    if is_accessible(scene, state, here) and kind in known.can_hold[receptacle]:
        yield Command(verb="move", thing=thing, receptacle=here, text=f"move {thing} to {here}")
    for verb, kinds in (("clean", known.cleanable), ("heat", known.heatable), ("cool", known.coolable)):
        if kind in kinds and receptacle == _TOOLS_BY_VERB[verb]:
            yield Command(verb=verb, thing=thing, receptacle=here, text=f"{verb} {thing} with {here}")
    if kind in KNIVES:
        for other in contents(scene, state, here):
            if scene.things[other] in known.sliceable:
                yield Command(verb="slice", thing=other, text=f"slice {other} with {thing}")


# Texts of ALFWorld's grammar (``alfred.twl2`` of the package 0.4.2).


PUT: Final = "move {o} to {r}"
_PUT: Final = re.compile(r'action\s+PutObject\s*\{\s*template\s*::\s*"([^"]+)"')


def put_command(grammar: str) -> str | None:
    """The command that puts a thing down in a game's grammar, :data:`PUT` here; None if there is none.

    Releases of ALFWorld before 0.4 have another one, so that prompts and examples of one release teach
    commands that the games of another do not know.
    """
    match = _PUT.search(grammar)
    return match[1] if match else None


NOTHING_HAPPENS: Final = "Nothing happens."
_MIDDLE: Final = "You are in the middle of a room. Looking quickly around you, you see {seen}."
_HELP: Final = (
    "Available commands:\n"
    "  look:                             look around your current location\n"
    "  inventory:                        check your current inventory\n"
    "  go to (receptacle):               move to a receptacle\n"
    "  open (receptacle):                open a receptacle\n"
    "  close (receptacle):               close a receptacle\n"
    "  take (object) from (receptacle):  take an object from a receptacle\n"
    "  move (object) to (receptacle):  place an object in or on a receptacle\n"
    "  examine (something):              examine a receptacle or an object\n"
    "  use (object):                     use an object\n"
    "  heat (object) with (receptacle):  heat an object using a receptacle\n"
    "  clean (object) with (receptacle): clean an object using a receptacle\n"
    "  cool (object) with (receptacle):  cool an object using a receptacle\n"
    "  slice (object) with (object):     slice an object using a sharp object\n"
)
_DONE: Final = {
    "close": "You close the {r}.",
    "take": "You pick up the {o} from the {r}.",
    "move": "You move the {o} to the {r}.",
    "heat": "You heat the {o} using the {r}.",
    "clean": "You clean the {o} using the {r}.",
    "cool": "You cool the {o} using the {r}.",
    "use": "You turn on the {o}.",  # the original never says that a lamp is switched off
    "help": _HELP,
}


def opening(scene: Scene) -> str:
    """The first observation: the room and the goal."""
    room = _MIDDLE.format(seen=listed(tuple(scene.receptacles)))
    return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\nYour task is to: {scene.goal.text}."


def feedback(scene: Scene, state: State, command: Command) -> str:
    """The reply to a command; ``state`` is the state after it."""
    thing, receptacle = command.thing, command.receptacle
    match command.verb:
        case "look":
            # In the middle of the room the grammar asks for receptacles at that very place, and there are
            # none; only the opening lists them all.
            if state.here is None:
                return _MIDDLE.format(seen="nothing")
            return f"You are facing the {state.here}. Next to it, you see nothing."
        case "inventory":
            carried = [] if state.carried is None else [state.carried]
            return f"You are carrying: {listed(carried)}." if carried else "You are not carrying anything."
        case "go":
            return f"You arrive at {receptacle}. {inside(scene, state, receptacle)}"
        case "open":
            return f"You open the {receptacle}. {inside(scene, state, receptacle)}"
        case "examine":
            return inside(scene, state, receptacle) if receptacle else condition(scene, state, thing)
        case "slice":
            return f"You sliced the {thing} with the {state.carried}."
    return _DONE[command.verb].format(o=thing, r=receptacle)


def inside(scene: Scene, state: State, receptacle: str) -> str:
    """Description of a receptacle and its contents."""
    is_openable = scene.receptacles[receptacle] in tables().openable
    if not is_accessible(scene, state, receptacle):
        return f"The {receptacle} is closed."
    seen = listed(contents(scene, state, receptacle))
    if is_openable:
        return f"The {receptacle} is open. In it, you see {seen}."
    return f"On the {receptacle}, you see {seen}."


def condition(scene: Scene, state: State, thing: str) -> str:
    """Description of a thing, by the first of the grammar's rules that applies."""
    kind = scene.things[thing]
    if kind in tables().vessels:
        return f"This is a normal {thing}. In it, you see nothing."
    is_clean, is_hot, is_cool = thing in state.clean, thing in state.hot, thing in state.cool
    sliced = "sliced " if thing in state.sliced else ""
    if is_clean and (is_hot or is_cool):
        return f"This is a {'hot' if is_hot else 'cool'} and clean {sliced}{thing}."
    if is_clean:
        return f"This is a clean {sliced}{thing}."
    if is_hot:
        return f"This is a hot {sliced}{thing}."
    if is_cool:
        return f"This is a {'cool' if sliced else 'cold'} {sliced}{thing}."
    return f"This is a sliced {thing}." if sliced else f"There's nothing special about {thing}."


def listed(names: Sequence[str]) -> str:
    """For example, ``a bed 1, a desk 2, and a desk 1``; the article is always ``a``."""
    if not names:
        return "nothing"
    *first, last = (f"a {name}" for name in names)
    return f"{', '.join(first)}, and {last}" if first else last


# Making a game from a floor plan and a seed.
#
# The floor plan determines the receptacles and the kinds of things. The number of things of a kind, their
# locations and the goal are drawn here, so scores on these games are not comparable with published ones. As
# in the original's text games, there are no sliced variants.


MOST_OF_A_KIND: Final = 3
"""Maximum number of things of one kind in a room, as in the original's generator."""
_T = TypeVar("_T")
# Possible locations of a lamp, which cannot be moved; the original's tables do not list them.
_FOR_LAMPS: Final = ("Desk", "Dresser", "SideTable", "CoffeeTable", "DiningTable", "Shelf")


@lru_cache(maxsize=4096)
def make_scene(game_seed: int, split: Split, task_type: TaskType, index: int) -> Scene:
    """Game ``index`` of a type and a split: the same on every machine, independent of other games."""
    draw = stream(game_seed, "alfworld", split, task_type, index)
    plan = _choose(draw, [candidate for candidate in split_plans(split) if goals(candidate, task_type)])
    # First the thing, then the receptacle: a thing that fits everywhere must not be chosen more often.
    candidates = goals(plan, task_type)
    thing = _choose(draw, list(dict.fromkeys(kind for kind, _ in candidates)))
    receptacle = _choose(draw, [receptacle for kind, receptacle in candidates if kind == thing])
    text = _choose(draw, tables().goal_texts[task_type])
    goal = Goal(
        task_type=task_type,
        thing=thing,
        receptacle=receptacle,
        text=text.format(obj=thing.lower(), recep=receptacle.lower(), toggle=LAMP.lower()),
    )
    receptacles = {
        name: kind for kind, number in sorted(plan.receptacles.items()) for name in _names(kind, number)
    }
    things, locations = _furnish(draw, plan, goal, receptacles)
    return Scene(
        floor_plan=plan.number, receptacles=receptacles, things=things, locations=locations, goal=goal
    )


@cache
def goals(plan: FloorPlan, task_type: TaskType) -> tuple[tuple[str, str], ...]:
    """The possible goals in a room, as pairs of kinds: the thing and its target receptacle.

    The thing may have another place at first, and the target is not the receptacle that cleans, heats or
    cools it.
    """
    known = tables()
    if plan.room not in known.goal_rooms[task_type]:
        return ()
    things = [kind for kind in plan.things if kind != LAMP and _homes(plan, kind)]
    if task_type == "look_at_obj_in_light":
        return tuple((kind, "") for kind in things) if LAMP in plan.things else ()
    verb, tool = TOOLS.get(task_type, ("", ""))
    if tool and tool not in plan.receptacles:
        return ()
    suited = {"": frozenset(things), "clean": known.cleanable, "heat": known.heatable, "cool": known.coolable}
    return tuple(
        (kind, receptacle)
        for kind in things
        for receptacle in _homes(plan, kind)
        if kind in suited[verb] and receptacle != tool and len(_homes(plan, kind)) > 1
    )


def _furnish(
    draw: np.random.Generator, plan: FloorPlan, goal: Goal, receptacles: dict[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Kind and location of every thing. The goal's thing is never in a target receptacle."""
    things: dict[str, str] = {}
    locations: dict[str, str] = {}
    for kind in plan.things:
        homes = _homes(plan, kind)
        if not homes:
            continue
        least, most = (1, 1) if kind == LAMP else (1, MOST_OF_A_KIND)
        if kind == goal.thing:
            homes = tuple(home for home in homes if home != goal.receptacle)
            least = 2 if goal.task_type == "pick_two_obj_and_place" else least
        names = _names(kind, int(draw.integers(least, most + 1)))
        candidates = [name for name, receptacle in receptacles.items() if receptacle in homes]
        things |= dict.fromkeys(names, kind)
        locations |= {name: _choose(draw, candidates) for name in names}
    return things, locations


@cache
def _homes(plan: FloorPlan, kind: str) -> tuple[str, ...]:
    """Kinds of the room's receptacles that a thing can be in."""
    if kind == LAMP:
        return tuple(receptacle for receptacle in _FOR_LAMPS if receptacle in plan.receptacles)[:1]
    can_hold = tables().can_hold
    return tuple(receptacle for receptacle in sorted(plan.receptacles) if kind in can_hold[receptacle])


def _names(kind: str, number: int) -> tuple[str, ...]:
    """``cabinet 3``, ``cabinet 2``, ``cabinet 1``."""
    return tuple(f"{kind.lower()} {index}" for index in range(number, 0, -1))


def _choose(draw: np.random.Generator, choices: Sequence[_T]) -> _T:
    return choices[int(draw.integers(len(choices)))]


# The expert: the fewest commands from the start of a game to its goal.
#
# All receptacles are one step apart, so a plan is determined by the choice of things, target and tool. All
# choices are tried; the commands between are the necessary ones.


class _Route:
    """Commands of a plan, with the state that they lead to."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._here: str | None = None
        self._opened: set[str] = set()
        self.commands: list[str] = []

    def go(self, receptacle: str) -> None:
        if receptacle != self._here:
            self.commands.append(f"go to {receptacle}")
            self._here = receptacle

    def reach_into(self, receptacle: str) -> None:
        self.go(receptacle)
        if self._scene.receptacles[receptacle] in tables().openable and receptacle not in self._opened:
            self.commands.append(f"open {receptacle}")
            self._opened.add(receptacle)

    def pick_up(self, thing: str) -> None:
        location = self._scene.locations[thing]
        self.reach_into(location)
        self.commands.append(f"take {thing} from {location}")

    def move(self, thing: str, receptacle: str) -> None:
        self.reach_into(receptacle)
        self.commands.append(f"move {thing} to {receptacle}")


def shortest_plan(scene: Scene) -> tuple[str, ...]:
    """The shortest plan; of equally short ones the first in alphabetical order."""
    return min((tuple(route.commands) for route in _routes(scene)), key=lambda plan: (len(plan), plan))


def _routes(scene: Scene) -> Iterator[_Route]:
    goal = scene.goal
    things = [name for name, kind in scene.things.items() if kind == goal.thing]
    targets = [name for name, kind in scene.receptacles.items() if kind == goal.receptacle]
    if goal.task_type == "look_at_obj_in_light":
        lamps = [name for name, kind in scene.things.items() if kind == LAMP]
        yield from (_light_route(scene, thing, lamp) for thing in things for lamp in lamps)
    elif goal.task_type == "pick_two_obj_and_place":
        for pair in permutations(things, 2):
            yield from (_move_route(scene, pair, target) for target in targets)
    else:
        verb, kind = TOOLS.get(goal.task_type, ("", ""))
        tools = [name for name, candidate in scene.receptacles.items() if candidate == kind] or [""]
        for thing in things:
            for target in targets:
                yield from (_move_route(scene, (thing,), target, verb, tool) for tool in tools)


def _light_route(scene: Scene, thing: str, lamp: str) -> _Route:
    route = _Route(scene)
    route.pick_up(thing)
    route.go(scene.locations[lamp])
    route.commands.append(f"use {lamp}")
    return route


def _move_route(scene: Scene, things: tuple[str, ...], target: str, verb: str = "", tool: str = "") -> _Route:
    route = _Route(scene)
    for thing in things:
        route.pick_up(thing)
        if tool:
            route.go(tool)
            route.commands.append(f"{verb} {thing} with {tool}")
        route.move(thing, target)
    return route
