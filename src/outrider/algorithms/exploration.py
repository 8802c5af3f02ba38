"""RAPO, ARPO, AEPO, EMPO² and any combination of them, as one algorithm with up to three parts.

- Retrieval (RAPO, arXiv 2603.03078): hybrid rollouts continue from retrieved steps of other agents.
  :mod:`outrider.algorithms.retrieval`.
- Branching (ARPO, arXiv 2507.19849; AEPO, arXiv 2510.14545): rollouts fork where uncertainty changes after a
  tool result. :mod:`outrider.algorithms.entropy_branching`.
- Tips (EMPO², arXiv 2602.23008): rollouts explore with a memory of tips, and off-policy updates distill the
  tips into the policy. :mod:`outrider.algorithms.tips`.

A disabled part changes nothing: without any part the run is bit-identical to GRPO. The types ``rapo``,
``arpo`` and ``empo2`` have one part each, with its keys at the top level of ``[algorithm]``; ``combined`` has
a section for each part. docs/algorithms/combined.md explains how the parts interact.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from outrider.algorithms.base import (
    Algorithm,
    AlgorithmContext,
    Arrays,
    GroupAdvantages,
    ObjectiveSettings,
    OffPolicyObjective,
    TurnScoreSettings,
    outcome_advantages,
    turn_advantages,
    write_advantages,
)
from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.entropy_branching import (
    BranchHook,
    BranchSettings,
    entropy_advantage_factors,
    require_countable,
)
from outrider.algorithms.loss_settings import ClipLoss, LossSettings
from outrider.algorithms.retrieval import (
    RetrievalAdvantageSettings,
    RetrievalHook,
    RetrievalSettings,
    retrieval_advantages,
)
from outrider.algorithms.tips import (
    TIPS_OFF,
    MemorySettings,
    ModeSchedule,
    TipHook,
    TipSettings,
    never_shows_a_tip,
    reward_novelty,
    tip_metrics,
    tip_mode,
)
from outrider.environments.base import is_inline, is_stateful
from outrider.memory.embedders import Embedder
from outrider.memory.novelty import NoveltyStore, RandomDistillation
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.tips import MemoryChange
from outrider.rollout.hooks import HYBRID, ON_POLICY, Hook, join_modes
from outrider.trace import Trace

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of an exploration run; None disables a part.

    ``retrieval`` configures when and what to retrieve, ``reward`` how retrieved steps change advantages and
    ratios; set both or neither. ``entropy_advantage`` is the weight a of AEPO's advantage.
    """

    retrieval: RetrievalSettings | None = None
    reward: RetrievalAdvantageSettings | None = None
    branch: BranchSettings | None = None
    entropy_advantage: float = 0.0
    tips: TipSettings | None = None


class ExplorationSettings(TurnScoreSettings):
    """Validation and properties shared by all types with exploration parts.

    A subclass defines the fields and :attr:`parts`. ``flat`` is the part whose keys are at the top level of
    ``[algorithm]``; the other parts are sections.
    """

    flat: ClassVar[Literal["", "retrieval", "branch", "tips"]] = ""

    @property
    def parts(self) -> Parts:
        """The settings of each part, independent of where a type has their keys."""
        raise NotImplementedError

    def _section(self, part: str) -> str:
        """Return the prefix of a part's keys in messages."""
        return "" if self.flat == part else f"{part}."

    @model_validator(mode="after")
    def _validate_parts(self) -> Self:
        parts, ratio_weight = self.parts, 0.0
        if self.advantage == "pass_at_k" and parts.tips is not None and parts.tips.intrinsic_coefficient:
            raise ValueError(
                "advantage = pass_at_k counts successes only: set "
                f"{self._section('tips')}intrinsic_coefficient = 0"
            )
        if parts.reward is not None:
            ratio_weight = parts.reward.ratio_weight
            if parts.reward.num_hybrid > self.group_size:
                raise ValueError(
                    f"{self._section('retrieval')}num_hybrid {parts.reward.num_hybrid} exceeds group_size "
                    f"{self.group_size}"
                )
            if self.loss.type != "clip" and ratio_weight > 0:
                raise ValueError(
                    f"loss.type = {self.loss.type} does not support RAPO's ratio: set ratio_weight = 0 or "
                    "loss.type = clip"
                )
        if parts.branch is not None:
            self._check_first_wave(parts.branch)
            if parts.branch.attribution == "hard" and ratio_weight > 0:
                raise ValueError(
                    "branch.attribution = hard needs ratio_weight = 0, because rollouts that share a token "
                    "scale its ratio differently"
                )
            require_countable(self, parts.branch.attribution)
        if self.distill is not None and parts.tips is not None:
            self._check_shares(self.distill, parts.tips)
        if self.has_steps_as_help and parts.reward and parts.reward.num_hybrid == self.group_size:
            raise ValueError(
                "distill.help = retrieved needs rollouts that do not retrieve themselves: set "
                f"{self._section('retrieval')}num_hybrid below group_size"
            )
        return self

    def _check_shares(self, distill: DistillSettings, tips: TipSettings) -> None:
        prefix = self._section("tips")
        if distill.plays != "unhelped" and not tips.memory_probability * tips.off_policy_probability:
            raise ValueError(
                f"distill.plays = {distill.plays} needs groups that are sampled with tips and trained "
                f"without them: set {prefix}memory_probability and {prefix}off_policy_probability above 0"
            )
        if distill.plays != "helped" and tips.memory_probability == 1.0:
            raise ValueError(
                f"distill.plays = {distill.plays} needs groups that are sampled without tips: set "
                f"{prefix}memory_probability below 1"
            )

    def _check_first_wave(self, branch: BranchSettings) -> None:
        if branch.first_wave is not None and branch.first_wave > self.group_size:
            key = f"algorithm.{self._section('branch')}first_wave"
            raise ValueError(
                f"{key} {branch.first_wave} exceeds group_size {self.group_size}: set {key} to at most "
                f"{self.group_size}, or algorithm.group_size to at least {branch.first_wave}"
            )

    def validate_run(self, run: "RunSettings") -> None:
        """Raise ValueError if the environment cannot execute or render retrieved steps."""
        super().validate_run(run)
        retrieval = self.parts.retrieval
        if retrieval is None:
            return
        if retrieval.mode == "execute" and not is_stateful(run.environment):
            raise ValueError(
                "retrieval.mode = execute needs a stateful environment "
                "(scienceworld, webshop, textworld, house, alfworld)"
            )
        if retrieval.form == "turn" and retrieval.mode == "context" and not is_inline(run.environment):
            raise ValueError(
                "retrieval.form = turn needs retrieval.mode = execute, or an environment whose observations "
                "continue the message of the policy: the tag protocol (factbook, tools), or a class of yours "
                'with protocol = "inline"'
            )

    def warnings(self, *, num_groups: int, num_tasks: int) -> list[str]:
        lines = super().warnings(num_groups=num_groups, num_tasks=num_tasks)
        tips = self.parts.tips
        if tips is None or not never_shows_a_tip(
            tips, num_groups=num_groups, num_tasks=num_tasks, has_teacher=self.has_tips_as_help
        ):
            return lines
        return [
            *lines,
            f"NO TIPS: {num_groups} groups play none of the {num_tasks} tasks twice, and a task is shown its "
            f"own tips only; algorithm.{self._section('tips')}memory.scope=all shares them",
        ]

    @property
    def shows_tips(self) -> bool:
        """Whether any group acts with tips."""
        tips = self.parts.tips
        return tips is not None and tips.memory_probability > 0

    @property
    def has_tips_as_help(self) -> bool:
        """Whether a teacher reads the tips of the run (self-distillation)."""
        return self.distill is not None and "tips" in self.distill.help

    @property
    def has_steps_as_help(self) -> bool:
        """Whether a teacher reads retrieved steps (self-distillation)."""
        return self.distill is not None and "retrieved" in self.distill.help

    @property
    def retrieves(self) -> bool:
        parts = self.parts
        num_hybrid = parts.reward.num_hybrid if parts.reward is not None else 0
        return parts.retrieval is not None and (num_hybrid > 0 or self.has_steps_as_help)

    @property
    def executes_retrieved(self) -> bool:
        retrieval = self.parts.retrieval
        return retrieval is not None and retrieval.mode == "execute"

    @property
    def depends_on_num_steps(self) -> bool:
        # the schedule reaches final_probability at the last step
        retrieval = self.parts.retrieval
        return (
            retrieval is not None
            and retrieval.final_probability is not None
            and retrieval.schedule_steps is None
        )

    @property
    def forks_by_replay(self) -> bool:
        return self.parts.branch is not None

    @property
    def tip_memory(self) -> MemorySettings | None:
        tips = self.parts.tips
        return None if tips is None else tips.memory


_Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"]


class RetrievalSection(RetrievalSettings, RetrievalAdvantageSettings):
    """When and what hybrid rollouts retrieve, and how retrieval changes their advantages (RAPO)."""


class BranchSection(BranchSettings):
    """When rollouts fork (ARPO, AEPO). ``entropy_advantage`` is the weight a of AEPO's advantage."""

    entropy_advantage: float = Field(0.0, ge=0)


class CombinedSettings(OffPolicyObjective, ExplorationSettings):
    """Retrieved steps (``retrieval``), branches (``branch``) and tips (``tips``) in one run.

    Leave out a section to disable its part. With one section, the run is bit-identical to that method with
    the objective configured here; with none, to GRPO.
    """

    type: Literal["combined"] = "combined"
    aggregation: _Aggregation = "token_mean"
    retrieval: RetrievalSection | None = None
    branch: BranchSection | None = None
    tips: TipSettings | None = None

    @property
    def parts(self) -> Parts:
        return Parts(
            retrieval=self.retrieval,
            reward=self.retrieval,
            branch=self.branch,
            entropy_advantage=self.branch.entropy_advantage if self.branch else 0.0,
            tips=self.tips,
        )

    @model_validator(mode="after")
    def _maskable(self) -> Self:
        # A loss without token ratios is valid if no group acts with tips.
        if self.shows_tips:
            super()._maskable()  # type: ignore[operator]
        return self


class RapoSettings(RetrievalAdvantageSettings, ExplorationSettings):
    """RAPO. Every ablation of the paper is a setting. Defaults are those of the paper if it states one; only
    a group has 8 rollouts, of which 4 retrieve, where the paper has 16 and 8.

    ``retrieval`` configures when and what to retrieve. Set ``branch`` to fork rollouts as well.
    """

    flat = "retrieval"

    type: Literal["rapo"] = "rapo"
    loss: LossSettings = ClipLoss(clip_low=0.28, clip_high=0.28)
    aggregation: _Aggregation = "sequence_mean_token_mean"
    retrieval: RetrievalSettings = RetrievalSettings()
    branch: BranchSettings | None = None

    @property
    def parts(self) -> Parts:
        return Parts(retrieval=self.retrieval, reward=self, branch=self.branch)

    def _check_first_wave(self, branch: BranchSettings) -> None:
        if branch.num_first(self.group_size) >= self.group_size and not branch.pre_monitor:
            raise ValueError(
                f"branch.first_wave {branch.num_first(self.group_size)} leaves no room for forks "
                f"in group_size {self.group_size}"
            )


_RELEASED = {"source": "previous_segment", "reduce": "sum", "loss": {"dual_clip": 3.0}}
_AEPO = {"loss": {"keep_clipped_gradient": True}, "entropy_advantage": 0.2, "branch_penalty": 0.05}
_AEPO_RELEASED = (
    _AEPO
    | _RELEASED
    | {
        "loss": {"keep_clipped_gradient": True, "dual_clip": 3.0},
        "decision": "aepo_released",
        "penalty_scope": "prompt",
    }
)
ARPO_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "arpo": {},
    "arpo-released": _RELEASED,
    "aepo": _AEPO | {"pre_monitor": True},
    "aepo-released": _AEPO_RELEASED,
    # ENABLE_DYNAMIC_ROLLOUTS=True, which the authors advise: https://github.com/RUC-NLPIR/ARPO/issues/42
    "aepo-advised": _AEPO_RELEASED | {"pre_monitor": True},
}


class ArpoSettings(BranchSettings, ExplorationSettings):
    """ARPO and AEPO: up to ``group_size`` M rollouts per prompt. ``entropy_advantage`` is the weight a of
    AEPO's advantage. ``preset`` sets the defaults of all keys that you leave out. Deviations from the papers:
    docs/algorithms/details/arpo.md.
    """

    flat = "branch"
    presets = ARPO_PRESETS

    type: Literal["arpo"] = "arpo"
    preset: Literal["arpo", "arpo-released", "aepo", "aepo-released", "aepo-advised"] = "arpo"
    group_size: int = Field(16, ge=2)
    entropy_advantage: float = Field(0.0, ge=0)

    @property
    def parts(self) -> Parts:
        return Parts(branch=self, entropy_advantage=self.entropy_advantage)


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


class Empo2Settings(TipSettings, OffPolicyObjective, ExplorationSettings):
    """EMPO². ``preset`` sets the defaults of all keys that you leave out."""

    flat = "tips"
    presets = EMPO2_PRESETS

    type: Literal["empo2"] = "empo2"
    preset: Literal["empo2", "empo2-alg1", "empo2-centered", "empo2-released"] = "empo2"
    loss: LossSettings = ClipLoss(clip_high=0.3, dual_clip=10.0)

    @property
    def parts(self) -> Parts:
        return Parts(tips=self)


class Exploration(Algorithm):
    """Group advantages with retrieved steps, branches and tips, as configured.

    ``tips`` and ``retrieval`` are the hooks of their parts (None: off); ``novelty`` counts visited states. If
    ``every_action`` is True, rollouts may branch after every action of a simulator and not only after tool
    calls.
    """

    def __init__(
        self,
        settings: ExplorationSettings,
        *,
        buffer: StepTraceBuffer | None = None,
        num_training_steps: int = 1,
        vocabulary_size: int = 2,
        every_action: bool = False,
        embedder: Embedder | None = None,
        count_tokens: Callable[[str], int] = len,
        groups_per_step: int = 1,
        first_group: Callable[[int], int] | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = settings
        self.objective: ObjectiveSettings = settings
        self.parts = parts = settings.parts
        self.tips: TipHook | None = None
        self.retrieval: RetrievalHook | None = None
        # The order of hooks is the order of splices in the context: a tip is appended to the user's message,
        # a retrieved step begins the assistant's. A rollout forks after both.
        hooks: list[Hook] = []
        if parts.tips is not None:
            if embedder is None:
                raise ValueError("tips need an embedder")
            self.tips = TipHook(parts.tips.memory, embedder=embedder, count_tokens=count_tokens, seed=seed)
            self.novelty: NoveltyStore | RandomDistillation = (
                NoveltyStore(threshold=parts.tips.novelty_threshold)
                if parts.tips.novelty == "count"
                else RandomDistillation(embedder.dim, parts.tips.rnd, seed=seed)
            )
            self._schedule = ModeSchedule(
                memory_probability=parts.tips.memory_probability,
                off_policy_probability=parts.tips.off_policy_probability,
                seed=seed,
                groups_per_step=groups_per_step,
                first_group=first_group,
            )
            if parts.tips.memory_probability or settings.has_tips_as_help:
                hooks.append(self.tips)
        if parts.retrieval is not None and settings.retrieves and buffer is not None:
            self.retrieval = RetrievalHook(
                parts.retrieval, buffer=buffer, num_training_steps=num_training_steps
            )
            hooks.append(self.retrieval)
            if parts.retrieval.mode == "execute" and parts.retrieval.form == "turn":
                hooks.reverse()  # the tips of the state to which a retrieved turn leads
        if parts.branch is not None:
            hooks.append(
                BranchHook(
                    parts.branch,
                    group_size=settings.group_size,
                    vocabulary_size=vocabulary_size,
                    every_action=every_action,
                )
            )
        self.hooks = tuple(hooks)
        num_hybrid = parts.reward.num_hybrid if parts.reward is not None else 0
        self.modes = (ON_POLICY,) * (settings.group_size - num_hybrid) + (HYBRID,) * num_hybrid

    @classmethod
    def build(cls, settings: ExplorationSettings, context: AlgorithmContext) -> Self:
        tips = settings.parts.tips
        return cls(
            settings,
            buffer=context.buffer,
            num_training_steps=context.num_training_steps,
            vocabulary_size=context.vocabulary_size,
            every_action=context.is_stateful,
            embedder=None if tips is None else context.load_embedder(tips.memory.embedder),
            count_tokens=context.count_tokens,
            groups_per_step=context.groups_per_step,
            first_group=context.first_group,
            seed=context.seed,
        )

    @property
    def label(self) -> str:
        """The type, or ``grpo`` if no part has an effect: the run is then bit-identical to GRPO."""
        pays = self.parts.tips is not None and self.parts.tips.intrinsic_coefficient > 0
        return self.objective.label if self.hooks or pays else "grpo"

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """Return the modes of a group: all with tips or all without; the last ``num_hybrid`` may retrieve."""
        if self.tips is None:
            return self.modes
        mode = self._schedule.mode_of(step, group)
        if self.parts.reward is None:
            return (mode,) * len(self.modes)
        return tuple(join_modes(mode, own) for own in self.modes)

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Compute advantages from returns and novelty, and write them to the nodes of ``trace``.

        The order matters: RAPO's factor multiplies the group advantages, ``attribution`` distributes them to
        shared tokens, and AEPO's factor multiplies the result.
        """
        parts = self.parts
        measurements: dict[str, list[float]] = {}
        if parts.tips is not None and self.tips is not None:
            measured = reward_novelty(
                trace, parts.tips, self.novelty, self.tips.embedder, advantage=self.objective.advantage
            )
            measurements["tips/intrinsic_mean"] = [leaf.intrinsic for leaf, _ in trace.scored_rollouts()]
            measurements[self.novelty.metric] = measured
            trace.without_memory = tip_mode(trace.modes[0]) == TIPS_OFF
        advantages, scales = (
            turn_advantages([trace], self.settings)[0]
            if self.settings.scores_turns
            else outcome_advantages(trace, self.objective.advantage, pass_k=self.objective.pass_k),
            None,
        )
        if parts.reward is not None:
            advantages, scales, retrieval_measurements = retrieval_advantages(trace, advantages, parts.reward)
            measurements |= retrieval_measurements
        attribution = parts.branch.attribution if parts.branch is not None else None
        write_advantages(trace, advantages, scales, attribution=attribution)
        if parts.entropy_advantage:
            scale_by_entropy(trace, weight=parts.entropy_advantage)
        return GroupAdvantages(advantages=advantages, measurements=measurements)

    def measure(self, traces: Sequence[Trace]) -> dict[str, float]:
        return {} if self.tips is None else tip_metrics(traces, self.tips)

    @property
    def remembers(self) -> bool:
        return self.tips is not None

    def state(self) -> tuple[dict[str, Any], Arrays]:
        if self.tips is None:
            return {}, {}
        tips, tip_arrays = self.tips.memory.snapshot()
        novelty, novelty_arrays = self.novelty.snapshot()
        # counts of rollouts that were sampled during an update and that no step has measured yet
        counts = {"counts": dict(self.tips.counts)} if self.tips.counts else {}
        return {"tips": tips, "novelty": novelty, **counts}, {**tip_arrays, **novelty_arrays}

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        if self.tips is not None:
            self.tips.memory.restore(state["tips"], arrays)
            self.tips.counts = Counter(state.get("counts", {}))
            self.novelty.restore(state["novelty"], arrays)

    def memory_changes(self) -> list[MemoryChange]:
        return [] if self.tips is None else self.tips.memory.pop_changes()

    def counts(self) -> list[dict[str, int]]:
        return [] if self.retrieval is None else [dict(self.retrieval.counts)]

    def restore_counts(self, saved: Sequence[Mapping[str, int]]) -> None:
        if self.retrieval is not None:
            [counts] = saved
            self.retrieval.counts = Counter(counts)

    def discard_step(self) -> None:
        if self.tips is not None:
            self.tips.discard_step()


class Rapo(Exploration):
    """RAPO (arXiv 2603.03078): exploration by retrieval."""

    Settings = RapoSettings


class Arpo(Exploration):
    """ARPO and AEPO (arXiv 2507.19849, 2510.14545): exploration by branching."""

    Settings = ArpoSettings


class Empo2(Exploration):
    """EMPO² (arXiv 2602.23008): exploration with tips."""

    Settings = Empo2Settings


class Combined(Exploration):
    """Any combination of retrieval, branching and tips."""

    Settings = CombinedSettings


def scale_by_entropy(trace: Trace, *, weight: float) -> None:
    """Multiply every token advantage by ``1 + weight * z`` (AEPO).

    z is the z-score of the token's entropy at sampling time over all policy tokens of the group.
    """
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
