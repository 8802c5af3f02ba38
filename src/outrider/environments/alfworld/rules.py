"""What can be done in a made game: the actions of ALFWorld's PDDL domain (``alfred.pddl``), with their
preconditions and effects, and the commands of its grammar (``alfred.twl2``).

As there, a microwave and a fridge work shut, and a thing is examined only in the hand: the domain's
precondition for one that lies in sight names a type that there is none of (``location,``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from outrider.environments.alfworld.floor_plans import tables
from outrider.environments.alfworld.scene import LAMP, TOOLS, Scene, State, contents

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
