"""A hidden object, and a policy that gives up at once: every return ties, so that GRPO has no gradient and
only tips explore.

Same loop, hooks, credit and update as in :mod:`tests.toys`. The stand-in for a language model reads: what a
tip says to avoid gets a lower logit, what led to a good end a higher one. Without tips it is a table. Shape
letters: N packed tokens, A actions.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.algorithms.exploration import Empo2, Empo2Settings
from outrider.algorithms.grpo import Grpo, GrpoSettings
from outrider.algorithms.loss_settings import ClipLoss
from outrider.config import validate
from outrider.engines.base import FinishReason, Generation, Request
from outrider.engines.local.attention import TreePlan
from outrider.environments.base import EpisodeResult, StepResult
from outrider.memory.embedders import HashEmbedder
from outrider.memory.tips import Key, TipMemory
from outrider.seeding import stream
from outrider.tokens import Tokenizer
from outrider.types import Message, Task
from tests.toy_result import Result
from tests.toys import ROOMS, TabularEngine, TabularModel, Toy, ToyRun

GIVE_UP = "!"
PLACES = '"#$'
ACTIONS = GIVE_UP + PLACES
DEPTH = 3
EAGER = 4.85  # logit of giving up: probability 0.977; a place has 0.0076, above the off-policy mask's 0.0067
AVOID, GOOD = -6.0, 1.8  # how much tips move logits: all places are about as likely, or the right one by 0.6
NUM_STEPS = 90
LEARNING_RATE = 0.5

_TIP = re.compile(r"<tip>.*?</tip>", re.DOTALL)
_AVOID = re.compile(r"avoid (.)")
_GOOD = re.compile(r"Here: (.); final score 1\.")


class HiddenObject:
    """Three rooms; the right place of a room opens the next one, a wrong one and giving up end the episode
    with nothing.
    """

    def __init__(self, task: Task) -> None:
        self._places = str(task.metadata["places"])
        self._room = 0

    def reset(self, seed: int) -> Sequence[Message]:
        """Into the first room."""
        self._room = 0
        return (Message(role="user", content=f"room {ROOMS[0]}"),)

    def step(self, message: Message) -> StepResult:
        """Look at a place, or give up."""
        if message.content != self._places[self._room]:
            return StepResult(message=None, done=True)
        self._room += 1
        if self._room == DEPTH:
            return StepResult(message=None, reward=1.0, done=True)
        return StepResult(message=Message(role="user", content=f"room {ROOMS[self._room]}"))

    def result(self) -> EpisodeResult:
        """1 when the object was found."""
        found = self._room == DEPTH
        return EpisodeResult(episode_return=float(found), success=found)

    def close(self) -> None:
        """Nothing to release."""


class HiddenFactory:
    """Makes environments; nothing is shared."""

    def __call__(self, task: Task) -> HiddenObject:
        return HiddenObject(task)

    def close(self) -> None:
        """Nothing to release."""


class HiddenToy(Toy):
    """One object."""

    def tasks(self) -> list[Task]:
        """The places are metadata, which the policy never sees."""
        draws = stream(self.seed, "hidden").integers(len(PLACES), size=DEPTH)
        places = "".join(PLACES[i] for i in draws)
        return [
            Task(
                key="hidden",
                question="room A",
                metadata={"places": places, "combination": places, "rooms": ROOMS[:DEPTH]},
            )
        ]


class ReadingModel(TabularModel):
    """A table of rooms whose logits tips move by a constant."""

    actions = ACTIONS
    avoid = AVOID

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        super().__init__(tokenizer, vocabulary_size, actions=self.actions)
        with torch.no_grad():
            self.table.weight[:, 0] = EAGER
        decoded = [tokenizer.decode([i], skip_special_tokens=False) for i in range(vocabulary_size)]
        self.characters = [one if len(one) == 1 else "\x00" for one in decoded]

    def text(self, ids: Sequence[int]) -> str:
        """One character a token; markers become a control character, so that positions stay."""
        return "".join([self.characters[i] for i in ids])

    def read(self, text: str) -> list[tuple[int, int, np.ndarray]]:
        """(position, room, what tips add) from that position on: newest room, newest tips."""
        # rooms that tips mention are not where the policy is
        hidden = _TIP.sub(lambda found: "\x00" * len(found[0]), text)
        events: list[tuple[int, int | None, np.ndarray | None]] = [
            (place.start(), ROOMS.index(place[1]), None) for place in re.finditer(r"room ([A-Z])", hidden)
        ]
        events += [(found.end(), None, self._moved(found[0])) for found in _TIP.finditer(text)]
        room, moved = 0, np.zeros(len(self.actions))
        states = []
        for position, new_room, new_moved in sorted(events, key=lambda event: event[0]):
            if new_room is not None:
                # tips are for the state at which they are shown
                room, moved = new_room, np.zeros(len(self.actions))
            moved = moved if new_moved is None else new_moved
            states.append((position, room, moved))
        return states

    def base_model(
        self, *, input_ids: Tensor, position_ids: Tensor, use_cache: bool, plan: TreePlan
    ) -> SimpleNamespace:
        """Logits over actions at every packed token, from the text of its own branch."""
        texts, outputs, start = [], [], 0
        for segment in plan.segments:
            own = self.text(input_ids[0, start : start + segment.length].tolist())
            before = "".join(texts[i] for i in segment.ancestors)
            texts.append(own)
            rooms, moved = np.zeros(len(own), dtype=np.int64), np.zeros((len(own), len(self.actions)))
            for position, room, shift in self.read(before + own):
                first = max(0, position - len(before))
                rooms[first:], moved[first:] = room, shift
            outputs.append(self.table(torch.from_numpy(rooms)) + torch.from_numpy(moved).float())
            start += segment.length
        return SimpleNamespace(last_hidden_state=torch.cat(outputs)[None])

    def _moved(self, tip: str) -> np.ndarray:
        moved = np.zeros(len(self.actions))
        moved[[self.actions.index(a) for a in set(_AVOID.findall(tip)) if a in self.actions]] += self.avoid
        moved[[self.actions.index(a) for a in set(_GOOD.findall(tip)) if a in self.actions]] += GOOD
        return moved


class ReadingEngine(TabularEngine):
    """Acts by the model; asked for a tip, it says what ended the episode if it was its own doing."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See :class:`outrider.engines.base.Engine`."""
        return [
            self._reflection(one) if one.request_id.endswith("/reflection") else self._act(one)
            for one in requests
        ]

    @torch.no_grad()
    def _act(self, request: Request) -> Generation:
        _, room, moved = self._model.read(self._model.text(request.token_ids))[-1]
        logits = self._model.table.weight[room] + torch.from_numpy(moved).float()
        return self.drawn(request, logits[None])

    def _reflection(self, request: Request) -> Generation:
        said = re.findall("assistant\n(.)\x00", self._model.text(request.token_ids))
        ids = self.tokenizer.encode(
            "avoid !" if said and said[-1] == GIVE_UP else "go on", add_special_tokens=False
        )
        return Generation(
            request_id=request.request_id, token_ids=tuple(ids), logprobs=(0.0,) * len(ids),
            entropies=(0.0,) * len(ids), finish_reason=FinishReason.EOS, weight_version=self.weight_version,
        )  # fmt: skip


class ShuffledMemory(TipMemory):
    """Every record speaks of other actions than those that were taken."""

    def add(self, task_key: str, state_key: Key, text: str, score: float, **origin: Any) -> bool:
        """Store the text with its actions exchanged, by the record's own stream."""
        order = stream(0, "shuffled", text, self.num_added(task_key)).permutation(len(ACTIONS))
        exchanged = str.maketrans({one: ACTIONS[i] for one, i in zip(ACTIONS, order, strict=True)})
        found = re.sub(r"(avoid |Here: )(.)", lambda m: m[1] + m[2].translate(exchanged), text)
        return super().add(task_key, state_key, found, score, **origin)


class HiddenRun(ToyRun):
    """ToyRun on the hidden object."""

    factory = HiddenFactory()
    learning_rate = LEARNING_RATE
    model_type, engine_type = ReadingModel, ReadingEngine

    def _algorithm(self, settings: Any) -> Any:
        if isinstance(settings, Empo2Settings):
            return Empo2(
                settings, embedder=HashEmbedder(), count_tokens=len, groups_per_step=1, seed=self.toy.seed
            )
        return Grpo(settings)

    def expected_return(self) -> float:
        """Exact, without memory: the chance of three right places in a row."""
        probabilities = torch.softmax(self.model.table.weight.detach().double(), dim=-1).numpy()
        places = str(self.tasks[0].metadata["places"])
        return float(
            np.prod([probabilities[room, ACTIONS.index(place)] for room, place in enumerate(places)])
        )


def empo2(**given: Any) -> Empo2Settings:
    """The paper's settings, with tips short enough for a toy of one character a token."""
    memory = {
        "embedder": "hash",
        "num_shown": 4,
        "max_tip_tokens": 8,
        "max_shown_tokens": 240,
        "max_prompt_tokens": 2600,
    }
    return validate(
        Empo2Settings,
        {
            "group_size": 8,
            "memory_probability": 0.75,
            "intrinsic_coefficient": 0.0,
            "memory": memory,
            **given,
        },
    )


def grpo() -> GrpoSettings:
    """The same objective."""
    return GrpoSettings(group_size=8, loss=ClipLoss(clip_high=0.3, dual_clip=10.0))


def play(settings: Any, *, seed: int, shuffled: bool = False, num_steps: int = NUM_STEPS) -> Result:
    """One run in a folder of its own."""
    with TemporaryDirectory() as folder:
        run = HiddenRun(HiddenToy(seed=seed, num_turns=DEPTH), settings, folder=Path(folder))
        if shuffled:
            run.algorithm.tips.memory = ShuffledMemory(per_state=True)
        try:
            return run.train(max_policy_tokens=10**9, max_steps=num_steps)
        finally:
            run.buffer.close()
