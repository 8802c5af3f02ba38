"""Gymnasium, GEM and environments of the same form: ``environment.type = "gym"``."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, Final, Self

from outrider.environments.base import Environment, EpisodeResult, StepResult
from outrider.environments.gym.making import (
    GymConfig,
    IsolatedRandom,
    Recipe,
    close,
    make_recipe,
    observation_text,
    package_version,
)
from outrider.environments.seeded import MAX_EXPERT_TURNS, MoveRecord, opening_message, task_seed
from outrider.environments.text_games import STOP
from outrider.errors import EnvironmentFault, OutriderError
from outrider.plugins.imports import import_target
from outrider.types import Message, Task

_NUM_STEPS: Final = 4


class GymEnvironment(Environment):
    """One episode. The observation is a user message, and the return the sum of the environment's rewards.

    An exception of the environment is a fault. An environment that raises one for some text of the policy
    needs a wrapper that returns an observation instead. ``shared`` is the :class:`Recipe`.
    """

    Settings = GymConfig
    name = "gym"

    def __init__(self, settings: GymConfig | None = None, shared: Recipe | None = None) -> None:
        super().__init__(settings, shared)
        self.can_copy = shared is not None and shared.copies_are_exact
        self._env: Any = None
        self._draws: IsolatedRandom | None = None
        self._record = MoveRecord(name=self.settings.id, settings=self.settings)

    @classmethod
    def tasks(cls, settings: GymConfig, split: str) -> Sequence[Task]:
        """One task per seed. The metadata name the package's version: another one may have other games, so a
        resumed run rejects it.
        """
        return settings.seed_tasks(split, settings.id, {"package": package_version(settings)})

    @classmethod
    def stop_strings(cls, settings: GymConfig) -> tuple[str, ...]:
        return () if settings.reads_raw else (STOP,)

    @classmethod
    def open_shared(cls, settings: GymConfig) -> Recipe:
        """Make one environment, and check whether it can be copied. Raises ToolUnavailable or ConfigError."""
        recipe = make_recipe(settings)
        return replace(recipe, copies_are_exact=copies_are_exact(recipe, settings))

    def reset(self, task: Task, seed: int) -> Message:
        """Make an environment and reset it to the task's seed; ``seed`` is not used."""
        config, seed = self.settings, task_seed(task, self.settings.id)
        self.close()
        self._record = MoveRecord(name=config.id, settings=config)
        self._draws = IsolatedRandom(seed, config.lock_timeout_s) if config.has_own_draws else None
        with self._outside_code("reset"):
            self._env = self.shared.make()
            observation, info = self._env.reset(seed=seed)
            text = self._render(observation, info)
        return opening_message(config, self.shared.action.instructions, text)

    def step(self, action: str) -> StepResult:
        if self._env is None:
            raise EnvironmentFault(f"{self.settings.id} was never reset, or is closed")
        self._record.num_turns += 1
        move, problem = self.shared.action.read(action)
        if problem:
            return self._record.record_invalid(problem)
        with self._outside_code("step"):
            observation, reward, terminated, truncated, info = self._env.step(move)
            text = self._render(observation, info)
            success = None if (key := self.settings.success_key) is None else info.get(key)
        return self._record.record_move(
            text, reward, terminated=terminated, truncated=truncated, success=success
        )

    def result(self) -> EpisodeResult:
        return self._record.result()

    def copy(self) -> Self:
        twin = copy.copy(self)
        twin._record = replace(self._record)
        with self._outside_code("deepcopy"):
            twin._env = copy.deepcopy(self._env)
        twin._draws = copy.copy(self._draws)
        return twin

    def expert(self) -> Sequence[str]:
        """The turns of the user's function for this environment, all of them before any is played."""
        solve = import_target(self.settings.expert)
        with self._outside_code("expert"):
            return tuple(islice(solve(self._env), MAX_EXPERT_TURNS))

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            with self._outside_code("close"):
                close(env)

    def _render(self, observation: Any, info: Any) -> str:
        rendered = self._env.render() if self.shared.observation == "render" else None
        return observation_text(observation, info, self.shared.observation, rendered)

    @contextmanager
    def _outside_code(self, operation: str) -> Iterator[None]:
        """Run the environment's code with this episode's generators; its exceptions are faults."""
        try:
            with nullcontext() if self._draws is None else self._draws.inside():
                yield
        except OutriderError:
            raise
        except Exception as error:
            raise EnvironmentFault(
                f"{self.settings.id}: {operation} raised {type(error).__name__}: {error}"
            ) from error


def copies_are_exact(recipe: Recipe, config: GymConfig) -> bool:
    """Whether a deep copy behaves like its original, and both as without a copy: tried before each of the
    first steps of the first task. Environments that cannot be copied are forked by replaying their actions.
    """
    task = Task(key="copy", question="", metadata={"environment": config.id, "seed": config.first_seed})
    probes = recipe.action.probes
    turns = [probes[number % len(probes)] for number in range(_NUM_STEPS + 1)]
    try:
        alone, again = (_play(GymEnvironment(config, recipe), task, turns) for _ in range(2))
        # If the seed does not determine the environment, there is nothing to compare with.
        expected = alone if alone == again else None
        return all(
            _copy_matches(GymEnvironment(config, recipe), task, turns, step, expected)
            for step in range(_NUM_STEPS)
        )
    except Exception:  # an environment may raise anything when it is copied
        return False


def _play(environment: GymEnvironment, task: Task, turns: Sequence[str]) -> list[StepResult]:
    """The results of the turns without a copy."""
    results: list[StepResult] = []
    with closing(environment):
        environment.reset(task, 0)
        for turn in turns:
            results.append(environment.step(turn))
            if results[-1].done:
                break
    return results


def _copy_matches(
    original: GymEnvironment,
    task: Task,
    turns: Sequence[str],
    step: int,
    expected: Sequence[StepResult] | None,
) -> bool:
    seen: list[StepResult] = []
    with ExitStack() as opened:
        opened.callback(original.close)
        original.reset(task, 0)
        for turn in turns[:step]:
            seen.append(original.step(turn))
            if seen[-1].done:
                return True
        twin, other = (opened.enter_context(closing(original.copy())) for _ in range(2))
        other.step(turns[-1])  # must not affect the others
        for turn in turns[step:]:
            seen.append(original.step(turn))
            if seen[-1] != twin.step(turn) or original.result() != twin.result():
                return False
            if seen[-1].done:
                break
        return expected is None or seen == expected
