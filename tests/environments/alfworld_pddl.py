"""A made game as the package's own kind of file: the same room and goal in PDDL, for the package's engine."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from outrider.environments.alfworld.made_games import LAMP, Scene, tables

_BASINS = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}


def identifier(name: str, kind: str) -> str:
    """The engine numbers what is of one kind from the last identifier on, and adds "basin" itself."""
    number = f"{99 - int(name.rpartition(' ')[2]):02d}"
    return f"{_BASINS[kind]}_bar_{number}_bar_{kind}" if kind in _BASINS else f"{kind}_bar_{number}"


def problem(scene: Scene, goal: str) -> str:
    known = tables()
    receptacles = {name: identifier(name, kind) for name, kind in scene.receptacles.items()}
    things = {name: identifier(name, kind) for name, kind in scene.things.items()}
    places = {name: f"loc_bar_{number}" for number, name in enumerate(receptacles)}
    thing_kinds = sorted({*scene.things.values()} | {one for held in known.can_hold.values() for one in held})
    receptacle_kinds = sorted(set(known.can_hold) - set(thing_kinds))
    lines = [
        "(define (problem p)",
        "(:domain alfred)",
        "(:objects",
        "agent1 - agent",
        "loc_bar_init - location",
    ]
    lines += [f"{kind}Type - otype" for kind in thing_kinds]
    lines += [f"{kind}Type - rtype" for kind in receptacle_kinds]
    lines += [f"{one} - object" for one in things.values()]
    lines += [f"{one} - receptacle" for one in receptacles.values()]
    lines += [f"{one} - location" for one in places.values()]
    lines += [")", "(:init", "(= (total-cost) 0)", "(atLocation agent1 loc_bar_init)"]
    for name, kind in scene.receptacles.items():
        lines.append(f"(receptacleType {receptacles[name]} {kind}Type)")
        lines.append(f"(receptacleAtLocation {receptacles[name]} {places[name]})")
        if kind in known.openable:
            lines.append(f"(openable {receptacles[name]})")
    for name, kind in scene.things.items():
        place = scene.locations[name]
        lines.append(f"(objectType {things[name]} {kind}Type)")
        lines.append(f"(inReceptacle {things[name]} {receptacles[place]})")
        lines.append(f"(objectAtLocation {things[name]} {places[place]})")
        lines.append(f"({'toggleable' if kind == LAMP else 'pickupable'} {things[name]})")
        properties = {
            "cleanable": known.cleanable, "heatable": known.heatable, "coolable": known.coolable,
            "sliceable": known.sliceable, "isReceptacleObject": known.vessels,
        }  # fmt: skip
        lines += [f"({one} {things[name]})" for one, kinds in properties.items() if kind in kinds]
    for kind in receptacle_kinds:
        lines += [f"(canContain {kind}Type {one}Type)" for one in sorted(known.can_hold[kind])]
    return "\n".join([*lines, ")"]) + goal


def write_game(folder: Path, scene: Scene) -> Path:
    """A folder as the published ones are, with the package's own domain, grammar and goal."""
    from alfworld.gen.goal_library import gdict
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    goal = gdict[scene.goal.task_type]["pddl"].format(
        obj=scene.goal.thing, recep=scene.goal.receptacle, toggle=LAMP
    )
    grammar = Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", scene.goal.text)
    folder.mkdir(parents=True)
    (folder / "traj_data.json").write_text(json.dumps({"task_type": scene.goal.task_type}))
    game = {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(), "grammar": grammar, "solvable": True,
        "pddl_problem": problem(scene, goal.replace("#", "-")), "walkthrough": None,
    }  # fmt: skip
    (folder / "game.tw-pddl").write_text(json.dumps(game))
    return folder / "game.tw-pddl"


VECTORS = Path(__file__).parents[1] / "vectors" / "alfworld.json"
RARE = {
    "take": 3,
    "move": 3,
    "heat": 9,
    "cool": 9,
    "clean": 9,
    "slice": 9,
    "use": 5,
    "open": 5,
    "close": 1,
    "examine": 2,
}


def record(folder: Path) -> None:
    """Walks by chance and plans of ours in the package's engine, as vectors for where it is not installed."""
    from outrider.environments.alfworld import environment as published
    from outrider.environments.alfworld.made_games import TASK_TYPES, make_scene, shortest_plan
    from outrider.seeding import stream

    engines, games = published.Engines(published.new_engine), []
    for task_type in TASK_TYPES:
        for index in range(3):
            scene = make_scene(7, "train", task_type, index)
            path = write_game(folder / task_type / str(index), scene)
            game, draw, walk = (published.PublishedGame(path, engines), stream(0, path.name, index), [])
            opening, first = game.opening, game.commands()
            for _ in range(40):
                weights = [
                    RARE.get(one.partition(" ")[0], 0.3) for one in (*game.commands(), "put that there")
                ]
                drawn = draw.choice(len(weights), p=[one / sum(weights) for one in weights])
                walk.append(_turn(game, (*game.commands(), "put that there")[drawn]))
                if walk[-1]["won"]:
                    break
            solved = published.PublishedGame(path, engines)
            plan = [_turn(solved, command) for command in shortest_plan(scene)]
            games.append({
                "game": [7, "train", task_type, index], "opening": opening, "commands": list(first),
                "walk": walk, "plan": plan,
            })  # fmt: skip
            VECTORS.write_text(json.dumps(games, indent=1) + "\n")
            print(task_type, index, len(walk), plan[-1]["won"], flush=True)


def _turn(game: Any, command: str) -> dict[str, Any]:
    reply = game.act(command)
    admitted = hashlib.sha256("\n".join(game.commands()).encode()).hexdigest()
    return {
        "command": command, "text": reply.text, "won": reply.won, "refused": reply.refused,
        "admitted": admitted,
    }  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        record(Path(made))
