"""GiGPO's formulas (arXiv 2505.10978) as pure functions over the policy turns of one task's group.

Sequences over turns hold one value a policy turn, rollout after rollout. float64 throughout; sums are rounded
once, so that no value depends on the order of the rollouts.
"""

import math
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Literal, TypeAlias

import numpy as np

from outrider.algorithms.common.advantages import Float64Array

Normalization = Literal["none", "std"]
Similarity: TypeAlias = Literal["exact"] | float


def discounted_returns_per_turn(rewards: Sequence[float], *, gamma: float) -> list[float]:
    """``R_t = sum_{k >= t} gamma^(k - t) r_k`` (Eq. 5) of one rollout, whose step rewards come in the order
    of time.

    Raises ValueError for gamma outside [0, 1] and for a reward that is not finite.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    if not all(map(math.isfinite, rewards)):
        raise ValueError("a step reward that is not finite cannot be credited")
    returns: list[float] = []
    later_return = 0.0
    for reward in reversed(rewards):
        later_return = reward + gamma * later_return
        returns.append(later_return)
    return returns[::-1]


def anchor_groups(anchors: Sequence[str], *, similarity: Similarity = "exact") -> list[int]:
    """The anchor group of each turn (Eq. 6): its turns acted on the same observation. Numbered by first
    appearance.

    ``exact`` compares the texts. A number in (0, 1] puts a text into the first group whose leader it
    resembles with at least that ratio of :class:`difflib.SequenceMatcher`. Texts found groups in alphabetical
    order, so that the partition does not depend on the order of the turns. The cost is quadratic in distinct
    texts and in their length. Raises ValueError for another number.
    """
    leaders = (
        {text: text for text in anchors}
        if isinstance(similarity, str)
        else _leaders(anchors, threshold=similarity)
    )
    numbers: dict[str, int] = {}
    return [numbers.setdefault(leaders[text], len(numbers)) for text in anchors]


def episode_advantages_per_turn(
    scores: Sequence[float],
    *,
    population: Sequence[float],
    normalization: Normalization,
    eps: float = 1e-6,
    spread_tolerance: float = 1e-9,
) -> Float64Array:
    """``A^E = (R - mean P) / F`` (Eq. 3) for the score R of every turn: its episode's return, less the turn's
    own penalty.

    ``population`` P is what mean and std count: one score per rollout in the paper, one per turn in the
    released code. F is 1 for ``none`` and ``std P + eps`` (sample std) for ``std``. A population of one, or
    whose spread is within ``spread_tolerance * max(1, max |P|)``, gives exactly 0.
    """
    counted = np.array(population, dtype=np.float64)
    return _deviations(np.array(scores, dtype=np.float64), counted, normalization, eps, spread_tolerance)


def step_advantages_per_turn(
    step_returns: Sequence[float],
    *,
    groups: Sequence[int],
    normalization: Normalization,
    eps: float = 1e-6,
    spread_tolerance: float = 1e-9,
) -> Float64Array:
    """``A^S = (R_t - mean) / F`` (Eq. 7) within the anchor group of each turn; ``groups`` as from
    :func:`anchor_groups`.

    Every turn counts once, also where one rollout met its anchor several times. F, groups of one and groups
    without spread are as in :func:`episode_advantages_per_turn`. Raises ValueError for sequences of unequal
    length.
    """
    if len(groups) != len(step_returns):
        raise ValueError(f"{len(step_returns)} step returns with {len(groups)} anchor groups")
    returns = np.array(step_returns, dtype=np.float64)
    members: dict[int, list[int]] = {}
    for turn, group in enumerate(groups):
        members.setdefault(group, []).append(turn)
    advantages = np.zeros(len(returns))
    for turns in members.values():
        advantages[turns] = _deviations(returns[turns], returns[turns], normalization, eps, spread_tolerance)
    return advantages


def _deviations(
    values: Float64Array,
    population: Float64Array,
    normalization: Normalization,
    eps: float,
    spread_tolerance: float,
) -> Float64Array:
    if population.size < 2:
        return np.zeros(values.size)
    spread, scale = float(np.ptp(population)), max(1.0, float(np.abs(population).max()))
    if spread <= spread_tolerance * scale:
        return np.zeros(values.size)
    mean = math.fsum(population) / population.size
    if normalization == "none":
        return values - mean
    centred = population - mean
    variance = math.fsum(centred * centred) / (population.size - 1)
    return (values - mean) / (math.sqrt(variance) + eps)


def _leaders(anchors: Sequence[str], *, threshold: float) -> dict[str, str]:
    """The leader of every distinct text."""
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"a similarity threshold must lie in (0, 1], got {threshold}")
    leaders: dict[str, str] = {}
    # Sorted: a set's order changes from process to process, and leaders depend on it.
    for text in sorted(set(anchors)):
        # autojunk would ignore frequent characters from 200 characters on: the ratio of long texts would mean
        # something else.
        matcher = SequenceMatcher(b=text, autojunk=False)
        known = (leader for leader, own in leaders.items() if leader == own)
        leaders[text] = next((leader for leader in known if _resembles(matcher, leader, threshold)), text)
    return leaders


def _resembles(matcher: "SequenceMatcher[str]", text: str, threshold: float) -> bool:
    """Whether the ratio reaches the threshold; its two upper bounds are cheap and decide most pairs."""
    matcher.set_seq1(text)
    return (
        matcher.real_quick_ratio() >= threshold
        and matcher.quick_ratio() >= threshold
        and matcher.ratio() >= threshold
    )
