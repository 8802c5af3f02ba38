"""One question, one reply, no tools: what an evaluation plays that only wants an answer."""

from collections.abc import Callable, Sequence

from outrider.environments.base import EpisodeResult, StepResult
from outrider.types import Message, Task


class QuestionEnvironment:
    """Asks once. The return is 0 whatever is said: whoever plays it grades the reply.

    ``extract`` takes the answer out of a reply; a reply without one is invalid.
    """

    def __init__(self, *, prompt: Sequence[Message], extract: Callable[[str], str]) -> None:
        self._prompt = prompt
        self._extract = extract

    def reset(self, seed: int) -> Sequence[Message]:
        """The prompt. Nothing is drawn, so the seed is not used."""
        return self._prompt

    def step(self, message: Message) -> StepResult:
        """Any reply ends the episode."""
        return StepResult(message=None, done=True, invalid=not self._extract(message.content).strip())

    def result(self) -> EpisodeResult:
        """A return of 0: there is no reward here."""
        return EpisodeResult(episode_return=0.0, success=False)

    def close(self) -> None:
        """Nothing is held."""


class QuestionFactory:
    """Makes environments; ``prompt`` gives the messages of a task."""

    def __init__(self, *, prompt: Callable[[Task], Sequence[Message]], extract: Callable[[str], str]) -> None:
        self._prompt = prompt
        self._extract = extract

    def __call__(self, task: Task) -> QuestionEnvironment:
        """A fresh environment for one reply."""
        return QuestionEnvironment(prompt=self._prompt(task), extract=self._extract)

    def close(self) -> None:
        """Nothing is shared."""
