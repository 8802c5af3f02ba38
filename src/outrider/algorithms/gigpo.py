"""GiGPO (arXiv 2505.10978): an episode advantage, plus a step advantage among turns that acted on the same
observation. Deviations: docs/algorithms/details/others.md.

Sequences over turns have one value per policy turn, rollout after rollout. All values are float64; sums are
rounded once, so that no value depends on the order of the rollouts.
"""

import math
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.advantages import (
    Float64Array,
    RolloutAdvantages,
    has_spread,
)
from outrider.algorithms.base import (
    AdvantageKind,
    GroupAdvantages,
    TurnScoreSettings,
    require_unassigned,
    turn_advantages,
)
from outrider.algorithms.grpo import OnPolicyGroup
from outrider.algorithms.presets import GIGPO_PRESETS, GigpoPreset, with_preset
from outrider.trace import Node, PolicyTurn, Trace, policy_turns
from outrider.types import Origin

Normalization = Literal["none", "std"]
Similarity: TypeAlias = Literal["exact"] | float


def discounted_returns_per_turn(rewards: Sequence[float], *, gamma: float) -> list[float]:
    """Compute ``R_t = sum_{k >= t} gamma^(k - t) r_k`` (Eq. 5) from the step rewards of one rollout in order
    of time.

    Raises ValueError for gamma outside [0, 1] and for a reward that is not finite.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    if not all(map(math.isfinite, rewards)):
        raise ValueError("a step reward is not finite")
    returns: list[float] = []
    later_return = 0.0
    for reward in reversed(rewards):
        later_return = reward + gamma * later_return
        returns.append(later_return)
    return returns[::-1]


def anchor_groups(anchors: Sequence[str], *, similarity: Similarity = "exact") -> list[int]:
    """Return the anchor group of each turn (Eq. 6), numbered by first appearance. The turns of a group acted
    on the same observation.

    ``exact`` compares the texts. A number in (0, 1] is a minimum ratio of :class:`difflib.SequenceMatcher`: a
    text joins the first group whose leader it resembles. Texts are processed in alphabetical order, so that
    the partition does not depend on the order of the turns. The cost is quadratic in the number of distinct
    texts and in their length. Raises ValueError for any other number.
    """
    leaders = (
        {text: text for text in anchors}
        if isinstance(similarity, str)
        else _leaders(anchors, threshold=similarity)
    )
    numbers: dict[str, int] = {}
    return [numbers.setdefault(leaders[text], len(numbers)) for text in anchors]


def episode_advantages_per_turn(
    scores: Sequence[float] | Float64Array,
    *,
    population: Sequence[float] | Float64Array,
    normalization: Normalization,
) -> Float64Array:
    """Compute ``A^E = (R - mean P) / F`` (Eq. 3) for the score R of every turn: the return of its episode
    minus the turn's own penalty.

    Mean and std are those of ``population`` P: one score per rollout in the paper, one per turn in the
    released code. F is 1 for ``none`` and ``std P + 1e-6`` (sample std) for ``std``. If P has one element or
    no spread, the result is exactly 0.
    """
    values, counted = np.array(scores, dtype=np.float64), np.array(population, dtype=np.float64)
    if not has_spread(counted):
        return np.zeros(values.size)
    mean = math.fsum(counted) / counted.size
    if normalization == "none":
        return values - mean
    centred = counted - mean
    variance = math.fsum(centred * centred) / (counted.size - 1)
    return (values - mean) / (math.sqrt(variance) + 1e-6)


def step_advantages_per_turn(
    step_returns: Sequence[float], *, groups: Sequence[int], normalization: Normalization
) -> Float64Array:
    """Compute ``A^S = (R_t - mean) / F`` (Eq. 7) within the anchor group of each turn.

    ``groups`` is the result of :func:`anchor_groups`. Every turn counts once, even if one rollout visited its
    anchor several times. F, groups of one and groups without spread are as in
    :func:`episode_advantages_per_turn`. Raises ValueError for sequences of unequal length.
    """
    if len(groups) != len(step_returns):
        raise ValueError(f"{len(step_returns)} step returns with {len(groups)} anchor groups")
    returns = np.array(step_returns, dtype=np.float64)
    members: dict[int, list[int]] = {}
    for turn, group in enumerate(groups):
        members.setdefault(group, []).append(turn)
    advantages = np.zeros(len(returns))
    for turns in members.values():
        advantages[turns] = episode_advantages_per_turn(
            returns[turns], population=returns[turns], normalization=normalization
        )
    return advantages


def _leaders(anchors: Sequence[str], *, threshold: float) -> dict[str, str]:
    """Return the leader of every distinct text."""
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"a similarity threshold must lie in (0, 1], got {threshold}")
    leaders: dict[str, str] = {}
    # Sorted, because leaders depend on the order and set order changes between processes.
    for text in sorted(set(anchors)):
        # autojunk ignores frequent characters in texts of 200 characters or more, which would change the
        # meaning of the ratio for long texts.
        matcher = SequenceMatcher(b=text, autojunk=False)
        known = (leader for leader, own in leaders.items() if leader == own)
        leaders[text] = next((leader for leader in known if _resembles(matcher, leader, threshold)), text)
    return leaders


def _resembles(matcher: "SequenceMatcher[str]", text: str, threshold: float) -> bool:
    """Return whether the ratio reaches the threshold; two cheap upper bounds reject most pairs first."""
    matcher.set_seq1(text)
    return (
        matcher.real_quick_ratio() >= threshold
        and matcher.quick_ratio() >= threshold
        and matcher.ratio() >= threshold
    )


_KINDS: Mapping[str, AdvantageKind] = {"none": "group_centered", "std": "group_normalized"}


class GigpoSettings(TurnScoreSettings):
    """Settings of GiGPO. The defaults are the paper's "w/o std". ``advantage`` is derived from
    ``normalization``.

    ``gamma`` discounts step rewards per turn. ``step_weight`` is omega of ``A = A^E + omega A^S``.
    ``normalization`` is the F of both parts, 1 or the sample std. ``similarity`` defines equal
    observations: ``exact``, or a minimum ratio of difflib. ``anchor = turn`` compares the step reward of turn
    number k with that of the other rollouts that have a turn k (MT-GRPO, arXiv 2505.11821, for any number of
    turns); it needs neither ``gamma`` nor ``similarity``. ``invalid_penalty`` is also subtracted from the
    step return of the turn. ``preset`` sets the defaults of all keys that you leave out.
    """

    presets = GIGPO_PRESETS

    type: Literal["gigpo"] = "gigpo"
    preset: GigpoPreset = "gigpo"
    group_size: int = Field(8, ge=1)
    advantage: AdvantageKind = "group_centered"
    gamma: float = Field(0.95, ge=0, le=1)
    step_weight: float = Field(1.0, ge=0)
    normalization: Normalization = "none"
    anchor: Literal["state", "turn"] = "state"
    """Turns that are compared: those that acted on the same observation, or those with the same number. With
    ``turn``, the reward of a rollout's last turn counts as 0, because it may be the outcome.
    """
    similarity: Literal["exact"] | Annotated[float, Field(gt=0, le=1)] = "exact"

    @model_validator(mode="before")
    @classmethod
    def _advantage(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        if (older := data.pop("episode_statistics", None)) is not None:  # in runs of earlier versions
            data.setdefault("statistics", "samples" if older == "turns" else older)
            if (older == "turns") != (data["statistics"] == "samples"):
                raise ValueError(
                    f"episode_statistics = {older} contradicts statistics = {data['statistics']}: remove "
                    "episode_statistics"
                )
        whole = with_preset(GIGPO_PRESETS, data, default="gigpo")
        return {"advantage": _KINDS.get(str(whole.get("normalization", "none")), "group_centered"), **whole}

    @model_validator(mode="after")
    def _validate(self) -> "GigpoSettings":
        self.require_ratio_per_token("the advantages of turns differ")
        if self.advantage != _KINDS[self.normalization]:
            raise ValueError(
                f"advantage = {self.advantage} contradicts normalization = {self.normalization}: leave it out"
            )
        if self.anchor == "turn":
            for key in ("gamma", "similarity"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} has no effect with anchor = turn: remove it")
        return self


class Gigpo(OnPolicyGroup):
    """On-policy rollouts from one initial state, with one advantage per turn."""

    Settings = GigpoSettings
    settings: GigpoSettings

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Assign ``A^E + omega A^S`` (Eq. 8) to the tokens of every turn; ``advantages`` is A^E per rollout.

        Raises ValueError for a node that several rollouts share, because their step returns may differ.
        """
        chosen = self.settings
        rollouts = list(trace.rollouts())
        turns: list[PolicyTurn] = []
        turn_numbers: list[int] = []
        step_scores: list[float] = []
        for leaf, path in rollouts:
            if leaf.episode_return is None:
                continue
            own = policy_turns(path)
            returns = (
                # The reward of the last turn may be the outcome, which is in the episode's advantage.
                [turn.node.reward if turn is not own[-1] else 0.0 for turn in own]
                if chosen.anchor == "turn"
                else step_returns(path, episode_return=leaf.episode_return, gamma=chosen.gamma)
            )
            turns += own
            turn_numbers += range(len(own))
            step_scores += [
                value - chosen.invalid_penalty * bool(turn.node.metadata.get("invalid", False))
                for value, turn in zip(returns, own, strict=True)
            ]
        require_unassigned(turn.node for turn in turns)
        [plain] = turn_advantages([trace], chosen)
        episode = np.concatenate([np.zeros(0), *(plain.turns or ())])
        groups = (
            turn_numbers
            if chosen.anchor == "turn"
            else anchor_groups([turn.observation for turn in turns], similarity=chosen.similarity)
        )
        step = step_advantages_per_turn(step_scores, groups=groups, normalization=chosen.normalization)
        combined = (episode + chosen.step_weight * step).tolist()
        for turn, value in zip(turns, combined, strict=True):
            turn.node.credit = (value,) * len(turn.node.token_ids)
        # The group has a signal if any token has one, even if only from the step advantage.
        has_signal = any(value and turn.node.token_ids for turn, value in zip(turns, combined, strict=True))
        advantages = RolloutAdvantages(
            values=plain.values,
            assigned=plain.assigned,
            has_signal=has_signal,
            reason=None if has_signal else plain.reason or "no_spread",
        )
        for (leaf, _), value in zip(rollouts, plain.values.tolist(), strict=True):
            leaf.advantage = None if leaf.episode_return is None else value
        sizes = np.bincount(np.array(groups, dtype=np.int64))
        measurements = {
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
        return GroupAdvantages(advantages=advantages, measurements=measurements)


def step_returns(path: Sequence[Node], *, episode_return: float, gamma: float) -> list[float]:
    """Return the discounted return of each policy turn of a rollout.

    A retrieved step takes one time step and adds its own reward. The difference between the environment's
    return and the sum of step rewards (:func:`reward_without_step`) is added to the last policy turn.
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
    """Return the episode return minus the step rewards. It is not 0 if rewards are paid only at the end."""
    return episode_return - math.fsum(node.reward for node in path)
