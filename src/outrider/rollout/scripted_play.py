"""Playing texts that are known beforehand straight against an environment: no model, no tokens."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from outrider.environments.base import (
    Environment,
    EnvironmentFactory,
    EpisodeResult,
    StepResult,
    episode_result,
    start_episode,
    take_step,
    turn_message,
)
from outrider.errors import EnvironmentFault, InvalidResult, ToolFault
from outrider.rollout.blocking import timed
from outrider.rollout.faults import invalid_in
from outrider.types import Message, Outcome, Step, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectEpisode:
    """Record of a scripted episode: the prompt, one result per text that was played, and its outcome."""

    prompt: tuple[Message, ...]
    results: tuple[StepResult, ...]
    record: EpisodeResult

    def steps(self, texts: Sequence[str]) -> tuple[Step, ...]:
        """The played texts with their observations; texts behind the end of the episode are left out."""
        return tuple(step_of(text, result) for text, result in zip(texts, self.results, strict=False))


def play_texts(
    factory: EnvironmentFactory, task: Task, texts: Sequence[str], *, seed: int, timeout_s: float
) -> DirectEpisode:
    """Play until the texts or the episode end, every call for at most ``timeout_s`` seconds.

    Raises ToolFault or EnvironmentFault when infrastructure broke or hangs.
    """
    environment = timed(factory, task, timeout_s=timeout_s)
    try:
        prompt = timed(start_episode, environment, seed, timeout_s=timeout_s)
        results: list[StepResult] = []
        for text in texts:
            said = turn_message(environment, text)
            results.append(timed(take_step, environment, said, timeout_s=timeout_s))
            if results[-1].done:
                break
        record = timed(episode_result, environment, timeout_s=timeout_s)
        return DirectEpisode(prompt=prompt, results=tuple(results), record=record)
    except InvalidResult as error:
        raise invalid_in(environment, task.key, error) from error
    finally:
        close_quietly(environment, timeout_s=timeout_s)


def close_quietly(environment: Environment, *, timeout_s: float) -> None:
    """A close that fails or hangs changes nothing of what was played."""
    with suppress(ToolFault, EnvironmentFault):
        timed(environment.close, timeout_s=timeout_s)


def step_of(text: str, result: StepResult) -> Step:
    """A played text as a step of a trajectory."""
    return Step(text=text, observation=result.text, is_terminal=result.done)


def outcome_of(result: StepResult) -> Outcome:
    """How an episode that the environment has ended (``done``) ended."""
    if result.truncated:
        return Outcome.TRUNCATED_TURNS
    return Outcome.INVALID if result.invalid else Outcome.FINISHED
