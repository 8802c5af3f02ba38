"""Settings of several methods in one run: each method is a section, and a section that is not given is that
method switched off.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.algorithms.arpo.hook import BranchSettings, first_wave_problem, require_countable
from outrider.algorithms.base import OffPolicyObjective
from outrider.algorithms.common.loss_settings import needs_whole_rollouts
from outrider.algorithms.empo2.hook import MemorySettings
from outrider.algorithms.empo2.tips import TipSettings, no_tips
from outrider.algorithms.rapo.credit import (
    RetrievalAdvantageSettings,
    require_equal_scales,
    require_known_ratio,
)
from outrider.algorithms.rapo.hook import RetrievalSettings, require_showable

if TYPE_CHECKING:
    from outrider.train.settings import RunSettings


class RetrievalSection(RetrievalSettings, RetrievalAdvantageSettings):
    """When and what hybrid rollouts retrieve, and what it does to their credit (RAPO)."""

    details: ClassVar[frozenset[str]] = frozenset(
        {"quality", "timing", "sign", "schedule", "final_probability", "include_terminal", "noise", "form"}
        | {"level", "min_similarity", "scope"}
    )

    def idle(self) -> frozenset[str]:
        """The parts of a retrieval reward that has no weight; all, where nobody retrieves."""
        parts = frozenset() if self.advantage_weight else frozenset({"quality", "timing", "sign"})
        return parts if self.num_hybrid else frozenset(type(self).model_fields) - {"num_hybrid"}


class BranchSection(BranchSettings):
    """Where rollouts leave another one; ``entropy_advantage`` is a of AEPO's advantage (ARPO, AEPO)."""

    details: ClassVar[frozenset[str]] = frozenset(
        {"threshold", "source", "reduce", "normalizer", "pre_monitor", "branch_penalty", "penalty_scope"}
        | {"num_children", "window", "decision", "attribution"}
    )

    entropy_advantage: float = Field(0.0, ge=0)


class TipSection(TipSettings):
    """Which groups act with tips, what new states are worth, and what is remembered (EMPO²)."""

    details: ClassVar[frozenset[str]] = frozenset(
        {"intrinsic_where_tied", "novelty", "novelty_threshold"}
        | {f"memory.{name}" for name in ("writer", "state_key", "min_similarity")}
        | {f"memory.{name}" for name in ("max_shown_tokens", "max_tip_tokens")}
    )


class CombinedSettings(OffPolicyObjective):
    """Retrieved steps (``retrieval``), branches (``branch``) and tips (``tips``) in one run.

    A section that is not given switches its method off: with one of them, this is that method with the
    objective of these settings, bit for bit; with none it is GRPO. What two of them mean to each other:
    docs/algorithms/combined.md.
    """

    details: ClassVar[frozenset[str]] = frozenset({"old_context", "student_mask", "min_probability"})

    type: Literal["combined"] = "combined"
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"
    ] = "token_mean"
    retrieval: RetrievalSection | None = None
    branch: BranchSection | None = None
    tips: TipSection | None = None

    def idle(self) -> frozenset[str]:
        """How to train without tips where nobody sees any."""
        off = frozenset({"old_context", "student_mask", "min_probability"})
        return super().idle() | (frozenset() if self.shows_tips else off)

    @property
    def shows_tips(self) -> bool:
        """Whether any group acts with tips."""
        return self.tips is not None and self.tips.memory_probability > 0

    @model_validator(mode="after")
    def _maskable(self) -> "CombinedSettings":
        """What the losses refuse to do without tips is no problem where there are none."""
        if self.shows_tips:
            super()._maskable()  # type: ignore[operator]
        return self

    @model_validator(mode="after")
    def _validate(self) -> "CombinedSettings":
        retrieval, branch = self.retrieval, self.branch
        if retrieval is not None:
            if retrieval.num_hybrid > self.group_size:
                raise ValueError(
                    f"retrieval.num_hybrid {retrieval.num_hybrid} exceeds group_size {self.group_size}"
                )
            require_known_ratio(self.loss, retrieval.ratio_weight)
        if branch is not None:
            if branch.first_wave > self.group_size:
                raise ValueError(first_wave_problem("algorithm.branch.", branch.first_wave, self.group_size))
            require_equal_scales(branch.attribution, retrieval.ratio_weight if retrieval else 0.0)
            require_countable(
                branch.attribution,
                self.aggregation,
                whole_rollouts=needs_whole_rollouts(
                    self.loss, self.sampler_correction, self.sampler_rejection
                ),
                positive_nll=self.positive_nll,
            )
        return self

    def validate_run(self, run: "RunSettings") -> None:
        """Retrieved steps that the environment can take, or show."""
        if self.retrieval is not None:
            require_showable(self.retrieval, run)

    @property
    def retrieves(self) -> bool:
        """Whether any rollout may."""
        return self.retrieval is not None and self.retrieval.num_hybrid > 0

    @property
    def executes_retrieved(self) -> bool:
        """By ``retrieval.mode``."""
        return self.retrieval is not None and self.retrieval.mode == "execute"

    @property
    def depends_on_num_steps(self) -> bool:
        """Where the probability of a retrieval runs to its last value at the last step."""
        return self.retrieval is not None and self.retrieval.final_probability is not None

    @property
    def forks_by_replay(self) -> bool:
        """Where rollouts branch."""
        return self.branch is not None

    @property
    def tip_memory(self) -> MemorySettings | None:
        """The memory of the section ``tips``."""
        return self.tips.memory if self.tips is not None else None

    def warnings(self, *, num_groups: int, num_tasks: int) -> list[str]:
        """Tips that are wanted and can never be shown."""
        if self.tips is None:
            return []
        return no_tips(self.tips, "algorithm.tips", num_groups=num_groups, num_tasks=num_tasks)
