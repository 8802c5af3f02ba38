"""Whether episodes of an environment can be forked by a deep copy."""

from collections.abc import Sequence

from outrider.environments.base import StepResult
from outrider.environments.gym.environment import CopyableGymEnvironment
from outrider.environments.gym.making import Recipe
from outrider.environments.gym.settings import GymConfig
from outrider.types import Message

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
