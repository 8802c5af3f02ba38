"""What a made game says, in the words of ALFWorld's grammar (``alfred.twl2`` of the package 0.4.2)."""

from collections.abc import Sequence
from typing import Final

from outrider.environments.alfworld.floor_plans import tables
from outrider.environments.alfworld.rules import Command, is_accessible
from outrider.environments.alfworld.scene import Scene, State, contents

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
