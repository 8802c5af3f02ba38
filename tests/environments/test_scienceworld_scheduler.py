"""ScienceWorld in the rollout loop while its simulators die in mid-episode: a fault of that rollout, and of
no other.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.environments.scienceworld import tasks as scienceworld_tasks
from outrider.environments.scienceworld.environment import (
    ScienceWorldConfig,
    ScienceWorldFactory,
    ScienceWorldTaskSet,
)
from outrider.environments.scienceworld.simulator import Opening, Reply
from outrider.errors import EnvironmentFault
from outrider.rollout.base import Limits
from outrider.rollout.scheduler import RolloutReport
from outrider.types import Outcome
from tests.rollout.fakes import scheduler, scripted

NUM_MOVES = 3
NUM_ROLLOUTS = 3


@dataclass(slots=True, kw_only=True)
class Laboratory:
    """A simulator whose episodes take three moves to the full score. ``dies`` is asked before every one of
    them.
    """

    number: int
    dies: Callable[[int, int, int], bool]
    alive: bool = True
    variation: int = 0
    num_moves: int = 0

    def load(self, *, task_name: str, variation: int, simplification: str) -> Opening:
        self.variation, self.num_moves = variation, 0
        return Opening(task_text=f"Task {variation}.", observation="A room.\n", action_templates=("wait",))

    def act(self, action: str) -> Reply:
        assert self.alive, "a dead simulator was lent"
        if self.dies(self.number, self.variation, self.num_moves):
            self.alive = False
            raise EnvironmentFault("the simulator died")
        self.num_moves += 1
        is_over = self.num_moves == NUM_MOVES
        text = f"Room {self.num_moves} of {self.variation}."
        return Reply(
            observation=text,
            score=100 if is_over else 10 * self.num_moves,
            completed=is_over,
            num_moves=self.num_moves,
        )

    def valid_actions(self) -> tuple[str, ...]:
        return ("wait",)

    def gold_actions(self, *, task_name: str, variation: int, simplification: str) -> tuple[str, ...]:
        return ("wait",) * NUM_MOVES

    def num_variations(self, task_name: str) -> int:
        return scienceworld_tasks.NUM_VARIATIONS[task_name]

    def is_alive(self) -> bool:
        return self.alive

    def close(self) -> None:
        self.alive = False


@dataclass(slots=True)
class Starts:
    """Numbers the simulators as they start."""

    dies: Callable[[int, int, int], bool]
    started: list[Laboratory] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> Laboratory:
        with self.lock:
            self.started.append(Laboratory(number=len(self.started), dies=self.dies))
            return self.started[-1]


def run(starts: Starts) -> tuple[RolloutReport, ScienceWorldFactory]:
    """Two variations, three rollouts each, two at a time on two simulators."""
    family = ScienceWorldTaskSet(
        ScienceWorldConfig(num_workers=2, num_train_variations=2, borrow_limit_s=5.0), start=starts
    )
    factory = family.make()
    limits = Limits(max_turns=5, max_turn_tokens=40, max_response_tokens=1000, step_timeout_s=60)
    engine = scripted(lambda request, text: "<action>wait</action>")
    runs = scheduler(
        engine,
        factory,  # type: ignore[arg-type]
        limits=limits,
        stop=(family.stop[0],),
        max_concurrent=2,
    )
    return runs.run(family.tasks("train"), modes=("plain",) * NUM_ROLLOUTS, training_step=0), factory


def played(report: RolloutReport) -> list[Any]:
    """What every rollout became: the broken tries hang in the tree and are in none of them."""
    return [
        (
            trace.task.key,
            leaf.rollout,
            leaf.outcome,
            leaf.episode_return,
            [(n.token_ids, n.reward, n.logprobs) for n in path],
        )
        for trace in report.traces
        for leaf, path in trace.rollouts()
    ]


def test_a_rollout_whose_simulator_dies_is_played_again_and_no_other_notices() -> None:
    whole, _ = run(Starts(lambda number, variation, move: False))
    # the first simulator dies in its first episode
    starts = Starts(lambda number, variation, move: number == 0 and move == 1)
    report, factory = run(starts)
    assert (
        report.faults == Counter({Outcome.ENVIRONMENT_FAULT.value: 1, "retries": 1})
        and report.num_retries == 1
    )
    assert played(report) == played(whole) and len(played(report)) == 2 * NUM_ROLLOUTS
    for _, _, outcome, episode_return, nodes in played(report):
        assert (outcome, episode_return) == (Outcome.FINISHED, 100.0)
        assert (
            sum(bool(logprobs) for _, _, logprobs in nodes) == NUM_MOVES
            and sum(r for _, r, _ in nodes) == 100.0
        )
    assert factory.pool.num_replaced == 1 and len(starts.started) == 3
    assert [one.alive for one in starts.started] == [False, True, True]
    factory.close()
    assert not any(one.alive for one in starts.started)


@pytest.mark.parametrize("deadly", [0, 1])
def test_where_every_try_dies_the_rollout_has_no_return_and_the_other_group_is_whole(deadly: int) -> None:
    whole, _ = run(Starts(lambda number, variation, move: False))
    variation_of_death = scienceworld_tasks.variations("find-animal", "train")[deadly]
    starts = Starts(lambda number, variation, move: variation == variation_of_death and move == NUM_MOVES - 1)
    report, factory = run(starts)
    tries = 3 * NUM_ROLLOUTS  # two retries
    assert report.faults == Counter({Outcome.ENVIRONMENT_FAULT.value: tries, "retries": tries - NUM_ROLLOUTS})
    broken = [
        trace for trace in report.traces if any(leaf.outcome.is_fault for leaf in trace.leaves.values())
    ]
    assert len(broken) == 1
    for leaf in broken[0].leaves.values():
        assert (leaf.outcome, leaf.episode_return, leaf.node_id) == (Outcome.ENVIRONMENT_FAULT, None, None)
        assert "the simulator died" in leaf.detail
    others = [one for one in played(report) if one[0] != broken[0].task.key]
    assert (
        others == [one for one in played(whole) if one[0] != broken[0].task.key]
        and len(others) == NUM_ROLLOUTS
    )
    assert sum(not one.alive for one in starts.started) == tries  # a fresh one for every try
    factory.close()
