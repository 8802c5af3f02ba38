"""An algorithm of one's own, with its advantage, token loss, metrics and memory. In a recipe:
``type = "own_algorithm:PastBaseline"``.

python examples/own_algorithm.py [MODEL]     # trains a few steps into runs/own-algorithm
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

import outrider
from outrider.algorithms.base import (
    Algorithm,
    GroupAdvantages,
    ObjectiveSettings,
    assign_advantages,
    group_advantages,
    with_values,
)
from outrider.metrics import Metric
from outrider.runs import Run
from outrider.trace import Trace

if TYPE_CHECKING:  # settings are read without torch
    from outrider.algorithms.losses import TokenLoss, TokenLossInputs


class PastBaselineSettings(ObjectiveSettings):
    """The section ``algorithm`` of a recipe: the keys of every objective, and these."""

    memory_weight: float = Field(0.5, ge=0, le=1)
    failure_weight: float = Field(0.5, ge=0)


class PastBaseline(Algorithm):
    """REINFORCE whose baseline mixes the group's mean with what the task gave before. Rollouts below the
    baseline weigh less."""

    Settings = PastBaselineSettings
    metrics = (
        Metric(
            name="past_baseline/known",
            unit="reward",
            meaning="mean return that is remembered of the step's tasks",
            healthy="follows reward/mean",
            look_at="algorithm.memory_weight",
        ),
        Metric(
            name="past_baseline/below_fraction",
            unit="1",
            meaning="share of trained tokens with a negative advantage",
            healthy="below 1",
            look_at="algorithm.failure_weight",
        ),
    )

    def __init__(self, settings: PastBaselineSettings) -> None:
        self.settings = settings
        self.objective: ObjectiveSettings = settings
        self.modes = ("on_policy",) * settings.group_size
        self._known: dict[str, float] = {}  # mean return by task

    def assign_advantages(self, trace: Trace) -> GroupAdvantages:
        """An advantage on every policy token. A return of None is a fault, which is in no statistic."""
        returns = [leaf.episode_return for leaf, _ in trace.rollouts()]
        advantages = group_advantages(returns, "group_centered")
        kept = [one for one in returns if one is not None]
        if not kept:
            assign_advantages(trace, advantages)
            return GroupAdvantages(advantages=advantages, measurements={})
        mean = sum(kept) / len(kept)
        known = self._known.get(trace.task.key, mean)
        weight = self.settings.memory_weight
        shift = weight * (mean - known)  # better than before is good, also where all rollouts are equal
        # with_values sets the flag that the group has a signal, also where all of its returns are equal
        advantages = with_values(advantages, advantages.values + shift)
        self._known[trace.task.key] = (known + mean) / 2
        assign_advantages(trace, advantages)
        return GroupAdvantages(advantages=advantages, measurements={"past_baseline/known": [known]})

    def token_loss(self, inputs: "TokenLossInputs") -> "TokenLoss":
        """Minus advantage times ratio, without a clip; one value a trained token."""
        from outrider.algorithms.losses import TokenLoss

        ratio = (inputs.logprobs_T - inputs.old_T).exp()
        below = inputs.advantages_T < 0
        weights = 1 + (self.settings.failure_weight - 1) * below
        inputs.measures.add("past_baseline/below_fraction", float(below.float().mean()), len(below))
        never = below & False  # nothing is clipped
        losses = -weights * inputs.advantages_T * ratio
        return TokenLoss(losses=losses, clipped_high=never, clipped_low=never, dual_clipped=never)

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Plain data and arrays for a checkpoint, so that a resumed run has the same bits."""
        return {"tasks": list(self._known)}, {"known": np.array(list(self._known.values()), dtype=np.float64)}

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Become what was saved."""
        self._known = dict(zip(state["tasks"], arrays["known"].tolist(), strict=True))


def main(
    model: str = "smollm2-135m-instruct", run: str = "runs/own-algorithm", overrides: Sequence[str] = ()
) -> Run:
    """Train in the environment of own_environment.py, beside this file; any other can stand there."""
    recipe = {
        "model": {"name": model},
        "environment": {"type": "own_environment:WordChain"},
        "algorithm": {"type": "own_algorithm:PastBaseline", "group_size": 8, "failure_weight": 0.5},
        "rollout": {"max_turns": 3, "max_turn_tokens": 8, "max_response_tokens": 256},
        "train": {"num_steps": 4, "tasks_per_step": 4},
        "evaluation": {"num_tasks": 3},
    }
    return outrider.train(recipe, run=run, overrides=overrides, progress="auto")


if __name__ == "__main__":
    print(main(*sys.argv[1:2]).metrics("train").column("reward/mean").to_pylist())
