"""Playing texts that are known beforehand straight against an environment: no model, no tokens."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from outrider.environments.base import Environment, EnvironmentFactory, EpisodeResult, StepResult
from outrider.errors import EnvironmentFault, ToolFault
from outrider.types import Message, Outcome, Step, Task

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectEpisode:
    """What the environment said: the prompt, one result a text that was played, and its record."""

    prompt: tuple[Message, ...]
    results: tuple[StepResult, ...]
    record: EpisodeResult

    def steps(self, texts: Sequence[str]) -> tuple[Step, ...]:
        """The played texts with their observations; texts behind the end of the episode are left out."""
        return tuple(step_of(text, result) for text, result in zip(texts, self.results, strict=False))


def play_texts(factory: EnvironmentFactory, task: Task, texts: Sequence[str], *, seed: int) -> DirectEpisode:
    """Play until the texts or the episode end. Raises ToolFault or EnvironmentFault when infrastructure broke."""
    environment = guarded(factory, task)
    try:
        prompt = tuple(guarded(environment.reset, seed))
        results: list[StepResult] = []
        for text in texts:
            results.append(guarded(environment.step, Message(role="assistant", content=text)))
            if results[-1].done:
                break
        return DirectEpisode(prompt=prompt, results=tuple(results), record=guarded(environment.result))
    finally:
        close_quietly(environment)


def close_quietly(environment: Environment) -> None:
    """A close that fails changes nothing of what was played."""
    with suppress(ToolFault, EnvironmentFault):
        guarded(environment.close)


def step_of(text: str, result: StepResult) -> Step:
    """A played text as a step of a trajectory."""
    return Step(text=text, observation=result.message.content if result.message else "", is_terminal=result.done)


def outcome_of(result: StepResult) -> Outcome:
    """How an episode that the environment has ended (``done``) ended."""
    if result.truncated:
        return Outcome.TRUNCATED_TURNS
    return Outcome.INVALID if result.invalid else Outcome.FINISHED


def guarded(call: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Whatever an environment raises besides its typed faults is one too, and never a reward."""
    try:
        return call(*arguments)
    except (ToolFault, EnvironmentFault):
        raise
    except Exception as error:
        raise EnvironmentFault(f"{type(error).__name__}: {error}") from error
