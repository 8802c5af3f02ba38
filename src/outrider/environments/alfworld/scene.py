"""A made game as plain data: which receptacles and things a room has, where the things lie at the start, and
what is asked for.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from outrider.environments.alfworld.floor_plans import TaskType

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
    (``cabinet 2`` before ``cabinet 1``, as the original lists them). ``locations``: the receptacle of each thing
    at the start.
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
