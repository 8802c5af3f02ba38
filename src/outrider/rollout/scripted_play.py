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
    is_answer,
    recorded_turn,
    start_episode,
    take_step,
    turn_message,
)
from outrider.errors import EnvironmentFault, InvalidResult, ToolFault
from outrider.rollout.blocking import run_timed
from outrider.rollout.faults import locate_invalid_result
from outrider.types import Message, Outcome, Step, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectEpisode:
    """Record of a scripted episode: the prompt, one result per text that was played, and its outcome.
    ``ends_with_answer``: the last turn was an answer as a whole.
    """

    prompt: tuple[Message, ...]
    results: tuple[StepResult, ...]
    record: EpisodeResult
    ends_with_answer: bool = False

    def steps(self, texts: Sequence[str]) -> tuple[Step, ...]:
        """The played texts with their observations; texts behind the end of the episode are left out."""
        return tuple(to_step(text, result) for text, result in zip(texts, self.results, strict=False))


def play_texts(
    factory: EnvironmentFactory, task: Task, texts: Sequence[str], *, seed: int, timeout_s: float
) -> DirectEpisode:
    """Play until the texts or the episode end, every call for at most ``timeout_s`` seconds. Calls in the
    Hermes form, as imported chats have them, are played in the environment's own.

    Raises ToolFault or EnvironmentFault when infrastructure broke or hangs.
    """
    environment = run_timed(factory, task, timeout_s=timeout_s)
    try:
        prompt = run_timed(start_episode, environment, seed, timeout_s=timeout_s)
        results: list[StepResult] = []
        answers = False
        for text in texts:
            message = turn_message(environment, recorded_turn(environment, text))
            answers = is_answer(environment, message)
            results.append(run_timed(take_step, environment, message, timeout_s=timeout_s))
            if results[-1].done:
                break
        record = run_timed(episode_result, environment, timeout_s=timeout_s)
        return DirectEpisode(prompt=prompt, results=tuple(results), record=record, ends_with_answer=answers)
    except InvalidResult as error:
        raise locate_invalid_result(environment, task.key, error) from error
    finally:
        close_quietly(environment, timeout_s=timeout_s)


def close_quietly(environment: Environment, *, timeout_s: float) -> None:
    """A close that fails or hangs changes nothing of what was played."""
    with suppress(ToolFault, EnvironmentFault):
        run_timed(environment.close, timeout_s=timeout_s)


def to_step(text: str, result: StepResult) -> Step:
    """A played text as a step of a trajectory."""
    return Step(text=text, observation=result.text, is_terminal=result.done)


def episode_outcome(result: StepResult, *, is_cut: bool = False, is_answer: bool = False) -> Outcome:
    """How an episode that the environment has ended (``done``) ended.

    ``is_cut``: the token limit ended its last turn. It is unreadable for that reason then and not because it
    is wrong, and if all of it was the answer (``is_answer``), it is not the one that was being written.
    """
    if is_cut and (result.invalid or is_answer):
        return Outcome.TRUNCATED_TOKENS
    if result.truncated:
        return Outcome.TRUNCATED_TURNS
    return Outcome.INVALID if result.invalid else Outcome.FINISHED
