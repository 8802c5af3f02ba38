"""One episode of one environment of Gymnasium's form."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from outrider.environments.base import Episode, EpisodeResult, StepResult
from outrider.environments.gym.making import (
    GymConfig,
    IsolatedRandom,
    RandomState,
    Recipe,
    close,
    make_recipe,
    package_version,
)
from outrider.environments.gym.spaces import observation_text
from outrider.environments.seeded import MAX_EXPERT_TURNS, ExpertTurns, MoveRecord, opening_message, task_seed
from outrider.environments.text_games import STOP
from outrider.errors import EnvironmentFault, OutriderError
from outrider.types import Message, Step, Task


class GymEnvironment:
    """Chat protocol: the policy's turn holds an action, the observation comes as a user message.

    The return is the sum of the environment's own rewards. What it raises is a fault: an environment that
    cannot bear a text needs a wrapper that answers it.
    """

    def __init__(self, *, recipe: Recipe, config: GymConfig, seed: int) -> None:
        """Nothing is made before :meth:`reset`. ``seed`` is the task's."""
        self._recipe = recipe
        self._config = config
        self._seed = seed
        self._env: Any = None
        self._draws = (
            IsolatedRandom(RandomState.from_seed(seed), config.lock_timeout_s)
            if config.has_own_draws
            else None
        )
        self._record = self._new_record()

    def reset(self, seed: int) -> Sequence[Message]:
        """A fresh environment at the task's seed. ``seed`` changes nothing: a group plays one game."""
        self.close()
        self._record = self._new_record()
        if self._draws is not None:
            self._draws = IsolatedRandom(RandomState.from_seed(self._seed), self._config.lock_timeout_s)
        with self._outside_code("reset"):
            self._env = self._recipe.make()
            observation, info = self._env.reset(seed=self._seed)
            text = self._written(observation, info)
        return (opening_message(self._config, self._recipe.action.instructions, text),)

    def step(self, message: Message) -> StepResult:
        """Do the turn's action. Text that holds none changes nothing and is answered in words."""
        if self._record.done:
            raise RuntimeError("the episode has ended")
        if self._env is None:
            raise EnvironmentFault(f"{self._config.id} was never reset, or is closed")
        self._record.num_turns += 1
        read = self._recipe.action.read(message.content)
        if read.problem:
            return self._record.record_invalid(read.problem)
        with self._outside_code("step"):
            observation, reward, terminated, truncated, info = self._env.step(read.action)
            text = self._written(observation, info)
            success = None if (key := self._config.success_key) is None else info.get(key)
        return self._record.record_move(
            text, reward, terminated=terminated, truncated=truncated, success=success
        )

    def result(self) -> EpisodeResult:
        """The sum of rewards so far."""
        return self._record.result()

    def expert_texts(self, solve: Callable[[Any], Iterable[str]]) -> Sequence[str]:
        """What ``solve`` says of the environment itself. It is asked at once, before anything is done."""
        with self._outside_code("expert"):
            return tuple(islice(solve(self._env), MAX_EXPERT_TURNS))

    def close(self) -> None:
        """Close the environment; may be called twice."""
        env, self._env = self._env, None
        if env is not None:
            with self._outside_code("close"):
                close(env)

    def _new_record(self) -> MoveRecord:
        return MoveRecord(name=self._config.id, settings=self._config)

    def _written(self, observation: Any, info: Any) -> str:
        rendered = self._env.render() if self._recipe.observation == "render" else None
        return observation_text(observation, info, self._recipe.observation, rendered)

    @contextmanager
    def _outside_code(self, operation: str) -> Iterator[None]:
        """Somebody else's code: with this episode's generators, and what it raises is a fault."""
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
    """One whose deep copy goes on as it would itself, which :func:`copies_are_exact` has tried."""

    def copy(self) -> "CopyableGymEnvironment":
        """The same episode at the same point; neither sees what the other does from then on."""
        twin = CopyableGymEnvironment(recipe=self._recipe, config=self._config, seed=self._seed)
        twin._record = replace(self._record)
        with self._outside_code("deepcopy"):
            twin._env = copy.deepcopy(self._env)
        twin._draws = None if self._draws is None else self._draws.twin()
        return twin


# Whether episodes of an environment can be forked by a deep copy.


_NUM_STEPS = 4


def copies_are_exact(recipe: Recipe, config: GymConfig, seed: int) -> bool:
    """Whether a deep copy goes on as its original, and both as they would alone: tried before each of the
    first steps of a task. Environments that cannot be copied are forked by playing their actions again.
    """
    try:
        alone, again = _play(recipe, config, seed), _play(recipe, config, seed)
        # An environment that its seed does not decide is another one each time: nothing to hold it against.
        expected = alone if alone == again else None
        return all(_copy_matches(recipe, config, seed, step, expected) for step in range(_NUM_STEPS))
    except Exception:  # whatever somebody else's environment raises when it is copied
        return False


def _turns(recipe: Recipe) -> list[Message]:
    return [
        Message(role="assistant", content=recipe.action.probe(number)) for number in range(_NUM_STEPS + 1)
    ]


def _play(recipe: Recipe, config: GymConfig, seed: int) -> list[StepResult]:
    """What the turns are answered where nobody makes a copy."""
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
        other.step(turns[-1])  # goes another way, which neither of the two may notice
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


# Gymnasium, GEM and environments of their form: ``environment.type = "gym"``.


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
        """The turns of ``expert``, played. See :class:`outrider.environments.seeded.ExpertTurns`."""
        return self._expert.steps(task, seed)

    def close(self) -> None:
        """Nothing is held."""


def _play_expert(environment: GymEnvironment, solve: Any, seed: int) -> Sequence[Step]:
    environment.reset(seed)
    texts = environment.expert_texts(solve)
    environment.reset(seed)  # it may have tried its way in the environment
    return Episode(environment).play(texts)
