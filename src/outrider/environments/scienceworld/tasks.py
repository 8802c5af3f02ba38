"""ScienceWorld's 30 tasks as frozen data: names, number of variations, the simulator's own split, what
replays exactly.

Held here so that listing a split needs no Java;
:func:`outrider.environments.scienceworld.environment.ScienceWorldTaskSet.make` compares the numbers with the
simulator before the first rollout. Measured on ScienceWorld 1.2.3 (Wang et al. 2022, arXiv 2203.07540).
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from outrider.errors import ConfigError
from outrider.types import Task

SIMULATOR_VERSION: Final = "1.2.3"

NUM_VARIATIONS: Final[Mapping[str, int]] = MappingProxyType(
    {
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
)
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
    """The simulator's own variations of a split (``train``, ``valid``, ``test``): two quarters, one quarter,
    the rest.
    """
    num_variations = NUM_VARIATIONS[task_name]
    quarter = num_variations // 4
    bounds = {
        "train": (0, 2 * quarter),
        "valid": (2 * quarter, 3 * quarter),
        "test": (3 * quarter, num_variations),
    }
    if split not in bounds:
        raise ConfigError(f"unknown split {split!r}; ScienceWorld has {', '.join(bounds)}")
    return range(*bounds[split])


def is_electrical(task_name: str) -> bool:
    """Whether the task needs ``connect`` actions, which the simplification ``noElectricalAction`` removes."""
    return "power-component" in task_name or "conductivity" in task_name


def replays_exactly(task_name: str, *, deterministic: bool) -> bool:
    """Whether the same actions lead to the same state again, so that a fork may replay a prefix.

    Measured in deterministic mode, gold paths mixed with other actions, twice in one process and once in a
    fresh one: all 30 tasks. Without it no task: even where scores repeat, the order in which a room's
    contents are listed does not.
    """
    return deterministic and task_name in NUM_VARIATIONS


def make_tasks(task_names: Sequence[str], split: str, limit: int | None) -> tuple[Task, ...]:
    """The frozen list of a split: tasks in the given order, the first ``limit`` variations of each (all for
    None).
    """
    return tuple(
        Task(
            key=f"scienceworld/{name}/{variation}",
            question=f"ScienceWorld task {name}, variation {variation}",
            metadata={"task_name": name, "variation": variation},
        )
        for name in task_names
        for variation in variations(name, split)[:limit]
    )


def hash_tasks(tasks: Sequence[Task]) -> str:
    """SHA-256 over the simulator version and the task keys in order: equal exactly when two panels hold the
    same episodes.
    """
    digest = hashlib.sha256(f"scienceworld {SIMULATOR_VERSION}\n".encode())
    for task in tasks:
        digest.update(task.key.encode() + b"\n")
    return digest.hexdigest()


# Texts of a ScienceWorld agent: the prompt, the action tag, the simulator's refusals.


STOP: Final = "</action>"
MAX_ACTION_CHARACTERS: Final = 200
_TAGGED: Final = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL)
_UNREADABLE: Final = ("No known action matches that input", "Unknown action.")
_AMBIGUOUS: Final = "Ambiguous request"
# What the simulator's checks of an action say (version 1.2.3); each is the whole observation, on one line.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAction:
    """The command in a policy message, or ``problem``: what was wrong, in words for the policy (one of them
    is empty).
    """

    action: str = ""
    problem: str = ""


def parse_action(text: str, *, lower: bool = True, verbatim: bool = False) -> ParsedAction:
    """Read the one ``<action>...</action>`` of a message; everything around it is free thought. Never raises.

    The command's white space is collapsed and, with ``lower``, it is lower-cased, as the simulator's parser
    expects. ``verbatim`` keeps what stands between the tags, of any length: a program, or JSON.
    """
    commands = _TAGGED.findall(text)
    if not commands:
        return ParsedAction(
            problem="No command found. Write exactly one command as <action>command</action>."
        )
    if len(commands) > 1:
        return ParsedAction(
            problem=(
                f"Found {len(commands)} commands; nothing was done. Write exactly one "
                "<action>command</action>."
            )
        )
    action = commands[0].strip() if verbatim else " ".join(commands[0].split())
    action = action.lower() if lower and not verbatim else action
    if not action:
        return ParsedAction(problem="The command is empty. Write one command as <action>command</action>.")
    if len(action) > MAX_ACTION_CHARACTERS and not verbatim:
        return ParsedAction(
            problem=f"The command is longer than {MAX_ACTION_CHARACTERS} characters; nothing was done."
        )
    return ParsedAction(action=action)


def render_action(action: str) -> str:
    """A policy message that holds the command and nothing else."""
    return f"<action>{action}{STOP}"


def render_prompt(*, task_text: str, observation: str, action_templates: Sequence[str]) -> str:
    """The first user message: how to act, the task, and what the agent sees."""
    instructions = INSTRUCTIONS.format(templates=", ".join(action_templates))
    return f"{instructions}\n\nTask: {task_text.strip()}\n\n{observation.strip()}"


def render_valid_actions(actions: Sequence[str], limit: int) -> str:
    """The list of commands that are understood now, cut to ``limit`` with the number left out stated."""
    listing = "\n".join(actions[:limit])
    num_hidden = len(actions) - limit
    return f"Commands understood now:\n{listing}" + (f"\n... and {num_hidden} more" if num_hidden > 0 else "")


def is_unreadable(observation: str) -> bool:
    """Whether the simulator could not read the command at all."""
    return observation.startswith(_UNREADABLE)


def is_refused(observation: str) -> bool:
    """Whether the simulator read the command and did not do it. It costs a move all the same, and time
    passes.

    A question back (:func:`is_ambiguous`) is no refusal: the simulator waits for its answer and takes nothing
    else.
    """
    return _REFUSED.fullmatch(observation.strip()) is not None


def is_ambiguous(observation: str) -> bool:
    """Whether the simulator asks which of several meanings the command has (costs no move)."""
    return observation.startswith(_AMBIGUOUS)


def nearest_action(action: str, valid_actions: Sequence[str]) -> str | None:
    """The valid action with the largest Jaccard similarity of white-space words; the first of equals; None
    when none shares a word.

    This is the "action correction" of EMPO²'s released wrapper (arXiv 2602.23008, agl-envs). Beware: it can
    turn a harmless unknown command into a real ``focus on`` that ends the episode at -100.
    """
    if action in valid_actions:
        return action
    best = max(valid_actions, key=lambda candidate: word_jaccard(action, candidate), default=None)
    return best if best is not None and word_jaccard(action, best) > 0 else None


def word_jaccard(left: str, right: str) -> float:
    """Size of the intersection over size of the union of two texts' white-space words; 0 for two empty
    texts.
    """
    words, others = set(left.split()), set(right.split())
    return len(words & others) / len(words | others) if words | others else 0.0
