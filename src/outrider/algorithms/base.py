"""The base class of algorithms, the settings of an objective, and how advantages are assigned to a trace."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from outrider import deprecated
from outrider.algorithms.advantages import (
    Float64Array,
    RolloutAdvantages,
    Statistics,
    TurnAdvantageKind,
    TurnScores,
    advantages_per_turn,
    best_minus_second_advantages_per_rollout,
    group_normalized_advantages_per_rollout,
    leave_one_out_advantages_per_rollout,
    mean_normalized_advantages_per_rollout,
    pass_at_k_advantages_per_rollout,
)
from outrider.algorithms.distill import DistillSettings
from outrider.algorithms.loss_settings import (
    ClipLoss,
    LossSettings,
    RejectionMask,
    SamplerCorrection,
    require_new_fields,
    require_new_spelling,
)
from outrider.algorithms.presets import with_preset
from outrider.config import Settings
from outrider.errors import InvalidResult
from outrider.memory.embedders import CachedEmbedder
from outrider.memory.step_buffer import StepTraceBuffer
from outrider.memory.tips import MemoryChange
from outrider.metrics import Metric
from outrider.rollout.hooks import Hook
from outrider.trace import Node, Share, Trace
from outrider.types import Step, Task

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.algorithms.losses import OldLogprobs, TokenLoss, TokenLossInputs
    from outrider.algorithms.tips import MemorySettings
    from outrider.training.settings import RunSettings


Attribution = Literal["soft", "hard"]
AdvantageKind = Literal[
    "group_normalized", "group_centered", "leave_one_out", "mean_normalized", "pass_at_k", "best_minus_second"
]


_LARGE_ENTROPY_BONUS = 0.01


class ObjectiveSettings(Settings):
    """The policy-gradient objective that the group methods share.

    ``loss`` selects the token loss. ``sampler_correction`` weights tokens that the engine sampled from a
    policy other than the trainer's (None: off). A TOML table for either overrides only the keys in it; the
    other keys keep the defaults of the method. See docs/algorithms/objectives.md. ``sampler_rejection`` masks
    tokens or rollouts, with or without the correction; the aggregation still counts them in its denominators.
    ``max_length`` is the length constant of the aggregations of Dr. GRPO and LUFFY. ``positive_nll`` is the
    weight of an added loss: the mean negative log-likelihood over the tokens of successful rollouts. If
    ``kl_weight`` is 0, no reference model is loaded.
    """

    if TYPE_CHECKING:
        type: str = ""  # name of the plug-in; set on lookup if the class does not declare it

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Defaults of each value of the field ``preset``, for classes that have this field."""

    group_size: int = Field(8, ge=2)
    """Number of rollouts per task; they form a group."""
    advantage: AdvantageKind = "group_normalized"
    """How the returns of a group become advantages: the mean is subtracted and the result divided by the
    std (``group_normalized``), or only the mean is subtracted (``group_centered``), or the mean of the
    other rollouts (``leave_one_out``). ``mean_normalized`` divides by the mean (MaxRL), ``pass_at_k`` rewards
    ``pass_k`` rollouts by one success, ``best_minus_second`` rewards the best rollout alone.
    """
    pass_k: int | None = Field(None, ge=1)
    """Number k of rollouts of ``advantage = pass_at_k``."""
    loss: LossSettings = ClipLoss()
    """Loss of a token."""
    aggregation: Literal[
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "constant_length",
        "sum_over_length",
    ] = "token_mean"
    """How the losses of tokens are averaged (docs/algorithms/objectives.md)."""
    max_length: int | None = Field(None, ge=1)
    sampler_correction: SamplerCorrection | None = SamplerCorrection()
    sampler_rejection: RejectionMask | None = None
    positive_nll: float = Field(0.0, ge=0)
    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of an entropy bonus: the mean entropy of the policy over its trained tokens."""
    observation_nll: float = Field(0.0, ge=0)
    """Weight of an added loss: the mean negative log-likelihood over the tokens of the environment's text
    after the prompt (ECHO), without those of the chat template.
    """
    kl_weight: float = Field(0.0, ge=0)
    kl_estimator: Literal["k2", "k3", "k3_ratio"] = "k2"
    """Estimator of the KL divergence from the reference model in the loss."""
    distill: DistillSettings | None = None
    """Self-distillation: learning from the same policy with help in its context
    (docs/algorithms/distill.md); None: off.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Reject fields of earlier versions."""
        super().__pydantic_init_subclass__(**kwargs)
        require_new_fields(cls.__name__, cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            require_new_spelling(data)
        if cls.presets:
            data = with_preset(cls.presets, data, default=cls.model_fields["preset"].default)
        return data

    @model_validator(mode="after")
    def _consistent(self) -> "ObjectiveSettings":
        if (self.aggregation in ("constant_length", "sum_over_length")) != (self.max_length is not None):
            raise ValueError(
                "max_length belongs to aggregation = constant_length or sum_over_length and to no other"
            )
        if (self.advantage == "pass_at_k") != (self.pass_k is not None):
            raise ValueError("pass_k belongs to advantage = pass_at_k and to no other")
        if self.pass_k is not None and self.pass_k >= self.group_size:
            raise ValueError(
                f"pass_k = {self.pass_k} needs a group_size above it, got {self.group_size}: with k = n no "
                "rollout has an advantage"
            )
        if self.observation_nll > 0 and self.distill is not None and self.distill.form == "divergence":
            raise ValueError(
                "observation_nll is not defined beside distill.form = divergence, whose pass scores the "
                "policy's tokens only: use another form, or set observation_nll = 0"
            )
        return self

    def require_ratio_per_token(self, reason: str) -> None:
        """Raise ValueError for GSPO with one term per rollout, in which advantages of its tokens cancel."""
        if self.loss.type == "gspo" and self.loss.sequence_ratio != "token":
            raise ValueError(
                f"loss.sequence_ratio = {self.loss.sequence_ratio} has one advantage per rollout, and "
                f"{reason}: set loss.sequence_ratio = token"
            )

    @property
    def label(self) -> str:
        """Name of the method in evaluations after training: the algorithm's type."""
        return str(getattr(self, "type", "objective")).rpartition(":")[2]  # class name of an import path

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs a frozen copy of the starting policy."""
        return self.kl_weight > 0 or (self.distill is not None and self.distill.needs_reference)

    @property
    def retrieves(self) -> bool:
        """Whether rollouts read a step-trace buffer. If so, the run opens or fills one."""
        return False

    @property
    def needs_experts(self) -> bool:
        """Whether every step requests solutions from the environment's experts."""
        return False

    @property
    def forks_by_replay(self) -> bool:
        """Whether rollouts fork. A fork may replay the actions of another rollout."""
        return False

    @property
    def whole_rollout_settings(self) -> list[str]:
        """The settings in use whose loss of a token depends on the other tokens of its rollout."""
        distill, correction, rejection = self.distill, self.sampler_correction, self.sampler_rejection
        settings = {
            "algorithm.loss.type = gspo": self.loss.type == "gspo",
            "algorithm.sampler_correction.level": correction is not None and correction.level != "token",
            "algorithm.sampler_rejection.scope": rejection is not None and rejection.scope != "token",
            "algorithm.distill.discount": distill is not None and distill.discount > 0,
        }
        return [name for name, is_used in settings.items() if is_used]

    @property
    def needs_whole_rollouts(self) -> bool:
        """Whether a micro-batch must have all contexts of a rollout."""
        # a context may have observations and no trained token
        has_observations = self.observation_nll > 0
        return bool(self.whole_rollout_settings) or has_observations or is_plugin_loss(self.token_loss)

    @property
    def drops_groups(self) -> bool:
        """Whether a step may sample additional tasks to replace groups that it does not train on."""
        return False

    @property
    def depends_on_num_steps(self) -> bool:
        """Whether the same step differs between runs with different numbers of steps."""
        return False

    @property
    def executes_retrieved(self) -> bool:
        """Whether retrieved steps are executed in the environment and not only inserted in the context."""
        return False

    @property
    def tip_memory(self) -> "MemorySettings | None":
        """Settings for writing and showing tips; None without tips."""
        return None

    def warnings(self, *, num_groups: int, num_tasks: int) -> list[str]:
        """Return a line per setting that has no effect with ``num_groups`` groups on ``num_tasks`` tasks, or
        that is usually a mistake.
        """
        if self.entropy_bonus > _LARGE_ENTROPY_BONUS:
            return [
                f"algorithm.entropy_bonus = {self.entropy_bonus:g} is above {_LARGE_ENTROPY_BONUS}: a "
                "bonus of this size often ends in random text; watch entropy/trainer_mean"
            ]
        return []

    def validate_run(self, run: "RunSettings") -> None:
        """Check the other settings of the run.

        Raises:
            ValueError: if a setting of the run is incompatible with these; the message has its dotted key.
        """
        reward = getattr(run.environment, "reward", None)
        has_function = getattr(reward, "function", None) is not None  # it replaces the penalty
        penalty = 0.0 if has_function else getattr(reward, "format_penalty", 0.0)
        if self.advantage == "mean_normalized" and penalty < 0.0:
            raise ValueError(
                "algorithm.advantage = mean_normalized needs returns of at least 0: set "
                f"environment.reward.format_penalty = 0 (now {penalty:g})"
            )
        if self.observation_nll > 0 and run.environment.rebuilt_prompt_tokens is not None:
            raise ValueError(
                "algorithm.observation_nll needs observations behind the turn that they answer, and "
                'environment.context = "window" shows them in the next prompt: set 0'
            )
        if self.observation_nll > 0 and run.environment.keeps_conversations:
            raise ValueError(
                "algorithm.observation_nll needs observations that the environment returns, and "
                f"environment.type = {run.environment.type} leaves the conversation to a program: set 0"
            )
        if self.observation_nll > 0 and run.model.history_thinking == "strip":
            raise ValueError("algorithm.observation_nll needs model.history_thinking = keep")
        if self.distill is not None:
            self.distill.validate_run(run)

    @property
    def rewards_kl(self) -> bool:
        """Whether advantages include the KL to the reference, which must then be computed first."""
        return False

    def old_logprobs(self, start_T: "Tensor", with_tips_T: "Tensor | None") -> "OldLogprobs":
        """Return the denominators of the importance ratio.

        Args:
            start_T: log-probs of the policy at the start of the update.
            with_tips_T: log-probs in the context in which the rollouts were sampled, NaN for tokens whose
                context is the same; None if it is the same for all tokens.
        """
        from outrider.algorithms.losses import OldLogprobs

        if with_tips_T is None or self.distill is None:
            return OldLogprobs(old_T=start_T, trainer_T=start_T)
        trainer_T = with_tips_T.where(~with_tips_T.isnan(), start_T)
        return OldLogprobs(old_T=trainer_T, trainer_T=trainer_T)

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """Return the loss of every trained token, before sampler correction and aggregation weights."""
        from outrider.algorithms.losses import configured_loss

        return configured_loss(inputs, self)


def is_plugin_loss(token_loss: "Callable[..., TokenLoss]") -> bool:
    """Whether a loss is that of a plug-in, which may need all tokens of a rollout at once."""
    return not token_loss.__module__.startswith("outrider.")


class TurnScoreSettings(ObjectiveSettings):
    """Settings of the methods that compare the scores of a group: the score of a turn is the return of its
    rollout minus the turn's penalty.
    """

    invalid_penalty: float = Field(0.0, ge=0)
    """Subtracted from the score of a turn that the environment could not parse, and of no other turn."""
    statistics: Statistics = "rollouts"
    """What mean and std of a group count: each rollout once, by the mean score of its turns, or each turn
    (``samples``), as published code that trains one row per turn does.
    """

    @model_validator(mode="after")
    def _turn_scores_apply(self) -> Self:
        if self.scores_turns and self.advantage in ("mean_normalized", "pass_at_k", "best_minus_second"):
            raise ValueError(
                f"advantage = {self.advantage} compares whole rollouts: remove invalid_penalty and "
                "statistics, or set advantage = group_normalized, group_centered or leave_one_out"
            )
        if self.scores_turns:
            self.require_ratio_per_token("invalid_penalty and statistics = samples differ by turn")
        return self

    @property
    def scores_turns(self) -> bool:
        """Whether the advantages may differ from those of the rollouts' returns."""
        return self.invalid_penalty > 0 or self.statistics == "samples"


class OffPolicyObjective(ObjectiveSettings):
    """Objective for rollouts that are sampled with tips and trained without them (EMPO²).

    ``old_context`` selects the denominator of the ratio: the policy with tips (``acting``, Table 3 of the
    paper) or without tips (``student``, its Algorithm 1). ``student_mask`` masks improbable tokens: with
    ``token``, each token whose probability without tips is below ``min_probability``; with ``turn``, every
    turn that contains a token whose probability with tips is below it (released code).
    """

    old_context: Literal["acting", "student"] = "acting"
    student_mask: Literal["token", "turn", "none"] = "token"
    min_probability: float = Field(math.exp(-5.0), ge=0, lt=1)

    @model_validator(mode="after")
    def _maskable(self) -> "OffPolicyObjective":
        if self.loss.type == "gspo" and self.student_mask != "none":
            raise ValueError(
                "loss.type = gspo has one ratio per rollout, so student_mask cannot mask single tokens: set "
                "student_mask = none"
            )
        if self.loss.type == "reinforce":
            raise ValueError(
                "loss.type = reinforce has no ratio, which rollouts that are trained without their tips need"
            )
        return self

    def old_logprobs(self, start_T: "Tensor", with_tips_T: "Tensor | None") -> "OldLogprobs":
        """Return the denominators selected by ``old_context`` for the rollouts trained without their tips
        (EMPO², Table 3 and Algorithm 1).
        """
        if with_tips_T is None:
            return super().old_logprobs(start_T, with_tips_T)
        from outrider.algorithms.losses import OldLogprobs

        is_without_tips_T = ~with_tips_T.isnan()
        trainer_T = with_tips_T.where(is_without_tips_T, start_T)
        old_T = trainer_T if self.old_context == "acting" else start_T
        return OldLogprobs(old_T=old_T, trainer_T=trainer_T, is_without_tips_T=is_without_tips_T)

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """Return the configured loss, masked by ``student_mask``."""
        from outrider.algorithms.losses import without_tips_mask

        loss, is_without_tips_T = super().token_loss(inputs), inputs.old_logprobs.is_without_tips_T
        if is_without_tips_T is None:
            return loss
        logprobs_T, with_tips_T = inputs.logprobs_T.detach(), inputs.old_logprobs.trainer_T
        mask_T = without_tips_mask(
            self,
            logprobs_T=logprobs_T,
            with_tips_T=with_tips_T,
            is_without_tips_T=is_without_tips_T,
            turn_T=inputs.turn_T,
        )
        if num := int(is_without_tips_T.sum()):
            measures = inputs.measures
            off = (with_tips_T - logprobs_T)[is_without_tips_T]
            ratios = (logprobs_T - inputs.old_T)[is_without_tips_T].exp()
            measures.add("tips/kl_acting_student", float(off.mean()), num)
            measures.add("tips/ratio_mean", float(ratios.mean()), num)
            measures.add("tips/masked_fraction", float(1.0 - mask_T[is_without_tips_T].mean()), num)
            measures.add_sum("tips/num_off_tokens", float(num))
        return replace(loss, losses=loss.losses * mask_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantages per rollout of one group, and measurements of the algorithm."""

    advantages: RolloutAdvantages
    measurements: dict[str, list[float]]


def total_returns(trace: Trace) -> list[float | None]:
    """Return the environment's return plus the intrinsic return of each rollout.

    None for a faulted rollout, which the advantage statistics exclude.
    """
    return [
        None if leaf.episode_return is None else leaf.episode_return + leaf.intrinsic
        for leaf, _ in trace.rollouts()
    ]


def turn_scores(trace: Trace, invalid_penalty: float) -> TurnScores:
    """Return the scores of a group: the return of the rollout (:func:`total_returns`), minus
    ``invalid_penalty`` for a turn that the environment could not parse.

    A turn that several rollouts share has a score in each of them.
    """
    rollouts: list[float | None] = []
    turns: list[list[float]] = []
    for value, (_, path) in zip(total_returns(trace), trace.rollouts(), strict=True):
        penalties = [
            invalid_penalty if node.metadata.get("invalid", False) else 0.0 for node in path if node.trainable
        ]
        if value is None:
            rollouts.append(None)
            turns.append([])
            continue
        # subtract the mean penalty of the turns, so that the advantages stay centred
        rollouts.append(value - (fmean(penalties) if penalties else 0.0))
        turns.append([value - penalty for penalty in penalties])
    return TurnScores(rollouts=rollouts, turns=turns)


def turn_advantages(
    traces: Sequence[Trace],
    settings: TurnScoreSettings,
    *,
    std: Literal["sample", "population", "batch"] = "sample",
) -> list[RolloutAdvantages]:
    """Compute the advantages of groups whose turns have scores of their own (``settings.scores_turns``)."""
    return advantages_per_turn(
        [turn_scores(trace, settings.invalid_penalty) for trace in traces],
        statistics=settings.statistics,
        kind=cast(TurnAdvantageKind, settings.advantage),
        std=std,
    )


def with_values(advantages: RolloutAdvantages, values: Float64Array) -> RolloutAdvantages:
    """Replace the advantages of a group by ``values`` [N], for example with those of a custom baseline.

    Rollouts without a return keep 0. ``has_signal`` is recomputed: it is False if all new values are 0.
    """
    assigned_values = np.where(advantages.assigned, values, 0.0)
    has_signal = bool(assigned_values.any())
    reason = None if has_signal else advantages.reason or "no_spread"
    return RolloutAdvantages(
        values=assigned_values, assigned=advantages.assigned, has_signal=has_signal, reason=reason
    )


def group_advantages(
    returns: Sequence[float | None] | Float64Array, kind: AdvantageKind, *, std_ddof: Literal[0, 1] = 1
) -> RolloutAdvantages:
    """Compute the advantages of one group from its returns, for every kind but ``pass_at_k``; ``std_ddof``
    applies to ``group_normalized`` only.
    """
    if kind == "leave_one_out":
        return leave_one_out_advantages_per_rollout(returns=returns)
    if kind == "mean_normalized":
        return mean_normalized_advantages_per_rollout(returns=returns)
    if kind == "best_minus_second":
        return best_minus_second_advantages_per_rollout(returns=returns)
    if kind == "pass_at_k":
        raise ValueError("advantage = pass_at_k needs successes: use outcome_advantages")
    return group_normalized_advantages_per_rollout(
        returns=returns, std_ddof=std_ddof, normalize_std=kind == "group_normalized"
    )


def outcome_advantages(
    trace: Trace, kind: AdvantageKind, *, pass_k: int | None = None, std_ddof: Literal[0, 1] = 1
) -> RolloutAdvantages:
    """Compute the advantages of a group from its :func:`total_returns`, or with ``pass_at_k`` from its
    successes.
    """
    if kind == "pass_at_k":
        success = [None if leaf.episode_return is None else leaf.success for leaf, _ in trace.rollouts()]
        return pass_at_k_advantages_per_rollout(success=success, k=pass_k or 1)
    returns = total_returns(trace)
    if kind == "mean_normalized" and min((value for value in returns if value is not None), default=0.0) < 0:
        raise InvalidResult(
            f"algorithm.advantage = mean_normalized needs returns of at least 0: a rollout of task "
            f"{trace.task.key!r} has {min(value for value in returns if value is not None):g}"
        )
    return group_advantages(returns, kind, std_ddof=std_ddof)


def require_unassigned(nodes: Iterable[Node]) -> None:
    """Raise ValueError for a node that already has an advantage or that several rollouts share."""
    seen: set[int] = set()
    for node in nodes:
        if node.credit is not None or node.shares is not None or id(node) in seen:
            raise ValueError(f"node {node.node_id} already has an advantage")
        seen.add(id(node))


def write_advantages(
    trace: Trace,
    advantages: RolloutAdvantages,
    ratio_scales: Sequence[float] | None = None,
    *,
    attribution: Attribution | None = None,
) -> None:
    """Write the advantage of each rollout, or of each of its turns (``advantages.turns``), to its trainable
    tokens; rollouts without a return get none.

    Args:
        attribution: advantage of a node that several rollouts share (ARPO, arXiv 2507.19849, section 3.2).
            ``soft``: the advantage of each rollout, counted once per rollout. ``hard``: the mean over its
            rollouts, counted once.

    Raises:
        ValueError: if a node is shared and ``attribution`` is missing, or if it is ``hard`` and the rollouts
            of a shared node scale their ratios differently.
    """
    scales = ratio_scales if ratio_scales is not None else [1.0] * len(advantages.values)
    users: dict[int, list[tuple[int, float, float]]] = {}
    values, assigned = np.asarray(advantages.values).tolist(), advantages.assigned.tolist()
    by_turn = advantages.turns
    for index, ((leaf, path), value, has_return, scale) in enumerate(
        zip(trace.rollouts(), values, assigned, scales, strict=True)
    ):
        leaf.advantage = value if has_return else None
        turns = None if by_turn is None else iter(by_turn[index].tolist())
        for node in path if has_return else ():
            # In a rollout of the policy, a demonstrator's turns are a prefix, which is only context.
            if node.trainable or (node.receives_advantages and leaf.is_demonstration):
                own = next(turns) if turns is not None and node.trainable else value
                users.setdefault(node.node_id, []).append((leaf.rollout, own, scale))
    for node_id, shared in users.items():
        node = trace.nodes[node_id]
        if node.credit is not None or node.shares is not None or (len(shared) > 1 and attribution is None):
            raise ValueError(f"node {node_id} already has an advantage")
        if len(shared) > 1 and attribution == "soft":
            node.shares = {
                rollout: Share((value,) * len(node.token_ids), scale) for rollout, value, scale in shared
            }
            continue
        rollouts, node_advantages, node_scales = zip(*shared, strict=True)
        if len(set(node_scales)) > 1:
            raise ValueError(
                f"hard attribution: the rollouts of node {node_id} scale their ratios differently"
            )
        node.credit = (sum(node_advantages) / len(node_advantages),) * len(node.token_ids)
        node.ratio_scale = node_scales[0]
        node.owner = rollouts[0] if len(shared) > 1 else None


Arrays = Mapping[str, NDArray[Any]]
ExpertPaths = Mapping[str, Sequence[Step] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Selects the groups of a step to train on; groups of additional tasks replace the others.

    After ``max_extra_batches`` additional rounds, the step trains on the groups collected so far.
    """

    select: Callable[[Sequence[Trace]], list[Trace]]
    max_extra_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """Tasks of a training step: the next ``num_groups`` in the run's order, or the given ``tasks``, which do
    not advance the order. ``group_filter`` selects the sampled groups to train on (None: all).
    """

    num_groups: int
    tasks: Sequence[Task] | None = None
    group_filter: GroupFilter | None = None
    groups: InitVar[GroupFilter | None] = None  # deprecated name of group_filter

    def __post_init__(self, groups: GroupFilter | None) -> None:
        if groups is not None:
            deprecated.warn("TaskChoice(groups=...)", "TaskChoice(group_filter=...)")
            object.__setattr__(self, "group_filter", groups)


def _groups(choice: TaskChoice) -> GroupFilter | None:
    deprecated.warn("TaskChoice.groups", "TaskChoice.group_filter")
    return choice.group_filter


# Reading the old name would otherwise give the default of the constructor's argument.
TaskChoice.groups = property(_groups)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Additional ``groups`` with advantages for a step, metrics, and the reasons of ``lost`` rollouts."""

    groups: list[Trace] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


class StepPlay(Protocol):
    """Samples additional rollouts for an algorithm in a training step, within the limits of the run."""

    def request_expert_paths(self, tasks: Sequence[Task]) -> tuple[ExpertPaths, list[str]]:
        """Return expert steps by task key (None: no expert), and the reasons of failed requests."""

    def play_experts(self, tasks: Sequence[Task], paths: ExpertPaths) -> list[Trace]:
        """Replay the expert steps: one rollout per task, from the initial state of the task's group."""


class Algorithm:
    """Base class of algorithms. Override :meth:`assign_advantages` and any other method that should differ
    from GRPO.

    ``objective`` has the settings of the loss, ``hooks`` run inside the rollouts, ``modes[i]`` is the mode of
    rollout i of a group, and ``metrics`` declares metrics in addition to those of
    :mod:`outrider.metrics.registry`. A plug-in has a class ``Settings`` (a subclass of
    :class:`ObjectiveSettings`). It is created with ``build(settings, context)``, where ``context`` is an
    :class:`AlgorithmContext`, or with its settings alone.
    """

    metrics: ClassVar[Sequence[Metric]] = ()
    objective: ObjectiveSettings
    hooks: tuple[Hook, ...] = ()
    modes: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        deprecated.rename_methods(cls, credit="assign_advantages", advantages="assign_step_advantages")

    @property
    def label(self) -> str:
        """Name of the method in evaluations after training."""
        return self.objective.label

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """Return the modes of the rollouts of group number ``group`` of a training step."""
        return self.modes

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        """Choose training ``tasks``; by default the next ``num_groups`` (``train.tasks_per_step``)."""
        return TaskChoice(num_groups=num_groups)

    def prepare(
        self, tasks: Sequence[Task], modes: Sequence[Sequence[str]], *, step: int, play: StepPlay
    ) -> Sequence[str] | None:
        """Called before the groups of ``tasks`` are sampled in ``modes``, for example to request experts.
        Returns the reasons of experts that failed, if any.
        """
        return None

    def augment(self, traces: Sequence[Trace], *, step: int, play: StepPlay) -> Augmentation:
        """Add rollouts to the sampled ``traces`` in place, and return additional groups to train on."""
        return Augmentation()

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Compute the advantages of one group and write them to its trainable nodes, for example with
        :func:`write_advantages`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has neither assign_advantages nor assign_step_advantages"
        )

    def assign_step_advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """Call :meth:`assign_advantages` for each group of a step and return one result per trace.

        Override this method to compute statistics that span several groups.
        """
        return [self.assign_advantages(trace) for trace in traces]

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """Return the loss of every trained token; by default that of the objective."""
        return self.objective.token_loss(inputs)

    def measure(self, traces: Sequence[Trace]) -> dict[str, float]:
        """Return metrics of a step by their declared names, after advantages have been assigned."""
        return {}

    @property
    def remembers(self) -> bool:
        """Whether checkpoints must store a :meth:`state`."""
        return type(self).state is not Algorithm.state

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return memories as plain data and arrays, for a checkpoint.

        With ``cluster.max_staleness`` 1, a checkpoint may be written between the rollouts of a step and its
        :meth:`measure`. The state must therefore include the counts that hooks collected for that step.
        """
        return {}, {}

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Restore the state that :meth:`state` returned."""

    def memory_changes(self) -> list[MemoryChange]:
        """Return additions to and removals from memories since the last call, logged with every step."""
        return []

    def counts(self) -> list[dict[str, int]]:
        """Return the hooks' counts over the whole run. Checkpoints store them; a step's metrics are their
        increments.
        """
        return []

    def restore_counts(self, saved: Sequence[Mapping[str, int]]) -> None:
        """Restore the counts that :meth:`counts` returned."""

    def discard_step(self) -> None:
        """Forget what the hooks have counted in the rollouts of a step that will be generated again."""


deprecated.rename_methods(Algorithm, credit="assign_advantages", advantages="assign_step_advantages")

Demonstrations = Mapping[str, Sequence[Step] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmContext:
    """Objects and sizes that a run passes to ``build(settings, context)`` of its algorithm.

    The run samples ``groups_per_step`` groups in each of ``num_training_steps`` steps, or fewer in a stage
    with fewer tasks; ``first_group`` maps a step to the number of groups before it.
    ``max_response_tokens`` is the limit per rollout. ``count_tokens`` counts the tokens of a text inside a
    message. ``is_stateful``: actions change the hidden state of the environment. ``buffer`` is None unless
    ``ObjectiveSettings.retrieves``. ``read_demonstrations`` reads a file of trajectories of ``train_tasks``,
    returns them by task key, and raises DataError if the file is invalid.
    """

    seed: int
    num_training_steps: int
    groups_per_step: int
    max_response_tokens: int
    vocabulary_size: int
    is_stateful: bool
    count_tokens: Callable[[str], int]
    train_tasks: Sequence[Task]
    buffer: StepTraceBuffer | None
    load_embedder: Callable[[str], CachedEmbedder]
    read_demonstrations: Callable[[str, Sequence[Task]], Demonstrations]
    first_group: Callable[[int], int] | None = None


deprecated.keep_old_names(__name__)
