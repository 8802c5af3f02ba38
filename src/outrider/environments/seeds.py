"""Environments whose tasks are seeds: how many of each split, what is a success, who knows the way."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, model_validator

from outrider.environments.base import EnvironmentSettings
from outrider.errors import ConfigError
from outrider.plugins.names import is_import_path
from outrider.types import Task

SPLITS: Final = ("train", "valid", "test")
SEEDS_PER_SPLIT: Final = 1_000_000
"""Seeds of a split begin a million apart, so that no split reaches into another one."""


class SeedSettings(EnvironmentSettings):
    """A task is a seed: all rollouts of a group play the same game."""

    details: ClassVar[frozenset[str]] = frozenset({"success_key"})

    num_train: Annotated[int, Field(ge=0, le=SEEDS_PER_SPLIT)] = 64
    num_valid: Annotated[int, Field(ge=0, le=SEEDS_PER_SPLIT)] = 16
    num_test: Annotated[int, Field(ge=0, le=SEEDS_PER_SPLIT)] = 32
    first_seed: Annotated[int, Field(ge=0, lt=2**30)] = 0
    """Seed of the first training task. More tasks leave the first ones as they are."""
    prompt: str | None = None
    """Text in front of the first observation; None explains the action tag."""
    success_at: float = 1.0
    """An episode with at least this return is a success."""
    success_key: str | None = None
    """What says so in its place: a key of ``info`` (``is_success``), of an OpenEnv server a field of the
    observation.
    """
    max_moves: Annotated[int, Field(ge=1)] | None = None
    """Steps of the environment after which an episode is cut, beside its own limit."""
    expert: str | None = None
    """A function of yours that knows the way, as ``my_module:solve``, for a cold start and for buffers. A way
    that is no success is not used.
    """

    @model_validator(mode="after")
    def _has_tasks(self) -> "SeedSettings":
        if self.num_train + self.num_valid + self.num_test == 0:
            raise ValueError("num_train, num_valid and num_test are all 0: there is nothing to play")
        if self.expert is not None and not is_import_path(self.expert):
            raise ValueError(f"expert is an import path such as my_module:solve, not {self.expert!r}")
        return self

    @property
    def has_experts(self) -> bool:
        """Where a function is named."""
        return self.expert is not None

    def imported(self) -> Mapping[str, str]:
        """The expert's function."""
        return {} if self.expert is None else {"expert": self.expert}

    def seeds(self, split: str) -> range:
        """Seeds of a split's tasks, in their order. Raises :class:`ConfigError` for an unknown split."""
        sizes = dict(zip(SPLITS, (self.num_train, self.num_valid, self.num_test), strict=True))
        if split not in sizes:
            raise ConfigError(f"unknown split {split!r}; an environment's seeds have {', '.join(SPLITS)}")
        begin = self.first_seed + SPLITS.index(split) * SEEDS_PER_SPLIT
        return range(begin, begin + sizes[split])

    def seed_tasks(self, split: str, name: str, metadata: Mapping[str, Any]) -> Sequence[Task]:
        """One task per seed of the game ``name``; ``metadata`` is what a resumed run has to find again."""
        return tuple(
            Task(
                key=f"{self.type}/{_slug(name)}/{split}/{seed}",
                question=f"{name}, seed {seed}",
                metadata={"environment": name, "seed": seed, **metadata},
            )
            for seed in self.seeds(split)
        )


def task_seed(task: Task, name: str) -> int:
    """The seed of a task of the game ``name``. Raises :class:`ConfigError` for another one's."""
    seed = task.metadata.get("seed")
    if task.metadata.get("environment") != name or not isinstance(seed, int):
        raise ConfigError(f"{task.key} is no task of {name}")
    return seed


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")
