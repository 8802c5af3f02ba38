"""LaMer (arXiv 2512.16848): several episodes of a task in one rollout, with reflections of the policy between
them. Deviations: docs/algorithms/lamer.md.

The rollout loop plays the episodes (:attr:`outrider.rollout.hooks.Hook.num_episodes`); this module requests
and shows the reflections, and assigns returns across episodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.advantages import RolloutAdvantages, group_normalized_advantages_per_rollout
from outrider.algorithms.base import (
    AdvantageKind,
    GroupAdvantages,
    ObjectiveSettings,
    group_advantages,
    require_unassigned,
)
from outrider.algorithms.gigpo import (
    anchor_groups,
    episode_advantages_per_turn,
    reward_without_step,
    step_advantages_per_turn,
)
from outrider.algorithms.grpo import OnPolicyGroup
from outrider.algorithms.tips import last_words
from outrider.environments.base import EpisodeResult
from outrider.rollout.hooks import EpisodeState, Splice, StatelessHook
from outrider.trace import EARLIER_RETURN, REFLECTION, Node, Trace, policy_turns, split_episodes
from outrider.types import Message, Origin

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings

REQUEST = (
    "Attempt {number} at this task is over, with a score of {score:.3g}, and the task was not completed. You "
    "will start again from the beginning and see only your answer to this message. What went wrong, and what "
    "have you learned about the task? Then write a short plan for the next attempt."
)
HEADING = "Your notes on earlier attempts at this task, which failed:"


class LamerSettings(ObjectiveSettings):
    """LaMer plays up to ``num_episodes`` episodes of a task in one rollout, until the first success. After an
    episode without success the policy writes a reflection, which is trained, and which the prompts of the
    later episodes contain. The limits of ``rollout`` apply to each episode.

    ``anchor``: an advantage compares the return to go of a turn with those of the same turn number of the
    same episode (``turn``). ``state`` has the two parts of GiGPO as in the released scripts: it compares
    turns that acted on the same observation, in any episode, and adds the centred return of the turn's own
    episode.
    """

    type: Literal["lamer"] = "lamer"
    advantage: AdvantageKind = "group_centered"
    num_episodes: int = Field(3, ge=2)
    """Most episodes of a rollout."""
    step_gamma: float = Field(0.95, ge=0, le=1)
    """Discount from a turn to the next one of its episode."""
    episode_gamma: float = Field(0.6, ge=0, le=1)
    """Discount from the last turn of an episode to the first turn of the next one."""
    max_reflection_tokens: int = Field(256, ge=1)
    """Most tokens of a reflection."""
    anchor: Literal["turn", "state"] = "turn"

    @model_validator(mode="after")
    def _validate(self) -> "LamerSettings":
        self.require_ratio_per_token("the advantages of episodes differ")
        if self.advantage not in ("group_centered", "group_normalized", "leave_one_out"):
            raise ValueError(
                f"lamer compares returns of turns: advantage = {self.advantage} does not apply to them; use "
                "group_centered, group_normalized or leave_one_out"
            )
        if self.anchor == "state" and self.advantage != "group_centered":
            raise ValueError("anchor = state centres both of its parts: remove advantage")
        if self.positive_nll:
            raise ValueError(
                "positive_nll imitates all turns of a solved rollout, also those of its failed episodes: "
                "remove it"
            )
        if self.distill is not None:
            raise ValueError(
                "algorithm.distill compares a context with help and one without, and a rollout of lamer has "
                "several contexts, with reflections: remove [algorithm.distill]"
            )
        return self

    @property
    def needs_whole_rollouts(self) -> bool:
        """The few episodes of a rollout stay in one micro-batch, so that earlier runs keep their bits."""
        return True

    def validate_run(self, run: "RunSettings") -> None:
        """Raise ValueError if the environment or the rendering has no second episode in a rollout."""
        super().validate_run(run)
        if run.environment.rebuilt_prompt_tokens is not None:
            raise ValueError(
                "algorithm.type = lamer shows reflections in later episodes of a rollout, and "
                'environment.context = "window" builds every prompt anew: set environment.context = "chat"'
            )
        if run.environment.keeps_conversations:
            raise ValueError(
                "algorithm.type = lamer starts episodes again inside a rollout, and environment.type = "
                f"{run.environment.type} leaves episodes to a program: use another algorithm"
            )
        if run.model.history_thinking == "strip":
            raise ValueError(
                "model.history_thinking = strip leaves out the reflections that algorithm.type = lamer "
                "shows: use keep"
            )


class LamerHook(StatelessHook):
    """Requests a reflection after every episode without success, and shows all of them in the next one."""

    def __init__(self, settings: LamerSettings) -> None:
        self.num_episodes = settings.num_episodes
        self.max_reflection_tokens = settings.max_reflection_tokens

    def closing_message(self, state: EpisodeState, result: EpisodeResult) -> Message:
        """Request a reflection, following the environment's last message."""
        number, score = len(state.reflections) + 1, result.episode_return
        return Message(role="user", content=last_words(state) + REQUEST.format(number=number, score=score))

    def before_turn(self, state: EpisodeState) -> Sequence[Splice]:
        """Insert the reflections once, before the first turn of an episode."""
        shown = [f"{number}. {text}" for number, text in enumerate(state.reflections, start=1) if text]
        if state.turn != state.first_turn or not shown:
            return ()
        text = "\n\n" + "\n".join([HEADING, *shown])
        return [Splice(origin=Origin.MEMORY, text=text, metadata={"num_reflections": len(shown)})]


def returns_to_go(
    turns: Sequence[tuple[int, float | None]], *, step_gamma: float, episode_gamma: float
) -> list[float]:
    """Compute the return to go of every turn of a rollout in order of time: ``G = r + step_gamma G'`` inside
    an episode and ``G = r + episode_gamma G''`` at its last turn, with G'' of the next episode's first turn.

    ``turns`` are pairs of the episode and the reward. The reward None marks a reflection, which has the G of
    the turn after it.
    """
    values: list[float] = []
    later, next_episode = 0.0, -1
    for episode, reward in reversed(turns):
        if reward is not None:
            later = reward + (step_gamma if episode == next_episode else episode_gamma) * later
            next_episode = episode
        values.append(later)
    return values[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTurn:
    """A policy turn. ``number`` counts the turns of its episode; a reflection has -1 of the episode after it.
    ``reward`` of an episode's last turn includes what no step reward explains; a reflection has None.
    ``episode_return`` is 0 for a reflection.
    """

    node: Node
    observation: str
    episode: int
    number: int
    reward: float | None
    episode_return: float

    @property
    def is_reflection(self) -> bool:
        return self.reward is None


def episode_turns(path: Sequence[Node], *, episode_return: float) -> list[EpisodeTurn]:
    """Return the policy's turns of a rollout whose last episode had this return."""
    episodes = split_episodes(path)
    ends = [float(nodes[0].metadata[EARLIER_RETURN]) for nodes in episodes[1:]] + [episode_return]
    turns: list[EpisodeTurn] = []
    for episode, (nodes, end) in enumerate(zip(episodes, ends, strict=True)):
        every = policy_turns(nodes)
        own = [turn for turn in every if REFLECTION not in turn.node.metadata]
        rewards = [turn.node.reward for turn in own]
        if rewards:
            rewards[-1] += reward_without_step(nodes, episode_return=end)
        turns += [
            EpisodeTurn(
                node=turn.node, observation=turn.observation, episode=episode, number=number, reward=reward,
                episode_return=end,
            )
            for number, (turn, reward) in enumerate(zip(own, rewards, strict=True))
        ]  # fmt: skip
        turns += [
            EpisodeTurn(
                node=turn.node, observation=REFLECTION, episode=episode + 1, number=-1, reward=None,
                episode_return=0.0,
            )
            for turn in every[len(own) :]
        ]  # fmt: skip
    return turns


class Lamer(OnPolicyGroup):
    """Rollouts of several episodes, with one advantage per turn."""

    Settings: ClassVar[type[LamerSettings]] = LamerSettings
    settings: LamerSettings

    def __init__(self, settings: LamerSettings) -> None:
        super().__init__(settings, hooks=(LamerHook(settings),))

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Assign the advantage of every turn to its tokens. ``advantages`` is their mean over each rollout.

        Raises ValueError for a node that several rollouts share.
        """
        chosen, rollouts = self.settings, list(trace.rollouts())
        own_turns = [
            [] if leaf.episode_return is None else episode_turns(path, episode_return=leaf.episode_return)
            for leaf, path in rollouts
        ]
        turns = [turn for own in own_turns for turn in own]
        require_unassigned(turn.node for turn in turns)
        plain = group_normalized_advantages_per_rollout(returns=[leaf.episode_return for leaf, _ in rollouts])
        returns = [
            value
            for own in own_turns
            for value in returns_to_go(
                [(turn.episode, turn.reward) for turn in own],
                step_gamma=chosen.step_gamma,
                episode_gamma=chosen.episode_gamma,
            )
        ]
        positions: dict[tuple[int, int], list[int]] = {}
        for position, turn in enumerate(turns):
            positions.setdefault((turn.episode, turn.number), []).append(position)
        if chosen.anchor == "state":
            scores = [turn.episode_return for turn in turns]
            groups = anchor_groups([turn.observation for turn in turns])
            values = step_advantages_per_turn(returns, groups=groups, normalization="none")
            values += episode_advantages_per_turn(scores, population=scores, normalization="none")
        else:
            values = np.zeros(len(turns))
            for members in positions.values():
                compared = [returns[position] for position in members]
                values[members] = group_advantages(compared, chosen.advantage).values
        for turn, value in zip(turns, values.tolist(), strict=True):
            turn.node.credit = (value,) * len(turn.node.token_ids)
        means = [
            fmean(tokens) if (tokens := [value for turn in own for value in turn.node.credit or ()]) else 0.0
            for own in own_turns
        ]
        for (leaf, _), mean in zip(rollouts, means, strict=True):
            leaf.advantage = None if leaf.episode_return is None else mean
        has_signal = any(value for turn in turns for value in turn.node.credit or ())
        advantages = RolloutAdvantages(
            values=np.array(means),
            assigned=plain.assigned,
            has_signal=has_signal,
            reason=None if has_signal else plain.reason or "no_spread",
        )
        return GroupAdvantages(
            advantages=advantages, measurements=_measure(trace, turns, values.tolist(), positions)
        )


def _measure(
    trace: Trace,
    turns: Sequence[EpisodeTurn],
    values: Sequence[float],
    positions: Mapping[tuple[int, int], Sequence[int]],
) -> dict[str, list[float]]:
    scored = [(leaf, split_episodes(path)) for leaf, path in trace.scored_rollouts()]
    reflections = [(turn, value) for turn, value in zip(turns, values, strict=True) if turn.is_reflection]
    return {
        "lamer/episodes": [float(len(episodes)) for _, episodes in scored],
        "lamer/solved_first": [float(leaf.success and len(episodes) == 1) for leaf, episodes in scored],
        "lamer/shown_fraction": [
            float(any("num_reflections" in node.metadata for node in nodes))
            for _, episodes in scored
            for nodes in episodes[1:]
        ],
        "lamer/share_alone": [float(len(positions[turn.episode, turn.number]) == 1) for turn in turns],
        "lamer/reflection_tokens": [float(len(turn.node.token_ids)) for turn, _ in reflections],
        "lamer/reflection_advantage_abs": [abs(value) for _, value in reflections],
    }
