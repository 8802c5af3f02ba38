"""The base class of all algorithms: what a page gets that only writes advantages, and that the update takes a
page's own loss.
"""

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
from outrider.algorithms.losses import TokenLoss, TokenLossInputs
from outrider.algorithms.luffy import LuffySettings
from outrider.algorithms.rollout_replay import RolloutReplay
from outrider.training.policy import Policy
from outrider.training.settings import OptimizerSettings, UpdateSettings
from outrider.training.update import update
from tests.tiny import tiny_model
from tests.training.test_pack_update import random_trace

ONE_BATCH = UpdateSettings(max_tokens=10_000, max_logprob_gap=99.0)


class Page(Algorithm):
    """Writes advantages and nothing else."""

    def __init__(self) -> None:
        self.objective = ObjectiveSettings()
        self.modes = ("on_policy",) * 2
        self.asked: list[Any] = []

    def assign_advantages(self, trace: Any) -> Any:
        self.asked.append(trace)
        return f"of {trace}"


def test_a_page_that_only_writes_advantages_has_everything_else() -> None:
    page: Any = Page()
    assert page.assign_step_advantages(["a", "b"]) == ["of a", "of b"] and page.asked == ["a", "b"]
    assert page.choose_tasks([], step=3, num_groups=7) == TaskChoice(num_groups=7)
    assert page.augment([], step=3, play=None) == Augmentation() and page.measure([]) == {}
    assert page.modes_of(5, 6) == page.modes and page.hooks == () and page.counts() == []
    assert page.state() == ({}, {}) and not page.remembers
    with pytest.raises(NotImplementedError, match="Algorithm has neither"):
        Algorithm().assign_advantages(page)


def test_who_has_a_state_remembers() -> None:
    assert all(Empo2.state is not Algorithm.state and kind.remembers.fget for kind in (Empo2, RolloutReplay))

    class Remembers(Page):
        def state(self) -> Any:
            return {}, {}

    assert Remembers().remembers  # also where it has nothing to tell yet


def test_objectives_say_what_a_run_asks() -> None:
    plain = ObjectiveSettings()
    assert not (
        plain.rewards_kl or plain.depends_on_num_steps or plain.executes_retrieved or plain.tip_memory
    )
    assert plain.warnings(num_groups=1, num_tasks=9) == [] and LuffySettings().label == "luffy"
    assert OffPolicyObjective.token_loss is not ObjectiveSettings.token_loss


def test_the_update_takes_the_loss_of_the_algorithm() -> None:
    """A page whose loss is zero everywhere makes no step; the objective's own would."""

    class Still(Page):
        def token_loss(self, inputs: TokenLossInputs) -> TokenLoss:
            found = super().token_loss(inputs)
            inputs.measures.add_sum("ratio/num_rejected", float(len(found.losses)))
            return replace(found, losses=found.losses * 0.0)

    page, norms = Still(), []
    for token_loss in (page.token_loss, None):
        policy = Policy(tiny_model(), OptimizerSettings())
        report = update(
            policy,
            [random_trace(1)],
            objective=page.objective,
            token_loss=token_loss,
            settings=ONE_BATCH,
            reference=None,
        )
        norms.append(report.metrics["grad/norm"])
        assert ("ratio/num_rejected" in report.metrics) == (token_loss is not None)
    assert norms[0] == 0.0 < norms[1]
