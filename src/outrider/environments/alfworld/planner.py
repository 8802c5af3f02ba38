"""The expert: the fewest commands that reach the goal of a made game from its start.

Every receptacle is one walk from every other, so a plan is decided by which things, which receptacle and
which tool it uses; all choices are tried. The commands between are those that nothing can do without.
"""

from collections.abc import Iterator
from itertools import permutations

from outrider.environments.alfworld.floor_plans import tables
from outrider.environments.alfworld.scene import LAMP, TOOLS, Scene


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
