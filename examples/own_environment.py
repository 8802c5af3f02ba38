"""An environment of your own: a word chain. In a recipe: ``type = "own_environment:WordChain"``.

python examples/own_environment.py [MODEL]     # trains a few steps into runs/own-environment
"""

import re
import sys
from collections.abc import Sequence

from pydantic import Field

import outrider as o

STARTS = {"train": ("sun", "tree", "lamp", "rain", "book", "milk"), "test": ("moon", "stone", "sleep")}
# the expert's words
KNOWN = ("night", "table", "egg", "green", "paper", "river", "red", "key", "yellow", "water")


class WordChain(o.Environment):
    """Every word begins with the last letter of the one before; the return is the share of accepted words."""

    class Settings(o.EnvironmentSettings):
        """The section ``environment`` of a recipe."""

        num_turns: int = Field(3, ge=1)

    settings: Settings

    @classmethod
    def tasks(cls, settings: Settings, split: str) -> Sequence[o.Task]:
        """The first words."""
        return [o.Task(key=f"word-chain/{split}/{word}", question=word) for word in STARTS.get(split, ())]

    def reset(self, task: o.Task, seed: int) -> str:
        """Start with the task's word."""
        self.words, self.num_played = [task.question], 0
        return f"A word chain. Write one word that begins with the last letter of: {task.question}"

    def step(self, action: str) -> o.StepResult:
        """Accept a new word that fits, and explain what is wrong with any other text."""
        self.num_played += 1
        done = self.num_played >= self.settings.num_turns
        word = re.search(r"[a-z]{2,}", action.lower())
        if word is None:
            return o.StepResult(message="Write a word of at least two letters.", invalid=True, done=done)
        last = self.words[-1][-1]
        if word[0][0] != last or word[0] in self.words:
            return o.StepResult(message=f"Write a new word that begins with {last}.", done=done)
        self.words.append(word[0])
        reward = 1 / self.settings.num_turns
        return o.StepResult(
            message=f"Good. The next one begins with {word[0][-1]}.", reward=reward, done=done
        )

    def result(self) -> o.EpisodeResult:
        """A success is a chain without a gap."""
        num = len(self.words) - 1
        return o.EpisodeResult(
            episode_return=num / self.settings.num_turns, success=num == self.settings.num_turns
        )

    def expert(self) -> Sequence[str] | None:
        """Known words that continue the chain, or None if there is none."""
        words = self.words[:1]
        while len(words) <= self.settings.num_turns:
            new = [word for word in KNOWN if word[0] == words[-1][-1] and word not in words]
            if not new:
                return None
            words.append(new[0])
        return words[1:]


def main(
    model: str = "smollm2-135m-instruct", run: str = "runs/own-environment", overrides: Sequence[str] = ()
) -> o.Run:
    """Train with GRPO. The command line can resume the folder ``run``."""
    recipe = {
        "model": {"name": model},
        "environment": {"type": "own_environment:WordChain", "num_turns": 3},
        "algorithm": {"type": "grpo", "group_size": 4},
        "rollout": {"max_turns": 3, "max_turn_tokens": 8, "max_response_tokens": 256},
        "train": {"num_steps": 4, "tasks_per_step": 2},
        "evaluation": {"num_tasks": 3},
    }
    return o.train(recipe, run=run, overrides=overrides, progress="auto")


if __name__ == "__main__":
    print(main(*sys.argv[1:2]).metrics("train").column("reward/mean").to_pylist())
