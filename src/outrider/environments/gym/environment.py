"""Gymnasium, GEM and environments of the same form: ``environment.type = "gym"``."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from outrider.environments.base import Episode, EpisodeResult, StepResult
from outrider.environments.gym.making import (
    GymConfig,
    IsolatedRandom,
    Recipe,
    close,
    make_recipe,
    package_version,
)
from outrider.environments.gym.spaces import observation_text
from outrider.environments.seeded import MAX_EXPERT_TURNS, MoveRecord, SeedTaskSet, opening_message, task_seed
from outrider.environments.text_games import STOP, SimpleFactory
from outrider.errors import EnvironmentFault, OutriderError
from outrider.types import Message, Step, Task

_NUM_STEPS: Final = 4


class GymEnvironment:
    """One episode. The observation is a user message, and the return the sum of the environment's rewards.

    An exception of the environment is a fault. An environment that raises one for some text of the policy
    needs a wrapper that returns an observation instead.
    """

    def __init__(self, *, recipe: Recipe, config: GymConfig, seed: int) -> None:
        """``seed`` is the task's. Nothing is made before :meth:`reset`."""
        self._recipe = recipe
        self._config = config
        self._seed = seed
        self._env: Any = None
        self._start_record()

    def reset(self, seed: int) -> Sequence[Message]:
        """Make an environment and reset it to the task's seed; ``seed`` is not used."""
        self.close()
        self._start_record()
        with self._outside_code("reset"):
            self._env = self._recipe.make()
            observation, info = self._env.reset(seed=self._seed)
            text = self._render(observation, info)
        return (opening_message(self._config, self._recipe.action.instructions, text),)

    def step(self, message: Message) -> StepResult:
        """Execute the action of the turn."""
        if self._record.done:
            raise RuntimeError("the episode has ended")
        if self._env is None:
            raise EnvironmentFault(f"{self._config.id} was never reset, or is closed")
        self._record.num_turns += 1
        action, problem = self._recipe.action.read(message.content)
        if problem:
            return self._record.record_invalid(problem)
        with self._outside_code("step"):
            observation, reward, terminated, truncated, info = self._env.step(action)
            text = self._render(observation, info)
            success = None if (key := self._config.success_key) is None else info.get(key)
        return self._record.record_move(
            text, reward, terminated=terminated, truncated=truncated, success=success
        )

    def result(self) -> EpisodeResult:
        return self._record.result()

    def expert_texts(self, solve: Callable[[Any], Iterable[str]]) -> Sequence[str]:
        """The turns of the user's function for this environment, all of them before any is played."""
        with self._outside_code("expert"):
            return tuple(islice(solve(self._env), MAX_EXPERT_TURNS))

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            with self._outside_code("close"):
                close(env)

    def _start_record(self) -> None:
        config = self._config
        self._record = MoveRecord(name=config.id, settings=config)
        self._draws = IsolatedRandom(self._seed, config.lock_timeout_s) if config.has_own_draws else None

    def _render(self, observation: Any, info: Any) -> str:
        rendered = self._env.render() if self._recipe.observation == "render" else None
        return observation_text(observation, info, self._recipe.observation, rendered)

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
                f"{self._config.id}: {operation} raised {type(error).__name__}: {error}"
            ) from error


class CopyableGymEnvironment(GymEnvironment):
    """An environment that a deep copy forks exactly, as checked by :func:`copies_are_exact`."""

    def copy(self) -> "CopyableGymEnvironment":
        """An independent episode in the same state."""
        twin = copy.copy(self)
        twin._record = replace(self._record)
        with self._outside_code("deepcopy"):
            twin._env = copy.deepcopy(self._env)
        twin._draws = copy.copy(self._draws)
        return twin


def copies_are_exact(recipe: Recipe, config: GymConfig, seed: int) -> bool:
    """Whether a deep copy behaves like its original, and both as without a copy: tried before each of the
    first steps of a task. Environments that cannot be copied are forked by replaying their actions.
    """
    try:
        alone, again = _play(recipe, config, seed), _play(recipe, config, seed)
        # If the seed does not determine the environment, there is nothing to compare with.
        expected = alone if alone == again else None
        return all(_copy_matches(recipe, config, seed, step, expected) for step in range(_NUM_STEPS))
    except Exception:  # an environment may raise anything when it is copied
        return False


def _turns(recipe: Recipe) -> list[Message]:
    probes = recipe.action.probes
    return [
        Message(role="assistant", content=probes[number % len(probes)]) for number in range(_NUM_STEPS + 1)
    ]


def _play(recipe: Recipe, config: GymConfig, seed: int) -> list[StepResult]:
    """The results of the turns without a copy."""
    environment = CopyableGymEnvironment(recipe=recipe, config=config, seed=seed)
    results: list[StepResult] = []
    try:
        environment.reset(0)
        for turn in _turns(recipe):
            results.append(environment.step(turn))
            if results[-1].done:
                break
    finally:
        environment.close()
    return results


def _copy_matches(
    recipe: Recipe, config: GymConfig, seed: int, step: int, expected: Sequence[StepResult] | None
) -> bool:
    turns = _turns(recipe)
    original = CopyableGymEnvironment(recipe=recipe, config=config, seed=seed)
    copies = []
    seen: list[StepResult] = []
    try:
        original.reset(0)
        for turn in turns[:step]:
            seen.append(original.step(turn))
            if seen[-1].done:
                return True
        copies = [original.copy(), original.copy()]
        twin, other = copies
        other.step(turns[-1])  # must not affect the others
        for turn in turns[step:]:
            seen.append(original.step(turn))
            if seen[-1] != twin.step(turn) or original.result() != twin.result():
                return False
            if seen[-1].done:
                break
        return expected is None or seen == expected
    finally:
        for environment in (original, *copies):
            environment.close()


class GymTaskSet(SeedTaskSet):
    """The seeds of one environment."""

    Settings = GymConfig
    name = "gym"

    def __init__(self, config: GymConfig) -> None:
        super().__init__(config.expert)
        self.config = config
        self.stop: tuple[str, ...] = () if config.reads_raw else (STOP,)

    def tasks(self, split: str) -> Sequence[Task]:
        """One task per seed. The metadata name the package's version: another one may have other games, so a
        resumed run rejects it.
        """
        return self.config.seed_tasks(split, self.config.id, {"package": package_version(self.config)})

    def make(self) -> SimpleFactory:
        """Make one environment, and check whether it can be copied. Raises ToolUnavailable or ConfigError."""
        config, recipe = self.config, make_recipe(self.config)
        is_copyable = copies_are_exact(recipe, config, config.first_seed)
        cls = CopyableGymEnvironment if is_copyable else GymEnvironment
        return SimpleFactory(lambda task: cls(recipe=recipe, config=config, seed=task_seed(task, config.id)))

    def play_expert(self, environment: GymEnvironment, solve: Any, seed: int) -> Sequence[Step]:
        environment.reset(seed)
        texts = environment.expert_texts(solve)
        environment.reset(seed)  # the expert may have stepped the environment
        return Episode(environment).play(texts)
