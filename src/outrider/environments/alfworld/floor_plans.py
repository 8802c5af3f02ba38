"""ALFWorld's 120 floor plans, its tables and its goal texts (Shridhar et al. 2021, arXiv 2010.03768), in one
shipped file.

The file is made from the package ``alfworld`` by ``python -m benchmarks.alfworld_floor_plans`` and holds its
licence (MIT). A floor plan names kinds of receptacles and of things; the package has no record of which thing
lies where.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, Literal, get_args

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
