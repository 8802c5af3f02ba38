"""REINFORCE++ (arXiv 2501.03262) and REINFORCE++-baseline: credit that is whitened over all policy tokens of
a step.

The formulas are in :mod:`outrider.algorithms.common.batch_advantages`, deviations in
docs/algorithms/objectives.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.base import AdvantageKind, GroupAdvantages
from outrider.algorithms.common.advantages import Float64Array, NoSignalReason, RolloutAdvantages
from outrider.algorithms.common.batch_advantages import (
    Variance,
    reinforce_plus_plus_advantages_per_token,
    reinforce_plus_plus_baseline_advantages_per_token,
)
from outrider.algorithms.common.group_settings import GroupSettings, measured_kl, with_preset
from outrider.algorithms.common.on_policy import OnPolicyBatch
from outrider.algorithms.common.presets import REINFORCE_PLUS_PLUS_PRESETS, ReinforcePlusPlusPreset
from outrider.trace import Leaf, Node, Trace


class ReinforcePlusPlusSettings(GroupSettings):
    """``group_baseline`` takes the group's mean from the return before whitening (REINFORCE++-baseline);
    without it a group of one will do, and ``gamma`` discounts over policy tokens. ``variance`` is that of the
    whitening. A ``preset`` fills what is not given.
    """

    type: Literal["reinforce++"] = "reinforce++"
    preset: ReinforcePlusPlusPreset = "reinforce++"
    group_size: int = Field(8, ge=1)
    advantage: AdvantageKind = "group_centered"
    group_baseline: bool = False
    gamma: float = Field(1.0, ge=0, le=1)
    variance: Variance = "sample"

    @property
    def label(self) -> str:
        """The preset's name."""
        return self.preset

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return with_preset(REINFORCE_PLUS_PLUS_PRESETS, data, default="reinforce++")

    @model_validator(mode="after")
    def _validate(self) -> "ReinforcePlusPlusSettings":
        if self.advantage != "group_centered":
            raise ValueError(
                "REINFORCE++ whitens over the batch: leave advantage out "
                "(group_baseline = true centres in the group)"
            )
        if self.group_baseline and self.group_size < 2:
            raise ValueError("group_baseline = true needs group_size >= 2: a group of one has no baseline")
        if self.group_baseline and (self.gamma != 1.0 or self.reward_kl_weight > 0):
            raise ValueError(
                "group_baseline = true has one value a rollout: no gamma, "
                "and a KL in the loss (kl_weight) instead"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScoredRollout:
    """A rollout with a return: its group's number in the batch and its policy nodes."""

    group: int
    leaf: Leaf
    nodes: Sequence[Node]

    @property
    def shaped_return(self) -> float:
        assert self.leaf.episode_return is not None
        return self.leaf.episode_return + self.leaf.intrinsic


class ReinforcePlusPlus(OnPolicyBatch[ReinforcePlusPlusSettings]):
    """On-policy rollouts; one advantage per token, against the whole batch."""

    Settings = ReinforcePlusPlusSettings

    def advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """Whitened advantages on every policy token; ``advantages`` holds their mean over each rollout.

        Raises ValueError for a node that several rollouts share: it would need the credit of each.
        """
        scored = [
            _ScoredRollout(group=number, leaf=leaf, nodes=[node for node in path if node.trainable])
            for number, trace in enumerate(traces)
            for leaf, path in trace.scored_rollouts()
        ]
        _require_unassigned([node for entry in scored for node in entry.nodes])
        measured = self._shaped(traces, sum_kl=False)
        owners = [
            rollout for rollout, entry in enumerate(scored) for node in entry.nodes for _ in node.token_ids
        ]
        values = iter(self._values(scored, owners).tolist())
        for entry in scored:
            _assign(entry, values)
        return [
            GroupAdvantages(advantages=_summary(trace), measurements=own)
            for trace, own in zip(traces, measured, strict=True)
        ]

    def _values(self, scored: Sequence[_ScoredRollout], owners: Sequence[int]) -> Float64Array:
        chosen = self.settings
        returns = [entry.shaped_return for entry in scored]
        if chosen.group_baseline:
            groups = [entry.group for entry in scored]
            return reinforce_plus_plus_baseline_advantages_per_token(
                returns=returns, groups=groups, rollout_index=owners, variance=chosen.variance
            )
        kl = None
        if chosen.reward_kl_weight > 0:
            kl = np.array(
                [value for entry in scored for node in entry.nodes for value in measured_kl(node)],
                dtype=np.float64,
            )
        return reinforce_plus_plus_advantages_per_token(
            returns=returns,
            rollout_index=owners,
            gamma=chosen.gamma,
            kl_per_token=kl,
            kl_weight=chosen.reward_kl_weight,
            variance=chosen.variance,
        )


def _require_unassigned(nodes: Sequence[Node]) -> None:
    seen: set[int] = set()
    for node in nodes:
        if node.credit is not None or node.shares is not None or id(node) in seen:
            raise ValueError(f"node {node.node_id} already has credit")
        seen.add(id(node))


def _assign(entry: _ScoredRollout, values: Iterator[float]) -> None:
    token_advantages: list[float] = []
    for node in entry.nodes:
        node.credit = tuple(next(values) for _ in node.token_ids)
        token_advantages.extend(node.credit)
    entry.leaf.advantage = fmean(token_advantages) if token_advantages else 0.0


def _summary(trace: Trace) -> RolloutAdvantages:
    """A group has a signal as soon as one of its tokens has."""
    rollouts = list(trace.rollouts())
    assigned = np.array([leaf.episode_return is not None for leaf, _ in rollouts])
    has_signal = any(value != 0.0 for _, path in rollouts for node in path for value in node.credit or ())
    reason: NoSignalReason | None = "no_spread" if assigned.any() else "unscorable"
    return RolloutAdvantages(
        values=np.array([leaf.advantage or 0.0 for leaf, _ in rollouts]),
        assigned=assigned,
        has_signal=has_signal,
        reason=None if has_signal else reason,
    )
