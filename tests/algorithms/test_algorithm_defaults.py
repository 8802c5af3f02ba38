"""The base class of algorithms and objectives: defaults, and a custom token loss in the update."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.algorithms.base import (
    Algorithm,
    Augmentation,
    ObjectiveSettings,
    OffPolicyObjective,
    TaskChoice,
)
from outrider.algorithms.exploration import Empo2
from outrider.algorithms.grpo import GroupSettings
from outrider.algorithms.losses import TokenLoss, TokenLossInputs
from outrider.algorithms.luffy import LuffySettings
from outrider.algorithms.rollout_replay import RolloutReplay
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import update
from tests.tiny import tiny_model
from tests.training.test_pack_update import random_trace

ONE_BATCH = UpdateSettings(max_tokens=10_000, max_logprob_gap=99.0)


class Minimal(Algorithm):
    """Writes advantages and nothing else."""

    def __init__(self) -> None:
        self.objective = ObjectiveSettings()
        self.modes = ("on_policy",) * 2
        self.traces: list[Any] = []

    def assign_advantages(self, trace: Any) -> Any:
        self.traces.append(trace)
        return f"of {trace}"


def test_an_algorithm_that_only_writes_advantages_has_defaults_for_everything_else() -> None:
    algorithm: Any = Minimal()
    assert algorithm.assign_step_advantages(["a", "b"]) == ["of a", "of b"] and algorithm.traces == ["a", "b"]
    assert algorithm.choose_tasks([], step=3, num_groups=7) == TaskChoice(num_groups=7)
    assert algorithm.augment([], step=3, play=None) == Augmentation() and algorithm.measure([]) == {}
    assert algorithm.modes_of(5, 6) == algorithm.modes and algorithm.hooks == () and algorithm.counts() == []
    assert algorithm.state() == ({}, {}) and not algorithm.remembers
    with pytest.raises(NotImplementedError, match="Algorithm has neither"):
        Algorithm().assign_advantages(algorithm)


def test_algorithms_with_a_state_are_stored_in_checkpoints() -> None:
    assert all(Empo2.state is not Algorithm.state and kind.remembers.fget for kind in (Empo2, RolloutReplay))

    class Remembers(Minimal):
        def state(self) -> Any:
            return {}, {}

    assert Remembers().remembers  # even if its state is empty


def test_objectives_declare_the_needs_of_a_run() -> None:
    plain = ObjectiveSettings()
    assert not (
        plain.rewards_kl or plain.depends_on_num_steps or plain.executes_retrieved or plain.tip_memory
    )
    assert plain.warnings(num_groups=1, num_tasks=9) == [] and LuffySettings().label == "luffy"
    assert OffPolicyObjective.token_loss is not ObjectiveSettings.token_loss
    for kind in (ObjectiveSettings, GroupSettings):
        assert not kind().needs_reference and kind(kl_weight=0.1).needs_reference
    assert GroupSettings(reward_kl_weight=0.1).needs_reference


def test_the_update_uses_the_loss_of_the_algorithm() -> None:
    """An algorithm whose loss is zero everywhere changes no weight; the loss of the objective does."""

    class Still(Minimal):
        def token_loss(self, inputs: TokenLossInputs) -> TokenLoss:
            found = super().token_loss(inputs)
            inputs.measures.add_sum("ratio/num_rejected", float(len(found.losses)))
            return replace(found, losses=found.losses * 0.0)

    algorithm, norms = Still(), []
    for token_loss in (algorithm.token_loss, None):
        policy = Policy(tiny_model(), OptimizerSettings())
        report = update(
            policy,
            [random_trace(1)],
            objective=algorithm.objective,
            token_loss=token_loss,
            settings=ONE_BATCH,
            reference=None,
        )
        norms.append(report.metrics["grad/norm"])
        assert ("ratio/num_rejected" in report.metrics) == (token_loss is not None)
    assert norms[0] == 0.0 < norms[1]
