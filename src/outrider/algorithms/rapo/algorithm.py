"""RAPO (arXiv 2603.03078): GRPO whose hybrid rollouts reason on over retrieved steps of other agents.

Equation -> function: Eq. 2, 5-10 in :mod:`outrider.algorithms.rapo.formulas`; Eq. 8's ratio in
:mod:`outrider.algorithms.common.ratios`; Eq. 3-4 and Algorithm 1 in :mod:`outrider.algorithms.rapo.hook`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from outrider.algorithms.algorithm import Algorithm
from outrider.algorithms.arpo.hook import BranchHook, BranchSettings, require_countable
from outrider.algorithms.base import GroupAdvantages, ObjectiveSettings, assign_advantages, outcome_advantages
from outrider.algorithms.common.loss_settings import ClipLoss, LossSettings, needs_whole_rollouts
from outrider.algorithms.context import AlgorithmContext
from outrider.algorithms.rapo.credit import (
    RetrievalAdvantageSettings,
    require_equal_scales,
    require_known_ratio,
    retrieval_advantages,
    retrieval_reward,
)
from outrider.algorithms.rapo.formulas import RetrievalReward, combined_advantages_per_rollout
from outrider.algorithms.rapo.hook import RetrievalHook, RetrievalSettings, require_showable
from outrider.memory.steps.buffer import StepTraceBuffer
from outrider.rollout.hooks import Hook
from outrider.trace import Node, Trace

if TYPE_CHECKING:
    from outrider.train.settings import RunSettings


class RapoSettings(RetrievalAdvantageSettings, ObjectiveSettings):
    """RAPO's own settings; every ablation of the paper is one of them (spec section 10).

    :class:`~outrider.algorithms.rapo.credit.RetrievalAdvantageSettings` has the parts of the credit; ``branch``
    lets rollouts branch as well. Defaults are the paper's where it gives one.
    """

    details: ClassVar[frozenset[str]] = frozenset({"quality", "timing", "sign"})

    type: Literal["rapo"] = "rapo"
    loss: LossSettings = ClipLoss(clip_low=0.28, clip_high=0.28)
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"
    ] = "sequence_mean_token_mean"
    retrieval: RetrievalSettings = RetrievalSettings()
    branch: BranchSettings | None = None

    def idle(self) -> frozenset[str]:
        """How to retrieve where nobody does, and the parts of a retrieval reward that has no weight."""
        parts = set() if self.advantage_weight and self.num_hybrid else {"quality", "timing", "sign"}
        rest = set() if self.num_hybrid else {"retrieval", "advantage_weight", "ratio_weight"}
        return super().idle() | parts | rest

    @property
    def depends_on_num_steps(self) -> bool:
        """Where the probability of a retrieval runs to its last value at the last step."""
        return self.retrieval.final_probability is not None

    @property
    def executes_retrieved(self) -> bool:
        """By ``retrieval.mode``."""
        return self.retrieval.mode == "execute"

    @model_validator(mode="after")
    def _validate(self) -> "RapoSettings":
        if self.num_hybrid > self.group_size:
            raise ValueError(f"num_hybrid {self.num_hybrid} exceeds group_size {self.group_size}")
        require_known_ratio(self.loss, self.ratio_weight)
        if self.branch is not None:
            self._can_branch(self.branch)
        return self

    def validate_run(self, run: "RunSettings") -> None:
        """Retrieved steps that the environment can take, or show."""
        require_showable(self.retrieval, run)

    @property
    def retrieves(self) -> bool:
        """Whether any rollout may."""
        return self.num_hybrid > 0

    @property
    def forks_by_replay(self) -> bool:
        """Where rollouts branch as well."""
        return self.branch is not None

    def _can_branch(self, branch: BranchSettings) -> None:
        if branch.first_wave >= self.group_size and not branch.pre_monitor:
            raise ValueError(
                f"branch.first_wave {branch.first_wave} leaves no place for forks "
                f"in group_size {self.group_size}"
            )
        require_equal_scales(branch.attribution, self.ratio_weight)
        require_countable(
            branch.attribution,
            self.aggregation,
            whole_rollouts=needs_whole_rollouts(self.loss, self.sampler_correction, self.sampler_rejection),
            positive_nll=self.positive_nll,
        )


class Rapo(Algorithm):
    """Pure on-policy rollouts first, hybrid ones after them; credit aware of the retrievals."""

    Settings = RapoSettings

    def __init__(
        self,
        settings: RapoSettings,
        *,
        buffer: StepTraceBuffer | None,
        num_training_steps: int,
        vocabulary_size: int = 2,
        every_action: bool = False,
    ) -> None:
        self.settings = settings
        self.objective: ObjectiveSettings = settings
        num_on_policy = settings.group_size - settings.num_hybrid
        self.modes = ("on_policy",) * num_on_policy + ("hybrid",) * settings.num_hybrid
        branching = settings.branch and BranchHook(
            settings.branch,
            group_size=settings.group_size,
            vocabulary_size=vocabulary_size,
            every_action=every_action,
        )
        retrieves = settings.num_hybrid > 0 and buffer is not None
        self._retrieval: tuple[RetrievalHook, ...] = (
            (RetrievalHook(settings.retrieval, buffer=buffer, num_training_steps=num_training_steps),)
            if retrieves and buffer
            else ()
        )
        self.hooks: tuple[Hook, ...] = (*self._retrieval, *((branching,) if branching else ()))

    @classmethod
    def build(cls, settings: RapoSettings, context: AlgorithmContext) -> "Rapo":
        """For a run."""
        return cls(
            settings,
            buffer=context.buffer,
            num_training_steps=context.num_training_steps,
            vocabulary_size=context.vocabulary_size,
            every_action=context.is_stateful,
        )

    @property
    def label(self) -> str:
        """Without hybrid rollouts and branches it is GRPO, bit for bit."""
        return self.objective.label if self.hooks else "grpo"

    def counts(self) -> list[dict[str, int]]:
        """Counts of the retrieval hook."""
        return [dict(hook.counts) for hook in self._retrieval]

    def restore_counts(self, saved: Sequence[Mapping[str, int]]) -> None:
        """Back to what :meth:`counts` gave."""
        for hook, counts in zip(self._retrieval, saved, strict=True):
            hook.counts = Counter(counts)

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """``A = (1 + a A_ret) A_acc`` (Eq. 10) and the ratio scale ``1 + m F_ret`` (Eq. 8)."""
        outcome = outcome_advantages(trace, self.objective.advantage)
        retrieval = retrieval_advantages(trace, self.settings)
        advantages = combined_advantages_per_rollout(outcome=outcome, factors=retrieval.factors)
        assign_advantages(
            trace,
            advantages,
            retrieval.scales,
            attribution=self.settings.branch.attribution if self.settings.branch else None,
        )
        return GroupAdvantages(advantages=advantages, measurements=retrieval.measurements)

    def retrieval_reward(self, path: Sequence[Node]) -> RetrievalReward:
        """:func:`outrider.algorithms.rapo.credit.retrieval_reward` with these settings."""
        return retrieval_reward(path, self.settings)
