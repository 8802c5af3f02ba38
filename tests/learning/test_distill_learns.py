"""The promise of self-distillation on the smallest task that shows it: one of twenty doors is right, the
policy hardly ever tries it, and help names it.

Same loop, credit and update as in :mod:`tests.toys`. The memory of tips has one record from the beginning,
and the environment writes no other. What help does to the policy is an assumption: it is followed nine times
in ten. If help added a constant to a logit, rollouts with help would soon all succeed, and EMPO² would stop
below 0.001. Shape letters: A actions.
"""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from outrider.algorithms.distill_help import add_help_hook, find_help_hook
from outrider.algorithms.exploration import Empo2, Empo2Settings
from outrider.algorithms.grpo import Grpo
from outrider.algorithms.tips import record_text
from outrider.config import validate
from outrider.memory.embedders import HashEmbedder
from outrider.tokens import Tokenizer
from outrider.training.policy import set_threads
from tests.toy_result import Result
from tests.toys import _SHARED, ACTIONS, TABLE_HEAD, Toy, ToyRun, grpo, table_row
from tests.toys_memory import ReadingEngine, ReadingModel

pytestmark = pytest.mark.long

SEEDS = range(3)
FEW_SEEDS = range(1)  # the others are run by `make test-slow`
MAX_POLICY_TOKENS = 600
CHANCE = 1e-5  # of the right door without help
FOLLOWS = 0.9
# Least expected return. EMPO² has no signal where all rollouts of a group succeed, which with help is soon.
LEARNING = {"likelihood": 0.98, "divergence": 0.98, "EMPO², student": 0.75}


class DoorModel(ReadingModel):
    """A table. A policy that sees a tip follows it with probability ``FOLLOWS``, otherwise the table acts."""

    actions = ACTIONS

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        super().__init__(tokenizer, vocabulary_size)
        torch.nn.init.zeros_(self.table.weight)

    def read(self, text: str) -> list[tuple[int, int, np.ndarray]]:
        """Tips add to the table what makes it the mixture."""
        return [
            (position, room, self._mixed(room, named) if named.any() else named)
            for position, room, named in super().read(text)
        ]

    def _moved(self, tip: str) -> np.ndarray:
        named = re.findall(r"Here: (.);", tip)
        return np.array([float(action in named) for action in self.actions])

    def _mixed(self, room: int, named_A: np.ndarray) -> np.ndarray:
        logits_A = self.table.weight[room].detach().double()
        mixture_A = (1 - FOLLOWS) * logits_A.softmax(0) + FOLLOWS * torch.from_numpy(named_A)
        return (mixture_A.log() - logits_A).numpy()


class DoorRun(ToyRun):
    """ToyRun with one tip. ``other``: the tip is that of another task, whose right door is the next one."""

    learning_rate = 0.4
    model_type, engine_type = DoorModel, ReadingEngine

    def __init__(self, toy: Toy, settings: Any, *, folder: Path, other: bool = False) -> None:
        self._other = other
        super().__init__(toy, settings, folder=folder)
        if (hook := find_help_hook(self.algorithm)) is not None:
            hook.renderer, hook.context_length = self.renderer, self.engine.context_length

    def _algorithm(self, settings: Any) -> Any:
        if not isinstance(settings, Empo2Settings):
            return Grpo(settings)
        algorithm = Empo2(
            settings, embedder=HashEmbedder(), count_tokens=len, groups_per_step=1, seed=self.toy.seed
        )
        assert algorithm.tips is not None
        (task,) = self.tasks
        door = (ACTIONS.index(str(task.metadata["combination"])) + self._other) % len(ACTIONS)
        text = record_text("The door.", action=ACTIONS[door], score=1.0)
        [key] = algorithm.tips.embedder.embed([task.question])
        algorithm.tips.memory.add(task.key, key, text, 1.0)
        add_help_hook(algorithm, count_tokens=len)
        return algorithm

    def chance_with_help(self) -> float:
        """Of the right door, by the untrained policy that sees the right tip."""
        (task,) = self.tasks
        text = record_text("The door.", action=str(task.metadata["combination"]), score=1.0)
        _, room, moved = self.model.read(f"{task.question}\n<tip>{text}</tip>")[-1]
        logits_A = self.model.table.weight[room].detach().double() + torch.from_numpy(moved)
        return float(torch.softmax(logits_A, dim=0)[ACTIONS.index(str(task.metadata["combination"]))])


def with_tips(*, helped: bool, **given: Any) -> Empo2Settings:
    """All rollouts are sampled with the tip and trained without it, or all are sampled without it."""
    share = 1.0 if helped else 0.0
    options = {
        "memory_probability": share, "off_policy_probability": share, "intrinsic_coefficient": 0.0,
        "memory": {"embedder": "hash", "writer": "environment"},
    }  # fmt: skip
    return validate(Empo2Settings, {**_SHARED, **options, **given})


LIKELIHOOD = {"form": "likelihood", "plays": "helped", "where": "succeeded", "policy_weight": 0.0}
ARMS: dict[str, tuple[Any, bool]] = {
    "likelihood": (with_tips(helped=True, distill=LIKELIHOOD), False),
    "divergence": (with_tips(helped=False, distill={"form": "divergence"}), False),
    "EMPO², student": (with_tips(helped=True, old_context="student", student_mask="none"), False),
    "divergence, another's help": (with_tips(helped=False, distill={"form": "divergence"}), True),
    "GRPO": (grpo(), False),
}


def play(name: str, *, seed: int) -> Result:
    """One run in a folder of its own."""
    settings, other = ARMS[name]
    toy = Toy(seed=seed, depth=1, num_turns=1, is_strict=True, chance=CHANCE)
    with TemporaryDirectory() as folder:
        run = DoorRun(toy, settings, folder=Path(folder), other=other)
        try:
            assert run.expected_return() == pytest.approx(CHANCE, rel=1e-4)
            assert run.chance_with_help() == pytest.approx(FOLLOWS, rel=1e-4)
            return run.train(max_policy_tokens=MAX_POLICY_TOKENS)
        finally:
            run.buffer.close()


@pytest.fixture(scope="module", params=[FEW_SEEDS, pytest.param(SEEDS, marks=pytest.mark.slow)], ids=len)
def results(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    """Expected return without help, after equal numbers of policy tokens."""
    set_threads(1)
    played = {name: [play(name, seed=seed) for seed in request.param] for name in ARMS}
    print("\n".join(["", TABLE_HEAD, *(table_row(name, rows) for name, rows in played.items())]))
    return played


@pytest.mark.parametrize("name", LEARNING)
def test_the_policy_without_help_learns_the_door(results: dict[str, list[Result]], name: str) -> None:
    assert all(row.expected_return > LEARNING[name] for row in results[name])


@pytest.mark.parametrize("name", ["GRPO", "divergence, another's help"])
def test_no_help_and_the_help_of_another_task_teach_nothing(
    results: dict[str, list[Result]], name: str
) -> None:
    assert all(row.expected_return <= CHANCE * 1.001 for row in results[name])
