"""RAPO (arXiv 2603.03078): GRPO whose hybrid rollouts reason on over retrieved steps of other agents.

Equation -> function: Eq. 2, 5-10 in :mod:`outrider.algorithms.retrieval`; Eq. 8's ratio in
:mod:`outrider.algorithms.sampler_correction`; Eq. 3-4 and Algorithm 1 in
:mod:`outrider.algorithms.retrieval`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from outrider.algorithms.base import (
    Algorithm,
    AlgorithmContext,
    Arrays,
    GroupAdvantages,
    ObjectiveSettings,
    OffPolicyObjective,
    assign_advantages,
    outcome_advantages,
)
from outrider.algorithms.entropy_branching import (
    BranchHook,
    BranchSettings,
    entropy_advantage_factors,
    first_wave_problem,
    require_countable,
)
from outrider.algorithms.grpo import OnPolicyGroup, with_preset
from outrider.algorithms.loss_settings import ClipLoss, LossSettings, needs_whole_rollouts
from outrider.algorithms.retrieval import (
    RetrievalAdvantageSettings,
    RetrievalHook,
    RetrievalReward,
    RetrievalSettings,
    combined_advantages_per_rollout,
    require_equal_scales,
    require_known_ratio,
    require_showable,
    retrieval_advantages,
    retrieval_reward,
)
from outrider.algorithms.tips import PLAIN, MemorySettings, Tips, TipSettings, no_tips, tip_metrics
from outrider.memory.embedders import Embedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.tips import MemoryChange
from outrider.rollout.base import HYBRID, ON_POLICY, join_modes
from outrider.rollout.hooks import Hook
from outrider.trace import Node, Trace

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings


class RapoSettings(RetrievalAdvantageSettings, ObjectiveSettings):
    """RAPO's own settings; every ablation of the paper is one of them (spec section 10).

    :class:`~outrider.algorithms.retrieval.RetrievalAdvantageSettings` has the parts of the credit; ``branch``
    lets rollouts branch as well. Defaults are the paper's where it gives one.
    """

    type: Literal["rapo"] = "rapo"
    loss: LossSettings = ClipLoss(clip_low=0.28, clip_high=0.28)
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"
    ] = "sequence_mean_token_mean"
    retrieval: RetrievalSettings = RetrievalSettings()
    branch: BranchSettings | None = None

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
        """:func:`outrider.algorithms.retrieval.retrieval_reward` with these settings."""
        return retrieval_reward(path, self.settings)


# ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545): rollouts branch where uncertainty changes after a tool
# result.
#
# The rule is in :mod:`outrider.algorithms.entropy_branching`; deviations are in docs/algorithms/arpo.md.


_RELEASED = {"source": "previous_segment", "reduce": "sum", "loss": {"dual_clip": 3.0}}
_AEPO = {"loss": {"keep_clipped_gradient": True}, "entropy_advantage": 0.2, "branch_penalty": 0.05}
ARPO_PRESETS: Mapping[str, Mapping[str, Any]] = {
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
        return with_preset(ARPO_PRESETS, data, default="arpo")

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


# EMPO² (arXiv 2602.23008): a memory of tips to explore with, and updates that make the tips unnecessary.
#
# A quarter of the groups act with tips; two thirds of those are trained as if there had been none. Modes are
# drawn in :mod:`outrider.algorithms.tips`, tips enter the loop in :mod:`outrider.algorithms.tips`,
# and the off-policy update is in :mod:`outrider.algorithms.losses`.


EMPO2_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "empo2": {},
    "empo2-alg1": {"old_context": "student"},
    "empo2-centered": {"advantage": "group_centered", "intrinsic_where_tied": False},
    "empo2-released": {
        "student_mask": "turn",
        "intrinsic_coefficient": 0.0,
        "memory": {
            "state_key": "chat",
            "max_tip_tokens": 32,
            "max_shown_tokens": 1024,
            "max_prompt_tokens": 4096,
        },
    },
}


class Empo2Settings(TipSettings, OffPolicyObjective):
    """:class:`~outrider.algorithms.tips.TipSettings` and a ``preset``, which fills what is not
    given.
    """

    type: Literal["empo2"] = "empo2"
    preset: Literal["empo2", "empo2-alg1", "empo2-centered", "empo2-released"] = "empo2"
    loss: LossSettings = ClipLoss(clip_high=0.3, dual_clip=10.0)

    @property
    def tip_memory(self) -> MemorySettings:
        """The section ``memory``."""
        return self.memory

    def warnings(self, *, num_groups: int, num_tasks: int) -> list[str]:
        """Tips that are wanted and can never be shown."""
        return no_tips(self, "algorithm", num_groups=num_groups, num_tasks=num_tasks)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return with_preset(EMPO2_PRESETS, data, default="empo2")


class Empo2(Algorithm):
    """GRPO's credit on returns with an intrinsic part; tips by mode. With p = 0 and c = 0 it is GRPO, bit for
    bit.
    """

    Settings = Empo2Settings

    def __init__(
        self,
        settings: Empo2Settings,
        *,
        embedder: Embedder,
        num_tokens: Callable[[str], int],
        groups_per_step: int,
        seed: int,
    ) -> None:
        self.settings = settings
        self.objective: ObjectiveSettings = settings
        self.modes: tuple[str, ...] = (PLAIN,) * settings.group_size
        self.part = Tips(
            settings,
            advantage=settings.advantage,
            embedder=embedder,
            num_tokens=num_tokens,
            groups_per_step=groups_per_step,
            seed=seed,
        )
        self.tips, self.novelty, self.hooks = self.part.hook, self.part.novelty, self.part.hooks

    @classmethod
    def build(cls, settings: Empo2Settings, context: AlgorithmContext) -> "Empo2":
        """For a run."""
        return cls(
            settings,
            embedder=context.load_embedder(settings.memory.embedder),
            num_tokens=context.count_tokens,
            groups_per_step=context.groups_per_step,
            seed=context.seed,
        )

    @property
    def label(self) -> str:
        """Without tips and novelty it is GRPO, bit for bit."""
        return self.objective.label if self.settings.acts else "grpo"

    def measure(self, traces: Sequence[Trace]) -> dict[str, float]:
        """Metrics of the step's tips."""
        return tip_metrics(traces, self.tips)

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """One mode for all rollouts of a group."""
        return (self.part.mode(step, group),) * self.settings.group_size

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Group-normalised returns, with what new states add, on every policy token."""
        measured = self.part.reward_novelty(trace)
        advantages = outcome_advantages(trace, self.objective.advantage)
        assign_advantages(trace, advantages)
        trace.without_memory = self.part.leaves_out(trace)
        return GroupAdvantages(advantages=advantages, measurements=self.part.measurements(trace, measured))

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Memory and novelty, as plain data and arrays, for a checkpoint."""
        return self.part.state()

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Puts back what :meth:`state` saved."""
        self.part.restore(state, arrays)

    def memory_changes(self) -> list[MemoryChange]:
        """Of the tips."""
        return self.tips.memory.pop_changes()


# Settings of several methods in one run: each method is a section, and a section that is not given is that
# method switched off.


class RetrievalSection(RetrievalSettings, RetrievalAdvantageSettings):
    """When and what hybrid rollouts retrieve, and what it does to their credit (RAPO)."""


class BranchSection(BranchSettings):
    """Where rollouts leave another one; ``entropy_advantage`` is a of AEPO's advantage (ARPO, AEPO)."""

    entropy_advantage: float = Field(0.0, ge=0)


class TipSection(TipSettings):
    """Which groups act with tips, what new states are worth, and what is remembered (EMPO²)."""


class CombinedSettings(OffPolicyObjective):
    """Retrieved steps (``retrieval``), branches (``branch``) and tips (``tips``) in one run.

    A section that is not given switches its method off: with one of them, this is that method with the
    objective of these settings, bit for bit; with none it is GRPO. What two of them mean to each other:
    docs/algorithms/combined.md.
    """

    type: Literal["combined"] = "combined"
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"
    ] = "token_mean"
    retrieval: RetrievalSection | None = None
    branch: BranchSection | None = None
    tips: TipSection | None = None

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


# Retrieval (RAPO), branching (ARPO, AEPO) and tips (EMPO²) in one rollout loop and one update.
#
# Nothing here has a formula of its own: hooks, factors and memories are those of the single methods, in an
# order that docs/algorithms/combined.md gives reasons for.


class Combined(Algorithm):
    """Tips act first, then retrieval, then the decision to branch; credit goes from returns and novelty over
    retrievals to shared tokens and entropies.
    """

    Settings = CombinedSettings

    def __init__(
        self,
        settings: CombinedSettings,
        *,
        buffer: StepTraceBuffer | None = None,
        num_training_steps: int = 1,
        vocabulary_size: int = 2,
        every_action: bool = False,
        embedder: Embedder | None = None,
        num_tokens: Callable[[str], int] = len,
        groups_per_step: int = 1,
        seed: int = 0,
    ) -> None:
        self.settings = settings
        self.objective: ObjectiveSettings = settings
        self.tips: Tips | None = None
        if settings.tips is not None:
            if embedder is None:
                raise ValueError("tips need an embedder")
            self.tips = Tips(
                settings.tips,
                advantage=settings.advantage,
                embedder=embedder,
                num_tokens=num_tokens,
                groups_per_step=groups_per_step,
                seed=seed,
            )
        self._retrieval: tuple[RetrievalHook, ...] = ()
        if settings.retrieval is not None and settings.retrieves and buffer is not None:
            hook = RetrievalHook(settings.retrieval, buffer=buffer, num_training_steps=num_training_steps)
            self._retrieval = (hook,)
        branching: tuple[Hook, ...] = ()
        if settings.branch is not None:
            branching = (
                BranchHook(
                    settings.branch,
                    group_size=settings.group_size,
                    vocabulary_size=vocabulary_size,
                    every_action=every_action,
                ),
            )
        # A tip ends the user's message, and a retrieved step begins the assistant's: this is their order in
        # the context. Whoever leaves a rollout leaves behind both.
        tip_hooks = self.tips.hooks if self.tips is not None else ()
        self.hooks: tuple[Hook, ...] = (*tip_hooks, *self._retrieval, *branching)
        self.modes = self._modes(None)

    @classmethod
    def build(cls, settings: CombinedSettings, context: AlgorithmContext) -> "Combined":
        """For a run."""
        return cls(
            settings,
            buffer=context.buffer,
            num_training_steps=context.num_training_steps,
            vocabulary_size=context.vocabulary_size,
            every_action=context.is_stateful,
            embedder=context.load_embedder(settings.tips.memory.embedder) if settings.tips else None,
            num_tokens=context.count_tokens,
            groups_per_step=context.groups_per_step,
            seed=context.seed,
        )

    @property
    def label(self) -> str:
        """Without a method that acts it is GRPO, bit for bit."""
        pays = self.settings.tips is not None and self.settings.tips.acts
        return self.objective.label if self.hooks or pays else "grpo"

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """One mode of tips for a group, and of its rollouts the last ``num_hybrid`` may retrieve."""
        return self._modes(None if self.tips is None else self.tips.mode(step, group))

    def _modes(self, tip_mode: str | None) -> tuple[str, ...]:
        size, retrieval = self.settings.group_size, self.settings.retrieval
        if retrieval is None:
            return (tip_mode or ON_POLICY,) * size
        own = (ON_POLICY,) * (size - retrieval.num_hybrid) + (HYBRID,) * retrieval.num_hybrid
        return own if tip_mode is None else tuple(join_modes(tip_mode, mode) for mode in own)

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Advantages of returns and novelty, times RAPO's factor, to shared tokens by ``attribution``, times
        AEPO's factor.
        """
        measurements: dict[str, list[float]] = {}
        if self.tips is not None:
            measurements |= self.tips.measurements(trace, self.tips.reward_novelty(trace))
            trace.without_memory = self.tips.leaves_out(trace)
        advantages, scales = outcome_advantages(trace, self.objective.advantage), None
        if self.settings.retrieval is not None:
            retrieval = retrieval_advantages(trace, self.settings.retrieval)
            advantages = combined_advantages_per_rollout(outcome=advantages, factors=retrieval.factors)
            scales = retrieval.scales
            measurements |= retrieval.measurements
        branch = self.settings.branch
        assign_advantages(trace, advantages, scales, attribution=branch.attribution if branch else None)
        if branch is not None and branch.entropy_advantage:
            scale_by_entropy(trace, weight=branch.entropy_advantage)
        return GroupAdvantages(advantages=advantages, measurements=measurements)

    def measure(self, traces: Sequence[Trace]) -> dict[str, float]:
        """Metrics of the step's tips."""
        return {} if self.tips is None else tip_metrics(traces, self.tips.hook)

    @property
    def remembers(self) -> bool:
        """Where there are tips, or novelty."""
        return self.tips is not None

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Memory and novelty, as plain data and arrays, for a checkpoint."""
        return ({}, {}) if self.tips is None else self.tips.state()

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Puts back what :meth:`state` saved."""
        if self.tips is not None:
            self.tips.restore(state, arrays)

    def memory_changes(self) -> list[MemoryChange]:
        """Of the tips, where there are any."""
        return [] if self.tips is None else self.tips.hook.memory.pop_changes()

    def counts(self) -> list[dict[str, int]]:
        """Counts of the retrieval hook."""
        return [dict(hook.counts) for hook in self._retrieval]

    def restore_counts(self, saved: Sequence[Mapping[str, int]]) -> None:
        """Back to what :meth:`counts` gave."""
        for hook, counts in zip(self._retrieval, saved, strict=True):
            hook.counts = Counter(counts)
