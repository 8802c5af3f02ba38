"""What retrieved steps do to the credit of a group: RAPO's factor on the advantages, and its scale of the
ratios (arXiv 2603.03078, Eq. 5-10).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from outrider.algorithms.common.advantages import Float64Array
from outrider.algorithms.common.loss_settings import LossSettings
from outrider.algorithms.rapo.formulas import (
    RetrievalReward,
    retrieval_advantages_per_rollout,
    retrieval_factors_per_rollout,
    retrieval_ratio_scale,
    retrieval_reward_per_rollout,
    retrieved_token_share,
    step_entropy_per_step,
)
from outrider.config import Settings
from outrider.trace import Leaf, Node, Trace
from outrider.types import Origin


class RetrievalAdvantageSettings(Settings):
    """``num_hybrid`` of the group's rollouts may retrieve; ``advantage_weight`` is a of Eq. 10,
    ``ratio_weight`` m of Eq. 8 (0 switches either off). ``quality``, ``timing`` and ``sign`` are the
    parts of the reward.
    """

    num_hybrid: int = Field(4, ge=0)
    advantage_weight: float = Field(0.2, ge=0)
    ratio_weight: float = Field(0.05, ge=0)
    quality: bool = True
    timing: Literal["entropy", "inverse_entropy", "none"] = "entropy"
    sign: Literal["decrease", "increase"] = "decrease"

    @model_validator(mode="after")
    def _rewards_something(self) -> "RetrievalAdvantageSettings":
        if not self.quality and self.timing == "none":
            raise ValueError(
                "quality = false with timing = none leaves no retrieval reward: "
                "set advantage_weight = 0 instead"
            )
        if not self.quality and self.sign == "increase":
            raise ValueError("sign acts on the quality term, which is off")
        return self


def require_known_ratio(loss: LossSettings, ratio_weight: float) -> None:
    """Raises ValueError for a loss whose ratio nothing scales."""
    if loss.type != "clip" and ratio_weight > 0:
        raise ValueError(
            f"loss.type = {loss.type} does not know RAPO's ratio: set ratio_weight = 0 or loss.type = clip"
        )


def require_equal_scales(attribution: str, ratio_weight: float) -> None:
    """Raises ValueError where a token counts once, and its rollouts scale its ratio differently."""
    if attribution == "hard" and ratio_weight > 0:
        raise ValueError(
            "branch.attribution = hard needs ratio_weight = 0: leaves "
            "of one token would scale its ratio differently"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalAdvantages:
    """Of one group [N]: ``factors`` on the outcome advantages, ``scales`` of the importance ratios, and what
    was measured.
    """

    factors: Float64Array
    scales: list[float]
    measurements: dict[str, list[float]]


def retrieval_advantages(trace: Trace, settings: RetrievalAdvantageSettings) -> RetrievalAdvantages:
    """``1 + a A_ret`` (Eq. 10) and ``1 + m F_ret`` (Eq. 8) of every rollout of a group."""
    rollouts = list(trace.rollouts())
    rewards = [retrieval_reward(path, settings) for _, path in rollouts]
    scored = [
        # The rollouts that the outcome cannot score: both advantages have to span the same ones.
        None if leaf.episode_return is None else reward.value
        for (leaf, _), reward in zip(rollouts, rewards, strict=True)
    ]
    factors = retrieval_factors_per_rollout(
        retrieval=retrieval_advantages_per_rollout(rewards=scored), weight=settings.advantage_weight
    )
    shares = [retrieved_share(path) for _, path in rollouts]
    scales = [
        retrieval_ratio_scale(retrieved_token_share=share, weight=settings.ratio_weight) for share in shares
    ]
    measured = _measure(rollouts, rewards, shares, factors.tolist())
    return RetrievalAdvantages(factors=factors, scales=scales, measurements=measured)


def retrieval_reward(path: Sequence[Node], settings: RetrievalAdvantageSettings) -> RetrievalReward:
    """Z_ret of one rollout (Eq. 5-7) from the entropies of the policy nodes around each retrieved node."""
    around = entropies_around_retrievals(path)
    return retrieval_reward_per_rollout(
        entropies_before=[before for before, _ in around],
        entropies_after=[after for _, after in around],
        quality=settings.quality,
        timing=settings.timing,
        sign=settings.sign,
    )


def entropies_around_retrievals(path: Sequence[Node]) -> list[tuple[float, float | None]]:
    """(H_b, H_a) of every retrieval: the policy steps before and after it; None where the rollout was cut.

    Several retrieved nodes in a row (trajectory-level retrieval) are one retrieval.
    """
    entropies: list[tuple[float, float | None]] = []
    before: float | None = None
    waiting = False
    for node in path:
        if node.origin is Origin.BUFFER and not waiting and before is not None:
            entropies.append((before, None))
            waiting = True
        elif node.trainable and node.entropies:
            entropy = step_entropy_per_step(token_entropies=node.entropies)
            if waiting:
                entropies[-1] = (entropies[-1][0], entropy)
                waiting = False
            before = entropy
    return entropies


def retrieved_share(path: Sequence[Node]) -> float:
    """``F_ret`` of a rollout. Tips are no part of its response: an update without them weighs it the same."""
    response = [node for node in path if node.origin not in (Origin.PROMPT, Origin.MEMORY)]
    return retrieved_token_share(
        num_retrieved_tokens=sum(len(node.token_ids) for node in response if node.origin is Origin.BUFFER),
        num_response_tokens=sum(len(node.token_ids) for node in response),
    )


def _measure(
    rollouts: Sequence[tuple[Leaf, list[Node]]],
    rewards: Sequence[RetrievalReward],
    shares: Sequence[float],
    factors: Sequence[float],
) -> dict[str, list[float]]:
    """Raw values behind the metrics of spec section 12; the trainer averages them over the step."""
    around = [entropies_around_retrievals(path) for _, path in rollouts]
    retrieved = [node for _, path in rollouts for node in path if node.origin is Origin.BUFFER]
    return {
        "retrieval/z_mean": [z for reward in rewards for z in reward.rewards],
        "retrieval/g_mean": [g for reward in rewards for g in reward.gains],
        "retrieval/entropy_before_mean": [before for pairs in around for before, _ in pairs],
        "retrieval/entropy_after_mean": [
            after for pairs in around for _, after in pairs if after is not None
        ],
        "retrieval/share_g_positive": [float(g > 0) for reward in rewards for g in reward.gains],
        "retrieval/token_share": [share for share in shares if share > 0],
        "retrieval/similarity_mean": [
            s for node in retrieved if not math.isnan(s := float(node.metadata["similarity"]))
        ],
        "retrieval/num_unscored": [float(reward.num_without_after) for reward in rewards],
        "retrieval/num_floored": [float(reward.num_floored) for reward in rewards],
        "retrieval/share_factor_negative": [float(factor < 0) for factor in factors],
    }
