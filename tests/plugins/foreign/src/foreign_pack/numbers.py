"""An environment: write a digit; the return is how near it is."""

import re
from collections.abc import Sequence
from copy import copy

from pydantic import Field

from outrider.environments.base import EnvironmentSettings, EpisodeResult, StepResult
from outrider.types import Message, Step, Task


class NumbersSettings(EnvironmentSettings):
    """Its section."""

    num_train: int = Field(6, ge=1)
    num_test: int = Field(3, ge=1)
    max_moves: int = Field(2, ge=1)


class Play:
    """One episode."""

    def __init__(self, target: int, settings: NumbersSettings) -> None:
        self._target = target
        self._settings = settings
        self._num_moves = 0
        self._near = 0.0

    def reset(self, seed: int) -> Sequence[Message]:
        self._num_moves, self._near = 0, 0.0
        return (Message(role="user", content=f"{self._target}?"),)

    def step(self, message: Message) -> StepResult:
        self._num_moves += 1
        found = re.search(r"[0-9]", message.content)
        done = self._num_moves >= self._settings.max_moves
        if found is None:
            return StepResult(
                message=Message(role="user", content="a digit"),
                invalid=True,
                done=done,
                truncated=done,
            )
        self._near = 1 - abs(int(found[0]) - self._target) / 10
        return StepResult(message=Message(role="user", content="on"), done=done, truncated=done)

    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=self._near, success=self._near == 1)

    def copy(self) -> "Play":
        return copy(self)

    def close(self) -> None:
        pass


class Factory:
    """Makes plays."""

    def __init__(self, settings: NumbersSettings) -> None:
        self._settings = settings

    def __call__(self, task: Task) -> Play:
        return Play(int(task.answers[0]), self._settings)

    def close(self) -> None:
        pass


class Numbers:
    """Digits that should be near another one."""

    Settings = NumbersSettings
    name = "numbers"
    stop: tuple[str, ...] = ()
    stateful = True

    def __init__(self, settings: NumbersSettings) -> None:
        self.settings = settings

    def tasks(self, split: str) -> Sequence[Task]:
        num = self.settings.num_train if split == "train" else self.settings.num_test
        return [Task(key=f"numbers/{split}/{i}", question="?", answers=(str(i % 10),)) for i in range(num)]

    def make(self) -> Factory:
        return Factory(self.settings)

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        return None

    def close(self) -> None:
        pass
