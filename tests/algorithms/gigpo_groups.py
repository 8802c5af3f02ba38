"""Groups of episodes for the tests of GiGPO, as traces built by hand, and the vectors: what the released code
makes of two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.algorithms.base import GroupAdvantages
from outrider.algorithms.gigpo import Gigpo, GigpoSettings
from outrider.config import validate
from outrider.trace import Leaf, Node, Trace
from outrider.types import Message, Origin, Outcome, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """``states[t]`` is what turn t acted on; ``extra`` is what the environment paid besides the step
    rewards.
    """

    states: tuple[str, ...]
    rewards: tuple[float, ...]
    invalid: tuple[bool, ...] = ()
    extra: float = 0.0

    @property
    def episode_return(self) -> float:
        return math.fsum(self.rewards) + self.extra

    def is_invalid(self, turn: int) -> bool:
        return bool(self.invalid) and self.invalid[turn]


def add(trace: Trace, parent: int | None, origin: Origin, text: str, **fields: Any) -> Node:
    """A node; a policy node has two tokens."""
    size = 2 if origin is Origin.POLICY else 1
    if origin is Origin.POLICY:
        fields |= {"logprobs": (-1.0,) * size, "entropies": (0.5,) * size}
    message = Message(role="assistant" if origin is Origin.POLICY else "user", content=text)
    return trace.append(parent=parent, origin=origin, token_ids=(1,) * size, message=message, **fields)


def finish(trace: Trace, rollout: int, node_id: int | None, episode_return: float | None) -> None:
    outcome = Outcome.TOOL_FAULT if episode_return is None else Outcome.FINISHED
    trace.finish(Leaf(node_id=node_id, rollout=rollout, outcome=outcome, episode_return=episode_return))


def play(episodes: Sequence[Episode]) -> tuple[Trace, list[list[Node]]]:
    """The group of these episodes, and the policy nodes of each."""
    trace = Trace(task=Task(key="t", question=""))
    prompts: dict[str, Node] = {}
    turns: list[list[Node]] = []
    for rollout, episode in enumerate(episodes):
        turns.append([])
        tip = add(trace, None, Origin.PROMPT, "nothing") if not episode.states else None
        for turn, (state, reward) in enumerate(zip(episode.states, episode.rewards, strict=True)):
            if tip is not None:
                tip = add(trace, tip.node_id, Origin.ENVIRONMENT, state)
            else:
                if state not in prompts:
                    prompts[state] = add(trace, None, Origin.PROMPT, state)
                tip = prompts[state]
            metadata = {"invalid": episode.is_invalid(turn)}
            tip = add(
                trace, tip.node_id, Origin.POLICY, f"{rollout}/{turn}", reward=reward, metadata=metadata
            )
            turns[-1].append(tip)
        assert tip is not None
        finish(trace, rollout, tip.node_id, episode.episode_return)
    return trace, turns


def credited(episodes: Sequence[Episode], **chosen: Any) -> tuple[list[list[float]], GroupAdvantages]:
    """The credit of every turn through the public class, and what it reported."""
    trace, turns = play(episodes)
    credit = Gigpo(validate(GigpoSettings, chosen)).assign_advantages(trace)
    values = []
    for own in turns:
        values.append([node.credit[0] for node in own if node.credit is not None])
        assert all(node.credit == (value,) * 2 for node, value in zip(own, values[-1], strict=True))
    return values, credit


def flat(values: Sequence[Sequence[float]]) -> list[float]:
    return [value for own in values for value in own]


# A worked group with the step rewards of the paper's kind of task; episode statistics over turns, no penalty,
# rounded to 1e-6.
SMALL = (
    Episode(states=("s0", "s1", "s2"), rewards=(0.0, 0.0, 10.0)),
    Episode(states=("s0", "s1", "s1", "s3"), rewards=(0.0,) * 4),
    Episode(states=("s0", "s2"), rewards=(0.0, 10.0)),
)
SMALL_RETURNS = [9.025, 9.5, 10.0, 0.0, 0.0, 0.0, 0.0, 9.5, 10.0]
SMALL_EXPECTED = {
    "none": {
        "episode": [4.444444] * 3 + [-5.555556] * 4 + [4.444444] * 2,
        "step": [2.85, 6.333333, 0.0, -6.175, -3.166667, -3.166667, 0.0, 3.325, 0.0],
        "joint": [
            7.294444,
            10.777778,
            4.444444,
            -11.730556,
            -8.722222,
            -8.722222,
            -5.555556,
            7.769444,
            4.444444,
        ],
    },
    "std": {
        "episode": [0.843274] * 3 + [-1.054092] * 4 + [0.843274] * 2,
        "step": [0.532414, 1.1547, 0.0, -1.153563, -0.57735, -0.57735, 0.0, 0.621149, 0.0],
        "joint": [
            1.375688,
            1.997974,
            0.843274,
            -2.207656,
            -1.631443,
            -1.631443,
            -1.054092,
            1.464423,
            0.843274,
        ],
    },
}

# The released code's own output (verl-agent) for two tasks, with a penalty of 0.1 on two turns. The second
# task has no spread.
LARGE = (
    Episode(
        states=("room", "desk", "desk", "shelf"),
        rewards=(0.0, 0.0, 0.0, 10.0),
        invalid=(False, True, False, False),
    ),
    Episode(states=("room", "shelf"), rewards=(0.0, 0.0)),
    Episode(states=("room", "desk", "bed"), rewards=(0.0, 0.0, 10.0), invalid=(True, False, False)),
)
LARGE_ZERO = (
    Episode(states=("hall", "sink"), rewards=(0.0, 0.0)),
    Episode(states=("hall", "hall", "sink"), rewards=(0.0, 0.0, 0.0)),
)
LARGE_SCORES = [[10.0, 9.9, 10.0, 10.0], [0.0, 0.0], [9.9, 10.0, 10.0]]
LARGE_STEP_SCORES = [8.57375, 8.925, 9.5, 10.0, 0.0, 0.0, 8.925, 9.5, 10.0]
LARGE_GROUPS = [0, 1, 1, 2, 0, 2, 0, 1, 3]
LARGE_EXPECTED = {
    "none": {
        "joint": [
            4.985277777777778, 1.761111111111112, 2.436111111111111, 7.2444444444444445, -13.588472222222222,
            -12.755555555555556, 5.236527777777779, 2.436111111111111, 2.2444444444444445,
        ],
        "over_turns": [2.2444444444444445, 2.144444444444445] + [2.2444444444444445] * 2
        + [-7.7555555555555555] * 2
        + [2.144444444444445] + [2.2444444444444445] * 2,
        "over_first_turns": [3.366666666666667, 3.2666666666666675] + [3.366666666666667] * 2
        + [-6.633333333333333] * 2
        + [3.2666666666666675] + [3.366666666666667] * 2,
        "step": [
            2.7408333333333337, -0.38333333333333286, 0.19166666666666643, 5.0, -5.832916666666667, -5.0,
            3.092083333333334, 0.19166666666666643, 0.0,
        ],
    },
    "std": {
        "joint": [
            1.052682214489976, -0.6670119534518323, 1.0877754292808002, 1.217533580402932,
            -2.9177554192535573, -2.470859035904515, 1.099432855939026, 1.0877754292808002,
            0.5104268992163704,
        ],
        "over_turns": [0.5104268992163704, 0.48768510667702725] + [0.5104268992163704] * 2
        + [-1.7637523547179532] * 2
        + [0.48768510667702725] + [0.5104268992163704] * 2,
        "over_first_turns": [0.5860317428870874, 0.5686248594349957] + [0.5860317428870874] * 2
        + [-1.1546566023220828] * 2
        + [0.5686248594349957] + [0.5860317428870874] * 2,
        "step": [
            0.5422553152736056, -1.1546970601288595, 0.5773485300644298, 0.7071066811865616,
            -1.154003064535604, -0.7071066811865616, 0.6117477492619987, 0.5773485300644298, 0.0,
        ],
    },
}  # fmt: skip
