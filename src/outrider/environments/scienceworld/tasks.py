"""ScienceWorld's 30 tasks as frozen data: names, number of variations, the simulator's own split, what
replays exactly.

Held here so that listing a split needs no Java;
:func:`outrider.environments.scienceworld.family.ScienceWorldTaskSet.make` compares the numbers with the
simulator before the first rollout. Measured on ScienceWorld 1.2.3 (Wang et al. 2022, arXiv 2203.07540).
"""

import hashlib
from collections.abc import Mapping, Sequence
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
