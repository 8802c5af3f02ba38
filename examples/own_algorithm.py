"""An algorithm of your own, with its advantage, token loss, metrics and memory. In a recipe:
``type = "own_algorithm:PastBaseline"``.

python examples/own_algorithm.py [MODEL]     # trains a few steps into runs/own-algorithm
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

import outrider as o


class PastBaseline(o.Algorithm):
    """REINFORCE with a baseline that mixes the group's mean with the task's earlier mean return.

    Rollouts below the baseline weigh less.
    """

    class Settings(o.ObjectiveSettings):
        """The section ``algorithm`` of a recipe: the keys of every objective, and these."""

        memory_weight: float = Field(0.5, ge=0, le=1)
        failure_weight: float = Field(0.5, ge=0)

    metrics = (
        o.Metric(
            name="past_baseline/known",
            unit="reward",
            meaning="mean remembered return of the step's tasks",
            healthy="follows reward/mean",
            look_at="algorithm.memory_weight",
        ),
        o.Metric(
            name="past_baseline/below_fraction",
            unit="1",
            meaning="share of trained tokens with a negative advantage",
            healthy="below 1",
            look_at="algorithm.failure_weight",
        ),
    )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.objective: o.ObjectiveSettings = settings
        self.modes = ("on_policy",) * settings.group_size
        self._known: dict[str, float] = {}  # mean return by task

    def assign_advantages(self, trace: o.Trace) -> o.GroupAdvantages:
        """Assign an advantage to every policy token. A rollout that ended by a fault has no return (None)."""
        returns = [leaf.episode_return for leaf, _ in trace.rollouts()]
        advantages = o.group_advantages(returns, "group_centered")
        known_returns = [value for value in returns if value is not None]
        if not known_returns:
            o.write_advantages(trace, advantages)
            return o.GroupAdvantages(advantages=advantages, measurements={})
        mean = sum(known_returns) / len(known_returns)
        known = self._known.get(trace.task.key, mean)
        weight = self.settings.memory_weight
        shift = weight * (mean - known)  # above the earlier mean is good, even if all rollouts are equal
        # with_values marks the group as having a signal even if all of its returns are equal
        advantages = o.with_values(advantages, advantages.values + shift)
        self._known[trace.task.key] = (known + mean) / 2
        o.write_advantages(trace, advantages)
        return o.GroupAdvantages(advantages=advantages, measurements={"past_baseline/known": [known]})

    def token_loss(self, inputs: "o.TokenLossInputs") -> "o.TokenLoss":
        """Minus advantage times ratio without a clip, one value per trained token."""
        ratio = (inputs.logprobs_T - inputs.old_T).exp()
        below = inputs.advantages_T < 0
        weights = 1 + (self.settings.failure_weight - 1) * below
        inputs.measures.add("past_baseline/below_fraction", float(below.float().mean()), len(below))
        never = below & False  # nothing is clipped
        losses = -weights * inputs.advantages_T * ratio
        return o.TokenLoss(losses=losses, clipped_high=never, clipped_low=never, dual_clipped=never)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The memory as plain data and arrays, for checkpoints: a resumed run has the same bits."""
        return {"tasks": list(self._known)}, {"known": np.array(list(self._known.values()), dtype=np.float64)}

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self._known = dict(zip(state["tasks"], arrays["known"].tolist(), strict=True))


def main(
    model: str = "smollm2-135m-instruct", run: str = "runs/own-algorithm", overrides: Sequence[str] = ()
) -> o.Run:
    """Train in the environment of own_environment.py; any other environment works as well."""
    recipe = {
        "model": {"name": model},
        "environment": {"type": "own_environment:WordChain"},
        "algorithm": {"type": "own_algorithm:PastBaseline", "group_size": 8, "failure_weight": 0.5},
        "rollout": {"max_turns": 3, "max_turn_tokens": 8, "max_response_tokens": 256},
        "train": {"num_steps": 4, "tasks_per_step": 4},
        "evaluation": {"num_tasks": 3},
    }
    return o.train(recipe, run=run, overrides=overrides, progress="auto")


if __name__ == "__main__":
    print(main(*sys.argv[1:2]).metrics("train").column("reward/mean").to_pylist())
