"""Whether episodes of an environment can be forked by a deep copy."""

from outrider.environments.gym.environment import CopyableGymEnvironment
from outrider.environments.gym.making import Recipe
from outrider.environments.gym.settings import GymConfig
from outrider.types import Message

_NUM_STEPS = 4


def copies_hold(recipe: Recipe, config: GymConfig, seed: int) -> bool:
    """Whether a deep copy goes on as its original, and leaves it alone: tried before each of the first steps
    of a task. Environments that cannot be copied are forked by playing their actions again.
    """
    try:
        return all(_holds(recipe, config, seed, at) for at in range(_NUM_STEPS))
    except Exception:  # whatever somebody else's environment raises when it is copied
        return False


def _holds(recipe: Recipe, config: GymConfig, seed: int, at: int) -> bool:
    turns = [
        Message(role="assistant", content=recipe.action.probe(number)) for number in range(_NUM_STEPS + 1)
    ]
    original = CopyableGymEnvironment(recipe=recipe, config=config, seed=seed)
    copies = []
    try:
        original.reset(0)
        for turn in turns[:at]:
            if original.step(turn).done:
                return True
        copies = [original.copy(), original.copy()]
        twin, other = copies
        other.step(turns[-1])  # goes another way, which neither of the two may notice
        for turn in turns[at:]:
            found, copied = original.step(turn), twin.step(turn)
            if found != copied or original.result() != twin.result():
                return False
            if found.done:
                break
        return True
    finally:
        for one in (original, *copies):
            one.close()
