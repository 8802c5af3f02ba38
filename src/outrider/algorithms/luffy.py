"""LUFFY (arXiv 2504.14945): a group of the policy's own rollouts and a demonstration, trained on together.

The demonstration is played through the environment and gets the return that the environment gives it. Token losses are
:func:`outrider.algorithms.objectives.luffy_per_token`; deviations are in docs/algorithms/luffy.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from outrider.algorithms.base import GroupCredit, ObjectiveSettings, write_credit
from outrider.algorithms.credit_family import mixed_group_advantages_per_rollout
from outrider.algorithms.group_settings import with_preset
from outrider.algorithms.on_policy import OnPolicyGroup
from outrider.trace import Trace
from outrider.types import Origin, Step

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
    """``group_size`` n counts the demonstration: n - 1 rollouts are the policy's. ``num_demonstrations`` 0 leaves it out.

    ``demonstrations`` names a ``.jsonl`` or ``.parquet`` file of trajectories (docs/algorithms/luffy.md); without it the environment's
    experts demonstrate. ``shaping`` is gamma of f(p) = p / (p + gamma), None: f(p) = p. ``statistics`` says whose returns make mean
    and std: the ``mixed`` group's or the ``on_policy`` rollouts' alone. ``clip_own`` clips the policy's own tokens. A ``preset``
    fills what is not given.
    """

    type: Literal["luffy"] = "luffy"
    preset: Literal["luffy-paper", "luffy-official"] = "luffy-paper"
    num_demonstrations: int = Field(1, ge=0, le=1)
    demonstrations: str | None = None
    shaping: float | None = Field(0.1, gt=0)
    statistics: Literal["mixed", "on_policy"] = "mixed"
    clip_own: bool = True

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        return with_preset(PRESETS, given, default="luffy-paper")

    @model_validator(mode="after")
    def _possible(self) -> "LuffySettings":
        if self.loss != "clip" or self.dual_clip is not None or self.keep_clipped_gradient:
            raise ValueError("luffy has a token loss of its own: loss = clip, without dual_clip and keep_clipped_gradient")
        if self.advantage == "leave_one_out":
            raise ValueError("advantage = leave_one_out is not defined for a group with a demonstration")
        if self.demonstrations is not None and not self.num_demonstrations:
            raise ValueError("demonstrations names a file, and num_demonstrations = 0 leaves it out")
        return self

    @property
    def asks_experts(self) -> bool:
        """Whether the environment's experts demonstrate."""
        return self.num_demonstrations > 0 and self.demonstrations is None


class Luffy(OnPolicyGroup):
    """One advantage a rollout. The demonstration joins a group once the policy's rollouts are played.

    ``paths`` are the demonstrations of a file by task; without one, experts are asked in every step.
    """

    def __init__(self, settings: LuffySettings, *, paths: Mapping[str, Sequence[Step] | None]) -> None:
        super().__init__(settings, num_rollouts=settings.group_size - settings.num_demonstrations)
        self.settings = settings
        self.paths = dict(paths)

    def credit(self, trace: Trace) -> GroupCredit:
        """Statistics over the group with or without its demonstration, on every token of policy and demonstrator."""
        leaves = [leaf for leaf, _ in trace.rollouts()]
        advantages = mixed_group_advantages_per_rollout(
            returns=[leaf.episode_return for leaf in leaves],
            is_demonstration=[leaf.is_demonstration for leaf in leaves],
            statistics=self.settings.statistics,
            normalize_std=self.settings.advantage == "group_normalized",
        )
        write_credit(trace, advantages)
        for node in trace.nodes:
            if node.origin is Origin.DEMONSTRATION and node.message is not None and not node.message.content:
                node.credit = None  # its script was over: nobody demonstrated an empty turn
        shown = [leaf for leaf in leaves if leaf.is_demonstration and leaf.episode_return is not None]
        return GroupCredit(
            advantages=advantages,
            measurements={
                "luffy/return_demonstration": [leaf.episode_return for leaf in shown if leaf.episode_return is not None],
                "luffy/fraction_solved": [float(leaf.success) for leaf in shown],
                "luffy/advantage_demonstration": [leaf.advantage for leaf in shown if leaf.advantage is not None],
            },
        )
