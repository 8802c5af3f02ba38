"""Rejection sampling (RAFT, arXiv 2304.06767): imitate the policy's own rollouts that were good enough, and
nothing else.

A policy gradient with advantages in {0, 1}: no baseline and no negative signal. Rejected rollouts are in no
denominator, so that the loss is the mean negative log-likelihood over the tokens of the kept ones, as
fine-tuning on them has it.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.base import AdvantageKind, GroupAdvantages, ObjectiveSettings
from outrider.algorithms.common.advantages import RolloutAdvantages
from outrider.algorithms.common.loss_settings import LossSettings, ReinforceLoss, SamplerCorrection
from outrider.algorithms.common.on_policy import OnPolicyGroup
from outrider.trace import Leaf, Node, Trace


class RejectionSettings(ObjectiveSettings):
    """Rollouts whose return, the environment's own, is at least ``threshold`` may be kept.

    ``keep``: of a task's, ``all`` (at most ``max_kept``, the first ones), the ``best``, or the ``first``.
    ``deduplicate`` counts rollouts in which the policy wrote the same tokens once. A ``loss.type`` other
    than ``reinforce`` clips what several optimiser steps do to a kept rollout.
    """

    type: Literal["rejection"] = "rejection"
    advantage: AdvantageKind = "group_centered"
    loss: LossSettings = ReinforceLoss()
    sampler_correction: SamplerCorrection | None = None
    threshold: float = 1.0
    keep: Literal["all", "best", "first"] = "all"
    max_kept: int | None = Field(None, ge=1)
    deduplicate: bool = True

    @model_validator(mode="after")
    def _validate(self) -> "RejectionSettings":
        if self.advantage != "group_centered":
            raise ValueError("rejection sampling has advantages of 0 and 1: leave advantage out")
        if self.aggregation != "token_mean":
            raise ValueError(
                "rejection sampling averages over the tokens of the kept rollouts: aggregation = token_mean"
            )
        if self.positive_nll > 0:
            raise ValueError(
                "rejection sampling is a negative log-likelihood of its own: leave positive_nll out"
            )
        if self.max_kept is not None and self.keep != "all":
            raise ValueError(f"keep = {self.keep} keeps one rollout a task: leave max_kept out")
        return self


class Rejection(OnPolicyGroup):
    """On-policy rollouts; credit 1 for those that are kept."""

    Settings = RejectionSettings

    def __init__(self, settings: RejectionSettings) -> None:
        super().__init__(settings, num_rollouts=settings.group_size)
        self.settings = settings

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """1 on every policy token of a kept rollout; the advantage of the others is 0, and their tokens are
        not trained on.

        Raises ValueError for a node that several kept rollouts share.
        """
        rollouts = list(trace.rollouts())
        scored = [leaf for leaf, _ in rollouts if leaf.episode_return is not None]
        accepted = [(leaf, path) for leaf, path in rollouts if self._is_accepted(leaf)]
        selected = {leaf.rollout for leaf, _ in self._select(accepted)}
        for leaf, path in rollouts:
            leaf.advantage = None if leaf.episode_return is None else float(leaf.rollout in selected)
            for node in path if leaf.rollout in selected else ():
                if node.trainable and node.credit is not None:
                    raise ValueError(f"node {node.node_id} already has credit")
                if node.trainable:
                    node.credit = (1.0,) * len(node.token_ids)
        advantages = RolloutAdvantages(
            values=np.array([leaf.advantage or 0.0 for leaf, _ in rollouts]),
            assigned=np.array([leaf.episode_return is not None for leaf, _ in rollouts]),
            has_signal=bool(selected),
            reason=None if selected else "rejected" if scored else "unscorable",
        )
        measured = {
            "rejection/passed_fraction": [float(self._is_accepted(leaf)) for leaf in scored],
            "rejection/kept_fraction": [float(leaf.rollout in selected) for leaf in scored],
            "rejection/task_fraction": [float(bool(selected))] if scored else [],
        }
        return GroupAdvantages(advantages=advantages, measurements=measured)

    def _is_accepted(self, leaf: Leaf) -> bool:
        return leaf.episode_return is not None and leaf.episode_return >= self.settings.threshold

    def _select(self, accepted: Sequence[tuple[Leaf, list[Node]]]) -> Sequence[tuple[Leaf, list[Node]]]:
        chosen = self.settings
        if chosen.keep == "best":  # before equal texts are put together: of those the better one counts
            # stable: the first of equal ones
            return sorted(accepted, key=lambda rollout: -(rollout[0].episode_return or 0.0))[:1]
        if chosen.deduplicate:
            first: dict[tuple[tuple[int, ...], ...], tuple[Leaf, list[Node]]] = {}
            for leaf, path in accepted:
                first.setdefault(tuple(node.token_ids for node in path if node.trainable), (leaf, path))
            accepted = list(first.values())
        return accepted[: 1 if chosen.keep == "first" else chosen.max_kept]
