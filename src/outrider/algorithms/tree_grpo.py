"""Tree-GRPO (arXiv 2509.21240): groups of trees, whose leaves are compared with the whole group and within
their own tree.

:mod:`outrider.rollout.branching` grows the trees; deviations are in docs/algorithms/details/others.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.advantages import TreeCombination, has_spread, tree_advantages_per_leaf
from outrider.algorithms.base import GroupAdvantages, ObjectiveSettings, write_advantages
from outrider.algorithms.entropy_branching import require_countable
from outrider.algorithms.grpo import OnPolicyGroup
from outrider.algorithms.presets import with_preset
from outrider.rollout.branching import Expansion
from outrider.trace import Leaf, Node, Trace

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tree-grpo": {},
    "tree-grpo-official": {
        "sampler_correction": None,
        "loss": {"dual_clip": 3.0},
        "kl_weight": 0.001,
        "kl_estimator": "k3",
    },
}


class TreeGrpoSettings(ObjectiveSettings):
    """``num_trees`` M trees per task. A tree is one rollout and, in each of ``num_rounds`` L rounds,
    ``num_expansions`` N rollouts that fork from it.

    ``num_kept`` K leaves of a tree are trained on (None: all 1 + N L). ``combination`` of the z-scores over
    group and tree: their ``sum``, that within the tree only (``inner``), or the z-score within the tree of
    the group's z-scores (``nested``). ``group_size`` is derived: M (1 + N L) rollouts.
    """

    presets = PRESETS

    type: Literal["tree_grpo"] = "tree_grpo"
    preset: Literal["tree-grpo", "tree-grpo-official"] = "tree-grpo"
    """Defaults of all keys that you leave out: the paper, or the released script."""
    group_size: int = Field(6, ge=2)
    num_trees: int = Field(2, ge=1)
    num_expansions: int = Field(2, ge=1)
    num_rounds: int = Field(1, ge=0)
    num_kept: int | None = Field(None, ge=1)
    combination: TreeCombination = "sum"

    @model_validator(mode="before")
    @classmethod
    def _group_size(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        merged = with_preset(PRESETS, data, default="tree-grpo")
        shape = [merged.get("num_trees", 2), merged.get("num_expansions", 2), merged.get("num_rounds", 1)]
        if all(isinstance(number, int) for number in shape):
            merged.setdefault("group_size", shape[0] * (1 + shape[1] * shape[2]))
        return merged

    @model_validator(mode="after")
    def _validate(self) -> "TreeGrpoSettings":
        if self.group_size != self.num_trees * self.tree_size:
            raise ValueError(
                f"group_size is derived from the trees ({self.num_trees * self.tree_size}): remove it"
            )
        if self.num_kept is not None and self.num_kept > self.tree_size:
            raise ValueError(f"num_kept {self.num_kept} exceeds the {self.tree_size} leaves of a tree")
        if self.advantage != "group_normalized":
            raise ValueError("tree_grpo has its own advantages: remove advantage and set combination")
        if self.combination != "sum" and min(self.num_kept or self.tree_size, self.tree_size) < 2:
            raise ValueError(f"combination = {self.combination} needs at least two leaves per tree")
        require_countable(self, "soft")
        return self

    @property
    def tree_size(self) -> int:
        """Number of leaves of a tree before pruning."""
        return 1 + self.num_expansions * self.num_rounds

    @property
    def forks_by_replay(self) -> bool:
        """True: every tree forks."""
        return True


class TreeGrpo(OnPolicyGroup):
    """Two z-scores per leaf; a token shared by several leaves is trained with the sum of their advantages."""

    Settings = TreeGrpoSettings
    settings: TreeGrpoSettings

    def __init__(self, settings: TreeGrpoSettings) -> None:
        self.expansion = Expansion(
            num_trees=settings.num_trees,
            num_expansions=settings.num_expansions,
            num_rounds=settings.num_rounds,
            num_trained_leaves=settings.num_kept or settings.tree_size,
        )
        super().__init__(settings, hooks=(self.expansion,))

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Assign the advantage of a leaf to every token of its path, counted once per leaf. Pruned leaves are
        excluded from all statistics.
        """
        rollouts = list(trace.rollouts())
        trees = [leaf.rollout // self.expansion.tree_size for leaf, _ in rollouts]
        advantages = tree_advantages_per_leaf(
            returns=[None if leaf.rollout in trace.pruned else leaf.episode_return for leaf, _ in rollouts],
            trees=trees,
            combination=self.settings.combination,
        )
        write_advantages(trace, advantages, attribution="soft")
        scored = list(trace.scored_rollouts())
        retained = [rollout for rollout in scored if rollout[0].rollout not in trace.pruned]
        return GroupAdvantages(
            advantages=advantages, measurements=_measure(retained, scored, self.expansion.tree_size)
        )


def _measure(
    rollouts: Sequence[tuple[Leaf, list[Node]]], scored: Sequence[tuple[Leaf, list[Node]]], tree_size: int
) -> dict[str, list[float]]:
    """Measure how much the selected ``rollouts`` share with the ``scored`` rollouts before them in their
    tree; the trainer averages over the step.
    """
    depths: list[float] = []
    for leaf, path in rollouts:
        tree = leaf.rollout // tree_size
        others = [
            other
            for other_leaf, other in scored
            if other_leaf.rollout // tree_size == tree and other_leaf.rollout < leaf.rollout
        ]
        seen = {node.node_id for other in others for node in other}
        if leaf.rollout % tree_size:
            depths.append(float(sum(node.trainable and node.node_id in seen for node in path)))
    written = {node.node_id: len(node.token_ids) for _, path in rollouts for node in path if node.trainable}
    on_paths = sum(len(node.token_ids) for _, path in rollouts for node in path if node.trainable)
    inner: dict[int, list[float]] = {}
    for leaf, _ in rollouts:
        if leaf.episode_return is not None:
            inner.setdefault(leaf.rollout // tree_size, []).append(leaf.episode_return)
    return {
        "tree/turns_shared": depths,
        "tree/share_at_root": [float(depth == 0) for depth in depths],
        "tree/tokens_shared": [1.0 - sum(written.values()) / on_paths] if on_paths else [],
        "tree/fraction_without_spread": [
            float(not has_spread(np.array(values))) for values in inner.values()
        ],
    }
