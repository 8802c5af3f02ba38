"""ALFWorld's 120 floor plans, its tables and its goal texts (Shridhar et al. 2021, arXiv 2010.03768), in one
shipped file.

The file is made from the package ``alfworld`` by ``python -m benchmarks.alfworld_floor_plans`` and holds its
licence (MIT). A floor plan names kinds of receptacles and of things; the package has no record of which thing
lies where.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib import resources
from itertools import permutations
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np

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

Split = Literal["train", "valid", "test"]
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
# Of the 24 plans of a room that the original trains on, the last four are ours to choose settings with.
_VALID: Final = range(27, 31)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FloorPlan:
    """One room, of which there is one object. ``receptacles``: how many it has of each kind; ``things``:
    kinds that can lie in them.
    """

    number: int
    room: str
    receptacles: Mapping[str, int]
    things: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What goes with what, by kind. ``can_hold``: receptacle to things; ``vessels``: things that look like
    receptacles; ``goal_rooms`` and ``goal_texts``: of each task type.
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
    """Those of the shipped file."""
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
    """The floor plans of a split, no two of which share one: ``test`` has those that the original holds out
    (six of each room), ``valid`` the last four of the others.
    """
    held_out = frozenset(_load_data()["held_out"])
    return tuple(plan for plan in floor_plans() if _plan_split(plan.number, held_out) == split)


def _plan_split(number: int, held_out: frozenset[int]) -> Split:
    if number in held_out:
        return "test"
    return "valid" if number % 100 in _VALID else "train"


@cache
def _load_data() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("floor_plans.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


# A made game as plain data: which receptacles and things a room has, where the things lie at the start, and
# what is asked for.


LAMP: Final = "DeskLamp"
TOOLS: Final[Mapping[TaskType, tuple[str, str]]] = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge"),
}
"""What has to be done to the thing, and the kind of receptacle that does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """``thing`` and ``receptacle`` are kinds; what is looked at in light needs no receptacle (empty)."""

    task_type: TaskType
    thing: str
    receptacle: str
    text: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """A game. ``receptacles`` and ``things``: kind of each name, in the order in which they are listed
    (``cabinet 2`` before ``cabinet 1``, as the original lists them). ``locations``: the receptacle of each
    thing at the start.
    """

    floor_plan: int
    receptacles: Mapping[str, str]
    things: Mapping[str, str]
    locations: Mapping[str, str]
    goal: Goal

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all of it (64 hex digits): equal exactly for equal games."""
        parts = [str(self.floor_plan), repr(self.goal)]
        parts += [f"{name}={kind}" for name, kind in self.receptacles.items()]
        parts += [f"{name}={kind}@{self.locations[name]}" for name, kind in self.things.items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(slots=True, kw_only=True)
class State:
    """Where an episode is. ``here`` is None in the middle of the room; ``locations`` lacks the thing that is
    held.
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
        """An equal one that shares nothing that changes."""
        return State(
            locations=dict(self.locations),
            here=self.here,
            carried=self.carried,
            opened=set(self.opened),
            clean=set(self.clean),
            hot=set(self.hot),
            cool=set(self.cool),
            sliced=set(self.sliced),
            toggled=set(self.toggled),
        )


def opening_state(scene: Scene) -> State:
    """In the middle of the room, with empty hands and everything shut."""
    return State(locations=dict(scene.locations))


def contents(scene: Scene, state: State, receptacle: str) -> tuple[str, ...]:
    """Things that lie there now, seen or not, in the scene's order."""
    return tuple(name for name in scene.things if state.locations.get(name) == receptacle)


def is_reached(scene: Scene, state: State) -> bool:
    """Whether the goal holds now, by the formulas of the original's goal library."""
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


# What can be done in a made game: the actions of ALFWorld's PDDL domain (``alfred.pddl``), with their
# preconditions and effects, and the commands of its grammar (``alfred.twl2``).
#
# As there, a microwave and a fridge work shut, and a thing is examined only in the hand: the domain's
# precondition for one that lies in sight names a type that there is none of (``location,``).


KNIVES: Final = frozenset({"Knife", "ButterKnife"})
VERBS: Final = (
    "go", "open", "close", "take", "move", "put", "examine", "use", "heat", "clean", "cool", "slice",
    "inventory", "look", "help",
)  # fmt: skip
"""First words of commands; ``put`` is that of older game files."""
_TOOLS_BY_VERB: Final[Mapping[str, str]] = dict(TOOLS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One action: ``text`` is what is typed. ``thing`` and ``receptacle`` are names, empty where it has
    none.
    """

    verb: str
    thing: str = ""
    receptacle: str = ""
    text: str


def commands(scene: Scene, state: State) -> dict[str, Command]:
    """Every command that does something or tells something now, by its text, sorted as the original sorts
    them.
    """
    by_text = {
        command.text: command
        for command in (*_anywhere(scene, state), *_here(scene, state), *_carried(scene, state))
    }
    return dict(sorted(by_text.items()))


def is_accessible(scene: Scene, state: State, receptacle: str) -> bool:
    """Whether its inside can be seen and reached: it is open, or has nothing to open."""
    return scene.receptacles[receptacle] not in tables().openable or receptacle in state.opened


def apply(scene: Scene, state: State, command: Command) -> None:
    """Do a command of :func:`commands`; the state changes in place."""
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
    """What the receptacle that one stands at and its contents allow."""
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
    """What the thing in hand allows here."""
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


# What a made game says, in the words of ALFWorld's grammar (``alfred.twl2`` of the package 0.4.2).


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
    """The first observation: the room and the task."""
    room = _MIDDLE.format(seen=listed(tuple(scene.receptacles)))
    return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\nYour task is to: {scene.goal.text}."


def feedback(scene: Scene, state: State, command: Command) -> str:
    """What is said after a command, in the state that it led to."""
    thing, receptacle = command.thing, command.receptacle
    match command.verb:
        case "look":
            return around(state)
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


def around(state: State) -> str:
    """What ``look`` tells. In the middle of the room the grammar asks for receptacles at that very place, and
    there is none; only the opening names them all.
    """
    if state.here is None:
        return _MIDDLE.format(seen="nothing")
    return f"You are facing the {state.here}. Next to it, you see nothing."


def inside(scene: Scene, state: State, receptacle: str) -> str:
    """What a look at a receptacle tells."""
    is_openable = scene.receptacles[receptacle] in tables().openable
    if not is_accessible(scene, state, receptacle):
        return f"The {receptacle} is closed."
    seen = listed(contents(scene, state, receptacle))
    if is_openable:
        return f"The {receptacle} is open. In it, you see {seen}."
    return f"On the {receptacle}, you see {seen}."


def condition(scene: Scene, state: State, thing: str) -> str:
    """What a look at a thing tells; the first of the grammar's rules that holds."""
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
    """``a bed 1, a desk 2, and a desk 1``; the article is always ``a``."""
    if not names:
        return "nothing"
    *first, last = (f"a {name}" for name in names)
    return f"{', '.join(first)}, and {last}" if first else last


# Games of the six types, made from a floor plan and a seed.
#
# The floor plans say which receptacles and kinds of things a room has; how many of a kind there are, where
# they lie and what is asked for is drawn here. So scores on these games compare with no published one. The
# sliced variants are left out, as the original's text games leave them out.


MOST_OF_A_KIND: Final = 3
"""Things of one kind in a room; the original's generator has the same bound."""
_T = TypeVar("_T")
# Where a lamp may stand; it cannot be moved, and no table of the original says where it does.
_FOR_LAMPS: Final = ("Desk", "Dresser", "SideTable", "CoffeeTable", "DiningTable", "Shelf")


@lru_cache(maxsize=4096)
def make_scene(game_seed: int, split: Split, task_type: TaskType, index: int) -> Scene:
    """Game ``index`` of a type and a split: the same on every machine, whatever other games there are."""
    draw = stream(game_seed, "alfworld", split, task_type, index)
    plan = _choose(draw, [candidate for candidate in split_plans(split) if goals(candidate, task_type)])
    thing, receptacle = _goal(draw, plan, task_type)
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
    """What can be asked for in a room: kinds of a thing and of the receptacle that it has to come into.

    The thing can lie elsewhere too, and the receptacle is not the one that cleans, heats or cools it.
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


def _goal(draw: np.random.Generator, plan: FloorPlan, task_type: TaskType) -> tuple[str, str]:
    """First the thing, then the receptacle: a thing that fits everywhere is not asked for more often."""
    candidates = goals(plan, task_type)
    thing = _choose(draw, list(dict.fromkeys(kind for kind, _ in candidates)))
    return thing, _choose(draw, [receptacle for kind, receptacle in candidates if kind == thing])


def _furnish(
    draw: np.random.Generator, plan: FloorPlan, goal: Goal, receptacles: dict[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Kind and place of every thing. What is asked for is nowhere in a receptacle of the kind that it has to
    come into.
    """
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
    """Kinds of the room's receptacles that a thing can lie in."""
    if kind == LAMP:
        return tuple(receptacle for receptacle in _FOR_LAMPS if receptacle in plan.receptacles)[:1]
    can_hold = tables().can_hold
    return tuple(receptacle for receptacle in sorted(plan.receptacles) if kind in can_hold[receptacle])


def _names(kind: str, number: int) -> tuple[str, ...]:
    """``cabinet 3``, ``cabinet 2``, ``cabinet 1``."""
    return tuple(f"{kind.lower()} {index}" for index in range(number, 0, -1))


def _choose(draw: np.random.Generator, choices: Sequence[_T]) -> _T:
    return choices[int(draw.integers(len(choices)))]


# The expert: the fewest commands that reach the goal of a made game from its start.
#
# Every receptacle is one walk from every other, so a plan is decided by which things, which receptacle and
# which tool it uses; all choices are tried. The commands between are those that nothing can do without.


class _Route:
    """Commands so far, and what they have led to."""

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
    """The fewest commands from the start to the goal; of equally short plans the first in alphabetical
    order.
    """
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
            yield from (_place_route(scene, pair, target) for target in targets)
    else:
        verb, kind = TOOLS.get(goal.task_type, ("", ""))
        tools = [name for name, candidate in scene.receptacles.items() if candidate == kind] or [""]
        for thing in things:
            for target in targets:
                yield from (_place_route(scene, (thing,), target, verb, tool) for tool in tools)


def _light_route(scene: Scene, thing: str, lamp: str) -> _Route:
    route = _Route(scene)
    route.pick_up(thing)
    route.go(scene.locations[lamp])
    route.commands.append(f"use {lamp}")
    return route


def _place_route(
    scene: Scene, things: tuple[str, ...], target: str, verb: str = "", tool: str = ""
) -> _Route:
    route = _Route(scene)
    for thing in things:
        route.pick_up(thing)
        if tool:
            route.go(tool)
            route.commands.append(f"{verb} {thing} with {tool}")
        route.move(thing, target)
    return route
