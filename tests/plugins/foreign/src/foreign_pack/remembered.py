"""An algorithm with an advantage, a loss, metrics and a memory of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import outrider as o


class Remembered(o.Algorithm):
    """Returns less what their task is remembered to give."""

    class Settings(o.ObjectiveSettings):
        forgetting: float = 0.5
        loss_scale: float = 0.5

    metrics = (
        o.Metric(
            name="remembered/mean",
            unit="reward",
            meaning="what is remembered",
            healthy="any",
            look_at="reward/mean",
        ),
        o.Metric(
            name="remembered/loss_tokens",
            unit="tokens",
            meaning="tokens that the scaled loss was taken of",
            healthy="above 0",
            look_at="tokens/policy",
        ),
    )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.objective: o.ObjectiveSettings = settings
        self.modes = ("on_policy",) * settings.group_size
        self._known: dict[str, float] = {}

    def assign_advantages(self, trace: o.Trace) -> o.GroupAdvantages:
        known = self._known.get(trace.task.key, 0.0)
        kept = [leaf.episode_return for leaf, _ in trace.rollouts() if leaf.episode_return is not None]
        if kept:
            forgetting = self.settings.forgetting
            self._known[trace.task.key] = (1 - forgetting) * known + forgetting * sum(kept) / len(kept)
        shaped = [
            None if leaf.episode_return is None else leaf.episode_return - known
            for leaf, _ in trace.rollouts()
        ]
        advantages = o.group_advantages(shaped, "group_centered")
        # The memory decides the numbers, so a resumed run without it would have other ones.
        advantages.values[:] = np.where(advantages.assigned, advantages.values - known, 0.0)
        o.write_advantages(trace, advantages)
        return o.GroupAdvantages(
            advantages=advantages, measurements={"remembered/mean": list(self._known.values())}
        )

    def token_loss(self, inputs: "o.TokenLossInputs") -> "o.TokenLoss":
        found = super().token_loss(inputs)
        inputs.measures.add_sum("remembered/loss_tokens", float(len(found.losses)))
        return replace(found, losses=found.losses * self.settings.loss_scale)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"tasks": list(self._known)}, {"known": np.array(list(self._known.values()), dtype=np.float64)}

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        self._known = dict(zip(state["tasks"], arrays["known"].tolist(), strict=True))
