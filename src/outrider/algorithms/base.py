"""The base class of algorithms, the settings of an objective, and how advantages are assigned to a trace."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from outrider import deprecated
from outrider.algorithms.advantages import (
    Float64Array,
    RolloutAdvantages,
    group_normalized_advantages_per_rollout,
    leave_one_out_advantages_per_rollout,
)
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
AdvantageKind = Literal["group_normalized", "group_centered", "leave_one_out"]


class ObjectiveSettings(Settings):
    """The policy-gradient objective that the group methods share.

    ``loss`` is the token loss and ``sampler_correction`` the weight of tokens that the engine drew from
    another policy than the trainer's (None: off; both docs/algorithms/objectives.md); a table of either sets
    what it names, and the rest is the method's own. ``sampler_rejection`` leaves tokens or rollouts out
    instead, or as well; the denominators stay. ``max_length`` is the constant of Dr. GRPO's aggregation and
    of LUFFY's. ``positive_nll`` adds that much of the mean negative log-likelihood over the tokens of
    successful rollouts. ``kl_weight`` 0 keeps no reference model.
    """

    if TYPE_CHECKING:
        type: str = ""  # the plug-in's name; a class that does not declare it gets it when it is named

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What each value of the field ``preset`` sets, in a class that has this field."""

    group_size: int = Field(8, ge=2)
    advantage: AdvantageKind = "group_normalized"
    loss: LossSettings = ClipLoss()
    aggregation: Literal[
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "constant_length",
        "sum_over_length",
    ] = "token_mean"
    max_length: int | None = Field(None, ge=1)
    sampler_correction: SamplerCorrection | None = SamplerCorrection()
    sampler_rejection: RejectionMask | None = None
    positive_nll: float = Field(0.0, ge=0)
    kl_weight: float = Field(0.0, ge=0)
    kl_estimator: Literal["k2", "k3", "k3_ratio"] = "k2"

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse fields that an earlier version read."""
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
        return self

    @property
    def label(self) -> str:
        """Name of the method in evaluations after training: the algorithm's type."""
        return str(getattr(self, "type", "objective")).rpartition(":")[2]  # of an import path the class

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the starting policy is kept."""
        return self.kl_weight > 0

    @property
    def retrieves(self) -> bool:
        """Whether rollouts read a step-trace buffer, which the run then opens or fills."""
        return False

    @property
    def needs_experts(self) -> bool:
        """Whether every step requests solutions from the environment's experts."""
        return False

    @property
    def forks_by_replay(self) -> bool:
        """Whether rollouts fork, which may replay the actions of another rollout."""
        return False

    @property
    def drops_groups(self) -> bool:
        """Whether a step may play further tasks in place of groups that it does not train on."""
        return False

    @property
    def depends_on_num_steps(self) -> bool:
        """Whether a step with the same number differs between runs of different lengths."""
        return False

    @property
    def executes_retrieved(self) -> bool:
        """Whether retrieved steps are executed in the environment instead of only shown."""
        return False

    @property
    def tip_memory(self) -> "MemorySettings | None":
        """How tips are written and shown; None without tips."""
        return None

    def warnings(self, *, num_groups: int, num_tasks: int) -> list[str]:
        """One line for each setting that can never act in ``num_groups`` groups on ``num_tasks`` tasks."""
        return []

    def validate_run(self, run: "RunSettings") -> None:
        """Raise ValueError, with dotted keys, if the rest of the run does not fit these settings."""

    @property
    def rewards_kl(self) -> bool:
        """Whether advantages include a KL to the reference, which is then measured before them."""
        return False

    def old_logprobs(self, start_T: "Tensor", with_tips_T: "Tensor | None") -> "OldLogprobs":
        """Denominators of the importance ratio: ``start_T``, the policy's log-probs when the update began.

        ``with_tips_T`` are the log-probs in the context that the rollouts acted in, NaN if the context is
        the same; None if it is the same for all tokens.
        """
        from outrider.algorithms.losses import OldLogprobs

        return OldLogprobs(old_T=start_T, trainer_T=start_T)

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """The loss of every trained token, before the sampler correction and the weights of the
        aggregation.
        """
        from outrider.algorithms.losses import configured_loss

        return configured_loss(inputs, self)


class OffPolicyObjective(ObjectiveSettings):
    """Objective for rollouts whose tips the update leaves out (EMPO²).

    ``old_context``: the denominator of the ratio is the policy with tips (``acting``, the paper's Table 3) or
    without (``student``, its Algorithm 1). ``student_mask`` leaves tokens out that are less likely than
    ``min_probability``: each one by the student's own probability (``token``), or the ``turn`` that holds one
    by the acting policy's (released code).
    """

    old_context: Literal["acting", "student"] = "acting"
    student_mask: Literal["token", "turn", "none"] = "token"
    min_probability: float = Field(math.exp(-5.0), ge=0, lt=1)

    @model_validator(mode="after")
    def _maskable(self) -> "OffPolicyObjective":
        if self.loss.type == "gspo" and self.student_mask != "none":
            raise ValueError(
                "loss.type = gspo has one ratio a rollout, which student_mask cannot leave tokens out of"
            )
        if self.loss.type == "reinforce":
            raise ValueError(
                "loss.type = reinforce has no ratio, and rollouts without their tips are trained in "
                "another context"
            )
        return self

    def old_logprobs(self, start_T: "Tensor", with_tips_T: "Tensor | None") -> "OldLogprobs":
        """By ``old_context``, for the rollouts whose tips are left out."""
        from outrider.algorithms.losses import old_logprobs_without_tips

        return (
            super().old_logprobs(start_T, with_tips_T)
            if with_tips_T is None
            else old_logprobs_without_tips(start_T, with_tips_T, self)
        )

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """The named loss of the tokens that the student's mask keeps."""
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
    """Advantages per rollout of one group, and the algorithm's own measurements."""

    advantages: RolloutAdvantages
    measurements: dict[str, list[float]]


def total_returns(trace: Trace) -> list[float | None]:
    """The environments' returns plus the algorithm's own intrinsic rewards; None for a fault, which is in no
    statistic.
    """
    return [
        None if leaf.episode_return is None else leaf.episode_return + leaf.intrinsic
        for leaf, _ in trace.rollouts()
    ]


def with_values(advantages: RolloutAdvantages, values: Float64Array) -> RolloutAdvantages:
    """The same rollouts with other advantages ``values`` [N], such as those of a baseline of one's own.

    Rollouts without a return keep 0. ``has_signal`` follows the new values: it is False if all of them are 0.
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
    """The advantages of one group; ``std_ddof`` is that of ``group_normalized``."""
    if kind == "leave_one_out":
        return leave_one_out_advantages_per_rollout(returns=returns)
    return group_normalized_advantages_per_rollout(
        returns=returns, std_ddof=std_ddof, normalize_std=kind == "group_normalized"
    )


def outcome_advantages(trace: Trace, kind: AdvantageKind) -> RolloutAdvantages:
    """The group's advantages from :func:`total_returns`."""
    return group_advantages(total_returns(trace), kind)


def require_unassigned(nodes: Iterable[Node]) -> None:
    """Raise ValueError for a node that has an advantage, or that several rollouts share."""
    seen: set[int] = set()
    for node in nodes:
        if node.credit is not None or node.shares is not None or id(node) in seen:
            raise ValueError(f"node {node.node_id} already has credit")
        seen.add(id(node))


def assign_advantages(
    trace: Trace,
    advantages: RolloutAdvantages,
    ratio_scales: Sequence[float] | None = None,
    *,
    attribution: Attribution | None = None,
) -> None:
    """Give every trainable token of a rollout its advantage; rollouts without a return stay unassigned.

    ``attribution`` says what a node that several rollouts share gets (ARPO, arXiv 2507.19849, section 3.2):
    ``soft`` every rollout's own advantage, counted once per rollout; ``hard`` the mean over its rollouts,
    counted once. Raises ValueError for a shared node without it, and for ``hard`` where the rollouts scale
    their ratios differently.
    """
    scales = ratio_scales if ratio_scales is not None else [1.0] * len(advantages.values)
    users: dict[int, list[tuple[int, float, float]]] = {}
    values, assigned = np.asarray(advantages.values).tolist(), advantages.assigned.tolist()
    for (leaf, path), value, has_return, scale in zip(
        trace.rollouts(), values, assigned, scales, strict=True
    ):
        leaf.advantage = value if has_return else None
        for node in path if has_return else ():
            if node.receives_advantages:
                users.setdefault(node.node_id, []).append((leaf.rollout, value, scale))
    for node_id, shared in users.items():
        node = trace.nodes[node_id]
        if node.credit is not None or node.shares is not None or (len(shared) > 1 and attribution is None):
            raise ValueError(f"node {node_id} already has credit")
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
    """Selects the groups of a step to train on; further tasks replace the others.

    After ``max_extra_batches`` further rounds the step trains on the groups that it has.
    """

    select: Callable[[Sequence[Trace]], list[Trace]]
    max_extra_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """Tasks of a training step: the next ``num_groups`` in the run's order, or these ``tasks``, which do not
    advance the order. ``groups`` filters the groups that were played (None: train on all).
    """

    num_groups: int
    tasks: Sequence[Task] | None = None
    groups: GroupFilter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Further ``groups`` with advantages that join a step, metrics, and the reasons of ``lost`` rollouts."""

    groups: list[Trace] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


class StepPlay(Protocol):
    """Plays further rollouts for an algorithm in a training step, within the limits of the run."""

    def request_expert_paths(self, tasks: Sequence[Task]) -> tuple[ExpertPaths, list[str]]:
        """Expert steps by task key (None: there is no expert), and the reasons of failed requests."""

    def play_experts(self, tasks: Sequence[Task], paths: ExpertPaths) -> list[Trace]:
        """One rollout per task that follows these steps, in the state that the task's group began in."""


class Algorithm:
    """Base class of algorithms: you override :meth:`assign_advantages` and what else differs from GRPO.

    ``objective`` has the settings of the loss, ``hooks`` act inside the rollouts, ``modes[i]`` is the mode of
    rollout i of a group, and ``metrics`` declares measurements beside those of
    :mod:`outrider.metrics.registry`. A plug-in has a class ``Settings`` (a subclass of
    :class:`ObjectiveSettings`) and is made by ``build(settings, context)`` with an
    :class:`AlgorithmContext`, or of its settings alone.
    """

    metrics: ClassVar[Sequence[Metric]] = ()
    objective: ObjectiveSettings
    hooks: tuple[Hook, ...] = ()
    modes: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept ``credit``, the old name of :meth:`assign_advantages`, for one more version."""
        super().__init_subclass__(**kwargs)
        if "credit" in vars(cls) and "assign_advantages" not in vars(cls):
            warnings.warn(
                f"{cls.__name__}.credit is now assign_advantages; the old name goes with the next version",
                FutureWarning,
                stacklevel=2,
            )
            cls.assign_advantages = vars(cls)["credit"]  # type: ignore[method-assign]

    @property
    def label(self) -> str:
        """Name of the method in evaluations after training."""
        return self.objective.label

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """The modes of the rollouts of group number ``group`` of a training step."""
        return self.modes

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        """Choose training ``tasks``; by default the next ``num_groups`` (``train.tasks_per_step``)."""
        return TaskChoice(num_groups=num_groups)

    def augment(self, traces: Sequence[Trace], *, step: int, play: StepPlay) -> Augmentation:
        """Add rollouts to the played ``traces`` in place, and return further groups to train on."""
        return Augmentation()

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Write ``credit`` and ``ratio_scale`` on the trainable nodes of every rollout that has a
        return.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither assign_advantages nor advantages")

    def advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """:meth:`assign_advantages` of all groups of a step, one entry a trace; override it for statistics
        that span groups.
        """
        return [self.assign_advantages(trace) for trace in traces]

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """The loss of every trained token; by default the objective's."""
        return self.objective.token_loss(inputs)

    def measure(self, traces: Sequence[Trace]) -> dict[str, float]:
        """Metrics of a step's groups after their advantages, by their declared names."""
        return {}

    @property
    def remembers(self) -> bool:
        """Whether there is a :meth:`state`, which a checkpoint then has to hold."""
        return type(self).state is not Algorithm.state

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Memories as plain data and arrays, for a checkpoint.

        With ``cluster.max_staleness`` 1 a checkpoint comes between the rollouts of a step and its
        :meth:`measure`: include what hooks have counted for it.
        """
        return {}, {}

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Restore what :meth:`state` returned."""

    def memory_changes(self) -> list[MemoryChange]:
        """Additions to and removals from memories since the last call, recorded with every step."""
        return []

    def counts(self) -> list[dict[str, int]]:
        """Counts of the hooks over the whole run. Checkpoints store them; a step's metrics are their
        increments.
        """
        return []

    def restore_counts(self, saved: Sequence[Mapping[str, int]]) -> None:
        """Restore what :meth:`counts` returned."""

    def discard_step(self) -> None:
        """Forget what the hooks have counted in the rollouts of a step that will be generated again."""


Demonstrations = Mapping[str, Sequence[Step] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmContext:
    """What a run provides to ``build(settings, context)`` of its algorithm.

    ``groups_per_step`` groups are played in each of ``num_training_steps`` steps. ``max_response_tokens`` is
    the limit of a rollout. ``count_tokens`` counts the tokens of a text inside a message. ``is_stateful``:
    actions change the hidden state of the environment. ``buffer`` is None unless
    ``ObjectiveSettings.retrieves``. ``read_demonstrations`` reads a file of trajectories, by task key, for
    ``train_tasks``, and raises DataError.
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


deprecated.keep_old_names(__name__)
