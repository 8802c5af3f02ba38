"""GRPO (DeepSeekMath, arXiv 2402.03300) and the methods that differ from it in settings alone: one advantage
per rollout.

Dr. GRPO, DAPO, GPPO, GSPO, CISPO and RLOO are presets (:mod:`outrider.algorithms.common.presets`), and every
part of them is a setting of its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from outrider.algorithms.base import GroupAdvantages, assign_advantages, group_advantages, total_returns
from outrider.algorithms.common.advantages import RolloutAdvantages
from outrider.algorithms.common.batch_advantages import (
    batch_scaled_advantages_per_rollout,
    leave_one_out_batch_normalized_advantages_per_rollout,
)
from outrider.algorithms.common.group_settings import GroupSettings, with_preset
from outrider.algorithms.common.on_policy import OnPolicyBatch
from outrider.algorithms.common.presets import GRPO_PRESETS, GrpoPreset
from outrider.trace import Trace


class GrpoSettings(GroupSettings):
    """``advantage_std`` divides the advantage: the group's ``sample`` or ``population`` std, or that of the
    whole ``batch``, which spans all groups of a step (TRL: ``scale_rewards = "batch"``, and
    ``normalize_advantages`` with leave-one-out).

    A ``preset`` fills what is not given.
    """

    type: Literal["grpo"] = "grpo"
    preset: GrpoPreset = "grpo"
    advantage_std: Literal["sample", "population", "batch"] = "sample"

    @property
    def label(self) -> str:
        """The preset's name."""
        return self.preset

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return with_preset(GRPO_PRESETS, data, default="grpo")

    @model_validator(mode="after")
    def _validate(self) -> "GrpoSettings":
        if self.advantage_std == "population" and self.advantage != "group_normalized":
            raise ValueError(f"advantage_std = population has no meaning with advantage = {self.advantage}")
        if self.advantage_std == "batch" and self.advantage == "group_centered":
            raise ValueError("advantage = group_centered divides by no std: leave advantage_std out")
        return self


class Grpo(OnPolicyBatch[GrpoSettings]):
    """On-policy rollouts, one advantage per rollout."""

    Settings = GrpoSettings

    def advantages(self, traces: Sequence[Trace]) -> list[GroupAdvantages]:
        """Advantages of the shaped returns on every policy token."""
        measured = self._shaped(traces)
        results = self._advantages([total_returns(trace) for trace in traces])
        for trace, advantages in zip(traces, results, strict=True):
            assign_advantages(trace, advantages)
        return [
            GroupAdvantages(advantages=result, measurements=values)
            for result, values in zip(results, measured, strict=True)
        ]

    def _advantages(self, returns: Sequence[Sequence[float | None]]) -> list[RolloutAdvantages]:
        chosen = self.settings
        own = [
            group_advantages(
                group, chosen.advantage, std_ddof=0 if chosen.advantage_std == "population" else 1
            )
            for group in returns
        ]
        if chosen.advantage_std != "batch":
            return own
        is_left_out = chosen.advantage == "leave_one_out"
        over_batch = (
            leave_one_out_batch_normalized_advantages_per_rollout
            if is_left_out
            else batch_scaled_advantages_per_rollout
        )
        values = over_batch(
            returns=[value for group in returns for value in group],
            groups=[number for number, group in enumerate(returns) for _ in group],
        )
        bounds = np.cumsum([len(group) for group in returns])[:-1]
        return (
            [replace(group, values=part) for group, part in zip(own, np.split(values, bounds), strict=True)]
            if own
            else []
        )
