"""The settings of a loss, and how advantages are written on a trace; what an algorithm is:
:mod:`outrider.algorithms.algorithm`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.common.advantages import (
    Float64Array,
    GroupAdvantages,
    group_normalized_advantages_per_rollout,
    leave_one_out_advantages_per_rollout,
)
from outrider.config import Settings
from outrider.trace import Share, Trace

if TYPE_CHECKING:  # settings are read without torch, and losses are imported where one is computed
    from torch import Tensor

    from outrider.algorithms.common.token_loss import Denominators, TokenLoss, TokenLossInputs
    from outrider.algorithms.empo2.hook import MemorySettings

Attribution = Literal["soft", "hard"]
AdvantageKind = Literal["group_normalized", "group_centered", "leave_one_out"]
LossKind = Literal["clip", "gppo", "cispo", "gspo", "reinforce"]


class RejectionMask(Settings):
    """Leaves tokens out of the update on which engine and trainer disagree
    (:mod:`outrider.algorithms.common.sampler_correction`).

    ``statistic`` of the log-ratio d = log trainer - log engine: ``k1`` = -d, ``k2`` = d^2 / 2, ``k3`` =
    exp(d) - 1 - d; ``scope`` takes each token's own value, or the sum, mean or maximum over its rollout,
    which then goes as a whole. The bounds of k1 are ratios engine / trainer (``lower`` None: 1 / ``upper``),
    that of k2 and k3 is one on the value.
    """

    statistic: Literal["k1", "k2", "k3"] = "k1"
    scope: Literal["token", "sum", "mean", "max"] = "token"
    upper: float = Field(2.0, gt=0)
    lower: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _bounded(self) -> "RejectionMask":
        if self.statistic != "k1" and self.lower is not None:
            raise ValueError(f"{self.statistic} is never negative: it has no lower bound")
        if self.statistic == "k1" and self.scope == "max":
            raise ValueError("k1 has a sign: its maximum over a rollout says nothing about the other side")
        if self.statistic == "k1" and (self.lower or 1.0 / self.upper) >= self.upper:
            raise ValueError(
                "the bounds of k1 are ratios with lower < upper; without lower, upper is above 1"
            )
        return self


class ObjectiveSettings(Settings):
    """The clipped policy-gradient objective that the group methods share.

    ``clip_low`` and ``clip_high`` bound the ratio at 1 - low and 1 + high; ``keep_clipped_gradient`` keeps
    the gradient of a token that the upper bound clips (AEPO); ``dual_clip`` (None: off) bounds the loss of
    negative advantages; ``max_length`` is the constant of Dr. GRPO's aggregation and of LUFFY's;
    ``sampler_correction`` caps the token weight trainer / engine (None: off); ``kl_weight`` 0 keeps no
    reference model.

    ``loss`` is the token loss (docs/algorithms/objectives.md). ``ratio_cap`` and ``ratio_floor`` are CISPO's
    bounds on the ratio itself. ``sampler_level`` says whose ratio is corrected, ``sampler_floor`` bounds it
    from below, and ``sampler_outside`` whether a weight outside is put on the bound or to 0.
    ``sampler_rejection`` leaves tokens or rollouts out instead, or as well; the denominators stay.
    ``sequence_ratio`` is GSPO's ratio of a rollout: differentiated token by token, as a whole, or as a
    ``product`` without the length. ``positive_nll`` adds that much of the mean negative log-likelihood over
    the tokens of successful rollouts.
    """

    if TYPE_CHECKING:
        type: str = ""  # the plug-in's name; a class that does not declare it gets it when it is named

    group_size: int = Field(8, ge=2)
    advantage: AdvantageKind = "group_normalized"
    loss: LossKind = "clip"
    clip_low: float = Field(0.2, ge=0, le=1)
    clip_high: float = Field(0.2, ge=0)
    keep_clipped_gradient: bool = False
    dual_clip: float | None = Field(None, gt=1)
    ratio_cap: float | None = Field(None, gt=0)
    ratio_floor: float = Field(0.0, ge=0)
    aggregation: Literal[
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "constant_length",
        "sum_over_length",
    ] = "token_mean"
    max_length: int | None = Field(None, ge=1)
    sampler_correction: float | None = Field(2.0, gt=0)
    sampler_level: Literal["token", "sequence", "geometric"] = "token"
    sampler_floor: float | None = Field(None, ge=0)
    sampler_outside: Literal["truncate", "zero"] = "truncate"
    sampler_rejection: RejectionMask | None = None
    sequence_ratio: Literal["token", "sequence", "product"] = "token"
    positive_nll: float = Field(0.0, ge=0)
    kl_weight: float = Field(0.0, ge=0)
    kl_estimator: Literal["k2", "k3", "k3_ratio"] = "k2"

    @model_validator(mode="after")
    def _consistent(self) -> "ObjectiveSettings":
        if (self.aggregation in ("constant_length", "sum_over_length")) != (self.max_length is not None):
            raise ValueError(
                "max_length belongs to aggregation = constant_length or sum_over_length and to no other"
            )
        if (self.loss == "cispo") != (self.ratio_cap is not None):
            raise ValueError("ratio_cap belongs to loss = cispo and to no other")
        if self.ratio_floor >= (self.ratio_cap or math.inf) or (
            self.ratio_floor > 0 and self.loss != "cispo"
        ):
            raise ValueError("ratio_floor belongs to loss = cispo and lies below ratio_cap")
        if self.keep_clipped_gradient and self.loss != "clip":
            raise ValueError("keep_clipped_gradient belongs to loss = clip")
        if self.dual_clip is not None and self.loss not in ("clip", "gppo"):
            raise ValueError(f"loss = {self.loss} has no dual clip")
        if (self.sampler_floor or 0.0) >= (self.sampler_correction or math.inf):
            raise ValueError("sampler_floor lies below sampler_correction")
        bounds = (self.sampler_level, self.sampler_floor, self.sampler_outside)
        if self.sampler_correction is None and bounds != ("token", None, "truncate"):
            raise ValueError(
                "sampler_level, sampler_floor and sampler_outside belong to a sampler_correction, which is none"
            )
        if self.sequence_ratio != "token" and self.loss != "gspo":
            raise ValueError("sequence_ratio belongs to loss = gspo")
        return self

    @property
    def label(self) -> str:
        """What evaluations after training call it: the algorithm's type."""
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
    def asks_experts(self) -> bool:
        """Whether the environment's experts are asked in every step."""
        return False

    @property
    def forks_by_replay(self) -> bool:
        """Whether a rollout may go on from the middle of another one, whose actions are then played again."""
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
        """What a run of ``num_groups`` groups on ``num_tasks`` training tasks could never do, a line each."""
        return []

    @property
    def rewards_kl(self) -> bool:
        """Whether advantages count a KL to the reference, which is then measured before them."""
        return False

    def denominators(self, start_T: "Tensor", acting_T: "Tensor | None") -> "Denominators":
        """What divides the ratio of T trained tokens: the policy's log-probs when the update began,
        ``start_T``.

        ``acting_T`` are those in the context that the rollouts acted in, NaN where it is the same one; None:
        everywhere.
        """
        from outrider.algorithms.common.token_loss import Denominators

        return Denominators(old_T=start_T, trainer_T=start_T)

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """The loss of every trained token, before the sampler correction and the weights of the
        aggregation.
        """
        from outrider.algorithms.common.loss_kinds import named_loss

        return named_loss(inputs, self)


class OffPolicyObjective(ObjectiveSettings):
    """What the update does with rollouts whose tips it leaves out (EMPO²).

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
        if self.loss == "gspo" and self.student_mask != "none":
            raise ValueError(
                "loss = gspo has one ratio a rollout, which student_mask cannot leave tokens out of"
            )
        if self.loss == "reinforce":
            raise ValueError(
                "loss = reinforce has no ratio, and rollouts without their tips are trained in another context"
            )
        return self

    def denominators(self, start_T: "Tensor", acting_T: "Tensor | None") -> "Denominators":
        """By ``old_context``, for the rollouts whose tips are left out."""
        from outrider.algorithms.common.loss_kinds import without_tips

        return (
            super().denominators(start_T, acting_T)
            if acting_T is None
            else without_tips(start_T, acting_T, self)
        )

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """The named loss, of the tokens that the student's mask keeps."""
        from outrider.algorithms.common.loss_kinds import measured_student_mask

        found, is_off_T = super().token_loss(inputs), inputs.denominators.is_off_T
        return (
            found
            if is_off_T is None
            else replace(found, losses=found.losses * measured_student_mask(inputs, self, is_off_T))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCredit:
    """What credit assignment found in one group: advantages per rollout and the algorithm's own
    measurements.
    """

    advantages: GroupAdvantages
    measurements: dict[str, list[float]]


def credited_returns(trace: Trace) -> list[float | None]:
    """The environments' returns plus the algorithm's own intrinsic rewards; None for a fault, which is in no
    statistic.
    """
    return [
        None if leaf.episode_return is None else leaf.episode_return + leaf.intrinsic
        for leaf, _ in trace.rollouts()
    ]


def group_advantages(
    returns: Sequence[float | None] | Float64Array, kind: AdvantageKind, *, std_ddof: Literal[0, 1] = 1
) -> GroupAdvantages:
    """The advantages of one group; ``std_ddof`` is that of ``group_normalized``."""
    if kind == "leave_one_out":
        return leave_one_out_advantages_per_rollout(returns=returns)
    return group_normalized_advantages_per_rollout(
        returns=returns, std_ddof=std_ddof, normalize_std=kind == "group_normalized"
    )


def outcome_advantages(trace: Trace, kind: AdvantageKind) -> GroupAdvantages:
    """The group's advantages from :func:`credited_returns`."""
    return group_advantages(credited_returns(trace), kind)


def write_credit(
    trace: Trace,
    advantages: GroupAdvantages,
    ratio_scales: Sequence[float] | None = None,
    *,
    attribution: Attribution | None = None,
) -> None:
    """Give every trainable token of a rollout its advantage; rollouts without a return stay unassigned.

    ``attribution`` says what a node that several rollouts share gets (ARPO, arXiv 2507.19849, section 3.2):
    ``soft`` every rollout's own advantage, counted once a rollout; ``hard`` the mean over its rollouts,
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
            if node.takes_credit:
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
        rollouts, credits_, node_scales = zip(*shared, strict=True)
        if len(set(node_scales)) > 1:
            raise ValueError(
                f"hard attribution: the rollouts of node {node_id} scale their ratios differently"
            )
        node.credit = (sum(credits_) / len(credits_),) * len(node.token_ids)
        node.ratio_scale = node_scales[0]
        node.owner = rollouts[0] if len(shared) > 1 else None
