"""Environments of other packages whose tasks are seeds: settings, tasks, records and experts."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from outrider.environments.base import (
    SPLITS,
    EnvironmentSettings,
    EpisodeResult,
    StepResult,
    as_bool,
    as_float,
    known_split,
    require_tasks,
    split_size,
)
from outrider.errors import ConfigError
from outrider.plugins.registry import is_import_path
from outrider.types import Message, Task

SEEDS_PER_SPLIT: Final = 1_000_000
"""The seeds of two splits start this far apart, so that they never overlap."""
MAX_EXPERT_TURNS: Final = 10_000
"""Limit of turns that are requested from an expert, which may be endless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFormat:
    """How the actions of an environment are written in a turn.

    Attributes:
        instructions: explanation of the format in the prompt.
        probes: turns with which the environment is tried before a run.
        read: from a turn to its action and an empty text; or to None and, for the policy, what is wrong.
    """

    instructions: str
    probes: tuple[str, ...]
    read: Callable[[str], tuple[Any, str]]


class SeedSettings(EnvironmentSettings):
    """A task is a seed: all rollouts of a group play the same game."""

    num_train: Annotated[int, Field(ge=0, le=SEEDS_PER_SPLIT)] = 64
    """Number of tasks of the split, each with its own seed."""
    num_valid: Annotated[int, Field(ge=0, le=SEEDS_PER_SPLIT)] = 16
    num_test: Annotated[int, Field(ge=0, le=SEEDS_PER_SPLIT)] = 32
    first_seed: Annotated[int, Field(ge=0, lt=2**30)] = 0
    """Seed of the first training task. If you increase the number of tasks, the first ones stay the same."""
    prompt: str | None = None
    """Text before the first observation; None explains the action tag."""
    success_at: float = 1.0
    """An episode with at least this return is a success."""
    success_key: str | None = None
    """Take success from this key of ``info`` instead (for example, ``is_success``); with an OpenEnv server,
    from this field of the observation.
    """
    max_moves: Annotated[int, Field(ge=1)] | None = None
    """Limit of environment steps per episode, in addition to the environment's own limit."""
    expert: str | None = None
    """Import path of a function of yours that solves the environment, such as ``my_module:solve``, for a cold
    start and for buffers. Episodes without success are not used.
    """

    @model_validator(mode="after")
    def _validate_seeds(self) -> "SeedSettings":
        require_tasks(self)
        if self.expert is not None and not is_import_path(self.expert):
            raise ValueError(f"expert is an import path such as my_module:solve, not {self.expert!r}")
        return self

    @property
    def has_experts(self) -> bool:
        return self.expert is not None

    def imported(self) -> Mapping[str, str]:
        """The expert's function."""
        return {} if self.expert is None else {"expert": self.expert}

    def seed_tasks(self, split: str, name: str, metadata: Mapping[str, Any]) -> Sequence[Task]:
        """The tasks of a split of the game ``name``. ``metadata`` must be the same when a run is resumed.

        Raises ConfigError for an unknown split.
        """
        known = known_split(split, name)
        begin = self.first_seed + SPLITS.index(known) * SEEDS_PER_SPLIT
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")
        return tuple(
            Task(
                key=f"{self.type}/{slug}/{split}/{seed}",
                question=f"{name}, seed {seed}",
                metadata={"environment": name, "seed": seed, **metadata},
            )
            for seed in range(begin, begin + (split_size(self, known) or 0))
        )


def task_seed(task: Task, name: str) -> int:
    """The seed of a task of the game ``name``. Raises ConfigError for a task of another one."""
    seed = task.metadata.get("seed")
    if task.metadata.get("environment") != name or not isinstance(seed, int):
        raise ConfigError(f"{task.key} is no task of {name}")
    return seed


@dataclass(slots=True, kw_only=True)
class MoveRecord:
    """Record of one episode, whose return is the sum of the rewards. ``name`` is for messages."""

    name: str
    settings: SeedSettings
    episode_return: float = 0.0
    num_moves: int = 0
    num_turns: int = 0
    num_invalid: int = 0
    success: bool | None = None
    """The last value of ``success_key``."""
    done: bool = False
    truncated: bool = False

    def record_invalid(self, problem: str) -> StepResult:
        """Record a turn without a readable action."""
        self.num_invalid += 1
        return StepResult(message=Message(role="user", content=problem), invalid=True)

    def record_move(
        self, text: str, reward: Any, *, terminated: Any, truncated: Any = False, success: Any
    ) -> StepResult:
        """Record an executed action. ``success`` is the value of ``success_key``; None is no success.

        Raises InvalidResult for a reward or flag of another type, and NonFiniteResult for NaN and infinity.
        """
        step_reward = as_float(reward, f"{self.name} returned the reward {reward}: it")
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
        # GEM's games set both flags if the last turn won, and if it was only the last one.
        limit = self.settings.max_moves
        is_truncated = not is_over and (is_cut or (limit is not None and self.num_moves >= limit))
        self.done, self.truncated = is_over or is_truncated, is_truncated
        return StepResult(
            message=Message(role="user", content=text or "Nothing is seen."),
            reward=step_reward,
            done=self.done,
            truncated=is_truncated,
        )

    def result(self) -> EpisodeResult:
        """The record in the form of an environment's result."""
        reached = self.episode_return >= self.settings.success_at
        return EpisodeResult(
            episode_return=self.episode_return,
            success=(reached if self.success is None else self.success) and self.num_moves > 0,
            metrics={
                "num_moves": float(self.num_moves),
                "num_turns": float(self.num_turns),
                "num_invalid": float(self.num_invalid),
            },
            reason=self._reason,
        )

    @property
    def _reason(self) -> str:
        end = "" if self.done else "the episode did not end; "
        end = f"cut after {self.num_moves} moves; " if self.truncated else end
        if self.success is not None:
            return f"{end}{self.settings.success_key} is {self.success}"
        relation = ">=" if self.episode_return >= self.settings.success_at else "<"
        return f"{end}return {self.episode_return:g} {relation} success_at = {self.settings.success_at:g}"


def opening_message(settings: SeedSettings, instructions: str, text: str) -> Message:
    """The prompt of an episode: instructions and first observation."""
    prompt = instructions if settings.prompt is None else settings.prompt
    return Message(role="user", content="\n\n".join(part for part in (prompt, text) if part))
