"""A corridor that the policy knows and a vault at its end that it does not: what is worth sampling is the
last decision.

Same loop, credit and update as in :mod:`tests.toys`. A rollout writes one token a room, so a fork in front of
the vault costs one token and a rollout from the prompt costs the whole corridor.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from outrider.algorithms.exploration import Arpo, ArpoSettings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.config import validate
from outrider.environments.base import EpisodeResult, StepResult
from outrider.seeding import stream
from outrider.types import Message, Task
from tests.toy_result import Result
from tests.toys import _SHARED, ACTIONS, ROOMS, Toy, ToyRun

DEPTH = 9  # rooms of the corridor; the vault is the next
KNOWN = 7.0  # logit of the right action in the corridor: probability 0.983


class CorridorEnvironment:
    """A wrong action in the corridor, and any in the vault, ends the episode."""

    def __init__(self, task: Task) -> None:
        self._combination = str(task.metadata["combination"])
        self._room = 0
        self._success = False

    def reset(self, seed: int) -> Sequence[Message]:
        """Into the corridor."""
        self._room, self._success = 0, False
        return (Message(role="user", content=f"room {ROOMS[0]}"),)

    def step(self, message: Message) -> StepResult:
        """Every answered step counts as an executed call."""
        right = message.content == self._combination[self._room]
        if not right or self._room == DEPTH:
            self._success = right
            return StepResult(message=None, reward=float(right), done=True, num_tool_calls=1)
        self._room += 1
        return StepResult(
            message=Message(role="inline", content=f" now {ROOMS[self._room]}\n"), num_tool_calls=1
        )

    def result(self) -> EpisodeResult:
        """1 for the right action in the vault."""
        return EpisodeResult(episode_return=float(self._success), success=self._success)

    def copy(self) -> "CorridorEnvironment":
        """The same place."""
        return copy.copy(self)

    def close(self) -> None:
        """Nothing to release."""


class CorridorFactory:
    """Makes environments; nothing is shared."""

    def __call__(self, task: Task) -> CorridorEnvironment:
        return CorridorEnvironment(task)

    def close(self) -> None:
        """Nothing to release."""


class CorridorToy(Toy):
    """One task; the combination opens corridor and vault."""

    def tasks(self) -> list[Task]:
        draws = stream(self.seed, "corridor").integers(len(ACTIONS), size=DEPTH + 1)
        combination = "".join(ACTIONS[i] for i in draws)
        return [
            Task(
                key="corridor",
                question="corridor",
                metadata={"combination": combination, "rooms": ROOMS[: DEPTH + 1]},
            )
        ]


class CorridorRun(ToyRun):
    """ToyRun on the corridor, with the corridor learned."""

    factory = CorridorFactory()

    def __init__(self, toy: Toy, settings: Any, *, folder: Path) -> None:
        super().__init__(toy, settings, folder=folder)
        with torch.no_grad():
            for room, action in enumerate(self._combination()[:DEPTH]):
                self.model.table.weight[room, ACTIONS.index(action)] = KNOWN
        self.policy.round_masters()  # in float32 they are the table itself

    def _combination(self) -> str:
        return str(self.tasks[0].metadata["combination"])

    def _algorithm(self, settings: Any) -> Any:
        return (
            Arpo(settings, vocabulary_size=len(ACTIONS))
            if isinstance(settings, ArpoSettings)
            else Grpo(settings)
        )

    def expected_return(self) -> float:
        """Exact: every right action in a row."""
        probabilities = torch.softmax(self.model.table.weight.detach().double(), dim=-1).numpy()
        return float(
            np.prod([probabilities[room, ACTIONS.index(a)] for room, a in enumerate(self._combination())])
        )


def branching(*, at_random: bool) -> ArpoSettings:
    """A quarter begins at the prompt; forks where entropy rose, or anywhere with the same chance."""
    rule = (
        {"entropy_weight": 0.0, "base_probability": 0.3}
        if at_random
        else {"decision": "threshold", "threshold": 0.55}
    )
    shared = {key: value for key, value in _SHARED.items() if key != "type"}
    return validate(
        ArpoSettings, shared | {"type": "arpo", "first_wave": 3, "num_children": 3, "window": 1} | rule
    )


def plain() -> GrpoSettings:
    """GRPO with the same objective."""
    return GrpoSettings(**_SHARED)


def play(settings: Any, *, seed: int, max_policy_tokens: int) -> Result:
    """One run in a folder of its own."""
    with TemporaryDirectory() as folder:
        run = CorridorRun(
            CorridorToy(seed=seed, depth=DEPTH + 1, num_turns=DEPTH + 1), settings, folder=Path(folder)
        )
        try:
            return run.train(max_policy_tokens=max_policy_tokens)
        finally:
            run.buffer.close()
