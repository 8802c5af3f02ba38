"""Gymnasium, GEM and environments of their form: ``environment.type = "gym"``."""

from collections.abc import Sequence
from typing import Any, Literal

from outrider.environments.base import play_steps
from outrider.environments.expert_turns import ExpertTurns
from outrider.environments.gym.copying import copies_are_exact
from outrider.environments.gym.environment import CopyableGymEnvironment, GymEnvironment
from outrider.environments.gym.making import Recipe, make_recipe, package_version
from outrider.environments.gym.settings import GymConfig
from outrider.environments.scienceworld.text import STOP
from outrider.environments.seeds import task_seed
from outrider.types import Step, Task


class GymFactory:
    """Makes environments; nothing is shared but how they are made."""

    def __init__(self, *, recipe: Recipe, config: GymConfig, is_copyable: bool) -> None:
        self._recipe = recipe
        self._config = config
        self._cls = CopyableGymEnvironment if is_copyable else GymEnvironment

    def __call__(self, task: Task) -> GymEnvironment:
        """A fresh episode of the task. Raises :class:`ConfigError` for a task of another environment."""
        seed = task_seed(task, self._config.id)
        return self._cls(recipe=self._recipe, config=self._config, seed=seed)

    def close(self) -> None:
        """Nothing is held."""


class GymTaskSet:
    """The seeds of one environment."""

    Settings = GymConfig
    name = "gym"
    protocol: Literal["inline", "chat"] = "chat"
    stateful = True

    def __init__(self, config: GymConfig) -> None:
        """Make nothing."""
        self.config = config
        self.stop: tuple[str, ...] = () if config.reads_raw else (STOP,)
        self._expert: ExpertTurns[GymEnvironment] = ExpertTurns(config.expert, self.make, _play_expert)

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed of ``train``, ``valid`` or ``test``. They name the package's version, which may
        play other games: a resumed run refuses another one.
        """
        package = package_version(self.config)
        return self.config.seed_tasks(split, self.config.id, {"package": package})

    def make(self) -> GymFactory:
        """Make one environment, and try whether its copies hold. Raises :class:`ToolUnavailable` or
        :class:`ConfigError`.
        """
        recipe = make_recipe(self.config)
        is_copyable = copies_are_exact(recipe, self.config, self.config.first_seed)
        return GymFactory(recipe=recipe, config=self.config, is_copyable=is_copyable)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """The turns of ``expert``, played. See :class:`outrider.environments.expert_turns.ExpertTurns`."""
        return self._expert.steps(task, seed)

    def close(self) -> None:
        """Nothing is held."""


def _play_expert(environment: GymEnvironment, solve: Any, seed: int) -> Sequence[Step]:
    environment.reset(seed)
    texts = environment.expert_texts(solve)
    environment.reset(seed)  # it may have tried its way in the environment
    return play_steps(environment, texts)
