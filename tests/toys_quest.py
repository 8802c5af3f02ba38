"""A quest that needs all three methods: a march, a lock, a crossroads, a hidden place and a vault.

A wrong action ends the episode. The *march* is many tokens, and the policy is sure of them. Of the *lock*'s
two keys it takes the wrong one, and experts took the right one (RAPO). All ways lead on from the
*crossroads*, and the policy stays undecided: who leaves there spends no march (ARPO). In the *hidden* place
policy and experts give up (EMPO²'s tips). Of the *vault*'s twenty actions the right one is rare. Same loop,
hooks, credit and update as in :mod:`tests.toys`.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from outrider.engines.base import Generation, Request
from outrider.rollout.scheduler import Scheduler
from outrider.rollout.settings import Limits
from outrider.seeding import stream
from outrider.tokens import Tokenizer
from outrider.types import Task, Trajectory
from tests.toys import ACTIONS, ROOMS, Toy
from tests.toys_expedition import Expedition, ExpeditionFactory, ExpeditionModel, ExpeditionRun, unrewarded
from tests.toys_memory import GIVE_UP, PLACES, ReadingEngine

KINDS: Final = "mlchv"
KEYS: Final = "@:"
MARCH: Final = "="  # every token of the march
NEVER: Final = -30.0  # logit of what is never tried: its gradient is under Adam's epsilon
LEARNING_RATE: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestToy(Toy):
    """One task. ``march`` tokens lead to the lock. ``lock``, ``hidden`` and ``vault`` are the untrained
    policy's chances of what is right there, without tips.
    """

    num_turns: int = len(KINDS)
    march: int = 1000
    lock: float = 0.01
    hidden: float = 0.0005
    vault: float = 0.006

    @property
    def longest(self) -> int:
        """The march, and a token in every other room."""
        return self.march + len(KINDS) - 1

    def tasks(self) -> list[Task]:
        """What is right in every room is metadata, which the policy never sees; nothing is wrong at the
        crossroads.
        """
        random = stream(self.seed, "quest")
        key, place = KEYS[random.integers(len(KEYS))], PLACES[random.integers(len(PLACES))]
        vault = ACTIONS[random.integers(1, len(ACTIONS))]
        right = [MARCH * self.march, key, "", place, vault]
        return [Task(key="quest", question="quest", metadata={"right": right})]


class Quest(Expedition):
    """What is right leads into the next room, and from the crossroads everything does."""

    def __init__(self, task: Task) -> None:
        self._right = list(task.metadata["right"])
        self._room = 0

    def _is_right(self, action: str) -> bool:
        return self._right[self._room] in ("", action)


class QuestFactory(ExpeditionFactory):
    """Makes environments; nothing is shared."""

    def __call__(self, task: Task) -> Quest:
        return Quest(task)


class QuestModel(ExpeditionModel):
    """The march and the crossroads do not learn: there is nothing to be learned in them."""

    avoid = -9.0

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        super().__init__(tokenizer, vocabulary_size)
        learns = torch.tensor([kind not in "mc" for kind in KINDS] + [False] * (len(ROOMS) - len(KINDS)))
        self.table.weight.register_hook(lambda gradient: gradient * learns[:, None])


class QuestEngine(ReadingEngine):
    """Marches; says what to avoid where it gave up, and else nothing."""

    march = 1  # tokens, set by :class:`QuestRun`

    def _act(self, request: Request) -> Generation:
        one = super()._act(request)
        is_behind = f"room {ROOMS[1]}" in self._model.text(request.token_ids)
        length = 1 if is_behind else self.march
        return replace(
            one, token_ids=one.token_ids * length, logprobs=one.logprobs * length,
            entropies=one.entropies * length,
        )  # fmt: skip

    def _reflection(self, request: Request) -> Generation:
        one = super()._reflection(request)
        if "avoid" in self._model.text(one.token_ids):
            return one
        nothing = tuple(self.tokenizer.encode("\n", add_special_tokens=False))
        return replace(one, token_ids=nothing, logprobs=(0.0,), entropies=(0.0,))


def half_way(task: Task) -> Trajectory:
    """An expert that opens the lock and gives up in the hidden place: it has no reward."""
    march, key, *_ = task.metadata["right"]
    return unrewarded(task, Quest(task), [march, key, GIVE_UP, GIVE_UP])


class QuestRun(ExpeditionRun):
    """ToyRun on a quest, with any method of the registry."""

    factory = QuestFactory()
    learning_rate = LEARNING_RATE
    model_type, engine_type = QuestModel, QuestEngine
    toy: QuestToy

    def __init__(self, toy: QuestToy, settings: Any, *, folder: Path) -> None:
        super().__init__(toy, settings, folder=folder)
        self.engine.march = toy.march

    def begin(self) -> None:
        """The untrained policy."""
        _, key, _, _, vault = self.tasks[0].metadata["right"]
        march, lock, _, hidden, last = self.model.table.weight[: len(KINDS)]
        places = [ACTIONS.index(one) for one in PLACES]
        for row in (march, lock, hidden):
            row.fill_(NEVER)
        march[ACTIONS.index(MARCH)] = 0.0
        lock[[ACTIONS.index(one) for one in KEYS]] = 0.0
        lock[ACTIONS.index(key)] = math.log(self.toy.lock / (1 - self.toy.lock))
        hidden[places] = 0.0
        hidden[ACTIONS.index(GIVE_UP)] = math.log(1 / self.toy.hidden - len(PLACES))
        last[ACTIONS.index(vault)] = math.log(self.toy.vault / (1 - self.toy.vault) * (len(ACTIONS) - 1))

    def demonstrated(self, task: Task) -> Trajectory:
        """Of experts that never saw the vault."""
        return half_way(task)

    def scheduler(self, *, training: bool) -> Scheduler:
        """With turns as long as the march."""
        made = super().scheduler(training=training)
        march = self.toy.march
        limits = Limits(
            max_turns=self.toy.num_turns, max_turn_tokens=march, max_response_tokens=2 * march + 500
        )
        return replace(made, limits=limits)

    def expected_return(self) -> float:
        """Exact, without memory, retrieval and forks: all that is right in a row."""
        probabilities = torch.softmax(self.model.table.weight.detach().double(), dim=-1)
        chance = 1.0
        for row, kind, right in zip(probabilities, KINDS, self.tasks[0].metadata["right"], strict=False):
            if kind != "c":
                chance *= float(row[ACTIONS.index(right[0])]) ** len(right)
        return chance
