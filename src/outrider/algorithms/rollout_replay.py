"""RolloutReplay with difficulty-targeted tasks (arXiv 2506.05316): part of every step's groups come from
earlier steps.

The token loss is :func:`outrider.algorithms.losses.replay_centred_per_token`; deviations are in
docs/algorithms/details/others.md. The filter, baseline and schedule of SPEAR (arXiv 2509.22601) are settings;
docs/algorithms/small_methods.md describes them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from outrider.algorithms.advantages import RolloutAdvantages, difficulty_scores, replayable_groups
from outrider.algorithms.base import (
    AlgorithmContext,
    Arrays,
    Augmentation,
    GroupAdvantages,
    ObjectiveSettings,
    StepPlay,
    TaskChoice,
    outcome_advantages,
    total_returns,
    with_values,
    write_advantages,
)
from outrider.algorithms.grpo import OnPolicyGroup
from outrider.algorithms.loss_settings import plain_clip
from outrider.config import Settings
from outrider.environments.base import is_stateful
from outrider.errors import CheckpointError
from outrider.seeding import stream
from outrider.trace import Leaf, Node, Trace
from outrider.types import Message, Origin, Outcome, Task

if TYPE_CHECKING:
    from outrider.algorithms.losses import TokenLoss, TokenLossInputs
    from outrider.training.settings import RunSettings


_TEXT = Message(role="assistant", content="")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """The rollouts of one group in training step ``step``, as copied by :func:`stored_copy`."""

    step: int
    trace: Trace


def stored_copy(trace: Trace) -> Trace:
    """Copy the data of a group that a later update needs: ids and log-probs of the rollouts with a return,
    without texts and advantages. Entropies are set to 0, because they describe an outdated policy.
    """
    copy = Trace(task=Task(key=trace.task.key, question=""))
    copy.is_replayed = True
    positions: dict[int, int] = {}
    for leaf, path in trace.scored_rollouts():
        for node in path:
            if node.node_id not in positions:
                added = copy.append(
                    parent=None if node.parent is None else positions[node.parent],
                    origin=node.origin,
                    token_ids=node.token_ids,
                    message=_TEXT,
                    logprobs=node.logprobs,
                    entropies=(0.0,) * len(node.logprobs),
                    restarts=node.restarts,
                )
                positions[node.node_id] = added.node_id
        copy.finish(
            Leaf(
                node_id=positions[path[-1].node_id],
                rollout=leaf.rollout,
                outcome=leaf.outcome,
                episode_return=leaf.episode_return,
                success=leaf.success,
                intrinsic=leaf.intrinsic,
            )
        )
    return copy


def snapshot_groups(groups: Sequence[StoredGroup]) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Return plain data, and the concatenated ids and log-probs of all groups as arrays, without rounding."""
    plain = [
        {
            "task_key": group.trace.task.key,
            "step": group.step,
            "nodes": [
                [node.parent, node.origin.value, len(node.token_ids), *([True] if node.restarts else [])]
                for node in group.trace.nodes
            ],
            "leaves": [
                [
                    leaf.rollout,
                    leaf.node_id,
                    leaf.outcome.value,
                    leaf.episode_return,
                    leaf.success,
                    *([leaf.intrinsic] if leaf.intrinsic else []),
                ]
                for leaf in group.trace.leaves.values()
            ],
        }
        for group in groups
    ]
    nodes = [node for group in groups for node in group.trace.nodes]
    arrays = {
        "replay_ids": np.array([token for node in nodes for token in node.token_ids], dtype=np.int64),
        "replay_logprobs": np.array([value for node in nodes for value in node.logprobs], dtype=np.float64),
    }
    return plain, arrays if len(arrays["replay_ids"]) else {}


def restore_groups(
    plain: Sequence[Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]]
) -> list[StoredGroup]:
    """Restore groups from :func:`snapshot_groups`. Raises CheckpointError if data and arrays do not match."""
    ids = arrays["replay_ids"].tolist() if "replay_ids" in arrays else []
    logprobs = arrays["replay_logprobs"].tolist() if "replay_logprobs" in arrays else []
    lengths = [(node[1], node[2]) for entry in plain for node in entry["nodes"]]
    num_ids = sum(length for _, length in lengths)
    num_logprobs = sum(length for origin, length in lengths if origin == Origin.POLICY)
    if (num_ids, num_logprobs) != (len(ids), len(logprobs)):
        raise CheckpointError(
            f"stored groups of {num_ids} ids and {num_logprobs} log-probs with {len(ids)} and {len(logprobs)}"
        )
    next_id, next_logprob = iter(ids), iter(logprobs)
    groups: list[StoredGroup] = []
    for entry in plain:
        trace = Trace(task=Task(key=entry["task_key"], question=""))
        trace.is_replayed = True
        for parent, origin, length, *restarts in entry["nodes"]:
            own = length if origin == Origin.POLICY else 0
            trace.append(
                parent=parent,
                origin=Origin(origin),
                token_ids=tuple(islice(next_id, length)),
                message=_TEXT,
                logprobs=tuple(islice(next_logprob, own)),
                entropies=(0.0,) * own,
                restarts=bool(restarts),
            )
        for rollout, node, outcome, value, success, *intrinsic in entry["leaves"]:
            leaf = Leaf(
                node_id=node,
                rollout=rollout,
                outcome=Outcome(outcome),
                episode_return=value,
                success=success,
                intrinsic=intrinsic[0] if intrinsic else 0.0,
            )
            trace.finish(leaf)
        groups.append(StoredGroup(step=entry["step"], trace=trace))
    return groups


def cosine_rise(step: int, num_steps: int) -> float:
    """Return (1 - cos(pi s / S)) / 2: 0 in step 0, 1 from step S = ``num_steps`` on (SPEAR)."""
    return (1.0 - math.cos(math.pi * min(step / num_steps, 1.0))) / 2.0


class ToolBonusSettings(Settings):
    """A bonus for tool calls, which falls over the training steps (SPEAR, arXiv 2509.22601). It is added to
    the returns that advantages compare, and to no metric of returns. In a stateful environment, every valid
    action is a call.
    """

    per_call: float = Field(0.1, gt=0)
    """Bonus of a call that was executed in a valid turn."""
    maximum: float = Field(1.0, gt=0)
    """Most bonus of a rollout."""
    fall_steps: int = Field(200, ge=1)
    """Training steps in which the factor of the bonus falls from 1 to 0 along a cosine."""

    def value(self, num_calls: int, *, step: int) -> float:
        """Return ``min(maximum, per_call num_calls) (1 + cos(pi s / S)) / 2`` for step s (0-based)."""
        return min(self.maximum, self.per_call * num_calls) * (1.0 - cosine_rise(step, self.fall_steps))


def num_valid_calls(path: Sequence[Node], *, counts_actions: bool) -> int:
    """Return the number of tool calls, or of actions, in the valid turns of the policy."""
    valid = [node for node in path if node.trainable and not node.metadata.get("invalid")]
    return sum(1 if counts_actions else node.metadata.get("num_tool_calls", 0) for node in valid)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "rollout-replay": {},
    "rollout-replay-official": {"weight_cap": None, "selection": "difficulty", "sampler_correction": None},
}


class RolloutReplaySettings(ObjectiveSettings):
    """``fresh_share`` sigma of the groups of a step are sampled; the others are replayed from the
    ``buffer_size`` stored groups.

    In the first ``num_fresh_steps`` steps all groups are fresh. ``weight_cap``, at least 1, bounds pi_start /
    pi_behaviour of a replayed token (None: the released code). ``reward``: a group is eligible for replay if
    the mean of this reward, ``success`` or ``return``, is strictly between 0 and 1. ``selection``: sample
    tasks in the usual ``order``, or by ``difficulty``: a running mean of that reward. ``preset`` sets the
    defaults of all keys that you leave out.

    Four settings are SPEAR's (arXiv 2509.22601): ``replayed_rollouts``, ``replay_baseline``,
    ``replay_rise_steps`` and ``bonus``.
    """

    presets = PRESETS

    type: Literal["rollout_replay"] = "rollout_replay"
    preset: Literal["rollout-replay", "rollout-replay-official"] = "rollout-replay"
    fresh_share: float = Field(0.5, gt=0, le=1)
    buffer_size: int = Field(512, ge=1)
    num_fresh_steps: int = Field(1, ge=0)
    weight_cap: float | None = Field(2.0, ge=1)
    reward: Literal["success", "return"] = "success"
    selection: Literal["order", "difficulty"] = "order"
    estimate_rate: float = Field(0.5, gt=0, le=1)
    """Weight of the newest group in the running mean of a task (``selection = "difficulty"``)."""
    target: float = Field(0.5, ge=0, le=1)
    """Tasks whose running mean is near this value are preferred (``selection = "difficulty"``)."""
    temperature: float = Field(1e-3, gt=0)
    """The lower it is, the stronger is the preference for tasks near ``target``."""
    max_age: int | None = Field(None, ge=1)
    """Groups that are older than this number of steps are not replayed."""
    replayed_rollouts: Literal["all", "positive"] = "all"
    """``positive``: of a stored group, only the rollouts with an advantage above 0 are replayed."""
    replay_baseline: Literal["group", "median"] = "group"
    """Baseline of a replayed return: that of its own group, or the median of the mean returns of the last
    ``buffer_size`` fresh groups. Rollouts below the median are not replayed.
    """
    replay_rise_steps: int | None = Field(None, ge=1)
    """Steps in which the weight of the replayed loss rises from 0 to 1 along a cosine (None: always 1)."""
    bonus: ToolBonusSettings | None = None
    """A bonus for tool calls that falls over the training steps; None: off."""

    @model_validator(mode="after")
    def _validate(self) -> "RolloutReplaySettings":
        plain_clip(self.loss, method="rollout_replay")
        if self.replay_baseline == "median" and self.advantage == "pass_at_k":
            raise ValueError(
                "replay_baseline = median compares returns, and advantage = pass_at_k reads successes: set "
                "replay_baseline = group"
            )
        if self.bonus is not None and self.advantage == "pass_at_k":
            raise ValueError("advantage = pass_at_k counts successes only: remove [algorithm.bonus]")
        if (distill := self.distill) is not None and distill.plays != "unhelped" and distill.pairs == "none":
            raise ValueError(
                f"distill.plays = {distill.plays} trains rollouts without the help that they were shown, and "
                "stored groups keep it: set plays = unhelped, or use another algorithm"
            )
        changed = [
            name
            for name in ("max_age", "replayed_rollouts", "replay_baseline", "replay_rise_steps")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if self.fresh_share == 1.0 and changed:
            raise ValueError(f"fresh_share = 1 replays no group: remove {', '.join(changed)}")
        return self

    def validate_run(self, run: "RunSettings") -> None:
        """Raise ValueError if no rollout can earn the bonus."""
        super().validate_run(run)
        environment = run.environment
        has_calls = is_stateful(environment) or environment.call_format is not None
        if self.bonus is not None and not has_calls and getattr(environment, "tools", None) == ():
            raise ValueError(
                "algorithm.bonus is for tool calls, and environment.tools is empty: add a tool, or remove "
                "[algorithm.bonus]"
            )

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """Return the surrogate clipped around the policy at the start of the update, weighted by the ratio of
        that policy to the behaviour policy of the token.
        """
        import torch

        from outrider.algorithms.losses import replay_centred_per_token

        clip = plain_clip(self.loss, method="rollout_replay")
        replayed_T, old_T = inputs.is_off_policy_T, inputs.old_T
        self._measure(inputs)
        return replay_centred_per_token(
            logprobs=inputs.logprobs_T,
            old_logprobs=old_T,
            # For fresh tokens the behaviour policy is the policy at the start of the update. The sampler
            # correction accounts for any difference between engine and trainer.
            behaviour_logprobs=torch.where(replayed_T, inputs.engine_logprobs_T, old_T),
            advantages=inputs.advantages_T,
            clip_low=clip.clip_low,
            clip_high=clip.clip_high,
            weight_cap=self.weight_cap,
        )

    def _measure(self, inputs: "TokenLossInputs") -> None:
        """Record metrics of the replayed tokens, which all other metrics of the update exclude."""
        from outrider.algorithms.sampler_correction import log_ratio

        replayed_T, measures = inputs.is_replayed_T, inputs.measures
        if not (num := int(replayed_T.sum())):
            return
        log_weights = log_ratio(logprobs=inputs.old_T, reference_logprobs=inputs.engine_logprobs_T)
        weights = log_weights[replayed_T].exp()
        measures.add("replay/weight_mean", float(weights.mean()), num)
        measures.add_max("replay/weight_max", float(weights.max()))
        measures.add_sum("replay/num_capped", float((weights > (self.weight_cap or math.inf)).sum()))
        measures.add_sum("replay/num_tokens", float(num))


class RolloutReplay(OnPolicyGroup):
    """GRPO's advantages on fresh and stored groups. ``stored`` contains the groups, oldest first;
    ``estimates`` the running mean reward of each task. ``group_means`` are the mean returns of the last fresh
    groups, if ``replay_baseline`` is their median.
    """

    Settings = RolloutReplaySettings
    settings: RolloutReplaySettings

    def __init__(
        self,
        settings: RolloutReplaySettings,
        *,
        groups_per_step: int,
        seed: int,
        counts_actions: bool = False,
    ) -> None:
        super().__init__(settings)
        self.stored: list[StoredGroup] = []
        self.estimates: dict[str, float] = {}
        self.group_means: list[float] = []
        self._groups_per_step = groups_per_step
        self._seed = seed
        self._counts_actions = counts_actions

    @classmethod
    def build(cls, settings: RolloutReplaySettings, context: AlgorithmContext) -> "RolloutReplay":
        """Build the algorithm for a run."""
        return cls(
            settings,
            groups_per_step=context.groups_per_step,
            seed=context.seed,
            counts_actions=context.is_stateful,
        )

    def num_fresh(self, step: int) -> int:
        """Return how many groups of a step are sampled, at least one."""
        whole = self._groups_per_step
        return (
            whole if step < self.settings.num_fresh_steps else max(1, int(self.settings.fresh_share * whole))
        )

    def choose(self, tasks: Sequence[Task], *, step: int) -> list[Task] | None:
        """Choose the tasks of a step's fresh groups by estimated difficulty; None: use the run's order.

        Tasks are sampled without replacement, with probabilities proportional to the exponentials of
        :func:`~outrider.algorithms.advantages.difficulty_scores`. The estimate of a task that was never
        sampled is the target.
        """
        chosen = self.settings
        if chosen.selection == "order":
            return None
        predicted = [self.estimates.get(task.key, chosen.target) for task in tasks]
        scores = difficulty_scores(predicted, target=chosen.target, temperature=chosen.temperature)
        # Top-k of scores with Gumbel noise samples from the same distribution, and also works if
        # probabilities round to 0.
        noisy = scores + stream(self._seed, "difficulty", step).gumbel(size=len(tasks))
        return [tasks[i] for i in np.argsort(-noisy, kind="stable")[: self.num_fresh(step)]]

    def choose_tasks(self, tasks: Sequence[Task], *, step: int, num_groups: int) -> TaskChoice:
        """Choose fewer tasks than a whole step: stored groups fill the rest of the step."""
        return TaskChoice(num_groups=self.num_fresh(step), tasks=self.choose(tasks, step=step))

    def augment(self, traces: Sequence[Trace], *, step: int, play: StepPlay) -> Augmentation:
        """Return stored groups, with the advantages of their replay."""
        bonuses = self._add_bonus(traces, step=step)
        replayed, metrics = self.replay(traces, step=step)
        if bonuses:
            metrics["replay/tool_bonus_mean"] = fmean(bonuses)
        return Augmentation(groups=replayed, metrics=metrics)

    def _add_bonus(self, traces: Sequence[Trace], *, step: int) -> list[float]:
        """Write the bonus of every fresh rollout, before its advantages and before it is stored."""
        if (bonus := self.settings.bonus) is None:
            return []
        bonuses = []
        for trace in traces:
            for leaf, path in trace.scored_rollouts():
                num_calls = num_valid_calls(path, counts_actions=self._counts_actions)
                leaf.intrinsic = bonus.value(num_calls, step=step)
                bonuses.append(leaf.intrinsic)
        return bonuses

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Assign group-normalised returns, as recorded when the group was sampled, to every policy token."""
        advantages = outcome_advantages(trace, self.objective.advantage, pass_k=self.objective.pass_k)
        write_advantages(trace, advantages)
        return GroupAdvantages(advantages=advantages, measurements={})

    def replay(self, traces: Sequence[Trace], *, step: int) -> tuple[list[Trace], dict[str, float]]:
        """Store ``traces``; return stored groups with advantages to train on in addition, and metrics."""
        eligible = self._eligible(step=step)
        num_replayed = min(self._groups_per_step - self.num_fresh(step), len(eligible))
        indices = (
            np.sort(
                stream(self._seed, "replay", step).choice(len(eligible), size=num_replayed, replace=False)
            )
            if num_replayed
            else ()
        )
        replayed = [eligible[index] for index in indices]
        copies = [stored_copy(group.trace) for group in replayed]
        rise_steps = self.settings.replay_rise_steps
        loss_weight = 1.0 if rise_steps is None else cosine_rise(step, rise_steps)
        # Before the fresh groups are stored: their means belong to the baseline of later steps.
        for copy in copies:
            self._assign_replayed(copy, loss_weight)
        self._store(traces, step=step)
        ages = [float(step - group.step) for group in replayed]
        metrics = {
            "replay/num_groups": float(len(replayed)),
            "replay/num_eligible": float(len(eligible)),
            "replay/num_stored": float(len(self.stored)),
        }
        if ages:
            metrics |= {"replay/age_mean": fmean(ages), "replay/age_max": max(ages)}
        if self.settings.replayed_rollouts == "positive" or self.settings.replay_baseline == "median":
            metrics["replay/num_rollouts"] = float(sum(len(c.leaves) - len(c.pruned) for c in copies))
        if rise_steps is not None:
            metrics["replay/loss_weight"] = loss_weight
        if self.settings.selection == "difficulty" and self.estimates:
            metrics["replay/estimate_mean"] = fmean(self.estimates[key] for key in sorted(self.estimates))
        return copies, metrics

    def _replay_advantages(self, trace: Trace) -> RolloutAdvantages:
        """Return the advantages of a stored group; rollouts that are not replayed are not ``assigned``."""
        own = outcome_advantages(trace, self.objective.advantage, pass_k=self.objective.pass_k)
        values, replayed = own.values, own.assigned
        if self.settings.replayed_rollouts == "positive":
            replayed = replayed & (values > 0.0)
        if self.settings.replay_baseline == "median" and self.group_means:
            values = np.array(total_returns(trace), dtype=np.float64) - median(self.group_means)
            replayed = replayed & (values >= 0.0)
        return with_values(replace(own, assigned=replayed), values)

    def _assign_replayed(self, trace: Trace, loss_weight: float) -> None:
        """Assign the advantages of a stored group, and leave the other rollouts out of the update."""
        advantages = self._replay_advantages(trace)
        trace.pruned = frozenset(
            leaf.rollout
            for (leaf, _), assigned in zip(trace.rollouts(), advantages.assigned, strict=True)
            if not assigned
        )
        # The token loss is proportional to the advantage.
        write_advantages(trace, replace(advantages, values=loss_weight * advantages.values))

    def _eligible(self, *, step: int, room: int | None = None) -> list[StoredGroup]:
        keys = [group.trace.task.key for group in self.stored]
        max_age = self.settings.max_age
        # A mean of 0 makes groups ineligible for replay: those without a signal, and old ones.
        means = [
            self._mean_reward(group)
            if self._replay_advantages(group.trace).has_signal
            and (max_age is None or step - group.step <= max_age)
            else 0.0
            for group in self.stored
        ]
        return [self.stored[index] for index in replayable_groups(keys, mean_rewards=means, room=room)]

    def _store(self, traces: Sequence[Trace], *, step: int) -> None:
        """Store the fresh groups, and retain as many eligible older groups as fit in the buffer. Fresh groups
        are stored even if they are not eligible for replay.
        """
        retained = self._eligible(step=step, room=self.settings.buffer_size - len(traces))
        copies = [stored_copy(trace) for trace in traces]
        fresh = [StoredGroup(step=step, trace=copy) for copy in copies if copy.leaves]
        self.stored = (retained + fresh)[-self.settings.buffer_size :]
        if self.settings.replay_baseline == "median":
            means = [
                fmean(value for value in total_returns(group.trace) if value is not None) for group in fresh
            ]
            self.group_means = (self.group_means + means)[-self.settings.buffer_size :]
        rate = self.settings.estimate_rate
        for group in fresh:
            key = group.trace.task.key
            before = self.estimates.get(key, self.settings.target)
            self.estimates[key] = (1.0 - rate) * before + rate * self._mean_reward(group)

    def _mean_reward(self, group: StoredGroup) -> float:
        leaves = group.trace.leaves.values()
        if self.settings.reward == "success":
            return fmean(float(leaf.success) for leaf in leaves)
        return fmean(leaf.episode_return or 0.0 for leaf in leaves)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return stored groups and estimates, as plain data and arrays, for a checkpoint."""
        groups, arrays = snapshot_groups(self.stored)
        state = {"groups": groups, "estimates": self.estimates}
        return state | ({"group_means": self.group_means} if self.group_means else {}), arrays

    def restore(self, state: Mapping[str, Any], arrays: Arrays) -> None:
        """Restore the state that :meth:`state` returned."""
        self.stored = restore_groups(state["groups"], arrays)
        self.estimates = dict(state["estimates"])
        self.group_means = list(state.get("group_means", ()))
