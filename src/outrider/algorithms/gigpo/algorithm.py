"""GiGPO (arXiv 2505.10978): an episode advantage, plus a step advantage among the turns that acted on the
same observation.

Formulas are in :mod:`outrider.algorithms.gigpo.formulas`; deviations are in docs/algorithms/gigpo.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.base import AdvantageKind, GroupAdvantages, ObjectiveSettings
from outrider.algorithms.common.advantages import (
    Float64Array,
    RolloutAdvantages,
    group_normalized_advantages_per_rollout,
)
from outrider.algorithms.common.group_settings import with_preset
from outrider.algorithms.common.on_policy import OnPolicyGroup
from outrider.algorithms.common.presets import GIGPO_PRESETS, GigpoPreset
from outrider.algorithms.gigpo.formulas import (
    Normalization,
    anchor_groups,
    discounted_returns_per_turn,
    episode_advantages_per_turn,
    step_advantages_per_turn,
)
from outrider.trace import Leaf, Node, Trace, policy_turns
from outrider.types import Origin

_KINDS: Mapping[str, AdvantageKind] = {"none": "group_centered", "std": "group_normalized"}


class GigpoSettings(ObjectiveSettings):
    """GiGPO's own settings; those of its credit are by default the paper's "w/o std". ``advantage`` follows
    from ``normalization``.

    ``gamma`` discounts step rewards per turn; ``step_weight`` is omega of ``A = A^E + omega A^S``;
    ``normalization`` is the F of both parts, 1 or the sample std; ``similarity`` says which observations
    count as the same anchor, ``exact`` or a threshold of difflib's ratio; ``episode_statistics`` counts
    ``rollouts`` once, or ``turns`` as the released code does; ``invalid_penalty`` is taken from the return
    and the step return of a turn that the environment could not read. A ``preset`` fills what is not given.
    """

    type: Literal["gigpo"] = "gigpo"
    preset: GigpoPreset = "gigpo"
    group_size: int = Field(8, ge=1)
    advantage: AdvantageKind = "group_centered"
    gamma: float = Field(0.95, ge=0, le=1)
    step_weight: float = Field(1.0, ge=0)
    normalization: Normalization = "none"
    similarity: Literal["exact"] | Annotated[float, Field(gt=0, le=1)] = "exact"
    episode_statistics: Literal["rollouts", "turns"] = "rollouts"
    invalid_penalty: float = Field(0.0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _advantage(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        whole = with_preset(GIGPO_PRESETS, data, default="gigpo")
        return {"advantage": _KINDS.get(str(whole.get("normalization", "none")), "group_centered"), **whole}

    @model_validator(mode="after")
    def _validate(self) -> "GigpoSettings":
        if self.advantage != _KINDS[self.normalization]:
            raise ValueError(
                f"advantage = {self.advantage} contradicts normalization = {self.normalization}: leave it out"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One policy turn: its node, the observation that it acted on, and its penalty.

    ``score`` is the return of its episode and ``step_score`` its discounted step return, both less the
    penalty.
    """

    node: Node
    anchor: str
    penalty: float
    score: float
    step_score: float


class Gigpo(OnPolicyGroup):
    """On-policy rollouts of one initial state; credit per turn."""

    Settings = GigpoSettings

    def __init__(self, settings: GigpoSettings) -> None:
        super().__init__(settings, num_rollouts=settings.group_size)
        self.settings = settings

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """``A^E + omega A^S`` (Eq. 8) on the tokens of every turn; ``advantages`` holds A^E per rollout.

        Raises ValueError for a node that several rollouts share: it would need one credit for several step
        returns.
        """
        chosen = self.settings
        rollouts = list(trace.rollouts())
        rollout_turns = [self._turns(leaf, path) for leaf, path in rollouts]
        turns = [turn for own in rollout_turns for turn in own]
        _require_unassigned(turns)
        scores = [_score(leaf, own) for (leaf, _), own in zip(rollouts, rollout_turns, strict=True)]
        turn_scores = [turn.score for turn in turns]
        scorable = [score for score in scores if score is not None]
        population = scorable if chosen.episode_statistics == "rollouts" else turn_scores
        episode = episode_advantages_per_turn(
            turn_scores, population=population, normalization=chosen.normalization
        )
        groups = anchor_groups([turn.anchor for turn in turns], similarity=chosen.similarity)
        step_scores = [turn.step_score for turn in turns]
        step = step_advantages_per_turn(step_scores, groups=groups, normalization=chosen.normalization)
        for turn, value in zip(turns, (episode + chosen.step_weight * step).tolist(), strict=True):
            turn.node.credit = (value,) * len(turn.node.token_ids)
        rollout_advantages = episode_advantages_per_turn(
            scorable, population=population, normalization=chosen.normalization
        )
        advantages = _group_advantages(scores, rollout_advantages, turns)
        values, assigned = advantages.values.tolist(), advantages.assigned.tolist()
        for (leaf, _), value, has_return in zip(rollouts, values, assigned, strict=True):
            leaf.advantage = value if has_return else None
        return GroupAdvantages(advantages=advantages, measurements=_measure(rollouts, groups, episode, step))

    def _turns(self, leaf: Leaf, path: Sequence[Node]) -> list[Turn]:
        if leaf.episode_return is None:
            return []
        returns = step_returns(path, episode_return=leaf.episode_return, gamma=self.settings.gamma)
        turns = []
        for turn, step_return in zip(policy_turns(path), returns, strict=True):
            node, anchor = turn.node, turn.observation
            penalty = self.settings.invalid_penalty if node.metadata.get("invalid", False) else 0.0
            score, step_score = leaf.episode_return - penalty, step_return - penalty
            turns.append(Turn(node=node, anchor=anchor, penalty=penalty, score=score, step_score=step_score))
        return turns


def step_returns(path: Sequence[Node], *, episode_return: float, gamma: float) -> list[float]:
    """The discounted return of each policy turn of a rollout.

    A retrieved step takes one step of time and brings its own reward. What the step rewards lack of the
    environment's record (:func:`reward_without_step`) is put on the last policy turn.
    """
    steps = [node for node in path if node.origin in (Origin.POLICY, Origin.BUFFER)]
    policy_indices = [index for index, node in enumerate(steps) if node.trainable]
    if not policy_indices:
        return []
    rewards = [node.reward for node in steps]
    rewards[policy_indices[-1]] += reward_without_step(path, episode_return=episode_return)
    returns = discounted_returns_per_turn(rewards, gamma=gamma)
    return [returns[index] for index in policy_indices]


def reward_without_step(path: Sequence[Node], *, episode_return: float) -> float:
    """The environment's record less the step rewards: not 0 where an environment pays at the end only."""
    return episode_return - math.fsum(node.reward for node in path)


def _require_unassigned(turns: Sequence[Turn]) -> None:
    seen: set[int] = set()
    for node in (turn.node for turn in turns):
        if node.credit is not None or node.shares is not None or node.node_id in seen:
            raise ValueError(f"node {node.node_id} already has credit")
        seen.add(node.node_id)


def _score(leaf: Leaf, turns: Sequence[Turn]) -> float | None:
    """A rollout's value in the statistics: its return less the mean penalty of its turns, so that A^E stays
    centred.
    """
    if leaf.episode_return is None or not turns:
        return leaf.episode_return
    return leaf.episode_return - fmean(turn.penalty for turn in turns)


def _group_advantages(
    scores: Sequence[float | None], values: Float64Array, turns: Sequence[Turn]
) -> RolloutAdvantages:
    """A^E per rollout; the group has a signal as soon as one token has, if only from the step part."""
    plain = group_normalized_advantages_per_rollout(returns=scores)
    placed = np.zeros(len(scores))
    placed[plain.assigned] = values
    has_signal = any(value != 0.0 for turn in turns for value in turn.node.credit or ())
    reason = None if has_signal else plain.reason or "no_spread"
    return RolloutAdvantages(values=placed, assigned=plain.assigned, has_signal=has_signal, reason=reason)


def _measure(
    rollouts: Sequence[tuple[Leaf, list[Node]]],
    groups: Sequence[int],
    episode: Float64Array,
    step: Float64Array,
) -> dict[str, list[float]]:
    """Raw values behind the metrics: a group, a turn, a turn, a turn, a rollout; the trainer averages them
    over the step.
    """
    sizes = np.bincount(np.array(groups, dtype=np.int64))
    return {
        "gigpo/anchor_group_size": sizes.astype(np.float64).tolist(),
        "gigpo/share_alone": [float(sizes[group] == 1) for group in groups],
        "gigpo/episode_advantage_abs": np.abs(episode).tolist(),
        "gigpo/step_advantage_abs": np.abs(step).tolist(),
        "gigpo/reward_without_step_abs": [
            abs(reward_without_step(path, episode_return=leaf.episode_return))
            for leaf, path in rollouts
            if leaf.episode_return is not None
        ],
    }
