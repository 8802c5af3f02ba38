"""An expedition that needs two of the methods: locks that experts open, and hidden places where they give up.

Rooms come in three kinds; a wrong action ends the episode in each. In a *known* room the policy takes the
right one of twenty actions. Of a *locked* one it knows nothing, and experts opened it (RAPO). In a *hidden*
one it gives up but for two in a hundred times, the right place is one of three, and the experts gave up too
(EMPO²'s tips). Same loop, hooks, credit and update as in :mod:`tests.toys`.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

from outrider.environments.base import Env, EpisodeResult, StepResult
from outrider.environments.webshop.environment import WebShopConfig
from outrider.seeding import stream
from outrider.tokens import Tokenizer
from outrider.training.settings import RunSettings, TrainSettings
from outrider.training.setup import make_algorithm
from outrider.types import Message, Step, Task, Trajectory
from tests.toys import ACTIONS, ROOMS, Toy, ToyRun
from tests.toys_memory import EAGER, GIVE_UP, PLACES, ReadingEngine, ReadingModel

LEARNING_RATE = 0.3
KNOWN_LOGIT = 7.0  # probability 0.983
NEVER = -12.0  # logit of what is no place in a hidden room
# Known rooms stand between locks and before the hidden ones: retrieval shows no two steps in a row, so that a
# lock is retrieved in some rewarded rollouts and the policy's own in others.
KINDS: Final = "klklkhh"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpeditionToy(Toy):
    """One task. ``rooms`` holds a letter for every room: k(nown), l(ocked), h(idden). The return is 1 behind
    the last.
    """

    rooms: str = KINDS

    def tasks(self) -> list[Task]:
        """What is right in every room is metadata, which the policy never sees."""
        random = stream(self.seed, "expedition")
        right = "".join(
            PLACES[random.integers(len(PLACES))] if kind == "h" else ACTIONS[random.integers(1, len(ACTIONS))]
            for kind in self.rooms
        )
        metadata = {"combination": right, "kinds": self.rooms}
        return [Task(key="expedition", question="expedition", metadata=metadata)]


def expedition(seed: int, rooms: str = KINDS) -> ExpeditionToy:
    """One with a turn for every room."""
    return ExpeditionToy(seed=seed, rooms=rooms, depth=len(rooms), num_turns=len(rooms))


class Expedition:
    """The right action leads into the next room; a wrong one ends the episode with nothing."""

    def __init__(self, task: Task) -> None:
        self._right: Sequence[str] = str(task.metadata["combination"])
        self._room = 0

    def reset(self, seed: int) -> Sequence[Message]:
        """Into the first room."""
        self._room = 0
        return (Message(role="user", content=f"room {ROOMS[0]}"),)

    def step(self, message: Message) -> StepResult:
        """Every answered step counts as an executed call."""
        if not self._is_right(message.content):
            return StepResult(message=None, done=True, num_tool_calls=1)
        self._room += 1
        if self._room == len(self._right):
            return StepResult(message=None, reward=1.0, done=True, num_tool_calls=1)
        return StepResult(message=Message(role="user", content=f"room {ROOMS[self._room]}"), num_tool_calls=1)

    def result(self) -> EpisodeResult:
        """1 behind the last room."""
        success = self._room == len(self._right)
        return EpisodeResult(episode_return=float(success), success=success)

    def _is_right(self, action: str) -> bool:
        return action == self._right[self._room]

    def copy(self) -> Self:
        """The same place."""
        return copy.copy(self)

    def close(self) -> None:
        """Nothing to release."""


class ExpeditionFactory:
    """Makes environments; nothing is shared."""

    def __call__(self, task: Task) -> Expedition:
        return Expedition(task)

    def close(self) -> None:
        """Nothing to release."""


class ExpeditionModel(ReadingModel):
    """Twenty actions; what the rooms are like is set by :class:`ExpeditionRun`."""

    actions = ACTIONS

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        super().__init__(tokenizer, vocabulary_size)
        with torch.no_grad():
            self.table.weight.zero_()


def half_way(task: Task) -> Trajectory:
    """An expert that opens the locks and gives up in the first hidden room: it has no reward."""
    right, kinds = str(task.metadata["combination"]), str(task.metadata["kinds"])
    return unrewarded(task, Expedition(task), [*right[: kinds.index("h")], GIVE_UP])


def unrewarded(task: Task, environment: Env, actions: Sequence[str]) -> Trajectory:
    """An expert's actions, as the environment answers them."""
    environment.reset(0)
    steps = []
    for action in actions:
        answer = environment.step(Message(role="assistant", content=action))
        said = answer.message.content if answer.message else ""
        steps.append(Step(text=action, observation=said, is_terminal=answer.done))
    return Trajectory(
        trajectory_id=f"expert/{task.key}", task_key=task.key, agent="expert", prompt=(),
        steps=tuple(steps), reward=0.0,
    )  # fmt: skip


class ExpeditionRun(ToyRun):
    """ToyRun on an expedition, with any method of the registry."""

    factory = ExpeditionFactory()
    learning_rate = LEARNING_RATE
    model_type, engine_type = ExpeditionModel, ReadingEngine

    def __init__(self, toy: Toy, settings: Any, *, folder: Path) -> None:
        super().__init__(toy, settings, folder=folder)
        with torch.no_grad():
            self.begin()
        self.policy.round_masters()  # in float32 they are the table itself

    def begin(self) -> None:
        """The untrained policy."""
        metadata = self.tasks[0].metadata
        for row, kind, right in zip(
            self.model.table.weight, str(metadata["kinds"]), str(metadata["combination"]), strict=False
        ):
            if kind == "k":
                row[ACTIONS.index(right)] = KNOWN_LOGIT
            elif kind == "h":
                row.fill_(NEVER)
                row[0] = EAGER
                row[[ACTIONS.index(place) for place in PLACES]] = 0.0

    def demonstrated(self, task: Task) -> Trajectory:
        """Of experts that never saw the end."""
        return half_way(task)

    def _algorithm(self, settings: Any) -> Any:
        run = RunSettings(
            seed=self.toy.seed,
            environment=WebShopConfig(),  # any simulator: retrieved actions are executed
            algorithm=settings,
            train=TrainSettings(num_steps=1, tasks_per_step=1),
        )
        return make_algorithm(run, self.buffer, vocabulary_size=len(ACTIONS), stateful=True, count_tokens=len)

    def expected_return(self) -> float:
        """Exact, without memory, retrieval and forks: every right action in a row."""
        probabilities = torch.softmax(self.model.table.weight.detach().double(), dim=-1).numpy()
        right = str(self.tasks[0].metadata["combination"])
        return float(np.prod([probabilities[room, ACTIONS.index(one)] for room, one in enumerate(right)]))
