"""ScienceWorld's 30 tasks and the texts of its agents. Measured on version 1.2.3 (Wang et al. 2022, arXiv
2203.07540).

The number of variations is data here, so that listing a split needs no Java; the task set compares it with
the simulator before the first rollout.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from outrider.environments.base import Split, known_split
from outrider.types import Task

SIMULATOR_VERSION: Final = "1.2.3"

NUM_VARIATIONS: Final[Mapping[str, int]] = {
    "boil": 30,
    "melt": 30,
    "freeze": 30,
    "change-the-state-of-matter-of": 30,
    "use-thermometer": 540,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "find-animal": 300,
    "grow-plant": 126,
    "grow-fruit": 126,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125,
    "lifespan-shortest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
}
"""Task name -> number of variations, in the simulator's own task order."""

SIMPLIFICATIONS: Final = (
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)


def variations(task_name: str, split: str) -> range:
    """The simulator's own variations of a split: train is the first half, valid and test a quarter each."""
    num_variations = NUM_VARIATIONS[task_name]
    quarter = num_variations // 4
    bounds: dict[Split, range] = {
        "train": range(2 * quarter),
        "valid": range(2 * quarter, 3 * quarter),
        "test": range(3 * quarter, num_variations),
    }
    return bounds[known_split(split, "ScienceWorld")]


def make_tasks(task_names: Sequence[str], split: str, limit: int | None) -> tuple[Task, ...]:
    """The tasks of a split: the first ``limit`` variations (None: all) of every task, in the given order."""
    return tuple(
        Task(
            key=f"scienceworld/{name}/{variation}",
            question=f"ScienceWorld task {name}, variation {variation}",
            metadata={"task_name": name, "variation": variation},
        )
        for name in task_names
        for variation in variations(name, split)[:limit]
    )


_UNREADABLE: Final = ("No known action matches that input", "Unknown action.")
_AMBIGUOUS: Final = "Ambiguous request"
# Messages of the simulator's checks of an action (version 1.2.3); each is the whole observation, on one line.
_REFUSED: Final = re.compile(
    r"It'?s not clear how to .+|I'm not sure .+|You can't .+"
    r"|That can't be moved there.*|That object (?:already appears|does not appear) to be in the inventory\."
    r"|That is already flushing\.|Something can't be connected to itself\."
    r"|The door doesn't appear to go anywhere\."
    r"|You must disconnect entire objects .+|Connections must specify .+"
    r"|.+ is already connected, and must be disconnected .+"
    r"|.+ is already (?:activated|deactivated|open|closed)\."
    r"|.+ is not (?:something that can be "
    r"activated|closeable|openable|edible|moveable|movable|open|a container)\."
    r"|.+ appears broken, and can't be activated or deactivated\.|.+ isn't open, so you can't see inside\."
    r"|.+ can't be poured out,? because .+|.+ is empty, so there's nothing to pour\."
    r"|.+ does not contain any liquids to dunk into\.|The liquids in .+ aren't able to move\."
    r"|That container is empty, so there are no items to mix\.|There is only one thing \(.+\)"
)

INSTRUCTIONS: Final = (
    "You are in a simulated science laboratory and solve a task by typing commands, one a turn.\n"
    "You may think first. Then write exactly one command between <action> and </action>, for example "
    "<action>look around</action>. The next message tells what happened.\n"
    "Commands, where OBJ stands for an object that you can see (for example: open door to kitchen):\n"
    "{templates}\n"
    "When a command is ambiguous, answer with the number of the meaning that you want.\n"
    "Use 'focus on' only for the object that the task asks for: "
    "focusing on a wrong object ends the episode with a failure."
)


NUMBERED_INSTRUCTIONS: Final = (
    "You are in a simulated science laboratory and solve a task by choosing commands, one a turn.\n"
    "Every message ends with a numbered list of commands. Answer with the number of one of them in this form "
    "and nothing else: ### ACTION: number ###"
)


def render_prompt(*, task_text: str, observation: str, action_templates: Sequence[str]) -> str:
    """The first user message: instructions, task and first observation. Without templates, the instructions
    are those of numbered commands.
    """
    instructions = INSTRUCTIONS if action_templates else NUMBERED_INSTRUCTIONS
    instructions = instructions.format(templates=", ".join(action_templates))
    return f"{instructions}\n\nTask: {task_text.strip()}\n\n{observation.strip()}"


def render_numbered(commands: Sequence[str]) -> str:
    """The commands with their numbers, from 0."""
    return "\n".join(f"{number}. {command}" for number, command in enumerate(commands))


def is_unreadable(observation: str) -> bool:
    """Whether the simulator could not parse the command."""
    return observation.startswith(_UNREADABLE)


def is_refused(observation: str) -> bool:
    """Whether the simulator parsed the command but did not execute it; it counts as a move all the same.

    A question (:func:`is_ambiguous`) is no refusal, because the simulator waits for its answer.
    """
    return _REFUSED.fullmatch(observation.strip()) is not None


def is_ambiguous(observation: str) -> bool:
    """Whether the simulator asks which of several meanings the command has; this does not count as a move."""
    return observation.startswith(_AMBIGUOUS)


def nearest_action(action: str, valid_actions: Sequence[str]) -> str | None:
    """The valid action with the largest Jaccard similarity of words, the first one if several are equal; None
    if none shares a word.

    This is the "action correction" of EMPO²'s released wrapper (arXiv 2602.23008, agl-envs). It can turn a
    harmless unknown command into a ``focus on`` that ends the episode with a score of -100.
    """
    if action in valid_actions:
        return action
    best = max(valid_actions, key=lambda candidate: word_jaccard(action, candidate), default=None)
    return best if best is not None and word_jaccard(action, best) > 0 else None


def word_jaccard(left: str, right: str) -> float:
    """Jaccard similarity of the words of two texts; 0 for two empty texts."""
    words, others = set(left.split()), set(right.split())
    return len(words & others) / len(words | others) if words | others else 0.0
