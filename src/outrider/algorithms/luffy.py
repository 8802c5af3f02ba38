"""LUFFY (arXiv 2504.14945): a group of the policy's own rollouts and a demonstration, trained on together.

The demonstration is replayed in the environment and gets the environment's return. The token losses are in
:func:`outrider.algorithms.losses.luffy_per_token`; deviations are in docs/algorithms/details/others.md.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.algorithms.advantages import mixed_group_advantages_per_rollout
from outrider.algorithms.base import (
    AlgorithmContext,
    Augmentation,
    ExpertPaths,
    GroupAdvantages,
    ObjectiveSettings,
    StepPlay,
    write_advantages,
)
from outrider.algorithms.grpo import OnPolicyGroup
from outrider.algorithms.loss_settings import plain_clip
from outrider.rollout.experts import join_demonstration
from outrider.rollout.faults import lost_reasons
from outrider.trace import Trace
from outrider.types import Origin, Step

if TYPE_CHECKING:
    from outrider.algorithms.losses import TokenLoss, TokenLossInputs

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "luffy-paper": {},
    "luffy-official": {
        "clip_own": False,
        "advantage": "group_centered",
        "aggregation": "sum_over_length",
        "max_length": 8192,
        "sampler_correction": None,
    },
}


class LuffySettings(ObjectiveSettings):
    """``group_size`` n includes the demonstration: the policy samples n - 1 rollouts. Set
    ``num_demonstrations`` to 0 to disable the demonstration.

    ``demonstrations`` is a file of trajectories (docs/formats.md); without it the environment's experts
    demonstrate. ``shaping`` is gamma of f(p) = p / (p + gamma); None: f(p) = p. ``statistics``: mean and std
    over the ``mixed`` group or over the ``on_policy`` rollouts only. ``clip_own`` clips the tokens that the
    policy sampled. ``preset`` sets the defaults of all keys that you leave out.
    """

    input_paths: ClassVar[frozenset[str]] = frozenset({"demonstrations"})

    presets = PRESETS

    type: Literal["luffy"] = "luffy"
    preset: Literal["luffy-paper", "luffy-official"] = "luffy-paper"
    num_demonstrations: int = Field(1, ge=0, le=1)
    demonstrations: str | None = None
    shaping: float | None = Field(0.1, gt=0)
    statistics: Literal["mixed", "on_policy"] = "mixed"
    clip_own: bool = True

    @model_validator(mode="after")
    def _validate(self) -> "LuffySettings":
        plain_clip(self.loss, method="luffy")
        if self.advantage not in ("group_normalized", "group_centered"):
            raise ValueError(f"advantage = {self.advantage} is not defined for a group with a demonstration")
        if self.demonstrations is not None and not self.num_demonstrations:
            raise ValueError(
                "num_demonstrations = 0 disables demonstrations: remove the file of demonstrations"
            )
        return self

    @property
    def needs_experts(self) -> bool:
        """Whether the environment's experts demonstrate."""
        return self.num_demonstrations > 0 and self.demonstrations is None

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """Return the clipped surrogate for policy tokens and the shaped likelihood for demonstrations."""
        from outrider.algorithms.losses import luffy_per_token

        clip = plain_clip(self.loss, method="luffy")
        measured_T, measures = inputs.is_replayed_T, inputs.measures
        if num := int(measured_T.sum()):
            measures.add(
                "luffy/probability_mean",
                float(inputs.logprobs_T.detach()[measured_T].exp().mean()),
                num,
            )
            measures.add_sum("luffy/num_tokens", float(num))
        return luffy_per_token(
            logprobs=inputs.logprobs_T,
            old_logprobs=inputs.old_T,
            advantages=inputs.advantages_T,
            is_demonstration=inputs.is_off_policy_T,
            shaping=self.shaping,
            clip_low=clip.clip_low if self.clip_own else 1.0,
            clip_high=clip.clip_high if self.clip_own else math.inf,
        )


class Luffy(OnPolicyGroup):
    """One advantage per rollout. The demonstration joins a group after the policy's rollouts are finished.

    ``paths`` are the demonstrations of a file by task; without a file, every step requests them from the
    experts.
    """

    Settings = LuffySettings
    settings: LuffySettings

    def __init__(self, settings: LuffySettings, *, paths: Mapping[str, Sequence[Step] | None]) -> None:
        super().__init__(settings)
        self.modes = self.modes[settings.num_demonstrations :]
        self.paths = dict(paths)

    @classmethod
    def build(cls, settings: LuffySettings, context: AlgorithmContext) -> "Luffy":
        """Build the algorithm, and read the demonstrations if they come from a file."""
        path = settings.demonstrations if settings.num_demonstrations and context.train_tasks else None
        return cls(
            settings, paths={} if path is None else context.read_demonstrations(path, context.train_tasks)
        )

    def augment(self, traces: Sequence[Trace], *, step: int, play: StepPlay) -> Augmentation:
        """Replay demonstrations from the initial states of the groups, and add them to the groups.

        A group whose task has no demonstration is unchanged.
        """
        if not self.settings.num_demonstrations:
            return Augmentation()
        paths: ExpertPaths = self.paths  # from the file, read at the start of the run
        reasons: list[str] = []
        # Request in every step: a task that is sampled again is reset with another seed.
        if self.settings.needs_experts:
            paths, reasons = play.request_expert_paths([trace.task for trace in traces])
        demonstrated = [trace for trace in traces if paths.get(trace.task.key)]
        demonstrations = play.play_experts([trace.task for trace in demonstrated], paths)
        for trace, demonstration in zip(demonstrated, demonstrations, strict=True):
            join_demonstration(trace, demonstration)
        lost = [*reasons, *lost_reasons(demonstrations)]
        metrics = {
            "luffy/num_groups_without": float(len(traces) - len(demonstrated)),
            "luffy/num_faults": float(len(lost)),
        }
        return Augmentation(metrics=metrics, lost=lost)

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """Assign advantages to the tokens of policy and demonstrator, with statistics over the group with or
        without its demonstration.
        """
        leaves = [leaf for leaf, _ in trace.rollouts()]
        advantages = mixed_group_advantages_per_rollout(
            returns=[leaf.episode_return for leaf in leaves],
            is_demonstration=[leaf.is_demonstration for leaf in leaves],
            statistics=self.settings.statistics,
            normalize_std=self.settings.advantage == "group_normalized",
        )
        write_advantages(trace, advantages)
        for node in trace.nodes:
            if node.origin is Origin.DEMONSTRATION and node.message is not None and not node.message.content:
                node.credit = None  # an empty turn after the end of the script is not a demonstration
        demonstrations = [
            leaf for leaf in leaves if leaf.is_demonstration and leaf.episode_return is not None
        ]
        return GroupAdvantages(
            advantages=advantages,
            measurements={
                "luffy/return_demonstration": [
                    leaf.episode_return for leaf in demonstrations if leaf.episode_return is not None
                ],
                "luffy/fraction_solved": [float(leaf.success) for leaf in demonstrations],
                "luffy/advantage_demonstration": [
                    leaf.advantage for leaf in demonstrations if leaf.advantage is not None
                ],
            },
        )
