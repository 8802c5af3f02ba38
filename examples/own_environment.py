"""An environment of one's own: a word chain. In a recipe: ``type = "own_environment:WordChain"``.

python examples/own_environment.py [MODEL]     # trains a few steps into runs/own-environment
"""

import re
import sys
from collections.abc import Sequence
from copy import deepcopy

from pydantic import Field

import outrider
from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.runs import Run
from outrider.types import Message, Step, Task

STARTS = {"train": ("sun", "tree", "lamp", "rain", "book", "milk"), "test": ("moon", "stone", "sleep")}
KNOWN = (
    "night",
    "table",
    "egg",
    "green",
    "paper",
    "river",
    "red",
    "key",
    "yellow",
    "water",
)  # the expert's words


class WordChainSettings(EnvironmentSettings):
    """The section ``environment`` of a recipe; a key that is not here is refused."""

    num_turns: int = Field(3, ge=1)


class Chain:
    """One episode. Every word begins with the last letter of the one before; the return is the share kept."""

    def __init__(self, first: str, num_turns: int) -> None:
        self._first, self._num_turns = first, num_turns
        self.reset(0)

    def reset(self, seed: int) -> Sequence[Message]:
        """The messages are the prompt. What is drawn, is drawn from ``seed`` alone."""
        self._words, self._num_played = [self._first], 0
        asked = f"A word chain. Write one word that begins with the last letter of: {self._first}"
        return (Message(role="user", content=asked),)

    def step(self, message: Message) -> StepResult:
        """Whatever the policy wrote gets an answer in words."""
        self._num_played += 1
        done = self._num_played >= self._num_turns
        found = re.search(r"[a-z]{2,}", message.content.lower())
        if found is None:
            told = Message(role="user", content="Write a word of at least two letters.")
            return StepResult(message=told, invalid=True, done=done)
        last = self._words[-1][-1]
        if found[0][0] != last or found[0] in self._words:
            told = Message(role="user", content=f"Write a new word that begins with {last}.")
            return StepResult(message=told, done=done)
        self._words.append(found[0])
        told = Message(role="user", content=f"Good. The next one begins with {found[0][-1]}.")
        return StepResult(message=told, reward=1 / self._num_turns, done=done)

    def result(self) -> EpisodeResult:
        """The record so far; valid after any step."""
        num = len(self._words) - 1
        return EpisodeResult(episode_return=num / self._num_turns, success=num == self._num_turns)

    def copy(self) -> "Chain":
        """The same state, independent from here on: methods that branch need it."""
        return deepcopy(self)

    def close(self) -> None:
        """Nothing is held."""


class ChainFactory:
    """Makes the environment of an episode, and owns what episodes share."""

    def __init__(self, settings: WordChainSettings) -> None:
        self._settings = settings

    def __call__(self, task: Task) -> Chain:
        return Chain(task.question, self._settings.num_turns)

    def close(self) -> None:
        """Nothing is held."""


class WordChain:
    """The task family: its tasks, its episodes and, where there is one, its expert."""

    Settings = WordChainSettings
    name = "word-chain"
    stop: tuple[str, ...] = ()  # texts that end a turn
    stateful = True  # an answer depends on the turns before

    def __init__(self, settings: WordChainSettings) -> None:
        self.settings = settings

    def tasks(self, split: str) -> Sequence[Task]:
        """A frozen list, always in the same order."""
        return [Task(key=f"word-chain/{split}/{word}", question=word) for word in STARTS.get(split, ())]

    def make(self) -> ChainFactory:
        """Reports what is missing (a server, a file) as outrider.errors.ToolUnavailable."""
        return ChainFactory(self.settings)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """Steps that solve a task, for a cold start and for buffers; None where nobody knows."""
        words = [task.question]
        while len(words) <= self.settings.num_turns:
            new = [one for one in KNOWN if one[0] == words[-1][-1] and one not in words]
            if not new:
                return None
            words.append(new[0])
        last = len(words) - 2
        return [Step(text=one, observation="", is_terminal=i == last) for i, one in enumerate(words[1:])]

    def close(self) -> None:
        """Nothing is held."""


def main(
    model: str = "smollm2-135m-instruct", run: str = "runs/own-environment", overrides: Sequence[str] = ()
) -> Run:
    """Train with GRPO; the folder ``run`` can be resumed from the command line."""
    recipe = {
        "model": {"name": model},
        "environment": {"type": "own_environment:WordChain", "num_turns": 3},
        "algorithm": {"type": "grpo", "group_size": 4},
        "rollout": {"max_turns": 3, "max_turn_tokens": 8, "max_response_tokens": 256},
        "train": {"num_steps": 4, "tasks_per_step": 2},
        "evaluation": {"num_tasks": 3},
    }
    return outrider.train(recipe, run=run, overrides=overrides, progress="auto")


if __name__ == "__main__":
    print(main(*sys.argv[1:2]).metrics("train").column("reward/mean").to_pylist())
