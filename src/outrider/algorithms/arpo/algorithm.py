"""ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545): rollouts branch where uncertainty changes after a tool
result.

The rule is in :mod:`outrider.algorithms.arpo.hook`; deviations are in docs/algorithms/arpo.md.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from outrider.algorithms.arpo.formulas import entropy_advantage_factors
from outrider.algorithms.arpo.hook import BranchHook, BranchSettings, first_wave_problem, require_countable
from outrider.algorithms.base import GroupAdvantages, ObjectiveSettings, assign_advantages, outcome_advantages
from outrider.algorithms.common.group_settings import with_preset
from outrider.algorithms.common.loss_settings import needs_whole_rollouts
from outrider.algorithms.common.on_policy import OnPolicyGroup
from outrider.algorithms.context import AlgorithmContext
from outrider.trace import Trace

_RELEASED = {"source": "previous_segment", "reduce": "sum", "loss": {"dual_clip": 3.0}}
_AEPO = {"loss": {"keep_clipped_gradient": True}, "entropy_advantage": 0.2, "branch_penalty": 0.05}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "arpo": {},
    "arpo-released": _RELEASED,
    "aepo": _AEPO | {"pre_monitor": True},
    "aepo-released": _AEPO
    | _RELEASED
    | {
        "loss": {"keep_clipped_gradient": True, "dual_clip": 3.0},
        "decision": "aepo_released",
        "penalty_scope": "prompt",
    },
}


class ArpoSettings(BranchSettings, ObjectiveSettings):
    """``group_size`` M leaves a prompt; ``entropy_advantage`` is a of AEPO's advantage. A ``preset`` fills
    what is not given.
    """

    type: Literal["arpo"] = "arpo"
    preset: Literal["arpo", "arpo-released", "aepo", "aepo-released"] = "arpo"
    group_size: int = Field(16, ge=2)
    entropy_advantage: float = Field(0.0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return with_preset(PRESETS, data, default="arpo")

    @model_validator(mode="after")
    def _validate(self) -> "ArpoSettings":
        if self.first_wave > self.group_size:
            raise ValueError(first_wave_problem("algorithm.", self.first_wave, self.group_size))
        require_countable(
            self.attribution,
            self.aggregation,
            whole_rollouts=needs_whole_rollouts(self.loss, self.sampler_correction, self.sampler_rejection),
            positive_nll=self.positive_nll,
        )
        return self

    @property
    def forks_by_replay(self) -> bool:
        """Always."""
        return True


class Arpo(OnPolicyGroup):
    """Group-normalised outcome advantage; shared tokens by ``attribution``."""

    Settings = ArpoSettings

    def __init__(self, settings: ArpoSettings, *, vocabulary_size: int, every_action: bool = False) -> None:
        self.settings = settings
        self.hook = BranchHook(
            settings,
            group_size=settings.group_size,
            vocabulary_size=vocabulary_size,
            every_action=every_action,
        )
        super().__init__(settings, num_rollouts=settings.group_size, hooks=(self.hook,))

    @classmethod
    def build(cls, settings: ArpoSettings, context: AlgorithmContext) -> "Arpo":
        """For a run."""
        return cls(settings, vocabulary_size=context.vocabulary_size, every_action=context.is_stateful)

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Advantages, with AEPO's factor per token where it is on (statistics over the group's policy
        tokens).
        """
        advantages = outcome_advantages(trace, self.objective.advantage)
        assign_advantages(trace, advantages, attribution=self.settings.attribution)
        if self.settings.entropy_advantage:
            scale_by_entropy(trace, weight=self.settings.entropy_advantage)
        return GroupAdvantages(advantages=advantages, measurements={})


def scale_by_entropy(trace: Trace, *, weight: float) -> None:
    """Multiply every credited token's advantage by ``1 + a z`` of its entropy at sampling time."""
    nodes = [node for node in trace.nodes if node.credit is not None or node.shares is not None]
    factors = iter(
        entropy_advantage_factors([entropy for node in nodes for entropy in node.entropies], weight=weight)
    )
    for node in nodes:
        own = [next(factors) for _ in node.token_ids]
        if node.credit is not None:
            node.credit = tuple(value * factor for value, factor in zip(node.credit, own, strict=True))
        if node.shares is not None:
            node.shares = {rollout: share.scaled(own) for rollout, share in node.shares.items()}
