"""An environment: write a digit; the return is how near it is."""

import re
from collections.abc import Sequence

from pydantic import Field

import outrider as o


class Numbers(o.Environment):
    """Digits that should be near another one."""

    class Settings(o.EnvironmentSettings):
        num_train: int = Field(6, ge=1)
        num_test: int = Field(3, ge=1)
        max_moves: int = Field(2, ge=1)

    settings: Settings

    @classmethod
    def tasks(cls, settings: Settings, split: str) -> Sequence[o.Task]:
        num = settings.num_train if split == "train" else settings.num_test
        return [o.Task(key=f"numbers/{split}/{i}", question="?", answers=(str(i % 10),)) for i in range(num)]

    def reset(self, task: o.Task, seed: int) -> str:
        self.target, self.num_moves, self.near = int(task.answers[0]), 0, 0.0
        return f"{self.target}?"

    def step(self, action: str) -> o.StepResult:
        self.num_moves += 1
        digit = re.search(r"[0-9]", action)
        done = self.num_moves >= self.settings.max_moves
        if digit is None:
            return o.StepResult(message="a digit", invalid=True, done=done, truncated=done)
        self.near = 1 - abs(int(digit[0]) - self.target) / 10
        return o.StepResult(message="on", done=done, truncated=done)

    def result(self) -> o.EpisodeResult:
        return o.EpisodeResult(episode_return=self.near, success=self.near == 1)
