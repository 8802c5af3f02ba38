"""A toy task family with hidden numbers: every kind of end, fault and observation that the loop knows."""

from collections import Counter
from collections.abc import Sequence

from outrider.environments.base import EpisodeResult, StepResult
from outrider.environments.tool_qa.rewards import render_result
from outrider.errors import EnvironmentFault, ToolFault
from outrider.types import Message, Step, Task


class ToyEnvironment:
    """``<ask>..</ask>`` tells the number (the seed's share in it included), ``<answer>..</answer>`` ends the
    episode.
    """

    def __init__(self, task: Task, family: "ToyTaskSet") -> None:
        self.task = task
        self.family = family
        self.number = -1
        self.num_asked = 0
        self.episode_return = 0.0

    def reset(self, seed: int) -> Sequence[Message]:
        self.family.num_resets[self.task.key] += 1
        if (
            self.task.key in self.family.broken
            or self.family.num_resets[self.task.key] <= self.family.num_early_faults
        ):
            raise EnvironmentFault("the toy broke")
        self.number = seed % 1000
        return (
            Message(role="system", content="rules"),
            Message(role="user", content=f"{self.task.question} {seed % 7}"),
        )

    def step(self, message: Message) -> StepResult:
        text = message.content
        if "<crash>" in text:
            raise RuntimeError("crash")
        if "<break>" in text:
            raise ToolFault("tool down")
        if "</ask>" in text:
            self.num_asked += 1
            said = render_result(f"{self.family.words} {self.number}")
            return StepResult(
                message=Message(role=self.family.role, content=said), num_tool_calls=1, tools=("ask",)
            )
        if "</answer>" in text:
            right = text.endswith(f"<answer>{self.number}</answer>")
            self.episode_return = (2.0 if right else 0.25) + self.family.bonus
            return StepResult(message=None, done=True, reward=self.episode_return)
        return StepResult(message=None, done=True, invalid=True)

    def result(self) -> EpisodeResult:
        return EpisodeResult(episode_return=self.episode_return, success=self.episode_return >= 2)

    def close(self) -> None:
        self.family.num_closed += 1


class ToyTaskSet:
    name = "toy"
    stop: tuple[str, ...] = ("</ask>", "</answer>")
    stateful = False

    def __init__(self, num_tasks: int = 3, *, role: str = "inline", num_early_faults: int = 0) -> None:
        self.num_tasks = num_tasks
        self.role = role
        self.words = "it is"
        self.bonus = 0.0
        self.broken: set[str] = set()
        self.num_early_faults = num_early_faults
        self.num_resets: Counter[str] = Counter()
        self.num_closed = 0
        self.num_factories_open = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(key=f"toy/{i}", question=f"question {i}") for i in range(self.num_tasks)]

    def make(self) -> "ToyFactory":
        self.num_factories_open += 1
        return ToyFactory(self)

    def close(self) -> None:
        """Nothing is held."""

    def expert(self, task: Task, seed: int) -> Sequence[Step] | None:
        """Task 2 has no expert; that of task 1 is wrong, and claims the best of worlds all the same."""
        if task.key == "toy/2":
            return None
        answer = seed % 1000 + (task.key == "toy/1")
        return (
            Step(text="<ask>?</ask>", observation="claimed by the expert"),
            Step(text=f"<answer>{answer}</answer>", observation="", is_terminal=True),
        )


class ToyFactory:
    def __init__(self, family: ToyTaskSet) -> None:
        self.family = family

    def __call__(self, task: Task) -> ToyEnvironment:
        return ToyEnvironment(task, self.family)

    def close(self) -> None:
        self.family.num_factories_open -= 1
