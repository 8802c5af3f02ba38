"""The GRPO family: GRPO (arXiv 2402.03300), REINFORCE++ (arXiv 2501.03262) and rejection sampling (RAFT,
arXiv 2304.06767).

Dr. GRPO, DAPO, GPPO, GSPO, CISPO and RLOO are presets of GRPO (:mod:`outrider.algorithms.presets`); every
component of them is a setting. Formulas are in :mod:`outrider.algorithms.advantages`; sources and deviations
in docs/algorithms/objectives.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from outrider.algorithms.advantages import (
    NoSignalReason,
    RolloutAdvantages,
    Variance,
    advantages_per_turn,
    batch_scaled_advantages_per_rollout,
    groups_with_spread,
    leave_one_out_batch_normalized_advantages_per_rollout,
    overlong_penalty,
    reinforce_plus_plus_advantages_per_token,
    reinforce_plus_plus_baseline_advantages_per_token,
    whitened_per_token,
)
from outrider.algorithms.base import (
    AdvantageKind,
    Algorithm,
    AlgorithmContext,
    Arrays,
    Augmentation,
    GroupAdvantages,
    GroupFilter,
    ObjectiveSettings,
    StepPlay,
    TaskChoice,
    TurnScoreSettings,
    outcome_advantages,
    require_unassigned,
    total_returns,
    turn_advantages,
    turn_scores,
    write_advantages,
)
from outrider.algorithms.loss_settings import LossSettings, ReinforceLoss, SamplerCorrection
from outrider.algorithms.prefix import GUIDED, PrefixHook, PrefixSettings, prefix_length
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
from outrider.types import Task

if TYPE_CHECKING:
    from outrider.training.settings import RunSettings


_BUFFER_SHARE = 5  # the buffer is 1/5 of max_tokens, as in the released script: 4096 of 20480 tokens


class OverlongSettings(Settings):
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13): 0 to -``factor`` over the last ``buffer``
    tokens before ``max_tokens``.

    ``max_tokens`` None is ``rollout.max_response_tokens``; ``buffer`` None is a fifth of it, as in the
    released script. ``counted``: the tokens that the policy sampled, or all after the prompt (released code).
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
        """Return the maximum length and the buffer, in tokens. Raises ValueError if no rollout can reach the
        penalised range.
        """
        longest = self.max_tokens or max_response_tokens
        buffer = self.buffer or max(1, longest // _BUFFER_SHARE)
        if buffer > longest or longest - buffer >= max_response_tokens:
            raise ValueError(
                f"the overlong penalty begins after {longest - buffer} tokens, "
                f"and a response has at most {max_response_tokens}: "
                "set overlong.max_tokens and overlong.buffer"
            )
        return longest, buffer


class DynamicSamplingSettings(Settings):
    """DAPO's dynamic sampling: the step drops groups whose ``metric`` is constant, or, without penalties,
    whose advantages are all 0, and samples as many additional tasks to replace them. With ``advantage =
    pass_at_k``, which reads verdicts only, the ``metric`` is not used.

    ``metric`` is unshaped: the environment's return, or its verdict ``success``. After ``max_extra_batches``
    additional rounds (the released script stops after ten in total), the step trains on the groups collected
    so far and logs that.
    """

    metric: Literal["return", "success"] = "return"
    max_extra_batches: int = Field(9, ge=0)


class GroupSettings(TurnScoreSettings):
    """``overlong`` and ``dynamic_sampling`` are those of DAPO. ``reward_kl_weight`` is the weight of a KL
    penalty in the reward, without gradient: k1 = log pi_old - log reference, summed over a rollout or, in
    REINFORCE++, per token. The recorded return remains that of the environment.
    """

    overlong: OverlongSettings | None = None
    """DAPO's penalty for answers close to the length limit."""
    dynamic_sampling: DynamicSamplingSettings | None = None
    """DAPO's replacement of groups whose rollouts all have the same reward."""
    prefix: PrefixSettings | None = None
    """Groups that start behind steps of the environment's experts (docs/algorithms/small_methods.md)."""
    reward_kl_weight: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _shaping_applies(self) -> Self:
        shaping = "overlong" if self.overlong is not None else "reward_kl_weight"
        if self.overlong is None and not self.reward_kl_weight:
            return self
        if self.advantage == "pass_at_k":
            raise ValueError(f"advantage = pass_at_k counts successes only: remove {shaping}")
        if self.advantage == "mean_normalized":
            raise ValueError(
                f"advantage = mean_normalized needs returns of at least 0: remove {shaping}, which subtracts "
                "from them"
            )
        return self

    @property
    def label(self) -> str:
        """Name of the preset."""
        return str(getattr(self, "preset", "")) or super().label

    @property
    def needs_reference(self) -> bool:
        return super().needs_reference or self.reward_kl_weight > 0

    @property
    def drops_groups(self) -> bool:
        return self.dynamic_sampling is not None

    @property
    def rewards_kl(self) -> bool:
        return self.reward_kl_weight > 0

    def validate_run(self, run: "RunSettings") -> None:
        """Raise ValueError for a length penalty that no response could reach, and for a prefix without
        experts or replay.
        """
        super().validate_run(run)
        if self.overlong is not None:
            self.overlong.bounds(run.max_rollout_tokens)
        if self.prefix is not None:
            self.prefix.validate_run(run)


def measured_kl(node: Node) -> tuple[float, ...]:
    """Return the KL of a policy node's tokens. Raises ValueError if it was not measured or is no number."""
    if len(node.kl) != len(node.token_ids):
        raise ValueError(f"reward_kl_weight: no KL was measured on node {node.node_id}")
    if not all(map(math.isfinite, node.kl)):
        raise ValueError(f"reward_kl_weight: the KL of a token of node {node.node_id} is not finite")
    return node.kl


def groups_worth_training(traces: Sequence[Trace], rule: DynamicSamplingSettings) -> list[Trace]:
    """Return the groups whose metric is not constant, in order; faulted rollouts do not count."""
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
    """``group_size`` rollouts per group, all sampled by the policy without expert or retrieved steps."""

    settings: ObjectiveSettings

    def __init__(self, settings: ObjectiveSettings, *, hooks: tuple[Hook, ...] = ()) -> None:
        self.settings = settings
        self.objective = settings
        self.hooks = hooks
        self.modes = (ON_POLICY,) * settings.group_size


class OnPolicyBatch(OnPolicyGroup):
    """Base of methods whose advantages may span all groups of a step; subclasses override
    :meth:`assign_step_advantages`.

    ``max_response_tokens`` is the limit of the run, ``groups_per_step`` its number of groups in a step, and
    ``first_group`` maps a step to the number of groups before it, if stages have fewer.
    """

    settings: GroupSettings

    def __init__(
        self,
        settings: GroupSettings,
        *,
        max_response_tokens: int = Limits().max_response_tokens,
        groups_per_step: int = 1,
        first_group: Callable[[int], int] | None = None,
        seed: int = 0,
    ) -> None:
        self.prefix: PrefixHook | None = None
        if settings.prefix is not None:
            self.prefix = PrefixHook(
                settings.prefix, groups_per_step=groups_per_step, first_group=first_group, seed=seed
            )
        super().__init__(settings, hooks=() if self.prefix is None else (self.prefix,))
        self._max_response_tokens = max_response_tokens

    @classmethod
    def build(cls, settings: GroupSettings, context: AlgorithmContext) -> Self:
        return cls(
            settings,
            max_response_tokens=context.max_response_tokens,
            groups_per_step=context.groups_per_step,
            first_group=context.first_group,
            seed=context.seed,
        )

    def modes_of(self, step: int, group: int) -> Sequence[str]:
        """Return the modes of a group: all guided or all unguided, if the run has prefixes."""
        if self.prefix is not None and self.prefix.is_guided(step, group):
            return (GUIDED,) * len(self.modes)
        return self.modes

    def prepare(
        self, tasks: Sequence[Task], modes: Sequence[Sequence[str]], *, step: int, play: StepPlay
    ) -> Sequence[str]:
        return [] if self.prefix is None else self.prefix.prepare(tasks, modes, play=play)

    def augment(self, traces: Sequence[Trace], *, step: int, play: StepPlay) -> Augmentation:
        """Adapt the prefixes to the groups of the step, also to those that it does not train on."""
        return Augmentation(metrics={} if self.prefix is None else self.prefix.adapt(traces))

    @property
    def remembers(self) -> bool:
        return self.prefix is not None or type(self).state is not OnPolicyBatch.state

    def state(self) -> tuple[dict[str, Any], Arrays]:
        return {} if self.prefix is None else {"lengths": self.prefix.lengths}, {}

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        if self.prefix is not None:
            self.prefix.lengths = dict(state["lengths"])

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        return self.assign_step_advantages([trace])[0]

    def _assign_by_start(
        self, traces: Sequence[Trace], assign: Callable[[Sequence[Trace]], list[GroupAdvantages]]
    ) -> list[GroupAdvantages]:
        """Call ``assign`` for groups with a prefix and for the others, so that no statistic mixes them."""
        if self.prefix is None:
            return assign(traces)
        results: dict[int, GroupAdvantages] = {}
        for is_guided in (True, False):
            numbers = [i for i, trace in enumerate(traces) if (prefix_length(trace) > 0) == is_guided]
            if numbers:
                results |= zip(numbers, assign([traces[i] for i in numbers]), strict=True)
        return [results[i] for i in range(len(traces))]

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        """Choose the next tasks; with dynamic sampling, additional tasks replace dropped groups."""
        rule = self.settings.dynamic_sampling
        if rule is None:
            return TaskChoice(num_groups=num_groups)
        select = partial(self._select_groups, rule=rule)
        return TaskChoice(
            num_groups=num_groups,
            group_filter=GroupFilter(select=select, max_extra_batches=rule.max_extra_batches),
        )

    def _select_groups(self, traces: Sequence[Trace], *, rule: DynamicSamplingSettings) -> list[Trace]:
        """Return the groups that dynamic sampling keeps."""
        return groups_worth_training(traces, rule)

    def _shape_returns(self, traces: Sequence[Trace], *, sum_kl: bool = True) -> list[dict[str, list[float]]]:
        """Add the length penalty and, with ``sum_kl``, the rollout's KL penalty to ``leaf.intrinsic``.

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
                    length = sum(node.num_response_tokens for node in path if node.trainable or counts_all)
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
    """``advantage_std``: the std that advantages are divided by. It is the group's ``sample`` or
    ``population`` std, or the std over the ``batch``, all groups of a step (TRL: ``scale_rewards = "batch"``,
    and ``normalize_advantages`` with leave-one-out).

    ``preset`` sets the defaults of all keys that you leave out.
    """

    presets = GRPO_PRESETS

    type: Literal["grpo"] = "grpo"
    preset: GrpoPreset = "grpo"
    advantage_std: Literal["sample", "population", "batch"] = "sample"

    @model_validator(mode="after")
    def _validate(self) -> "GrpoSettings":
        if self.advantage_std == "population" and self.advantage != "group_normalized":
            raise ValueError(f"advantage_std = population has no meaning with advantage = {self.advantage}")
        if self.advantage_std == "batch" and self.advantage not in ("group_normalized", "leave_one_out"):
            raise ValueError(f"advantage = {self.advantage} divides by no std: remove advantage_std")
        return self


class Grpo(OnPolicyBatch):
    """GRPO and its variants: one advantage per rollout."""

    Settings = GrpoSettings
    settings: GrpoSettings

    def _select_groups(self, traces: Sequence[Trace], *, rule: DynamicSamplingSettings) -> list[Trace]:
        """Also drop groups whose advantages are all 0 although the metric differs, unless a penalty may still
        give them some. pass@k reads verdicts only, so its groups are dropped by their advantages alone.
        """
        chosen = self.settings
        reads_verdicts = chosen.advantage == "pass_at_k"
        candidates = list(traces) if reads_verdicts else groups_worth_training(traces, rule)
        is_shaped = chosen.overlong is not None or chosen.reward_kl_weight > 0 or chosen.scores_turns
        if is_shaped and not reads_verdicts:
            return candidates
        return [
            trace
            for trace in candidates
            if outcome_advantages(trace, chosen.advantage, pass_k=chosen.pass_k).has_signal
        ]

    def assign_step_advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """Assign the advantages of the shaped returns to every policy token."""
        return self._assign_by_start(traces, self._assign)

    def _assign(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        chosen = self.settings
        measured = self._shape_returns(traces)
        if chosen.scores_turns:
            results = turn_advantages(traces, chosen, std=chosen.advantage_std)
            return _write_groups(traces, results, measured)
        returns = [total_returns(trace) for trace in traces]
        std_ddof: Literal[0, 1] = 0 if chosen.advantage_std == "population" else 1
        results = [
            outcome_advantages(trace, chosen.advantage, pass_k=chosen.pass_k, std_ddof=std_ddof)
            for trace in traces
        ]
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
        return _write_groups(traces, results, measured)


def _write_groups(
    traces: Sequence[Trace], results: Sequence[RolloutAdvantages], measured: Sequence[dict[str, list[float]]]
) -> list[GroupAdvantages]:
    for trace, advantages in zip(traces, results, strict=True):
        write_advantages(trace, advantages)
    return [
        GroupAdvantages(advantages=result, measurements=values)
        for result, values in zip(results, measured, strict=True)
    ]


class ReinforcePlusPlusSettings(GroupSettings):
    """``group_baseline`` subtracts the mean of the group from the return before whitening
    (REINFORCE++-baseline). Without it, one rollout per task is enough and ``gamma`` discounts over policy
    tokens. ``variance`` is the convention of the whitening. ``preset`` sets the defaults of all keys that you
    leave out.
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
                "REINFORCE++ whitens over the batch: remove advantage "
                "(group_baseline = true centres in the group)"
            )
        if self.gamma != 1.0 or self.reward_kl_weight > 0:
            self.require_ratio_per_token("gamma and a KL in the reward differ by token")
        if self.statistics == "samples" and not self.group_baseline:
            raise ValueError(
                "statistics = samples needs group_baseline = true: REINFORCE++ without it has no group mean"
            )
        if self.dynamic_sampling is not None and not self.group_baseline:
            raise ValueError(
                "dynamic_sampling drops groups without spread, which have advantages in REINFORCE++ without "
                "group_baseline (and with group_size = 1 it drops all): set group_baseline = true, or remove "
                "dynamic_sampling"
            )
        if self.group_baseline and self.group_size < 2:
            raise ValueError("group_baseline = true needs group_size >= 2: a group of one has no baseline")
        if self.group_baseline and (self.gamma != 1.0 or self.reward_kl_weight > 0):
            raise ValueError(
                "group_baseline = true has one value per rollout: no gamma, "
                "and a KL in the loss (kl_weight) instead"
            )
        return self


class ReinforcePlusPlus(OnPolicyBatch):
    """REINFORCE++: one advantage per token, whitened over all policy tokens of a step."""

    Settings = ReinforcePlusPlusSettings
    settings: ReinforcePlusPlusSettings

    def assign_step_advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """Assign whitened advantages to every policy token; ``advantages`` is their mean over each rollout.

        Raises ValueError for a node that several rollouts share, because their advantages may differ.
        """
        return self._assign_by_start(traces, self._assign)

    def _assign(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
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
        if chosen.group_baseline and chosen.scores_turns:
            groups = [turn_scores(trace, chosen.invalid_penalty) for trace in traces]
            centred = advantages_per_turn(groups, statistics=chosen.statistics, kind="group_centered")
            by_turn = [value for group in centred for own in group.turns or () for value in own.tolist()]
            token_advantages = whitened_per_token(
                np.array(
                    [value for value, node in zip(by_turn, nodes, strict=True) for _ in node.token_ids],
                    dtype=np.float64,
                ),
                variance=chosen.variance,
            )
        elif chosen.group_baseline:
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
            penalties = None
            if chosen.invalid_penalty > 0:
                penalties = np.array(
                    [chosen.invalid_penalty * bool(node.metadata.get("invalid", False)) for node in nodes]
                )
            token_advantages = reinforce_plus_plus_advantages_per_token(
                returns=returns,
                turn_penalties=penalties,
                turn_index=[turn for turn, node in enumerate(nodes) for _ in node.token_ids],
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
    """Summarise token advantages per rollout. The group has a signal if any of its tokens has one."""
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
    """Rejection sampling: imitate accepted rollouts of the policy. This is a policy gradient with advantages
    0 and 1, without a baseline or a negative signal. Rejected rollouts are not counted in denominators, so
    the loss is the mean negative log-likelihood over the tokens of the selected rollouts.

    A rollout is accepted if its environment return is at least ``threshold``. ``keep`` selects among the
    accepted rollouts of a task: ``all`` (at most ``max_kept``, the first ones), the ``best``, or the
    ``first``. ``deduplicate`` counts rollouts with equal policy tokens once. A ``loss.type`` other than
    ``reinforce`` clips the change that several optimiser steps make to a selected rollout.
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
            raise ValueError("rejection sampling has advantages of 0 and 1: remove advantage")
        if self.aggregation != "token_mean":
            raise ValueError(
                "rejection sampling averages over the tokens of selected rollouts: set aggregation = "
                "token_mean"
            )
        if self.positive_nll > 0:
            raise ValueError(
                "the loss of rejection sampling already is a negative log-likelihood: remove positive_nll"
            )
        added = {"observation_nll": self.observation_nll > 0, "distill": self.distill is not None}
        if name := next((name for name, is_set in added.items() if is_set), None):
            raise ValueError(f"{name} also trains on rollouts that rejection sampling drops: remove it")
        if self.max_kept is not None and self.keep != "all":
            raise ValueError(f"keep = {self.keep} selects one rollout per task: remove max_kept")
        return self


class Rejection(OnPolicyGroup):
    """On-policy rollouts with advantage 1 for the selected ones."""

    Settings = RejectionSettings
    settings: RejectionSettings

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Assign 1 to every policy token of a selected rollout. The advantage of the others is 0, and their
        tokens are not trained on.

        Raises ValueError for a node that several selected rollouts share.
        """
        rollouts = list(trace.rollouts())
        scored = [leaf for leaf, _ in rollouts if leaf.episode_return is not None]
        accepted = [(leaf, path) for leaf, path in rollouts if self._is_accepted(leaf)]
        selected = {leaf.rollout for leaf, _ in self._select(accepted)}
        for leaf, path in rollouts:
            leaf.advantage = None if leaf.episode_return is None else float(leaf.rollout in selected)
            for node in path if leaf.rollout in selected else ():
                if node.trainable and node.credit is not None:
                    raise ValueError(f"node {node.node_id} already has an advantage")
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
        if chosen.keep == "best":  # sort before deduplication, so that the best of equal texts remains
            # stable sort: the first of equal returns
            return sorted(accepted, key=lambda rollout: -(rollout[0].episode_return or 0.0))[:1]
        if chosen.deduplicate:
            first: dict[tuple[tuple[int, ...], ...], tuple[Leaf, list[Node]]] = {}
            for leaf, path in accepted:
                first.setdefault(tuple(node.token_ids for node in path if node.trainable), (leaf, path))
            accepted = list(first.values())
        return accepted[: 1 if chosen.keep == "first" else chosen.max_kept]
