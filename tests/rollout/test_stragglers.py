"""Groups that take longer than train.group_timeout_s: what is under way is given up, masked and counted."""

from collections import Counter

import pytest

from outrider.environments.base import StepResult
from outrider.rollout.scheduler import RolloutReport, Scheduler
from outrider.training.step_metrics import rollout_metrics
from outrider.types import Outcome, Task
from tests.rollout.fakes import Factory, Fake, say, scheduler, scripted, tasks

END = StepResult(message=None, done=True)


class Slow:
    """Every step of a slow environment takes ten seconds of a clock that nothing else moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.factory = Factory(self._make)

    def _make(self, task: Task, number: int) -> Fake:
        is_slow = task.key == "task 0" and number == 0
        return Fake(on_step=self._step if is_slow else lambda n, text: END)

    def _step(self, number: int, text: str) -> StepResult:
        self.now += 10.0
        return say(" on")

    def run(
        self, limit: float | None, *, num_tasks: int = 1, size: int = 3, at_once: int = 9
    ) -> RolloutReport:
        return self.scheduler(limit, at_once).run(tasks(num_tasks), modes=("m",) * size, training_step=0)

    def scheduler(self, limit: float | None, at_once: int) -> Scheduler:
        made = scheduler(scripted(lambda r, c: "a."), self.factory, max_concurrent=at_once)
        made.group_timeout_s, made.clock = limit, lambda: self.now
        return made


def outcomes(report: RolloutReport) -> list[Counter[Outcome]]:
    return [Counter(leaf.outcome for leaf in trace.leaves.values()) for trace in report.traces]


@pytest.mark.parametrize(("limit", "num_steps"), [(25.0, 3), (30.0, 4)])
def test_a_rollout_that_is_under_way_is_given_up_in_front_of_its_next_turn(
    limit: float, num_steps: int
) -> None:
    slow = Slow()
    report = slow.run(limit)
    assert outcomes(report) == [{Outcome.FINISHED: 2, Outcome.CANCELLED: 1}]
    [lost] = [one for one in report.traces[0].leaves.values() if one.outcome is Outcome.CANCELLED]
    assert lost.episode_return is None and lost.node_id is None and "group_timeout_s" in lost.detail
    assert [made.num_steps for made in slow.factory.made] == [num_steps, 1, 1]  # type: ignore[attr-defined]
    assert all(made.num_closed == 1 for made in slow.factory.made)  # type: ignore[attr-defined]
    counted = rollout_metrics(report.traces)
    assert (counted["rollout/num_cancelled"], counted["rollout/num_finished"]) == (1.0, 2.0)


def test_a_group_s_time_begins_with_its_first_rollout() -> None:
    """Those that had no place yet begin no environment; the next group has all its time."""
    slow = Slow()
    report = slow.run(25.0, num_tasks=2, at_once=1)
    assert outcomes(report) == [{Outcome.CANCELLED: 3}, {Outcome.FINISHED: 3}]
    assert len(slow.factory.made) == 1 + 3


def test_without_a_limit_nobody_is_given_up() -> None:
    found = outcomes(Slow().run(None))
    assert found == [{Outcome.FINISHED: 2, Outcome.TRUNCATED_TURNS: 1}]
