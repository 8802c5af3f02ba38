"""Recorded trajectories as turns for a critic: what was seen, what was done, what it paid, what came then."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.algorithms.empo2.hook import action_text
from outrider.errors import DataError
from outrider.memory.embedder import Embedder, Vectors
from outrider.rollout.branch import prompt_text
from outrider.types import Trajectory

_PORTION = 256  # texts embedded at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A state in words: the ``prompt`` (the task is in it), the newest ``observation`` (empty in the first
    turn) and the ``previous`` action.
    """

    prompt: str
    observation: str = ""
    previous: str = ""

    @property
    def texts(self) -> tuple[str, str, str]:
        """In the order in which the critic reads them."""
        return self.prompt, self.observation, self.previous


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One turn. ``next_situation`` is None where the episode ended."""

    situation: Situation
    action: str
    reward: float
    next_situation: Situation | None


def to_transitions(trajectory: Trajectory) -> list[Transition]:
    """The turns of a trajectory; its reward is paid with the last one, as records keep nothing finer."""
    situation = Situation(prompt=prompt_text(trajectory.prompt))
    transitions = []
    for number, step in enumerate(trajectory.steps, start=1):
        action, is_last = action_text(step.text), number == len(trajectory.steps)
        after = Situation(prompt=situation.prompt, observation=step.observation, previous=action)
        reward = trajectory.reward if is_last else 0.0
        next_situation = None if is_last else after
        transitions.append(
            Transition(situation=situation, action=action, reward=reward, next_situation=next_situation)
        )
        situation = after
    return transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """N transitions as numbers. Texts are rows of ``vectors_UD``; ``states_N3`` and ``next_states_N3`` name
    three each (see :attr:`Situation.texts`), ``actions_N`` one. After an end ``next_states_N3`` repeats the
    state, and ``is_last_N`` is true.
    """

    vectors_UD: Vectors
    states_N3: NDArray[np.int64]
    actions_N: NDArray[np.int64]
    rewards_N: NDArray[np.float32]
    next_states_N3: NDArray[np.int64]
    is_last_N: NDArray[np.bool_]


def encode_turns(trajectories: Iterable[Trajectory], embedder: Embedder) -> Turns:
    """Every different text is embedded once. Raises DataError where nothing was done."""
    transitions = [transition for trajectory in trajectories for transition in to_transitions(trajectory)]
    if not transitions:
        raise DataError("the trajectories hold no turn to learn from")
    rows: dict[str, int] = {}

    def number(texts: Sequence[str]) -> list[int]:
        return [rows.setdefault(text, len(rows)) for text in texts]

    states = np.array([number(transition.situation.texts) for transition in transitions], np.int64)
    actions = np.array([number([transition.action])[0] for transition in transitions], np.int64)
    next_states = np.array(
        [number((transition.next_situation or transition.situation).texts) for transition in transitions],
        np.int64,
    )
    texts = list(rows)
    vectors = [embedder.embed(texts[start : start + _PORTION]) for start in range(0, len(texts), _PORTION)]
    return Turns(
        vectors_UD=np.concatenate(vectors),
        states_N3=states,
        actions_N=actions,
        rewards_N=np.array([transition.reward for transition in transitions], np.float32),
        next_states_N3=next_states,
        is_last_N=np.array([transition.next_situation is None for transition in transitions], np.bool_),
    )
