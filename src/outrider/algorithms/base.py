"""The settings of a loss, and how advantages are written on a trace; what an algorithm is:
:mod:`outrider.algorithms.algorithm`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.common.advantages import (
    Float64Array,
    RolloutAdvantages,
    group_normalized_advantages_per_rollout,
    leave_one_out_advantages_per_rollout,
)
from outrider.algorithms.common.loss_settings import (
    ClipLoss,
    LossSettings,
    RejectionMask,
    SamplerCorrection,
    require_new_fields,
    require_new_spelling,
)
from outrider.config import Settings
from outrider.trace import Share, Trace

if TYPE_CHECKING:  # settings are read without torch, and losses are imported where one is computed
    from torch import Tensor

    from outrider.algorithms.common.token_loss import OldLogprobs, TokenLoss, TokenLossInputs
    from outrider.algorithms.empo2.hook import MemorySettings
    from outrider.train.settings import RunSettings

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
    def _reject_old_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            require_new_spelling(data)
        return data

    @model_validator(mode="after")
    def _consistent(self) -> "ObjectiveSettings":
        if (self.aggregation in ("constant_length", "sum_over_length")) != (self.max_length is not None):
            raise ValueError(
                "max_length belongs to aggregation = constant_length or sum_over_length and to no other"
            )
        return self

    def idle(self) -> frozenset[str]:
        """The kind of a KL that nothing weighs."""
        return frozenset() if self.kl_weight else frozenset({"kl_estimator"})

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
        """Whether the environment's experts are asked in every step."""
        return False

    @property
    def forks_by_replay(self) -> bool:
        """Whether a rollout may go on from the middle of another one, whose actions are then played again."""
        return False

    @property
    def drops_groups(self) -> bool:
        """Whether further tasks may be played in a step for groups that are not trained on."""
        return False

    @property
    def depends_on_num_steps(self) -> bool:
        """Whether a step is another one in a longer run."""
        return False

    @property
    def executes_retrieved(self) -> bool:
        """Whether retrieved steps are done in the environment, and not only shown."""
        return False

    @property
    def tip_memory(self) -> "MemorySettings | None":
        """How tips are written and shown; None where nobody reads any."""
        return None

    def warnings(self, *, num_groups: int, num_tasks: int) -> list[str]:
        """Names what ``num_groups`` groups on ``num_tasks`` training tasks can never do, a line each."""
        return []

    def validate_run(self, run: "RunSettings") -> None:
        """Raises ValueError, with dotted keys, where the rest of the run does not go with these settings."""

    @property
    def rewards_kl(self) -> bool:
        """Whether advantages count a KL to the reference, which is then measured before them."""
        return False

    def old_logprobs(self, start_T: "Tensor", with_tips_T: "Tensor | None") -> "OldLogprobs":
        """Denominators of the importance ratio: the policy's log-probs when the update began, ``start_T``.

        ``with_tips_T`` are those in the context that the rollouts acted in, NaN where it is the same one; None:
        everywhere.
        """
        from outrider.algorithms.common.token_loss import OldLogprobs

        return OldLogprobs(old_T=start_T, trainer_T=start_T)

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """The loss of every trained token, before the sampler correction and the weights of the
        aggregation.
        """
        from outrider.algorithms.common.loss_kinds import configured_loss

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
        from outrider.algorithms.common.loss_kinds import old_logprobs_without_tips

        return (
            super().old_logprobs(start_T, with_tips_T)
            if with_tips_T is None
            else old_logprobs_without_tips(start_T, with_tips_T, self)
        )

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """The named loss, of the tokens that the student's mask keeps."""
        from outrider.algorithms.common.loss_kinds import measure_without_tips_mask

        loss, is_without_tips_T = super().token_loss(inputs), inputs.old_logprobs.is_without_tips_T
        return (
            loss
            if is_without_tips_T is None
            else replace(
                loss, losses=loss.losses * measure_without_tips_mask(inputs, self, is_without_tips_T)
            )
        )


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
