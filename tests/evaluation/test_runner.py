"""Intervals of an evaluation: Wilson's by its own equation, a bootstrap by its coverage, and nothing without
width.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.environments.base import EpisodeResult, StepResult
from outrider.errors import EnvironmentFault
from outrider.rollout.evaluate import Evaluation, averages_over_sets, evaluate, interval
from outrider.types import Task
from tests.rollout.fakes import END, Factory, Fake, say, scheduler, scripted, tasks

Z = 1.959963984540054


@given(st.integers(0, 300), st.integers(0, 300))
def test_wilsons_bounds_solve_their_equation(num_good: int, num_bad: int) -> None:
    """The bounds are the shares p for which the observed one is exactly z standard errors of p away."""
    num = num_good + num_bad
    if not num:
        assert all(map(math.isnan, interval([], binary=True)))
        return
    share = num_good / num
    low, high = interval([1.0] * num_good + [0.0] * num_bad, binary=True)
    assert 0.0 <= low <= share <= high <= 1.0 and low < high
    for bound in (low, high):
        assert (share - bound) ** 2 == pytest.approx(Z**2 * bound * (1 - bound) / num, abs=1e-12)
    mirrored = interval([1.0] * num_bad + [0.0] * num_good, binary=True)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize("num", [30, 200])
def test_coverage_of_the_bootstrap(num: int) -> None:
    rng = np.random.default_rng(num)
    found = [interval(list(rng.binomial(4, 0.3, num) / 4), binary=False) for _ in range(200)]
    assert 0.89 <= np.mean([low <= 0.3 <= high for low, high in found]) <= 0.99


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=20))
def test_an_interval_is_the_same_each_time(scores: list[float]) -> None:
    low, high = interval(scores, binary=False)
    assert (low, high) == interval(scores, binary=False)
    assert min(scores) <= low <= high <= max(scores)


def played(broken: set[str], *, num_samples: int) -> Evaluation:
    """Five tasks of which every rollout succeeds, but for those whose simulator is broken."""

    def make(task: Task, number: int) -> Fake:
        def act(step: int, text: str) -> StepResult:
            if task.key in broken:
                raise EnvironmentFault("the simulator died")
            return StepResult(message=None, done=True)

        return Fake(on_step=act, question=task.question)

    played_by = scheduler(scripted(lambda request, text: "yes."), Factory(make), max_retries=0)
    return evaluate(played_by, tasks(5), num_samples=num_samples, label="x", step=0)[0]


@pytest.mark.parametrize("num_samples", [1, 3])
def test_faults_are_in_no_score_and_equal_results_are_no_certainty(num_samples: int) -> None:
    found = played({"task 1", "task 4"}, num_samples=num_samples)
    assert (found.score, found.num_tasks, found.num_faults) == (1.0, 3, 2 * num_samples)
    assert len(found.fault_reasons) == 2 * num_samples and "the simulator died" in found.fault_reasons[0]
    assert sorted(found.task_scores) == ["task 0", "task 2", "task 3"]
    # three of three, whatever the samples
    assert found.ci_low == pytest.approx(3 / (3 + Z**2)) and found.ci_high == 1.0


def test_nothing_but_faults_has_no_score() -> None:
    found = played({f"task {n}" for n in range(5)}, num_samples=2)
    assert (
        math.isnan(found.score)
        and math.isnan(found.ci_low)
        and (found.num_tasks, found.num_faults) == (0, 10)
    )


class Graded(Fake):
    """Task n has n + 1 turns and pays n / 8; only long episodes succeed."""

    def result(self) -> EpisodeResult:
        number = int(self.question)
        return EpisodeResult(episode_return=number / 8, success=number >= 4)


@pytest.mark.parametrize("max_concurrent", [1, 3, 5, 64])
def test_scores_are_means_over_tasks_for_any_lengths_and_batches(max_concurrent: int) -> None:
    """Seven episodes of one to seven turns in batches of unequal size: a mean over turns would be 18/28, and
    a mean of the means of batches another one.
    """

    def make(task: Task, number: int) -> Fake:
        last = int(task.key.removeprefix("task "))
        return Graded(on_step=lambda step, text: END if step == last else say(" more"), question=str(last))

    played_by = scheduler(
        scripted(lambda request, text: "yes."), Factory(make), max_concurrent=max_concurrent
    )
    found, traces = evaluate(played_by, tasks(7), num_samples=2, label="x", step=0)
    assert found.score == pytest.approx(3 / 7, abs=1e-15)
    assert found.mean_return == pytest.approx(21 / 8 / 7, abs=1e-15)
    assert found.task_scores == {f"task {n}": float(n >= 4) for n in range(7)}
    assert [len(list(trace.rollouts())) for trace in traces] == [2] * 7
    assert (found.num_tasks, found.num_faults) == (7, 0)


def test_sets_of_unequal_size_are_weighted_as_named() -> None:
    lines = [
        {"num_tasks": num, "metric": {"score": {"value": value}}}
        for num, value in ((100, 0.5), (10, 0.8), (1, 0.0))
    ]
    averages = averages_over_sets(lines)
    assert averages["macro"] == pytest.approx((0.5 + 0.8 + 0.0) / 3)
    assert averages["micro"] == pytest.approx((50 + 8 + 0) / 111)
