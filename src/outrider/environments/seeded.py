"""The record of an episode of moves, whose return is the sum of what somebody else's environment gave."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import Field, model_validator

from outrider.environments.base import (
    Env,
    EnvironmentFactory,
    EnvironmentSettings,
    EpisodeResult,
    StepResult,
    as_bool,
    as_float,
)
from outrider.errors import ConfigError
from outrider.plugins.imports import import_target
from outrider.plugins.registry import is_import_path
from outrider.types import Message, Step, Task

# Environments whose tasks are seeds: how many of each split, what is a success, who knows the way.


SPLITS: Final = ("train", "valid", "test")
SEEDS_PER_SPLIT: Final = 1_000_000
"""Seeds of a split begin a million apart, so that no split reaches into another one."""


class SeedSettings(EnvironmentSettings):
    """A task is a seed: all rollouts of a group play the same game."""

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


MAX_EXPERT_TURNS: Final = 10_000
"""An expert may give turns without an end, of which an episode takes those that it needs."""


@dataclass(slots=True, kw_only=True)
class MoveRecord:
    """Counts of one episode. ``name`` is the environment's, for messages."""

    name: str
    settings: SeedSettings
    episode_return: float = 0.0
    num_moves: int = 0
    num_turns: int = 0
    num_invalid: int = 0
    success: bool | None = None
    """What the environment said last, where ``success_key`` asks for it."""
    done: bool = False

    def record_invalid(self, problem: str) -> StepResult:
        """A turn that held no action: nothing happened, and ``problem`` says why."""
        self.num_invalid += 1
        return StepResult(message=Message(role="user", content=problem), invalid=True)

    def record_move(
        self, text: str, reward: Any, *, terminated: Any, truncated: Any = False, success: Any
    ) -> StepResult:
        """A turn whose action was done. ``success`` is what the environment says under ``success_key``: None
        and a missing value are no success.

        Raises InvalidResult for a reward or flag that is none, NonFiniteResult for NaN and infinity.
        """
        step_reward = as_float(reward, f"{self.name} gave the reward {reward}: it")
        is_over, is_cut = (
            as_bool(flag, f"{self.name}: {name}")
            for name, flag in (("terminated", terminated), ("truncated", truncated))
        )
        key = self.settings.success_key
        if key is not None:
            success = success is not None and as_bool(success, f"{self.name}: {key}")
        self.num_moves += 1
        self.episode_return += step_reward
        self.success = success
        # GEM's games say both where the last turn won as well as where it was only the last one.
        limit = self.settings.max_moves
        is_truncated = not is_over and (is_cut or (limit is not None and self.num_moves >= limit))
        self.done = is_over or is_truncated
        return StepResult(
            message=Message(role="user", content=text or "Nothing is seen."),
            reward=step_reward,
            done=self.done,
            truncated=is_truncated,
        )

    def result(self) -> EpisodeResult:
        """The sum of rewards so far."""
        reached = self.episode_return >= self.settings.success_at
        return EpisodeResult(
            episode_return=self.episode_return,
            success=(reached if self.success is None else self.success) and self.num_moves > 0,
            metrics={
                "num_moves": float(self.num_moves),
                "num_turns": float(self.num_turns),
                "num_invalid": float(self.num_invalid),
            },
        )


def opening_message(settings: SeedSettings, instructions: str, text: str) -> Message:
    """The prompt of an episode: how to act, and what is seen first."""
    prompt = instructions if settings.prompt is None else settings.prompt
    return Message(role="user", content="\n\n".join(part for part in (prompt, text) if part))


# An expert that is a function of the user's: its turns, played.


EnvironmentT = TypeVar("EnvironmentT", bound=Env)


class ExpertTurns(Generic[EnvironmentT]):
    """``path`` names the function, ``play(environment, function, seed)`` plays what it says. The factory of
    ``make`` is made when an expert is first asked for, and again after :meth:`close`.
    """

    def __init__(
        self,
        path: str | None,
        make: Callable[[], EnvironmentFactory],
        play: Callable[[EnvironmentT, Any, int], Sequence[Step]],
    ) -> None:
        self._path = path
        self._make = make
        self._play = play
        self._solve: Any = None
        self._factory: EnvironmentFactory | None = None

    def steps(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The turns; None without a function, or where they are no success. Raises
        :class:`EnvironmentFault` where the function raises.
        """
        if self._path is None:
            return None
        if self._solve is None:
            self._solve = import_target(self._path)
        if self._factory is None:
            self._factory = self._make()
        environment: Any = self._factory(task)
        try:
            steps = self._play(environment, self._solve, seed)
        finally:
            environment.close()
        return steps if environment.result().success else None

    def close(self) -> None:
        """Close the factory; may be called twice."""
        factory, self._factory = self._factory, None
        if factory is not None:
            factory.close()
