"""Three methods in one run reach what no two of them find at equal policy tokens.

Retrieval opens the lock, forks at the crossroads spend no march, and tips find the hidden place; the vault
behind them is tried often enough only where all three are there.
"""

from pathlib import Path

import pytest
from benchmarks.learning_methods import Method
from benchmarks.learning_toys import ARENAS, play

from outrider.algorithms.grpo import GrpoSettings
from outrider.train.update.policy import set_threads
from outrider.types import Message
from tests.toy_result import Result
from tests.toys import TABLE_HEAD, table_row
from tests.toys_quest import Quest, QuestRun, QuestToy, half_way

(ARENA,) = [arena for arena in ARENAS if arena.name == "quest"]
METHODS: dict[str, Method] = {method.key: method for method in ARENA.methods()}
ALL = "rapo-arpo-empo2"
FEWER = tuple(key for key in METHODS if key != ALL)
TEN = {key: (range(10), ARENA.max_policy_tokens) for key in METHODS}


def test_an_untrained_policy_s_chance_is_that_of_its_rooms(tmp_path: Path) -> None:
    toy = QuestToy(seed=0)
    run = QuestRun(toy, GrpoSettings(), folder=tmp_path)
    assert run.expected_return() == pytest.approx(toy.lock * toy.hidden * toy.vault, rel=1e-4)
    run.buffer.close()


def test_experts_open_the_lock_and_were_never_rewarded() -> None:
    (task,) = QuestToy(seed=0).tasks()
    expert = half_way(task)
    assert expert.reward == 0.0
    assert [step.text for step in expert.steps[:2]] == task.metadata["right"][:2]
    assert [step.is_terminal for step in expert.steps] == [False, False, False, True]


def test_all_ways_lead_on_from_the_crossroads_and_nothing_else_is_forgiven() -> None:
    (task,) = QuestToy(seed=0).tasks()
    right = task.metadata["right"]
    for room, action in enumerate(right):
        environment = Quest(task)
        environment.reset(0)
        for before in right[:room]:
            environment.step(Message(role="assistant", content=before or "?"))
        answer = environment.step(Message(role="assistant", content="x"))
        assert answer.done is bool(action) and not environment.result().success


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    """Objective, group and learning rate are the same for all."""
    set_threads(1)
    played = {
        key: [play(ARENA, METHODS[key], seed=seed, max_policy_tokens=tokens) for seed in seeds]
        for key, (seeds, tokens) in TEN.items()
    }
    print("\n".join(["", TABLE_HEAD, *(table_row(METHODS[key].name, rows) for key, rows in played.items())]))
    return played


@pytest.mark.slow
def test_all_three_reach_the_end_without_experts_and_tips(results: dict[str, list[Result]]) -> None:
    returns = [result.expected_return for result in results[ALL]]
    assert sum(value >= 0.8 for value in returns) >= 0.8 * len(returns), returns


@pytest.mark.slow
@pytest.mark.parametrize("key", FEWER)
def test_fewer_do_not(results: dict[str, list[Result]], key: str) -> None:
    returns = [result.expected_return for result in results[key]]
    assert max(returns) < 0.05, returns
