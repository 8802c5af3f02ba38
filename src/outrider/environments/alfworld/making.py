"""Games of the six types, made from a floor plan and a seed.

The floor plans say which receptacles and kinds of things a room has; how many of a kind there are, where they
lie and what is asked for is drawn here. So scores on these games compare with no published one. The sliced
variants are left out, as the original's text games leave them out.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final, TypeVar

import numpy as np

from outrider.environments.alfworld.floor_plans import FloorPlan, Split, TaskType, split_plans, tables
from outrider.environments.alfworld.scene import LAMP, TOOLS, Goal, Scene
from outrider.seeding import stream

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
