"""One episode of one environment of Gymnasium's form."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.gym.generators import IsolatedRandom, RandomState
from outrider.environments.gym.making import Recipe, close
from outrider.environments.gym.observations import observation_text
from outrider.environments.gym.settings import GymConfig
from outrider.environments.moves import MAX_EXPERT_TURNS, MoveRecord, opening_message
from outrider.errors import EnvironmentFault, OutriderError
from outrider.types import Message


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
