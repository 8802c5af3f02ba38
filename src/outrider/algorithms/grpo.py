"""The GRPO family: GRPO (arXiv 2402.03300), REINFORCE++ (arXiv 2501.03262) and rejection sampling (RAFT,
arXiv 2304.06767).

Dr. GRPO, DAPO, GPPO, GSPO, CISPO and RLOO are presets of GRPO (:mod:`outrider.algorithms.presets`), and every
part of them is a setting. Formulas are in :mod:`outrider.algorithms.advantages`; sources and deviations in
docs/algorithms/objectives.md.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.advantages import (
    NoSignalReason,
    RolloutAdvantages,
    Variance,
    batch_scaled_advantages_per_rollout,
    groups_with_spread,
    leave_one_out_batch_normalized_advantages_per_rollout,
    overlong_penalty,
    reinforce_plus_plus_advantages_per_token,
    reinforce_plus_plus_baseline_advantages_per_token,
)
from outrider.algorithms.base import (
    AdvantageKind,
    Algorithm,
    AlgorithmContext,
    GroupAdvantages,
    GroupFilter,
    ObjectiveSettings,
    TaskChoice,
    assign_advantages,
    group_advantages,
    require_unassigned,
    total_returns,
)
from outrider.algorithms.loss_settings import LossSettings, ReinforceLoss, SamplerCorrection
from outrider.algorithms.presets import (
    GRPO_PRESETS,
    REINFORCE_PLUS_PLUS_PRESETS,
    GrpoPreset,
    ReinforcePlusPlusPreset,
)
from outrider.config import Settings
from outrider.rollout.hooks import ON_POLICY, Hook
from outrider.rollout.settings import Limits
from outrider.trace import Leaf, Node, Trace
from outrider.types import Origin, Task

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings


_BUFFER_SHARE = 5  # of the released script: 4096 of 20480 tokens


class OverlongSettings(Settings):
    """DAPO's soft punishment (arXiv 2503.14476, Eq. 13): 0 to -``factor`` over the last ``buffer`` tokens
    before ``max_tokens``.

    ``max_tokens`` None is the run's ``rollout.max_response_tokens``, ``buffer`` None a fifth of it, as in the
    released script. ``counted``: the tokens that the policy wrote, or all after the prompt (released code).
    """

    max_tokens: int | None = Field(None, ge=1)
    buffer: int | None = Field(None, ge=1)
    factor: float = Field(1.0, gt=0)
    counted: Literal["policy", "all"] = "policy"

    @model_validator(mode="after")
    def _validate(self) -> "OverlongSettings":
        if self.buffer is not None and self.max_tokens is not None and self.buffer > self.max_tokens:
            raise ValueError(f"overlong.buffer {self.buffer} exceeds overlong.max_tokens {self.max_tokens}")
        return self

    def bounds(self, max_response_tokens: int) -> tuple[int, int]:
        """Longest length and buffer. Raises ValueError for a punishment that no rollout of that length could
        reach.
        """
        longest = self.max_tokens or max_response_tokens
        buffer = self.buffer or max(1, longest // _BUFFER_SHARE)
        if buffer > longest or longest - buffer >= max_response_tokens:
            raise ValueError(
                f"the overlong punishment begins after {longest - buffer} tokens, "
                f"and a response has at most {max_response_tokens}: "
                "set overlong.max_tokens and overlong.buffer"
            )
        return longest, buffer


class DynamicSamplingSettings(Settings):
    """DAPO's dynamic sampling: groups whose ``metric`` is constant are left out, and as many further tasks
    are played instead.

    ``metric`` is unshaped: the environment's return, or its verdict ``success``. After ``max_extra_batches``
    further rounds (the released script stops after ten in all) the step trains on the groups that it has, and
    says so.
    """

    metric: Literal["return", "success"] = "return"
    max_extra_batches: int = Field(9, ge=0)


class GroupSettings(ObjectiveSettings):
    """``overlong`` and ``dynamic_sampling`` are DAPO's. ``reward_kl_weight`` subtracts that much of k1 = log
    pi_old - log reference from the reward, without gradient: summed over a rollout, or token by token in
    REINFORCE++. The recorded return stays the environment's.
    """

    overlong: OverlongSettings | None = None
    dynamic_sampling: DynamicSamplingSettings | None = None
    reward_kl_weight: float = Field(0.0, ge=0)

    @property
    def label(self) -> str:
        """The preset's name."""
        return str(getattr(self, "preset", "")) or super().label

    @property
    def needs_reference(self) -> bool:
        return self.kl_weight > 0 or self.reward_kl_weight > 0

    @property
    def drops_groups(self) -> bool:
        return self.dynamic_sampling is not None

    @property
    def rewards_kl(self) -> bool:
        return self.reward_kl_weight > 0

    def validate_run(self, run: "RunSettings") -> None:
        """Raise ValueError for a punishment of length that no response could reach."""
        if self.overlong is not None:
            self.overlong.bounds(run.rollout.max_response_tokens)


def measured_kl(node: Node) -> tuple[float, ...]:
    """The KL of a policy node's tokens. Raises ValueError if it was not measured."""
    if len(node.kl) != len(node.token_ids):
        raise ValueError(f"reward_kl_weight: no KL was measured on node {node.node_id}")
    return node.kl


def groups_worth_training(traces: Sequence[Trace], rule: DynamicSamplingSettings) -> list[Trace]:
    """The groups whose metric is not constant, in order; faults do not count."""
    metric: list[float | None] = []
    groups: list[int] = []
    for number, trace in enumerate(traces):
        for leaf, _ in trace.rollouts():
            value = leaf.episode_return if rule.metric == "return" else float(leaf.success)
            metric.append(None if leaf.episode_return is None else value)
            groups.append(number)
    informative = groups_with_spread(metric, groups=groups)
    return [trace for number, trace in enumerate(traces) if number in informative]


class OnPolicyGroup(Algorithm):
    """``group_size`` rollouts per group, all by the policy alone."""

    settings: ObjectiveSettings

    def __init__(self, settings: ObjectiveSettings, *, hooks: tuple[Hook, ...] = ()) -> None:
        self.settings = settings
        self.objective = settings
        self.hooks = hooks
        self.modes = (ON_POLICY,) * settings.group_size


class OnPolicyBatch(OnPolicyGroup):
    """A method whose advantages may span all groups of a step: a subclass overrides :meth:`advantages`.

    ``max_response_tokens`` is the limit of the run.
    """

    settings: GroupSettings

    def __init__(
        self, settings: GroupSettings, *, max_response_tokens: int = Limits().max_response_tokens
    ) -> None:
        super().__init__(settings)
        self._max_response_tokens = max_response_tokens

    @classmethod
    def build(cls, settings: GroupSettings, context: AlgorithmContext) -> Self:
        return cls(settings, max_response_tokens=context.max_response_tokens)

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        return self.advantages([trace])[0]

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        """The next tasks; with dynamic sampling, further ones replace groups that are left out."""
        rule = self.settings.dynamic_sampling
        if rule is None:
            return TaskChoice(num_groups=num_groups)
        select = partial(groups_worth_training, rule=rule)
        return TaskChoice(
            num_groups=num_groups, groups=GroupFilter(select=select, max_extra_batches=rule.max_extra_batches)
        )

    def _shape_returns(self, traces: Sequence[Trace], *, sum_kl: bool = True) -> list[dict[str, list[float]]]:
        """Write the punishment of length, and with ``sum_kl`` the rollout's KL, into ``leaf.intrinsic``.

        Returns the measurements of each group. Raises ValueError if the reward needs a KL that was not
        measured.
        """
        overlong, kl_weight = self.settings.overlong, self.settings.reward_kl_weight
        measurements: list[dict[str, list[float]]] = []
        for trace in traces:
            penalties: list[float] = []
            kls: list[float] = []
            for leaf, path in trace.scored_rollouts():
                shaping = 0.0
                if overlong is not None:
                    longest, buffer = overlong.bounds(self._max_response_tokens)
                    counts_all = overlong.counted == "all"
                    length = sum(
                        len(node.token_ids)
                        for node in path
                        if node.trainable or (counts_all and node.origin is not Origin.PROMPT)
                    )
                    shaping += overlong_penalty(
                        length=length, max_length=longest, buffer=buffer, factor=overlong.factor
                    )
                    penalties.append(shaping)
                if kl_weight > 0:
                    kl = math.fsum(value for node in path if node.trainable for value in measured_kl(node))
                    kls.append(kl)
                    shaping -= kl_weight * kl if sum_kl else 0.0
                leaf.intrinsic = shaping
            measurements.append({"reward/overlong_mean": penalties, "reward/kl_mean": kls})
        return measurements


class GrpoSettings(GroupSettings):
    """``advantage_std`` divides the advantage: the group's ``sample`` or ``population`` std, or that of the
    whole ``batch``, which spans all groups of a step (TRL: ``scale_rewards = "batch"``, and
    ``normalize_advantages`` with leave-one-out).

    A ``preset`` fills what is not given.
    """

    presets = GRPO_PRESETS

    type: Literal["grpo"] = "grpo"
    preset: GrpoPreset = "grpo"
    advantage_std: Literal["sample", "population", "batch"] = "sample"

    @model_validator(mode="after")
    def _validate(self) -> "GrpoSettings":
        if self.advantage_std == "population" and self.advantage != "group_normalized":
            raise ValueError(f"advantage_std = population has no meaning with advantage = {self.advantage}")
        if self.advantage_std == "batch" and self.advantage == "group_centered":
            raise ValueError("advantage = group_centered divides by no std: leave advantage_std out")
        return self


class Grpo(OnPolicyBatch):
    """One advantage per rollout."""

    Settings = GrpoSettings
    settings: GrpoSettings

    def advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """Advantages of the shaped returns on every policy token."""
        chosen = self.settings
        measured = self._shape_returns(traces)
        returns = [total_returns(trace) for trace in traces]
        std_ddof: Literal[0, 1] = 0 if chosen.advantage_std == "population" else 1
        results = [group_advantages(group, chosen.advantage, std_ddof=std_ddof) for group in returns]
        if chosen.advantage_std == "batch" and results:
            over_batch = (
                leave_one_out_batch_normalized_advantages_per_rollout
                if chosen.advantage == "leave_one_out"
                else batch_scaled_advantages_per_rollout
            )
            values = over_batch(
                returns=[value for group in returns for value in group],
                groups=[number for number, group in enumerate(returns) for _ in group],
            )
            bounds = np.cumsum([len(group) for group in returns])[:-1]
            parts = np.split(values, bounds)
            results = [replace(group, values=part) for group, part in zip(results, parts, strict=True)]
        for trace, advantages in zip(traces, results, strict=True):
            assign_advantages(trace, advantages)
        return [
            GroupAdvantages(advantages=result, measurements=values)
            for result, values in zip(results, measured, strict=True)
        ]


class ReinforcePlusPlusSettings(GroupSettings):
    """``group_baseline`` takes the group's mean from the return before whitening (REINFORCE++-baseline);
    without it a group of one will do, and ``gamma`` discounts over policy tokens. ``variance`` is that of the
    whitening. A ``preset`` fills what is not given.
    """

    presets = REINFORCE_PLUS_PLUS_PRESETS

    type: Literal["reinforce++"] = "reinforce++"
    preset: ReinforcePlusPlusPreset = "reinforce++"
    group_size: int = Field(8, ge=1)
    advantage: AdvantageKind = "group_centered"
    group_baseline: bool = False
    gamma: float = Field(1.0, ge=0, le=1)
    variance: Variance = "sample"

    @model_validator(mode="after")
    def _validate(self) -> "ReinforcePlusPlusSettings":
        if self.advantage != "group_centered":
            raise ValueError(
                "REINFORCE++ whitens over the batch: leave advantage out "
                "(group_baseline = true centres in the group)"
            )
        if self.group_baseline and self.group_size < 2:
            raise ValueError("group_baseline = true needs group_size >= 2: a group of one has no baseline")
        if self.group_baseline and (self.gamma != 1.0 or self.reward_kl_weight > 0):
            raise ValueError(
                "group_baseline = true has one value a rollout: no gamma, "
                "and a KL in the loss (kl_weight) instead"
            )
        return self


class ReinforcePlusPlus(OnPolicyBatch):
    """One advantage per token, whitened over all policy tokens of a step."""

    Settings = ReinforcePlusPlusSettings
    settings: ReinforcePlusPlusSettings

    def advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """Whitened advantages on every policy token; ``advantages`` holds their mean over each rollout.

        Raises ValueError for a node that several rollouts share: it would need the advantage of each.
        """
        chosen = self.settings
        scored = [
            (number, leaf, [node for node in path if node.trainable])
            for number, trace in enumerate(traces)
            for leaf, path in trace.scored_rollouts()
        ]
        nodes = [node for _, _, own in scored for node in own]
        require_unassigned(nodes)
        measured = self._shape_returns(traces, sum_kl=False)
        returns = [(leaf.episode_return or 0.0) + leaf.intrinsic for _, leaf, _ in scored]
        owners = [
            rollout for rollout, (_, _, own) in enumerate(scored) for node in own for _ in node.token_ids
        ]
        if chosen.group_baseline:
            token_advantages = reinforce_plus_plus_baseline_advantages_per_token(
                returns=returns,
                groups=[number for number, _, _ in scored],
                rollout_index=owners,
                variance=chosen.variance,
            )
        else:
            kl = None
            if chosen.reward_kl_weight > 0:
                kl = np.array([value for node in nodes for value in measured_kl(node)], dtype=np.float64)
            token_advantages = reinforce_plus_plus_advantages_per_token(
                returns=returns,
                rollout_index=owners,
                gamma=chosen.gamma,
                kl_per_token=kl,
                kl_weight=chosen.reward_kl_weight,
                variance=chosen.variance,
            )
        values = iter(token_advantages.tolist())
        for _, leaf, own in scored:
            for node in own:
                node.credit = tuple(next(values) for _ in node.token_ids)
            written = [value for node in own for value in node.credit or ()]
            leaf.advantage = fmean(written) if written else 0.0
        return [
            GroupAdvantages(advantages=_summary(trace), measurements=own)
            for trace, own in zip(traces, measured, strict=True)
        ]


def _summary(trace: Trace) -> RolloutAdvantages:
    """A group has a signal as soon as one of its tokens has."""
    rollouts = list(trace.rollouts())
    assigned = np.array([leaf.episode_return is not None for leaf, _ in rollouts])
    has_signal = any(value != 0.0 for _, path in rollouts for node in path for value in node.credit or ())
    reason: NoSignalReason | None = "no_spread" if assigned.any() else "unscorable"
    return RolloutAdvantages(
        values=np.array([leaf.advantage or 0.0 for leaf, _ in rollouts]),
        assigned=assigned,
        has_signal=has_signal,
        reason=None if has_signal else reason,
    )


class RejectionSettings(ObjectiveSettings):
    """Imitate the policy's own rollouts that were good enough, and nothing else: a policy gradient with
    advantages 0 and 1, without a baseline or a negative signal. Rejected rollouts are in no denominator, so
    that the loss is the mean negative log-likelihood over the tokens of the kept ones.

    Rollouts whose return, the environment's own, is at least ``threshold`` may be kept.

    ``keep``: of a task's, ``all`` (at most ``max_kept``, the first ones), the ``best``, or the ``first``.
    ``deduplicate`` counts rollouts in which the policy wrote the same tokens once. A ``loss.type`` other
    than ``reinforce`` clips what several optimiser steps do to a kept rollout.
    """

    type: Literal["rejection"] = "rejection"
    advantage: AdvantageKind = "group_centered"
    loss: LossSettings = ReinforceLoss()
    sampler_correction: SamplerCorrection | None = None
    threshold: float = 1.0
    keep: Literal["all", "best", "first"] = "all"
    max_kept: int | None = Field(None, ge=1)
    deduplicate: bool = True

    @model_validator(mode="after")
    def _validate(self) -> "RejectionSettings":
        if self.advantage != "group_centered":
            raise ValueError("rejection sampling has advantages of 0 and 1: leave advantage out")
        if self.aggregation != "token_mean":
            raise ValueError(
                "rejection sampling averages over the tokens of the kept rollouts: aggregation = token_mean"
            )
        if self.positive_nll > 0:
            raise ValueError(
                "rejection sampling is a negative log-likelihood of its own: leave positive_nll out"
            )
        if self.max_kept is not None and self.keep != "all":
            raise ValueError(f"keep = {self.keep} keeps one rollout a task: leave max_kept out")
        return self


class Rejection(OnPolicyGroup):
    """On-policy rollouts; credit 1 for those that are kept."""

    Settings = RejectionSettings
    settings: RejectionSettings

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """1 on every policy token of a kept rollout; the advantage of the others is 0, and their tokens are
        not trained on.

        Raises ValueError for a node that several kept rollouts share.
        """
        rollouts = list(trace.rollouts())
        scored = [leaf for leaf, _ in rollouts if leaf.episode_return is not None]
        accepted = [(leaf, path) for leaf, path in rollouts if self._is_accepted(leaf)]
        selected = {leaf.rollout for leaf, _ in self._select(accepted)}
        for leaf, path in rollouts:
            leaf.advantage = None if leaf.episode_return is None else float(leaf.rollout in selected)
            for node in path if leaf.rollout in selected else ():
                if node.trainable and node.credit is not None:
                    raise ValueError(f"node {node.node_id} already has credit")
                if node.trainable:
                    node.credit = (1.0,) * len(node.token_ids)
        advantages = RolloutAdvantages(
            values=np.array([leaf.advantage or 0.0 for leaf, _ in rollouts]),
            assigned=np.array([leaf.episode_return is not None for leaf, _ in rollouts]),
            has_signal=bool(selected),
            reason=None if selected else "rejected" if scored else "unscorable",
        )
        measured = {
            "rejection/passed_fraction": [float(self._is_accepted(leaf)) for leaf in scored],
            "rejection/kept_fraction": [float(leaf.rollout in selected) for leaf in scored],
            "rejection/task_fraction": [float(bool(selected))] if scored else [],
        }
        return GroupAdvantages(advantages=advantages, measurements=measured)

    def _is_accepted(self, leaf: Leaf) -> bool:
        return leaf.episode_return is not None and leaf.episode_return >= self.settings.threshold

    def _select(self, accepted: Sequence[tuple[Leaf, list[Node]]]) -> Sequence[tuple[Leaf, list[Node]]]:
        chosen = self.settings
        if chosen.keep == "best":  # before equal texts are put together: of those the better one counts
            # stable: the first of equal ones
            return sorted(accepted, key=lambda rollout: -(rollout[0].episode_return or 0.0))[:1]
        if chosen.deduplicate:
            first: dict[tuple[tuple[int, ...], ...], tuple[Leaf, list[Node]]] = {}
            for leaf, path in accepted:
                first.setdefault(tuple(node.token_ids for node in path if node.trainable), (leaf, path))
            accepted = list(first.values())
        return accepted[: 1 if chosen.keep == "first" else chosen.max_kept]
