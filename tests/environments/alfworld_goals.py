"""The goals of ALFWorld as formulas, read and checked apart from the games' own code: facts in, truth out."""

from typing import Any

from outrider.environments.alfworld.made_games import Scene, State

# gen/goal_library.py of the package alfworld 0.4.2, a variable's first letter is its type.
_PLACED = """(exists (?r) (exists (?o) (and
    (inReceptacle ?o ?r) (objectType ?o {obj}) (receptacleType ?r {recep}){more})))"""
FORMULAS = {
    "pick_and_place_simple": _PLACED,
    "pick_clean_then_place_in_recep": _PLACED.replace("{more}", " (isClean ?o)"),
    "pick_heat_then_place_in_recep": _PLACED.replace("{more}", " (isHot ?o)"),
    "pick_cool_then_place_in_recep": _PLACED.replace("{more}", " (isCool ?o)"),
    "pick_two_obj_and_place": """(exists (?r) (exists (?o1) (and
        (objectType ?o1 {obj}) (receptacleType ?r {recep}) (inReceptacle ?o1 ?r)
        (exists (?o2) (and (not (= ?o1 ?o2)) (objectType ?o2 {obj}) (receptacleType ?r {recep})
            (inReceptacle ?o2 ?r))))))""",
    "look_at_obj_in_light": """(and
        (exists (?ot) (and (objectType ?ot DeskLamp) (isToggled ?ot) (exists (?r) (and
            (atLocation agent ?r) (inReceptacle ?ot ?r)))))
        (exists (?o) (and (objectType ?o {obj}) (holds agent ?o))))""",
}


def holds(scene: Scene, state: State) -> bool:
    """Whether the goal's formula is true of the facts."""
    formula = FORMULAS[scene.goal.task_type].format(
        obj=scene.goal.thing, recep=scene.goal.receptacle, more=""
    )
    tokens = iter(formula.replace("(", " ( ").replace(")", " ) ").split())
    assert next(tokens) == "("
    names = {"o": list(scene.things), "r": list(scene.receptacles)}
    return _true(_read(tokens), facts(scene, state), names, {})


def facts(scene: Scene, state: State) -> set[tuple[str, ...]]:
    found = {("objectType", name, kind) for name, kind in scene.things.items()}
    found |= {("receptacleType", name, kind) for name, kind in scene.receptacles.items()}
    found |= {("inReceptacle", thing, place) for thing, place in state.locations.items()}
    found |= {("atLocation", "agent", str(state.here)), ("holds", "agent", str(state.carried))}
    for name, things in (
        ("isClean", state.clean), ("isHot", state.hot), ("isCool", state.cool), ("isToggled", state.toggled),
    ):  # fmt: skip
        found |= {(name, thing) for thing in things}
    return found


def _read(tokens: Any) -> list[Any]:
    parts: list[Any] = []
    for token in tokens:
        if token == ")":
            break
        parts.append(_read(tokens) if token == "(" else token)
    return parts


def _true(
    formula: Any, known: set[tuple[str, ...]], names: dict[str, list[str]], values: dict[str, str]
) -> bool:
    head, *rest = formula
    match head:
        case "and":
            return all(_true(one, known, names, values) for one in rest)
        case "not":
            return not _true(rest[0], known, names, values)
        case "=":
            return values[rest[0]] == values[rest[1]]
        case "exists":
            [variable], body = rest
            return any(_true(body, known, names, {**values, variable: name}) for name in names[variable[1]])
    return (head, *(values.get(one, one) for one in rest)) in known
